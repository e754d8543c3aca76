"""The coordinator: its schedule, its choices, and every report that it must not believe."""

from collections.abc import Callable

import pytest
from leader import D0, D1, D2, TORN, V0, Leader, attempting, committed, leading, stopped, token

from dcr.protocol.coordinator import Phase
from dcr.protocol.identity import Kind, manifest_root
from dcr.protocol.messages import (
    Acknowledged,
    AttemptFailed,
    CandidateReady,
    Emit,
    EmitFailed,
    Fold,
    Folded,
    OpenApply,
    Outcome,
    OwnerJoin,
    Prepare,
    Prepared,
    Published,
    Refuse,
    Sealed,
    Serving,
    StorageState,
    Withdraw,
)
from dcr.protocol.record import Member, OwnerRef


def kinds(orders: list) -> list[str]:
    return [type(o).__name__ for o in orders]


def test_the_synchronous_schedule() -> None:
    at = leading("a", "b")
    assert at.record is not None
    assert at.record.members == (Member("a", 1), Member("b", 1))
    at.push()
    a, b, emit = at.take()
    assert isinstance(a, Prepare)
    assert (a, a.incarnation, a.stage) == (b, 1, False)
    assert isinstance(emit, Emit)
    assert (emit.base.kind, emit.base.version, emit.base.baseline_id, emit.operation) == (Kind.RELATIVE, 0, D0, "add")
    at.prepared("a")
    at.acknowledged("a")  # before its order to apply: believed by nobody
    assert at.take() == []
    at.prepared("b")
    assert at.take() == [OpenApply("policy", 1)] * 2
    at.acknowledged("a")
    at.seals()
    assert at.reasons[-1] == "OpenAttempt"
    at.acknowledged("b")
    assert at.reasons[-1] == "Commit"
    assert (at.record.version, at.record.epoch, at.record.baseline_id) == (1, 1, D1)
    assert at.record.committed is not None
    assert at.record.committed.members == (Member("a", 1), Member("b", 1))
    assert at.record.committed.owners == (OwnerRef("o", 1),)
    assert at.take() == [Published("policy", 1), Published("policy", 1), Fold("policy", 1)]
    at.folded()
    (outcome,) = at.take()
    assert isinstance(outcome, Outcome)
    assert (outcome.error, outcome.version, outcome.epoch, outcome.incarnation, outcome.push) == ("", 1, 1, 1, 1)
    counts = {"attempts": 1, "changed_entries": 1, "elements": 3, "payloads": 1, "payload_bytes": 8}
    told = {"kind": "relative", "members": ["a", "b"], "failures": [], "warnings": [], "why_dense": ""}
    assert outcome.summary == counts | told
    assert at.c.phase is Phase.IDLE


@pytest.mark.parametrize(
    "what",
    [
        lambda at: at.fails("a"),
        lambda at: at.owner(EmitFailed("o", 1, at.epoch, "down", fatal=False)),
        lambda at: at.do(at.c.member_lost("a", 1)),
        lambda at: at.joins("a", incarnation=2),
        lambda at: at.prepared("a", TORN),
        lambda at: (at.prepared("a"), at.prepared("b"), at.seals(), at.acknowledged("b"), at.acknowledged("a", "bad")),
        lambda at: (at.prepared("b"), at.do(at.c.expired(at.timer))),
    ],
)
def test_whatever_goes_wrong_fails_the_attempt_and_the_next_is_absolute(what: Callable[[Leader], object]) -> None:
    at = attempting("a", "b")
    what(at)
    assert at.record is not None
    assert (at.record.version, at.record.epoch) == (0, 2)
    assert at.record.open is not None
    assert (at.record.open.attempts, at.record.open.kind) == (2, Kind.ABSOLUTE)
    assert at.c.phase is Phase.ATTEMPT


def test_a_member_that_lets_the_time_out_pass_is_evicted_until_it_speaks() -> None:
    at = attempting("a", "b")
    at.prepared("b")
    at.do(at.c.expired(at.timer))
    assert at.record is not None
    assert at.record.members == (Member("b", 1),)
    at.member(Serving("a", 1, 1, 0))
    at.fails("b")
    assert at.record.members == (Member("a", 1), Member("b", 1))


