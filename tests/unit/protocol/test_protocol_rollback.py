"""Turning a transition back: how it ends, and that it always does (DESIGN D17)."""

from collections.abc import Callable

import pytest
from leader import D0, D1, D2, TORN, V0, Leader, attempting, committed, leading, stopped, token

from dcr.protocol.coordinator import Phase
from dcr.protocol.identity import Kind
from dcr.protocol.messages import CandidateReady, EmitFailed, Outcome, Prepare, StorageState
from dcr.protocol.record import Direction


def torn(**settings: object) -> Leader:
    """An attempt that has torn one of its engines."""
    at = attempting("a", "b", **settings)
    at.prepared("a")
    at.prepared("b")
    at.seals()
    at.take()
    return at


def ordered(at: Leader) -> None:
    at.do(at.c.roll_back())


def taken_back(at: Leader) -> None:
    """By the rank whose push it is; an order that comes too early says nothing, and this stands."""
    at.owner(CandidateReady("o", 1, 1, refused="o: taken back"))


@pytest.mark.parametrize("turn", [ordered, taken_back])
def test_a_transition_is_turned_back(turn: Callable[[Leader], None]) -> None:
    at = torn()
    turn(at)
    assert at.record.open.direction is Direction.BACK
    assert (at.record.open.kind, at.record.open.attempts, at.record.open.target) == (Kind.ABSOLUTE, 2, 1)
    a, _, emit = at.take()
    assert isinstance(a, Prepare)
    assert (a.target, a.base) == (emit.target, emit.base)
    assert (emit.target, emit.base.version, emit.base.kind, emit.operation) == (0, 0, Kind.ABSOLUTE, "set")
    at.prepared("a", TORN)
    at.prepared("b")
    at.seals(D0)
    at.acknowledged("a")
    at.acknowledged("b")
    assert at.reasons[-1] == "Commit"
    assert (at.record.version, at.record.baseline_id, at.record.open) == (0, D0, None)
    assert at.record.committed.direction is Direction.BACK
    outcome = at.take()[-1]
    assert isinstance(outcome, Outcome)
    assert (outcome.version, outcome.push) == (0, 1)
    assert "was rolled back to version 0 on the operator's order: every member serves that version" in outcome.error
    assert at.c.phase is Phase.IDLE
    at.push(2)
    assert at.record.open.candidate == token(1, 2)


def test_a_rollback_that_fails_is_tried_again_and_never_turned_forward() -> None:
    at = torn()
    at.do(at.c.roll_back())
    at.fails("a")
    assert (at.record.open.direction, at.record.open.attempts) == (Direction.BACK, 3)
    at.push(1)
    assert at.record.open.direction is Direction.BACK


def test_a_rollback_that_is_out_of_reach_ends_as_an_abandon() -> None:
    at = torn(attempts_max=1)
    at.do(at.c.roll_back())
    at.fails("a")
    assert at.reasons[-2:] == ["Abandon", "OpenRestore"]  # what it has torn is restored
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert "rolled back to version 0 on the operator's order: abandoned, because roll-back attempt" in outcome.error
    at = torn()
    at.do(at.c.roll_back())
    at.owner(EmitFailed("o", 1, at.epoch, "candidate changed", fatal=True))
    assert at.reasons[-1] == "Abandon"


def test_a_rollback_without_a_baseline_or_a_candidate_ends_as_an_abandon() -> None:
    at = leading("a")
    at.owner_joins(2, "")
    at.owner(CandidateReady("o", 2, 1))
    at.do(at.c.roll_back())  # a dense attempt, which leaves no baseline to go back to
    assert at.reasons[-1] == "Abandon"
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert "the baseline of version 0 is not held" in outcome.error
    at = torn()
    at.do(at.c.roll_back())
    at.owner_joins(2)
    assert at.reasons[-1] == "Abandon"


def test_a_rollback_of_other_content_than_the_committed_is_not_committed() -> None:
    at = torn()
    at.do(at.c.roll_back())
    at.prepared("a")
    at.prepared("b")
    at.seals(D2)
    at.acknowledged("a")
    at.acknowledged("b")
    assert "Commit" not in at.reasons
    assert at.record.open is None


def test_a_stopped_transition_is_turned_back_without_a_push() -> None:
    at = stopped(D1)
    at.do(at.c.roll_back())
    assert at.record.open.direction is Direction.BACK
    at.prepared("a", TORN)
    at.seals(D0)
    at.acknowledged("a")
    assert at.record.committed.direction is Direction.BACK
    assert not any(isinstance(o, Outcome) for o in at.take())


def test_a_push_that_comes_after_the_order_to_turn_back_is_another_one() -> None:
    at = stopped(D1)
    at.do(at.c.roll_back())
    at.push(2)
    at.prepared("a", TORN)
    at.seals(D0)
    at.acknowledged("a")
    assert at.reasons[-2:] == ["Commit", "OpenAttempt"]
    assert not any(isinstance(o, Outcome) for o in at.take())
    assert at.record.open.direction is Direction.FORWARD


