"""What a leader may do and what it may not, action by action: the guards of the specification (DESIGN D4 to D17)."""

from collections.abc import Callable

import pytest
from leader import D0, D1, D2, TORN, V0, Bare, token

from dcr.protocol.coordinator_effects import SendMember, SendOwner
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.protocol.leader import Phase
from dcr.protocol.messages import (
    CandidateReady,
    Emit,
    EmitFailed,
    Fold,
    Folded,
    OpenApply,
    Prepare,
    Published,
    StorageState,
)
from dcr.protocol.record import Direction, Member
from dcr.protocol.step import Step

EMPTY = StorageState(None, "", ("unknown",))
V1 = StorageState(1, D1, ())


def idle(*engines: str, **settings: object) -> Bare:
    at = Bare(**settings)
    at.owner_joins()
    for e in engines or ("a", "b"):
        at.joins(e)
    at.do(at.c.admit())
    at.take()
    return at


def offered(**settings: object) -> Bare:
    at = idle(**settings)
    at.push()
    return at


def attempt(**settings: object) -> Bare:
    at = offered(**settings)
    at.do(at.c.open_attempt(Kind.RELATIVE))
    return at


def applying() -> Bare:
    at = attempt()
    at.prepared("a")
    at.prepared("b")
    at.do(at.c.order_open_apply())
    return at


def complete() -> Bare:
    at = applying()
    at.seals()
    at.acknowledged("a")
    at.acknowledged("b")
    return at


def broken() -> Bare:
    at = applying()
    at.fails("a")
    return at


def failed() -> Bare:
    at = broken()
    at.do(at.c.fail_attempt())
    return at


def stopped() -> Bare:
    at = failed()
    at.do(at.c.stop())
    return at


def turned() -> Bare:
    at = failed()
    at.do(at.c.roll_back())
    return at


def turned_and_failed() -> Bare:
    at = turned()
    at.fails("b")
    at.do(at.c.fail_attempt())
    return at


def orphaned() -> Bare:
    at = failed()
    at.owner_joins(2)
    return at


def folding() -> Bare:
    at = complete()
    at.do(at.c.commit())
    return at


def published() -> Bare:
    at = folding()
    at.do(at.c.publish())
    return at


def folded() -> Bare:
    at = published()
    at.folded()
    return at


def over() -> Bare:
    at = folded()
    at.do(at.c.finish_transition())
    return at


def newcomer() -> Bare:
    at = idle()
    at.joins("new", EMPTY)
    return at


def restoring() -> Bare:
    at = newcomer()
    at.do(at.c.open_restore())
    return at


def restored() -> Bare:
    at = restoring()
    at.prepared("new", EMPTY)
    at.do(at.c.order_open_apply())
    at.acknowledged("new")
    return at


def after_restore() -> Bare:
    at = restored()
    at.do(at.c.end_restore())
    return at


def holder() -> Bare:
    at = idle()
    at.joins("new")
    return at


ACTIONS: dict[str, Callable[[Bare], list]] = {
    "relative": lambda at: at.c.open_attempt(Kind.RELATIVE),
    "absolute": lambda at: at.c.open_attempt(Kind.ABSOLUTE),
    "dense": lambda at: at.c.open_attempt(Kind.DENSE),
    "roll_back": lambda at: at.c.roll_back(),
    "order_open_apply": lambda at: at.c.order_open_apply(),
    "fail_attempt": lambda at: at.c.fail_attempt(),
    "commit": lambda at: at.c.commit(),
    "stop": lambda at: at.c.stop(),
    "abandon": lambda at: at.c.abandon(),
    "publish": lambda at: at.c.publish(),
    "finish_transition": lambda at: at.c.finish_transition(),
    "open_restore": lambda at: at.c.open_restore(),
    "end_restore": lambda at: at.c.end_restore(),
    "admit": lambda at: at.c.admit(),
}

