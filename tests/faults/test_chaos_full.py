"""The disk of the harness itself full in the middle of a run: it ends soon, says so, and leaves no process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dcr.chaos.disk import Disk
from tests.faults.chaos_command import ROOT
from tests.faults.test_chaos_killed import all_end, beside, wait_for

_SCENARIO = """
name: long
deployment: {engines: 2, trainer: {refits: 2000}}
"""
_FIRST = """
name: short
deployment: {engines: 1, trainer: {refits: 1}}
"""


@pytest.fixture
def disk(tmp_path):
    """One of 64 MiB, which can be filled while others write to it."""
    made = Disk(tmp_path, 64 << 20)
    if not made.mounted:
        pytest.skip("NOT TESTED: a disk that fills in earnest: no tmpfs can be mounted here, which takes root")
    yield made
    made.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_disk_that_fills_in_the_middle_of_a_run_ends_it_by_name(disk, tmp_path):
    """What comes later is not run; what came before is told."""
    for name, text in (("first", _FIRST), ("long", _SCENARIO), ("never", _FIRST.replace("short", "never"))):
        (tmp_path / f"{name}.yaml").write_text(text)
    files = [tmp_path / f"{name}.yaml" for name in ("first", "long", "never")]
    command = [sys.executable, "-m", "dcr.cli.main", "chaos", "run", *files, "--no-logs", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--folder", disk.payloads], cwd=ROOT, start_new_session=True, stdout=pipe, stderr=pipe, text=True
    ) as harness:
        said = []
        reads = threading.Thread(target=lambda: said.extend(harness.stdout), daemon=True)
        reads.start()
        try:
            wait_for(lambda: any("refit 3: version 3 committed" in line for line in said), 300, "no refit came")
            disk.fill()
            filled = time.monotonic()
            assert harness.wait(60) == 3
            assert time.monotonic() - filled < 30
            reads.join(30)
            all_end(harness)
        finally:
            for pid in beside(harness.pid):
                os.kill(pid, signal.SIGKILL)
        errors = harness.stderr.read()
    print(errors)
    folder = disk.payloads / "long"
    assert f"dcr chaos run: {folder}: its disk is full: the run was broken off, and shows nothing" in errors
    assert "Traceback" not in errors
    last = json.loads(said[-1])
    assert (last["command"], last["ok"]) == ("chaos run", False)
    assert str(folder) in last["error"]
    assert any(line.startswith("short") and "ok, logs not validated" in line for line in said)
    assert not any("never: " in line for line in said)