@pytest.mark.parametrize(
    "report",
    [
        Prepared("a", 2, 1, V0),
        Prepared("x", 1, 1, V0),
        Acknowledged("a", 1, 0, "root", {}),
        AttemptFailed("a", 1, 0, "old", V0),
        AttemptFailed("a", 9, 1, "of another incarnation", V0),
    ],
)
def test_stale_reports_of_members_are_not_believed(report: object) -> None:
    at = attempting("a")
    at.take()
    at.member(report)
    assert at.take() == []
    assert at.c.phase is Phase.ATTEMPT
    at.prepared("a")
    assert kinds(at.take()) == ["OpenApply"]


@pytest.mark.parametrize(
    "report",
    [
        Sealed("o", 2, 1, "digest", D1, 1, 8, 1, 3, {}),
        Sealed("o", 1, 0, "digest", D1, 1, 8, 1, 3, {}),
        Sealed("x", 1, 1, "digest", D1, 1, 8, 1, 3, {}),
        EmitFailed("o", 1, 0, "old", fatal=True),
        Folded("o", 1, 1, D1, "", {}),
    ],
)
def test_stale_reports_of_owners_are_not_believed(report: object) -> None:
    at = attempting("a")
    at.prepared("a")
    at.acknowledged("a")
    at.owner(report)
    assert at.c.phase is Phase.ATTEMPT
    assert at.reasons[-1] == "OpenAttempt"
    at.seals()
    assert at.reasons[-1] == "Commit"


def test_old_timers_are_ignored() -> None:
    at = attempting("a")
    old = at.timer
    at.prepared("a")
    assert at.timer > old
    assert at.c.expired(old) == []


def test_attempts_are_bounded_and_the_stop_is_named() -> None:
    at = attempting("a")
    for attempt in range(3):
        at.prepared("a")
        at.seals()
        at.fails("a")
        if attempt == 1:  # it pauses before the third
            assert at.c.pausing.startswith("absolute attempt of epoch 2: a the loader raised")
            at.expires()
    assert at.reasons[-1] == "Stop"
    assert at.record is not None
    assert at.record.open is not None
    assert at.record.open.stopped
    assert at.record.open.content_digest == D1
    outcome = at.take()[-1]
    assert "the transition stopped" in outcome.error
    assert "a the loader raised" in outcome.error
    assert at.c.phase is Phase.IDLE


def test_a_stopped_transition_is_resumed_with_the_same_weights() -> None:
    at = stopped(D1)
    at.push(2)
    assert at.record is not None
    assert at.record.open is not None
    assert (at.record.open.attempts, at.record.open.candidate) == (2, token(1, 1))
    at.prepared("a", TORN)
    at.seals(D1)
    at.acknowledged("a")
    assert at.reasons[-1] == "Commit"


def test_other_weights_do_not_resume_it_and_fail_by_name() -> None:
    at = stopped(D1)
    at.push(2)
    at.take()
    at.seals(D2)
    assert at.reasons[-1] == "Stop"
    assert "candidate changed" in at.take()[-1].error


def test_a_stopped_transition_of_unknown_content_is_abandoned_not_resumed() -> None:
    at = stopped("")
    at.push(2)
    assert at.reasons[-2:] == ["Abandon", "OpenRestore"]  # its only member is torn: restore it first


def test_a_restarted_owner_takes_its_candidate_with_it() -> None:
    at = attempting("a", "b")
    at.prepared("a")
    at.prepared("b")
    at.fails("a")
    at.owner_joins(2)
    assert at.reasons[-3:] == ["OpenAttempt", "Abandon", "OpenRestore"]
    assert at.record is not None
    assert at.record.open is None


def test_abandon_waits_until_nothing_is_under_way() -> None:
    at = stopped(D1)
    at.do(at.c.abandon())
    assert at.reasons[-2:] == ["Abandon", "OpenRestore"]
    at = attempting("a")
    at.do(at.c.abandon())
    assert at.reasons[-1] == "OpenAttempt"


def test_without_a_baseline_the_attempt_is_dense() -> None:
    at = leading("a")
    at.owner_joins(2, baseline="")
    at.owner(CandidateReady("o", 2, 1))
    emit = at.take()[-1]
    assert (emit.base.kind, emit.base.baseline_id, emit.operation) == (Kind.DENSE, "", "set")