# What the specification enables; everything else must be refused.
ENABLED: dict[Callable[[], Bare], set[str]] = {
    idle: set(),
    offered: {"relative", "dense"},
    attempt: set(),
    applying: set(),
    complete: {"commit"},
    broken: {"fail_attempt"},
    failed: {"absolute", "dense", "roll_back", "stop", "abandon"},
    stopped: {"absolute", "dense", "roll_back", "abandon"},
    turned: set(),
    turned_and_failed: {"absolute", "stop", "abandon"},
    orphaned: {"stop", "abandon"},
    folding: {"publish"},
    published: set(),
    folded: {"finish_transition"},
    over: set(),
    newcomer: {"open_restore"},
    restoring: {"order_open_apply"},
    restored: {"end_restore"},
    after_restore: {"publish", "finish_transition"},
    holder: {"admit"},
}


def seen(at: Bare) -> tuple:
    """What the specification sees of a leader, and what was ordered."""
    c = at.c
    session = None if c.session is None else (c.session.epoch, c.session.applying)
    return c.phase, c.record, c.revision, c.candidate, session, len(at.reasons), list(at.sent)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", ENABLED, ids=lambda f: f.__name__)
def test_only_what_the_specification_enables(state: Callable[[], Bare], action: str) -> None:
    at = state()
    before = seen(at)
    if action in ENABLED[state]:
        at.do(ACTIONS[action](at))
        assert seen(at) != before
        return
    with pytest.raises(RefusedError, match=r"c1: \w+ of record 'policy' was refused at epoch \d+: "):
        ACTIONS[action](at)
    assert seen(at) == before


def test_reports_start_nothing() -> None:
    at = idle()
    at.push()
    at.joins("c")
    at.joins("d", EMPTY)
    assert (at.reasons, at.sent) == (["CreateRecord", "Admit"], [])
    at = complete()
    assert at.c.phase is Phase.ATTEMPT
    at.do(at.c.member_lost("a", 1))
    at.do(at.c.owner_lost("o", 1))
    assert at.c.phase is Phase.ATTEMPT
    at.do(at.c.commit())  # a session that is broken may be committed if all has come in
    assert at.record.version == 1


def test_the_orders_of_an_attempt_name_incarnations() -> None:
    at = idle("a")
    at.joins("b", incarnation=7)
    at.push()
    at.take()
    at.hold_writes = True
    at.do(at.c.open_attempt(Kind.RELATIVE))
    effects = at.c.written(at.held[-1].operation_id, 9)
    k, operation = at.held[-1].record, at.held[-1].operation_id
    assert effects[0] == Step("c1", "OpenAttempt", 1, record=k, revision=9, operation_id=operation)
    sent = [(e.engine, e.order.incarnation) for e in effects if isinstance(e, SendMember)]
    assert sent == [("a", 1), ("b", 7)]
    (emit,) = [e.order for e in effects if isinstance(e, SendOwner)]
    assert isinstance(emit, Emit)
    assert (at.c.phase, at.c.revision, at.c.session.epoch, at.c.candidate) == (Phase.ATTEMPT, 9, 1, token(1, 1))


def test_a_session_is_of_whom_the_leader_had_in_mind_when_it_wrote() -> None:
    at = offered()
    at.hold_writes = True
    at.do(at.c.open_attempt(Kind.RELATIVE))
    assert at.c.phase is Phase.WRITING
    at.joins("a", EMPTY, incarnation=2)
    at.joins("c")
    at.write()
    orders = [o for o in at.take() if isinstance(o, Prepare)]
    assert [o.incarnation for o in orders] == [1, 1]
    assert at.c.session.broken == "a restarted"
    at.do(at.c.fail_attempt())


def test_engines_that_do_not_admit_the_kind_are_left_out_and_others_by_name() -> None:
    at = offered()
    at.joins("torn", TORN)
    at.do(at.c.open_attempt(Kind.RELATIVE, leave_out={"b"}))
    assert at.record.members == (Member("a", 1),)
    at.fails("a")
    at.do(at.c.fail_attempt())
    at.joins("torn", StorageState(0, D0, (token(1, 1),)))
    at.do(at.c.open_attempt(Kind.ABSOLUTE))
    assert [m.engine for m in at.record.members] == ["a", "b", "torn"]


