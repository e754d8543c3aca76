"""Times to wait that a user's program gives."""

import math
import threading
from fractions import Fraction

import numpy as np
import pytest

from dcr.protocol.errors import RefusedError
from dcr.rollout.async_gate import AsyncGate
from dcr.rollout.gate import Gate
from dcr.runtime.seconds import seconds
from dcr.trainer.torch.pending_push import PendingPush

NO_TIMES = [math.nan, np.float32("nan"), "x", "3", True, b"", [1.0], 1j]


@pytest.mark.parametrize("value", NO_TIMES, ids=repr)
def test_what_is_no_time_is_refused_by_name_wherever_it_is_given(value):
    with pytest.raises(RefusedError, match=r"^the wait: .* is no time to wait; give a number of seconds"):
        seconds(value, "the wait")
    with pytest.raises(RefusedError, match=r"result\(timeout_s\)"):
        PendingPush.result(None, value)  # before it looks at anything of the push
    for gate in (lambda: Gate("a", value), lambda: AsyncGate("a", value, 5)):
        with pytest.raises(RefusedError, match="engine a: gate_wait_s"):
            gate()


@pytest.mark.parametrize(
    ("value", "waits"),
    [(0, 0.0), (2, 2.0), (0.5, 0.5), (-1, 0.0), (-math.inf, 0.0), (-(10**400), 0.0), (Fraction(1, 4), 0.25)],
    ids=range(7),
)
def test_a_number_is_taken(value, waits):
    found = seconds(value, "it")
    assert (found, type(found)) == (waits, float)


@pytest.mark.parametrize("value", [math.inf, 1e300, 10**400], ids=range(3))
def test_a_time_without_end_is_one_that_clocks_take(value):
    assert 1e8 < seconds(value, "it") < threading.TIMEOUT_MAX
