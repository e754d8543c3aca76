"""What commands say while they wait."""

import threading
import time

from dcr.cli import report
from dcr.cli.report import waiting


def test_a_wait_is_told_on_standard_error_now_and_then_and_a_short_one_is_not(capsys, monkeypatch):
    with waiting("verify", lambda: "nobody"):
        pass
    monkeypatch.setattr(report, "FIRST_S", 0.1)
    monkeypatch.setattr(report, "AGAIN_S", 0.05)
    told = threading.Semaphore(0)
    began = time.monotonic()
    with waiting("verify", lambda: told.release() or "engine a, at most 9 s"):
        assert told.acquire(timeout=20)
        assert time.monotonic() - began >= 0.1
        assert told.acquire(timeout=20)
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) >= 2
    assert lines[0] == "dcr verify has waited 0 s, now for engine a, at most 9 s"
