"""Processes that contend for one record while its store is killed, and what must be true afterwards."""

import random
import signal
import subprocess
import sys
import threading
import time

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ConflictError, ControlPlaneSettings, Stored

# Says what it tries before, and what came of it after; goes on when the server is back.
WRITER = """
import itertools, os, sys, time
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import *
plane = open_control_plane(sys.argv[1], ControlPlaneSettings(history_max=1_000_000))
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
for i in itertools.count():
    operation = f"{sys.argv[2]}.{i}"
    try:
        stored = plane.read("run")
    except ControlPlaneUnavailableError:
        time.sleep(0.05)
        continue
    expected = stored and stored.revision
    say("try", operation, expected)
    try:
        done = plane.compare_and_set("run", expected, operation.encode() * 100, operation_id=operation,
                                     actor=sys.argv[2], reason="write")
        say("ack", operation, done.revision)
    except ConflictError:
        say("not", operation, expected)
    except UnknownOutcomeError:
        say("unknown", operation, expected)
    except ControlPlaneUnavailableError:
        say("not", operation, expected)
"""


def write(plane, expected, operation, lease=None):
    return plane.compare_and_set(
        "run", expected, operation.encode() * 100, operation_id=operation, actor="t", reason="r", lease=lease
    )


def kills_lose_nothing(address, disturb, contenders, kills, attempts=6):
    """Nothing that was acknowledged is lost, nothing refused took effect, every revision has one winner.

    Args:
        address: of the control plane.
        disturb: kills servers and starts them again; called with the number of the turn and a source of chance.
        contenders: processes that write.
        kills: turns.
        attempts: lines that every writer has said before the next turn.
    """
    rng = random.Random(7)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, address, f"w{i}"], stdout=subprocess.PIPE, text=True)
        for i in range(contenders)
    ]
    said = [[] for _ in writers]
    listeners = [
        threading.Thread(target=lambda w=w, lines=lines: lines.extend(w.stdout))
        for w, lines in zip(writers, said, strict=True)
    ]
    for listener in listeners:
        listener.start()
    try:
        for turn in range(kills):
            before = [len(lines) for lines in said]
            deadline = time.monotonic() + 120
            while any(len(lines) < n + attempts for lines, n in zip(said, before, strict=True)):  # all are at work
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.2))
            disturb(turn, rng)
        time.sleep(0.3)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        for listener in listeners:
            listener.join(30)

    acked, refused, doubtful = {}, set(), {}
    for line in (line for lines in said for line in lines):
        word, operation, revision = line.split()
        if word == "ack":
            acked[operation] = int(revision)
        elif word == "not":
            refused.add(operation)
        else:
            doubtful[operation] = None if revision == "None" else int(revision)
    for done in (*acked, *refused):
        doubtful.pop(done, None)
    plane = open_control_plane(address, ControlPlaneSettings(history_max=1_000_000))
    assert len(set(acked.values())) == len(acked) > (attempts - 1) * kills  # one winner a revision
    for operation, revision in acked.items():
        assert plane.operation_revision("run", operation) == revision
    assert not any(plane.operation_revision("run", operation) for operation in refused)
    # Resolve every doubt as DESIGN D3 has it: read back, or repeat with the same id; either way once.
    for operation, expected in doubtful.items():
        revision = plane.operation_revision("run", operation)
        try:
            stored = write(plane, expected, operation)
            assert revision in (None, stored.revision)
            acked[operation] = stored.revision
        except ConflictError:
            if revision is not None:
                acked[operation] = revision
    history = plane.history("run", 1_000_000)
    assert {e.operation_id: e.revision for e in history} == acked
    assert [e.revision for e in history] == list(range(len(acked), 0, -1))
    last = max(acked, key=acked.get)
    assert plane.read("run") == Stored(acked[last], last.encode() * 100, last)
    plane.close()
