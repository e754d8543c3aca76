"""The harness killed in the middle of a stall: nothing that it started may outlive it, not even what is stopped."""

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


def in_session(leader):
    """The state of every process of this session, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader:
            found[int(path.parent.name)] = state
    return found


def wait_for(condition, timeout_s, what):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_nothing_outlives_a_harness_that_is_killed_while_a_node_is_stopped(tmp_path):
    (tmp_path / "held.yaml").write_text(_SCENARIO)
    command = [sys.executable, "-m", "dcr.cli.main", "chaos", "run", tmp_path / "held.yaml", "--no-logs"]
    with subprocess.Popen([*command, "--folder", tmp_path], cwd=ROOT, start_new_session=True) as harness:
        try:
            wait_for(lambda: "T" in in_session(harness.pid).values(), 300, "no node was stopped")
            harness.kill()
            harness.wait(30)
            alive = {pid: state for pid, state in in_session(harness.pid).items() if state != "Z"}
            wait_for(lambda: not {*in_session(harness.pid).values()} - {"Z"}, 15, f"still there: {alive}")
        finally:
            for pid in in_session(harness.pid):
                os.kill(pid, signal.SIGKILL)