def test_the_operator_can_order_a_dense_push() -> None:
    at = leading("a")
    at.c.dense_next()
    at.push()
    assert at.take()[-1].base.kind is Kind.DENSE


def test_weights_that_one_rank_refuses_end_the_push_on_every_rank_and_open_nothing() -> None:
    at = Leader(owners=("o", "p"))
    half = f"{5:032x}"
    for owner in ("o", "p"):
        at.owner(OwnerJoin(owner, 1, 1, half))
    at.joins("a")
    at.take()
    before = at.record
    at.owner(CandidateReady("p", 1, 1, refused="p holds 3 NaN"))
    assert at.take() == []  # the other rank may have more to say
    at.push()
    outcomes = at.take()
    assert [type(o) for o in outcomes] == [Outcome, Outcome]
    assert [(o.incarnation, o.push) for o in outcomes] == [(1, 1), (1, 1)]
    assert len({o.error for o in outcomes}) == 1
    assert outcomes[0].error.startswith("p holds 3 NaN; nothing was opened or sent")
    assert at.record == before
    # Asked again, after its connection was lost: the same answer.  And the next push is another one.
    at.push()
    assert [o.error for o in at.take()] == [outcomes[0].error]
    at.push(2)
    assert at.take() == []
    at.owner(CandidateReady("p", 1, 2))
    assert at.reasons[-1] == "OpenAttempt"


def test_weights_that_are_refused_leave_a_stopped_transition_as_it_is() -> None:
    at = stopped(D1)
    before = at.record
    at.owner(CandidateReady("o", 1, 2, refused="o holds 1 NaN"))
    assert at.take()[-1].error.startswith("o holds 1 NaN")
    assert at.record == before
    at.push(3)
    assert at.reasons[-1] == "OpenAttempt"


def test_fewer_than_members_min_wait_and_then_the_push_ends() -> None:
    at = attempting("a", members_min=2)
    assert at.reasons[-1] == "Admit"
    at.do(at.c.expired(at.timer))
    assert "members_min is 2" in at.take()[-1].error


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"control_version": 9}, "control version 9"),
        ({"wire_version": 9}, "wire version 9"),
        ({"refused": {"z": "later", "bias": "unknown operator"}}, "2 canonical tensor.*first bias: unknown operator"),
    ],
)
def test_engines_that_cannot_take_part_are_refused_by_name(changes: dict, why: str) -> None:
    at = leading("a")
    at.joins("x", **changes)
    (order,) = at.take()
    assert isinstance(order, Refuse)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(order.reason)
    at.push()
    assert at.record is not None
    assert at.record.members == (Member("a", 1),)


def test_a_push_that_was_given_up_takes_its_candidate_back() -> None:
    at = attempting("a")
    at.prepared("a")
    at.owner(Withdraw("o", 1, 1))
    assert at.reasons[-1] == "Abandon"
    assert at.record is not None
    assert at.record.open is None
    first = at.reasons.count("OpenAttempt")
    at.push(2)
    assert at.reasons.count("OpenAttempt") == first + 1
    assert at.record.open.candidate == token(1, 2)


def test_a_push_that_overtakes_one_that_was_given_up_is_not_answered_with_its_outcome() -> None:
    at = committed("a")  # push 1, being folded
    at.push(2)
    at.take()
    at.folded()
    assert not [o for o in at.take() if isinstance(o, Outcome)]
    assert at.reasons[-1] == "OpenAttempt"


def test_a_second_wait_has_a_time_out_of_its_own() -> None:
    at = leading()
    at.push(1)
    at.do(at.c.expired(at.timer))
    (first,) = [o for o in at.take() if isinstance(o, Outcome)]
    assert "too few engines" in first.error
    spent = at.timer
    at.push(2)
    assert at.timer != spent
    at.do(at.c.expired(at.timer))
    assert [o.push for o in at.take() if isinstance(o, Outcome)] == [2]


def test_a_stray_owner_changes_nothing() -> None:
    at = leading("a")
    at.owner(OwnerJoin("rank-7", 1, 1, D0))
    at.do(at.c.owner_lost("rank-7", 1))
    assert at.c.phase is Phase.IDLE