def test_weights_that_an_owner_refuses_are_no_candidate() -> None:
    at = idle()
    at.owner(CandidateReady("o", 1, 1, refused="o brings 3 NaN"))
    with pytest.raises(RefusedError, match="an owner refuses its candidate: o brings 3 NaN"):
        at.c.open_attempt(Kind.RELATIVE)
    at.owner(CandidateReady("o", 1, 2))
    at.do(at.c.open_attempt(Kind.RELATIVE))


def test_an_attempt_needs_enough_engines() -> None:
    at = offered(members_min=2)
    with pytest.raises(RefusedError, match="1 engines can take part, and 2 are needed"):
        at.c.open_attempt(Kind.RELATIVE, leave_out={"a"})
    at.do(at.c.open_attempt(Kind.RELATIVE))


def test_the_first_attempt_is_absolute_only_where_relative_payloads_are_not_used() -> None:
    at = offered()
    at.do(at.c.open_attempt(Kind.ABSOLUTE, first_absolute=True))
    assert at.record.open.kind is Kind.ABSOLUTE


def test_without_the_baseline_an_attempt_is_dense() -> None:
    at = idle()
    at.owner_joins(2, "")
    at.owner(CandidateReady("o", 2, 1))
    with pytest.raises(RefusedError, match="the baseline of version 0 is not held"):
        at.c.open_attempt(Kind.RELATIVE)
    at.do(at.c.open_attempt(Kind.DENSE))


def test_an_asynchronous_attempt_waits_for_the_stages() -> None:
    at = attempt(gate_mode="async")
    for engine in ("a", "b"):
        at.prepared(engine)
    with pytest.raises(RefusedError, match="may write"):
        at.c.order_open_apply()
    for engine in ("a", "b"):
        at.staged(engine)
    at.take()
    at.do(at.c.order_open_apply())
    assert at.take() == [OpenApply("policy", 1)] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda at: at.seals(),
        lambda at: (at.seals(), at.acknowledged("a"), at.acknowledged("b", "another root")),
        lambda at: (at.acknowledged("a"), at.acknowledged("b")),
        lambda at: (at.seals(incarnation=2), at.acknowledged("a"), at.acknowledged("b")),
        lambda at: (at.joins("b", incarnation=2), at.seals(), at.acknowledged("a"), at.acknowledged("b")),
    ],
)
def test_no_commit_without_every_seal_and_every_acknowledgement(wrong: Callable[[Bare], object]) -> None:
    at = applying()
    wrong(at)
    with pytest.raises(RefusedError, match="Commit"):
        at.c.commit()


def test_no_commit_of_other_content_than_the_record_names() -> None:
    at = applying()
    at.seals(D1)
    at.fails("a")
    at.do(at.c.fail_attempt())
    at.do(at.c.open_attempt(Kind.ABSOLUTE))
    assert at.record.open.content_digest == D1
    at.prepared("a", TORN)
    at.prepared("b")
    at.do(at.c.order_open_apply())
    at.seals(D2)
    at.acknowledged("a")
    at.acknowledged("b")
    with pytest.raises(RefusedError, match="other content"):
        at.c.commit()
    assert at.c.session.fatal
    assert "candidate changed" in at.c.session.broken


def test_a_time_out_fails_an_attempt_that_nothing_else_is_wrong_with() -> None:
    at = attempt()
    assert at.c.fail_attempt("it takes too long") == [Step("c1", "AttemptFailed", 1, "it takes too long")]
    assert at.c.phase is Phase.IDLE


def test_a_failure_of_an_emission_breaks_only_its_own_epoch() -> None:
    at = attempt()
    at.owner(EmitFailed("o", 1, 0, "old", fatal=True))
    assert at.c.session.broken == ""
    at.owner(EmitFailed("o", 1, 1, "down", fatal=False))
    assert at.c.session.broken == "down"


