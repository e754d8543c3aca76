"""An engine process that hangs (SIGSTOP) is evicted by name; when it goes on it is restored and rejoins."""

import os
import signal
from pathlib import Path

from tests.faults.deployment import Deployment


def test_a_stopped_engine_is_evicted_and_rejoins(tmp_path: Path) -> None:
    fleet = Deployment(tmp_path, {"prepare_timeout_s": 4.0})
    try:
        a, b = fleet.engine("a"), fleet.engine("b")
        fleet.check(a)
        fleet.check(b)
        os.kill(b.pid, signal.SIGSTOP)
        fleet.step()
        report = fleet.push()
        assert (report.kind, report.attempts, report.members) == ("absolute", 2, ("a",))
        assert "time-out: b did not prepare epoch 1" in report.failures[0]
        fleet.check(a)
        os.kill(b.pid, signal.SIGCONT)
        fleet.check(b)
        fleet.step()
        report = fleet.push()
        assert (report.kind, report.members) == ("relative", ("a", "b"))
        fleet.check(a)
        fleet.check(b)
        assert fleet.check_requests() > 10
    finally:
        fleet.close()
