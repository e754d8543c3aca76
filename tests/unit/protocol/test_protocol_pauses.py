"""Pauses between attempts: what failed at once would mostly fail again at once."""

import pytest
from leader import Leader, attempting

from dcr.protocol.messages import CandidateReady, EmitFailed, Serving, Withdraw
from dcr.protocol.record import Direction


def fails_to_emit(at: Leader, reason: str) -> None:
    at.owner(EmitFailed("o", 1, at.epoch, reason, fatal=False))


def test_what_fails_again_at_once_is_tried_again_after_longer_and_longer_pauses() -> None:
    at = attempting("a", attempts_max=8)
    paused = []
    while at.reasons[-1] != "Stop":
        at.timers.clear()
        fails_to_emit(at, f"rank-0: DeliveryError: default/{at.epoch:020d}/x, epoch {at.epoch}: the disk is full")
        pauses = [t.times for t in at.timers if t.name == "attempt_pause"]
        paused += pauses or [0]
        if pauses:
            assert at.reasons[-1] == "OpenAttempt"
            attempts = at.reasons.count("OpenAttempt")
            at.do(at.c.member_report(Serving("a", 1, 0, 0)))  # whatever is heard meanwhile hurries nothing
            assert at.reasons.count("OpenAttempt") == attempts
            at.expires()
            assert at.reasons.count("OpenAttempt") == attempts + 1
    assert paused == [0, 1, 2, 4, 8, 8, 8, 0]
    error = at.take()[-1].error
    assert error.count("the disk is full") == 1
    assert "relative attempt of epoch 1, absolute attempt of epoch 2" in error
    assert "epoch 8: the disk is full" in error
    at.timers.clear()
    at.push(2)  # somebody has made room: it is tried at once
    assert at.reasons[-2:] == ["Abandon", "OpenAttempt"]
    assert [t.name for t in at.timers] == ["prepare"]


def test_different_failures_are_all_told() -> None:
    at = attempting("a", attempts_max=2)
    fails_to_emit(at, "node e1 has no room")
    fails_to_emit(at, "node e2 has no room")
    error = at.take()[-1].error
    assert "epoch 1: node e1 has no room" in error
    assert "epoch 2: node e2 has no room" in error


def test_who_was_lost_or_late_puts_nothing_off() -> None:
    at = attempting("a", "b", "c", attempts_max=9)
    at.do(at.c.member_lost("a", 1))
    at.do(at.c.member_lost("b", 1))
    at.expires()
    assert at.reasons.count("OpenAttempt") == 4
    assert "attempt_pause" not in {t.name for t in at.timers}


def test_an_operator_does_not_wait_for_the_end_of_a_pause() -> None:
    for order in ("roll_back", "abandon"):
        at = attempting("a")
        fails_to_emit(at, "down")
        fails_to_emit(at, "down")
        assert at.c.pausing
        pause = at.timer
        at.do(getattr(at.c, order)())
        assert at.record is not None
        if order == "abandon":
            assert at.reasons[-1] == "Abandon"  # the push still waits: a new transition, after the pause
            at.do(at.c.expired(pause))
        else:
            assert at.record.open is not None
            assert at.record.open.direction is Direction.BACK
        assert (at.reasons[-1], at.c.pausing) == ("OpenAttempt", "")


@pytest.mark.parametrize("how", ["given up", "owner restarted"])
def test_the_failures_of_a_stopped_push_that_nobody_waits_for_any_more_put_the_next_one_not_off(how: str) -> None:
    at = attempting("a", attempts_max=2, stop_waits=True)
    fails_to_emit(at, "down")
    fails_to_emit(at, "down")
    assert at.reasons[-1] == "Stop"
    if how == "given up":
        at.owner(Withdraw("o", 1, 1))
        push = CandidateReady("o", 1, 2)
    else:
        at.do(at.c.owner_lost("o", 1))
        at.owner_joins(2)
        push = CandidateReady("o", 2, 1)
    assert at.reasons[-1] == "Abandon"
    at.timers.clear()
    at.owner(push)
    assert at.reasons[-1] == "OpenAttempt"
    assert [t.name for t in at.timers] == ["prepare"]