def test_publish_tells_engines_and_the_owners_whose_seals_were_committed() -> None:
    at = folding()
    at.take()
    at.do(at.c.publish())
    assert at.take() == [Published("policy", 1), Published("policy", 1), Fold("policy", 1)]
    at.do(at.c.owner_lost("o", 1))
    at.owner_joins(1)
    assert at.take() == [Fold("policy", 1)]  # the order may have been lost with the connection
    at.owner_joins(2, "")
    assert at.take() == []
    at.do(at.c.finish_transition())  # its seal died with it: nobody owes a fold


def test_a_push_that_was_committed_is_no_candidate_any_more() -> None:
    at = over()
    with pytest.raises(RefusedError, match="an owner still waits with the push that ended last"):
        at.c.open_attempt(Kind.RELATIVE)
    at.push(2)
    at.do(at.c.open_attempt(Kind.RELATIVE))
    assert at.record.open.target == 2


def test_a_rollback_is_committed_at_the_old_version() -> None:
    at = turned()
    assert (at.record.open.direction, at.record.open.kind) == (Direction.BACK, Kind.ABSOLUTE)
    at.prepared("a", TORN)
    at.prepared("b")
    at.do(at.c.order_open_apply())
    at.seals(D0)
    at.acknowledged("a")
    at.acknowledged("b")
    at.take()
    at.do(at.c.commit())
    assert (at.record.version, at.record.open, at.c.phase) == (0, None, Phase.IDLE)
    assert at.take() == [Published("policy", 2)] * 2
    with pytest.raises(RefusedError):
        at.c.open_attempt(Kind.RELATIVE)  # that push is over


def test_engines_of_a_restore_do_not_wait_for_one_another() -> None:
    at = idle()
    at.joins("x", EMPTY)
    at.joins("y", EMPTY)
    at.do(at.c.open_restore())
    at.prepared("x", EMPTY)
    at.take()
    at.do(at.c.order_open_apply())
    at.take()
    at.prepared("y", EMPTY)
    assert at.take() == [OpenApply("policy", at.epoch)]
    at.acknowledged("x")
    with pytest.raises(RefusedError, match="still being restored"):
        at.c.end_restore()
    at.do(at.c.member_lost("y", 1))
    at.do(at.c.end_restore())
    at.do(at.c.publish())
    at.do(at.c.finish_transition())
    at.do(at.c.admit())
    assert Member("x", 1) in at.record.members


def test_a_restore_that_takes_too_long_ends() -> None:
    at = restoring()
    at.do(at.c.end_restore("it takes too long"))
    assert at.c.phase is Phase.FOLDING


def test_an_engine_that_turns_out_to_need_no_restore_is_restored_like_the_others() -> None:
    at = restoring()
    at.prepared("new", V0)
    with pytest.raises(RefusedError, match="still being restored"):
        at.c.end_restore()


def test_a_restore_may_be_opened_while_owners_fold_what_was_published() -> None:
    at = folding()
    at.joins("new", EMPTY)
    with pytest.raises(RefusedError, match="not published"):
        at.c.open_restore()
    at.do(at.c.publish())
    at.do(at.c.open_restore())
    assert at.record.epoch == 2
    at.do(at.c.end_restore("enough"))
    with pytest.raises(RefusedError, match="o did not fold yet"):
        at.c.finish_transition()
    at.owner(Folded("o", 1, 1, D1, "", {}))
    at.do(at.c.finish_transition())


def test_an_owner_without_a_baseline_serves_no_restore() -> None:
    at = newcomer()
    at.owner_joins(2, "")
    with pytest.raises(RefusedError, match="o holds no baseline"):
        at.c.open_restore()
    at.owner_joins(3, D2)
    with pytest.raises(RefusedError, match="the baseline is not the committed version"):
        at.c.open_restore()


def test_leaving_engines_alone() -> None:
    at = newcomer()
    with pytest.raises(RefusedError, match="every engine holds"):
        at.c.open_restore(leave_out={"new"})
    at = holder()
    with pytest.raises(RefusedError, match="no engine that is not a member"):
        at.c.admit(leave_out={"new"})


def test_what_acknowledged_the_last_commit_holds_it() -> None:
    at = over()
    assert at.c.fleet.engines["a"].state == V1
    with pytest.raises(RefusedError, match="every engine holds"):
        at.c.open_restore()
