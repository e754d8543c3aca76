"""The one thread that calls a runtime: order, and what does not come back."""

import subprocess
import sys
import threading

import pytest

from dcr.rollout.vllm.caller import Caller

HANGS = """
import threading
from dcr.rollout.vllm.caller import Caller
caller = Caller("c")
under_way = threading.Event()
caller.submit(lambda: (under_way.set(), threading.Event().wait()))
assert under_way.wait(60)
print(caller.shutdown(0.1))
"""


def test_jobs_are_done_in_order_in_one_thread_and_failures_are_raised_where_they_were_submitted():
    caller, done = Caller("c"), []
    futures = [caller.submit(lambda n=n: done.append((n, threading.get_ident())) or n) for n in range(100)]
    failing = caller.submit(lambda: 1 // 0)
    after = caller.submit(lambda: "goes on")
    assert [future.result(60) for future in futures] == list(range(100))
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert after.result(60) == "goes on"
    assert [n for n, _ in done] == list(range(100))
    assert len({thread for _, thread in done}) == 1
    assert caller.shutdown(60)
    with pytest.raises(RuntimeError, match="it was shut down"):
        caller.submit(list)


def test_a_job_that_hangs_is_waited_for_no_longer_than_is_said_and_those_after_it_are_not_begun():
    caller, under_way, goes_on, begun = Caller("c"), threading.Event(), threading.Event(), []
    hung = caller.submit(lambda: under_way.set() or goes_on.wait(240))
    after = caller.submit(lambda: begun.append(1))
    assert under_way.wait(60)
    assert not caller.shutdown(0.1)
    goes_on.set()
    assert hung.result(60)
    assert caller.shutdown(60)
    assert after.cancelled()
    assert begun == []


def test_a_job_that_never_returns_does_not_keep_the_process_alive():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