def test_there_is_nothing_to_turn_back_between_transitions() -> None:
    at = leading("a")
    at.do(at.c.roll_back())
    at.push()
    assert at.record.open.direction is Direction.FORWARD
    at = committed("a")
    at.do(at.c.roll_back())  # too late
    at.folded()
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert outcome.error == ""


def test_a_rollback_that_has_to_wait_for_engines_is_not_forgotten() -> None:
    at = attempting("a")
    at.prepared("a")
    at.do(at.c.member_lost("a", 1))
    at.do(at.c.roll_back())
    at.joins("a")
    assert at.record.open.direction is Direction.BACK


def test_a_rollback_that_has_to_wait_for_an_owner_is_not_forgotten() -> None:
    at = attempting("a")
    at.prepared("a")
    at.do(at.c.owner_lost("o", 1))
    at.do(at.c.roll_back())
    at.owner_joins()
    at.push()
    assert at.record.open.direction is Direction.BACK


def test_a_rollback_that_waits_in_vain_ends_as_an_abandon() -> None:
    at = attempting("a")
    at.prepared("a")
    at.do(at.c.member_lost("a", 1))
    at.do(at.c.roll_back())
    at.do(at.c.expired(at.timer))
    assert at.reasons[-1] == "Abandon"
    assert "was rolled back to version 0 on the operator's order: abandoned" in at.take()[-1].error


def test_a_push_that_comes_after_a_rollback_hears_nothing_of_its_abandon() -> None:
    at = stopped(D1)
    at.do(at.c.roll_back())
    at.take()
    at.push(2)  # other weights
    at.do(at.c.member_lost("a", 1))
    assert at.reasons[-1] == "Abandon"
    assert not [o for o in at.take() if isinstance(o, Outcome)]


def test_what_is_pushed_while_a_transition_is_turned_back_comes_after_it() -> None:
    at = attempting("a", attempts_max=2)
    for state in (V0, TORN):
        at.prepared("a", state)
        at.fails("a")
    assert at.record.open.stopped
    at.do(at.c.roll_back())
    at.push(2)
    at.fails("a")
    assert (at.record.open.direction, at.record.open.attempts, at.record.open.pushes) == (Direction.BACK, 4, (1,))
    at.take()
    at.prepared("a", TORN)
    at.seals(D0)
    at.acknowledged("a")
    assert at.record.committed.direction is Direction.BACK
    assert [o for o in at.take() if isinstance(o, Outcome)] == []  # its push is not what was turned back
    assert (at.record.open.candidate, at.record.open.pushes) == (token(1, 2), (2,))


DENSE_TORN = StorageState(0, D0, ("dense",))


@pytest.mark.parametrize(("gone", "name", "why"), [("o", "owners", "no connection to o"), ("a", "members", "too few")])
def test_a_rollback_says_whom_it_waits_for(gone: str, name: str, why: str) -> None:
    at = attempting("a")
    at.do(at.c.roll_back())
    at.steps.clear()
    at.do(at.c.owner_lost("o", 1) if gone == "o" else at.c.member_lost("a", 1))
    (step,) = [s for s in at.steps if s.action == "Wait"]
    assert at.timers[-1].name == name
    assert step.detail.startswith(why)


def test_a_rollback_is_given_up_where_no_engine_is_torn_by_its_candidate_alone() -> None:
    at = attempting("a", attempts_max=1, stop_waits=True)
    at.fails("a", DENSE_TORN)
    assert at.c.fleet.at_fault == set()
    at.do(at.c.roll_back())
    assert at.reasons[-3:] == ["Stop", "Abandon", "OpenRestore"]


@pytest.mark.parametrize("state", [V0, DENSE_TORN])
def test_engines_that_failed_are_asked_once_more_to_go_back_if_they_can(state: StorageState) -> None:
    at = attempting("a", attempts_max=2, stop_waits=True)
    at.fails("a", V0)
    at.fails("a", state)
    assert at.reasons[-1] == "Stop"
    assert at.c.fleet.at_fault == {"a"}
    at.do(at.c.roll_back())
    outcomes = [o.error for o in at.take() if isinstance(o, Outcome)]
    if state.clean:
        assert (at.reasons[-1], at.record.open.direction, outcomes) == ("OpenAttempt", Direction.BACK, [])
        return
    assert at.reasons[-2:] == ["Abandon", "OpenRestore"]
    assert "abandoned, because too few engines can take part" in outcomes[0]


def test_the_retry_of_a_rollback_does_without_an_engine_that_fails_again_and_again() -> None:
    at = attempting("a", "b")
    at.do(at.c.roll_back())
    at.fails("a", V0)
    at.fails("a", V0)
    at.expires()
    assert at.record.open.direction is Direction.BACK
    assert [m.engine for m in at.record.members] == ["b"]


def test_a_rollback_that_cannot_be_ends_for_the_last_reason() -> None:
    at = attempting("a", attempts_max=3)
    at.do(at.c.roll_back())
    for why in ("first", "second", "last"):
        at.owner(EmitFailed("o", 1, at.epoch, why, fatal=False))
        if at.c.pausing:
            at.expires()
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert ": last; engines that it tore are restored" in outcome.error
