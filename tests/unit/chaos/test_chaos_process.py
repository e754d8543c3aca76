"""What the harness holds of a process that it started."""

import os
import signal
import time
from pathlib import Path

from dcr.chaos.child import FAILED, ChildConfig
from dcr.chaos.process import Child


def coordinator(folder, control):
    return Child(
        ChildConfig(
            role="coordinator",
            name="coordinator-0",
            number=0,
            start=1,
            folder=str(folder),
            control=control,
            delivery=f"file://{folder}/payloads",
            settings={},
        )
    )


def wait(done):
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(child):
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_stopped_itself_goes_on_only_once_what_it_said_was_heard(tmp_path):
    child = coordinator(tmp_path, f"sqlite://{tmp_path}/record.db")
    try:
        wait(child.pipe.poll)
        os.kill(child.pid, signal.SIGSTOP)  # as it does itself, at the point of a fault
        wait(lambda: state(child) == "T")
        child.keep_going()
        time.sleep(0.05)
        assert state(child) == "T"
        assert child.receive() == {"what": "ready"}
        assert not child.pipe.poll()
        child.keep_going()
        wait(lambda: state(child) != "T")
    finally:
        child.kill()


def test_what_a_process_said_before_it_was_killed_is_heard(tmp_path):
    child = coordinator(tmp_path, "nowhere://")
    wait(lambda: child.exitcode is not None)
    assert child.exitcode == FAILED
    (said,) = child.kill()
    assert said["what"] == "failed"
    assert "nowhere" in said["error"]
    assert child.kill() == []
