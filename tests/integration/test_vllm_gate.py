"""The gate of an engine, with real threads and no engine."""

import threading

import pytest

from dcr.protocol.errors import RefusedError
from dcr.rollout.gate import Gate, GateTimeoutError

LONG_S = 30.0


class Request(threading.Thread):
    """A request that runs until it is told to finish."""

    def __init__(self, gate):
        super().__init__(daemon=True)
        self._gate = gate
        self.inside, self.finish, self.version, self.error = threading.Event(), threading.Event(), None, None
        self.start()

    def run(self):
        try:
            with self._gate.request() as self.version:
                self.inside.set()
                assert self.finish.wait(LONG_S)
        except GateTimeoutError as error:
            self.error = error


def test_starts_closed_and_a_request_that_waits_too_long_is_refused_by_name():
    with pytest.raises(GateTimeoutError, match=r"engine a: a request waited 0\.01 s"), Gate("a", 0.01).request():
        pytest.fail("let in through a gate that was never opened")


def test_close_returns_only_when_running_requests_have_left():
    gate = Gate("a", LONG_S)
    gate.open(7)
    requests = [Request(gate) for _ in range(3)]
    for request in requests:
        assert request.inside.wait(LONG_S)
    closed = threading.Event()
    closer = threading.Thread(target=lambda: (gate.close(LONG_S), closed.set()), daemon=True)
    closer.start()
    for request in requests:
        assert not closed.wait(0.02)
        request.finish.set()
    assert closed.wait(LONG_S)
    gate.check_drained("writing")
    assert [request.version for request in requests] == [7, 7, 7]


def test_a_request_that_comes_while_closing_waits_for_the_next_version():
    gate = Gate("a", LONG_S)
    gate.open(0)
    gate.close(LONG_S)
    late = Request(gate)
    assert not late.inside.wait(0.05)
    gate.open(1)
    assert late.inside.wait(LONG_S)
    assert late.version == 1
    late.finish.set()
    late.join(LONG_S)


def test_drain_time_out_names_engine_and_stage_and_leaves_the_gate_closed():
    gate = Gate("a", 0.01)
    gate.open(0)
    request = Request(gate)
    assert request.inside.wait(LONG_S)
    with pytest.raises(GateTimeoutError, match=r"engine a: closing the gate, 1 requests still running"):
        gate.close(0.0)
    assert gate.version is None
    with pytest.raises(GateTimeoutError), gate.request():
        pytest.fail("let in while closing")
    with pytest.raises(RefusedError, match="resetting caches"):
        gate.check_drained("resetting caches")
    request.finish.set()
    gate.close(LONG_S)
    gate.check_drained("resetting caches")


def test_open_at_another_version_is_refused_and_at_the_same_is_not():
    gate = Gate("a", LONG_S)
    gate.open(3)
    gate.open(3)
    with pytest.raises(RefusedError, match="open at version 3, cannot be opened at 4"):
        gate.open(4)
    assert gate.version == 3


def test_a_request_that_fails_leaves_the_gate():
    gate = Gate("a", LONG_S)
    gate.open(0)
    with pytest.raises(ValueError, match="bad"), gate.request():
        raise ValueError("bad")
    gate.close(0.0)
