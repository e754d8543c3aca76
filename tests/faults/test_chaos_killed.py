"""The harness killed, or interrupted, during a stall: nothing that it started outlives it, not even what is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.chaos_command import ROOT

_SCENARIO = """
name: held
deployment: {engines: 2, trainer: {refits: 1}}
faults:
  - {at: "receiver[1] after 1 items of payload 0", do: stall, for_s: 30}
"""


def beside(leader):
    """By id, the state of every process that ``setsid`` put together with this one."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, first = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(first) == leader:
            found[int(path.parent.name)] = state
    return found


def wait_for(condition, timeout_s, what):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def harness(tmp_path):
    """One that holds a node still."""
    (tmp_path / "held.yaml").write_text(_SCENARIO)
    command = [sys.executable, "-m", "dcr.cli.main", "chaos", "run", tmp_path / "held.yaml", "--no-logs", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--folder", tmp_path], cwd=ROOT, start_new_session=True, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            wait_for(lambda: "T" in beside(process.pid).values(), 300, "no node was stopped")
            yield process
        finally:
            for pid in beside(process.pid):
                os.kill(pid, signal.SIGKILL)


def all_end(harness):
    alive = {pid: state for pid, state in beside(harness.pid).items() if state != "Z"}
    wait_for(lambda: not {*beside(harness.pid).values()} - {"Z"}, 60, f"still there: {alive}")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nothing_outlives_a_harness_that_is_killed_while_a_node_is_stopped(harness):
    harness.kill()
    harness.wait(30)
    all_end(harness)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_interrupted_harness_ends_everything_and_says_so_in_one_line(harness):
    os.killpg(harness.pid, signal.SIGINT)  # as a terminal does
    said, errors = harness.communicate(timeout=60)
    assert harness.returncode == 130
    assert errors == "dcr chaos run: interrupted\n"
    assert json.loads(said.splitlines()[-1]) == {"command": "chaos run", "ok": False, "error": "interrupted"}
    all_end(harness)
