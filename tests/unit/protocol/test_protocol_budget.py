"""Attempts of a push are counted over its stops and its leaders, and so are what is told of them (DESIGN D14, D16)."""

import pytest

from dcr.protocol.messages import Intervention, Outcome, StorageState
from tests.unit.protocol.leader import D0, Leader, attempting, succeeding, token
from tests.unit.protocol.test_protocol_intervention import holding, order

TORN = StorageState(0, D0, (token(1, 1),))


def fail(at: Leader) -> None:
    """The attempt under way fails by an error of the engine."""
    at.fails("a")
    if at.c.pausing:
        at.expires()


def followed(old: Leader, **settings: object) -> Leader:
    """The leader dies in an attempt, and the next one meets the same push and the torn engine."""
    at = succeeding(old, **settings)
    at.owner_joins()
    at.push()
    at.joins("a", TORN)
    return at


def attempts(at: Leader) -> int:
    assert at.record is not None
    assert at.record.open is not None
    return at.record.open.attempts


def ends(at: Leader) -> Outcome:
    """The attempt under way is committed and folded; what its push is told."""
    at.take()
    at.prepared("a", TORN)
    at.seals()
    at.acknowledged("a")
    at.folded()
    (told,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert told.error == ""
    return told


@pytest.mark.parametrize(("failed", "left"), [(1, 2), (2, 1), (3, 0)])
def test_a_new_leader_has_the_attempts_that_are_left(failed: int, left: int) -> None:
    at = attempting("a", attempts_max=3)
    for _ in range(failed - 1):
        fail(at)
    assert attempts(at) == failed
    at = followed(at, attempts_max=3)
    for _ in range(left):
        assert at.reasons[-1] == "OpenAttempt"
        fail(at)
    assert (at.reasons[-1], attempts(at)) == ("Stop", 3)
    (told,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert "an older attempt: the coordinator that led it is gone" in told.error


def test_leaders_that_die_one_after_the_other_do_not_go_on_for_ever() -> None:
    at = attempting("a", attempts_max=3)
    leaders = 1
    while at.reasons[-1] == "OpenAttempt":
        at, leaders = followed(at, attempts_max=3), leaders + 1
        assert leaders < 10
    assert (at.reasons[-1], attempts(at), leaders) == ("Stop", 3, 4)


def test_what_an_operator_allowed_anew_outlives_a_leader_too() -> None:
    at = attempting("a", attempts_max=2, stop_waits=True)
    fail(at)
    fail(at)
    assert at.reasons[-1] == "Stop"
    order(at, Intervention.RESUME)
    assert attempts(at) == 3
    at = followed(at, attempts_max=2, stop_waits=True)
    assert attempts(at) == 4
    fail(at)
    assert (at.reasons[-1], attempts(at)) == ("Stop", 4)


def test_a_push_that_is_resumed_tells_of_every_attempt() -> None:
    at = holding()
    order(at, Intervention.RESUME)
    told = ends(at)
    assert told.summary["attempts"] == 2
    (failure,) = told.summary["failures"]
    assert "the loader raised" in failure


def test_a_push_that_outlived_its_leader_tells_of_every_attempt() -> None:
    at = attempting("a", attempts_max=4)
    fail(at)
    at = followed(at, attempts_max=4)
    told = ends(at)
    assert told.summary["attempts"] == 3
    assert told.summary["failures"] == ["an older attempt: the coordinator that led it is gone; its log has the reason"]


def test_a_push_after_one_that_stopped_tells_of_its_own_attempts() -> None:
    at = attempting("a", attempts_max=1)
    at.prepared("a")
    at.seals()
    at.fails("a")
    assert at.reasons[-1] == "Stop"
    at.push(2)
    assert attempts(at) == 2
    told = ends(at)
    assert (told.summary["attempts"], told.summary["failures"]) == (1, [])
