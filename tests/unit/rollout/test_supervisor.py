"""The supervisor over real processes that behave badly: deaf ones, orphans, and some that are killed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0  # a bound; nothing takes a second on a quiet machine

# What is run: a server that starts helpers below it, says who they are, and waits.
PRELUDE = """
import multiprocessing, os, signal, subprocess, sys, time
from dcr.rollout.vllm.supervisor import end_with_parent, supervise

def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

def say(what):
    os.write(1, f"{what}\\n".encode())  # whole, whoever else writes

def wait():
    say(os.getpid())
    time.sleep(300)

def grandchild():
    deaf()
    wait()

def helper():
    if BOUND:
        end_with_parent()
    deaf()
    child = multiprocessing.get_context("fork").Process(target=below)
    child.start()
    wait()

def below():
    if BOUND:
        end_with_parent()
    grandchild()

leash = supervise()
"""
HELPER = 'multiprocessing.get_context("fork").Process(target=helper).start()\n'


@pytest.fixture
def run():
    started = []

    def run(body, *, bound=False, processes=1):
        """Start it; returns the process and the pids that its processes print, once there are so many."""
        source = f"BOUND = {bound}\n{PRELUDE}{body}"
        process = subprocess.Popen(
            [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process, [int(process.stdout.readline().split()[0]) for _ in range(processes)]

    yield run
    for process in started:
        for pid in session(process):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(WAIT_S)


def session(process):
    """Pids of all that descend from it, by its session: independent of who is whose parent."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == process.pid:
                found.append(int(entry.name))
    return found


def wait_gone(process):
    deadline = time.monotonic() + WAIT_S
    while session(process):
        assert time.monotonic() < deadline, session(process)
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_does_not_listen_yet_is_ended_with_its_deaf_children(run, number):
    process, _ = run(HELPER + "wait()", processes=3)
    assert len(session(process)) == 4
    process.send_signal(number)
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert session(process) == []


def test_a_server_that_ends_by_itself_is_left_its_time_and_its_status(run):
    graceful = """
def end(*_):
    time.sleep(0.5)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
leash.allow(300)
wait()
"""
    process, _ = run(graceful)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 7
    assert time.monotonic() - started > 0.5


def test_a_deaf_server_is_killed_at_its_bound(run):
    process, _ = run(HELPER + "deaf()\nleash.allow(0.7)\nwait()", processes=3)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert time.monotonic() - started > 0.7
    assert session(process) == []


def test_a_second_signal_kills_at_once(run):
    process, _ = run(HELPER + "deaf()\nleash.allow(300)\nwait()", processes=3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 128 + signal.SIGINT
    assert session(process) == []


@pytest.mark.parametrize(
    ("how", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134), ("os._exit(0)", 0)]
)
def test_a_server_that_ends_leaves_nothing_and_its_status_is_the_commands(run, how, status):
    process, _ = run(HELPER + f"time.sleep(0.5)\nsay(0)\n{how}")
    assert process.wait(WAIT_S) == status
    assert session(process) == []


@pytest.mark.parametrize("victim", ["supervisor", "server"])
def test_nothing_outlives_a_killed_supervisor_or_server(run, victim):
    process, _ = run(HELPER + "say(os.getpid())\ndeaf()\ntime.sleep(300)", bound=True, processes=3)
    family = session(process)
    assert len(family) == 4
    (server,) = [pid for pid in family if parent(pid) == process.pid]
    os.kill(process.pid if victim == "supervisor" else server, signal.SIGKILL)
    assert process.wait(WAIT_S) == (-signal.SIGKILL if victim == "supervisor" else 128 + signal.SIGKILL)
    wait_gone(process)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_process_whose_parent_has_ended_before_it_asks_ends_itself(run):
    late = """
def orphan():
    while os.getppid() == server:
        time.sleep(0.01)
    end_with_parent()
    say("went on")
    time.sleep(300)

server = os.getpid()
multiprocessing.get_context("fork").Process(target=orphan).start()
say(server)
time.sleep(300)
"""
    process, (server,) = run(late)
    os.kill(process.pid, signal.SIGSTOP)  # it would end the orphan as well
    os.kill(server, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while any(pid not in {process.pid, server} and state(pid) != "Z" for pid in session(process)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(WAIT_S) == 128 + signal.SIGKILL
    assert "went on" not in process.stdout.read()


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
