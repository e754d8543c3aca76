"""What the harness holds of a process that it started."""

import time

from dcr.chaos.child import FAILED, ChildConfig
from dcr.chaos.process import Child


def test_what_a_process_said_before_it_was_killed_is_heard(tmp_path):
    child = Child(
        ChildConfig(
            role="coordinator",
            name="coordinator-0",
            number=0,
            start=1,
            folder=str(tmp_path),
            control="nowhere://",
            delivery="file:///nowhere",
            settings={},
        )
    )
    deadline = time.monotonic() + 120
    while child.exitcode is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert child.exitcode == FAILED
    (said,) = child.kill()
    assert said["what"] == "failed"
    assert "nowhere" in said["error"]
    assert child.kill() == []