def test_a_lost_outcome_is_told_again() -> None:
    at = committed("a")
    at.folded()
    (outcome,) = [o for o in at.take() if isinstance(o, Outcome)]
    at.owner_joins(1, D1)
    at.push(1)  # it reconnected and still waits
    assert at.take() == [outcome]
    assert at.c.phase is Phase.IDLE
    at.push(2)
    assert at.c.phase is Phase.ATTEMPT


def test_an_owner_that_restarted_after_the_commit_is_not_told_that_its_next_push_succeeded() -> None:
    at = Leader(owners=("o", "p"))
    half = f"{5:032x}"
    at.owner(OwnerJoin("o", 1, 1, half))
    at.owner(OwnerJoin("p", 1, 1, half))
    at.joins("a")
    at.push()
    at.owner(CandidateReady("p", 1, 1))
    at.prepared("a")
    at.seals(half)
    at.owner(Sealed("p", 1, at.epoch, "digest", half, 1, 8, 1, 3, {}))
    at.acknowledged("a", manifest_root({"o": "digest", "p": "digest"}))
    assert at.c.phase is Phase.FOLDING
    at.owner(OwnerJoin("o", 2, 1, ""))
    at.owner(CandidateReady("o", 2, 1))  # with other weights
    at.take()
    at.owner(Folded("p", 1, at.epoch, half, "", {}))
    (outcome,) = at.take()  # one: to p
    assert (outcome.error, outcome.push) == ("", 1)
    at.owner(CandidateReady("p", 1, 2))
    assert at.c.phase is Phase.ATTEMPT  # o still waits, so both are ready now


def test_a_commit_does_not_vouch_for_an_engine_that_restarted_meanwhile() -> None:
    at = attempting("a", "b")
    at.prepared("a")
    at.prepared("b")
    at.seals()
    at.acknowledged("a")
    at.hold_writes = True
    at.acknowledged("b")
    at.joins("b", V0, incarnation=2)
    at.write()
    assert at.c.fleet.engines["b"].state == V0


def test_folds_that_time_out_make_the_next_push_dense() -> None:
    at = committed("a")
    at.take()
    at.do(at.c.expired(at.timer))
    (outcome,) = at.take()
    assert outcome.error == ""
    assert "time-out: no answer to the order to fold" in " ".join(outcome.summary["warnings"])
    at.push(2)
    assert at.take()[-1].base.kind is Kind.DENSE


def test_an_owner_whose_fold_was_given_up_is_not_believed_to_hold_the_baseline_until_it_has_folded() -> None:
    at = attempting("a")
    at.prepared("a")
    at.seals(D0)  # nothing changed: the baseline is what was committed already
    at.acknowledged("a")
    at.do(at.c.expired(at.timer))
    at.take()
    at.do(at.c.owner_lost("o", 1))
    at.owner_joins(1, D0)
    assert at.take() == [Fold("policy", 1)]
    at.joins("new", StorageState(None, "", ("unknown",)))
    assert at.reasons[-1] == "Commit"  # no restore that the owner could not serve
    at.folded(D0)
    assert at.reasons[-1] == "OpenRestore"


def test_a_reconnected_owner_is_told_to_fold_again() -> None:
    at = committed("a")
    at.take()
    at.do(at.c.owner_lost("o", 1))
    at.owner_joins(1)
    assert at.take() == [Fold("policy", 1)]


# ---------------------------------------------------------------- the asynchronous gate


def test_the_asynchronous_schedule() -> None:
    at = attempting("a", "b", gate_mode="async")
    a, b, _ = at.take()
    assert (a.stage, b.stage) == (True, True)
    at.prepared("a")
    at.prepared("b")
    at.staged("a")
    assert at.take() == []
    at.staged("b")
    assert at.take() == [OpenApply("policy", 1)] * 2
    at.seals()
    at.acknowledged("a")
    at.acknowledged("b")
    assert at.reasons[-1] == "Commit"


def test_whoever_does_not_stage_in_time_is_left_out() -> None:
    at = attempting("a", "b", gate_mode="async")
    preparing = at.timer
    at.prepared("a")
    at.prepared("b")
    assert at.timer > preparing  # staging has a time of its own
    at.seals()
    at.staged("b")
    at.do(at.c.expired(at.timer))
    assert at.record.members == (Member("b", 1),)
    assert at.record.open.kind is Kind.ABSOLUTE
