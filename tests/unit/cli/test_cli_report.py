"""What commands say while they wait."""

import re
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
        assert told.acquire(timeout=60)
        assert time.monotonic() - began >= 0.1
        assert told.acquire(timeout=60)
    said = capsys.readouterr()
    assert said.out == ""
    took = time.monotonic() - began
    lines = said.err.splitlines()
    assert len(lines) >= 2
    told = [re.fullmatch(r"dcr verify has waited (\d+) s, now for engine a, at most 9 s", line) for line in lines]
    assert all(0 <= int(line[1]) <= took + 0.5 for line in told)
