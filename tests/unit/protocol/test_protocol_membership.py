"""Engines that come, go and are restored, as the coordinator sees them (DESIGN D15)."""

import pytest
from leader import D0, V0, Leader, leading

from dcr.protocol.coordinator import Phase
from dcr.protocol.fleet import ENGINES_MAX
from dcr.protocol.identity import Kind
from dcr.protocol.messages import EmitFailed, OpenApply, Refuse, Serving, StorageState
from dcr.protocol.record import Member, OwnerRef
from dcr.protocol.step import Step


def test_restore_then_admit() -> None:
    at = leading("a")
    at.joins("new", StorageState(None, "", ("unknown",)))
    prepare, emit = at.take()
    assert prepare.base.kind is emit.base.kind is Kind.RESTORE
    assert emit.operation == "set"
    at.prepared("new", StorageState(None, "", ("unknown",)))
    at.seals(D0)
    assert at.reasons[-1] == "OpenRestore"
    at.acknowledged("new")
    assert at.reasons[-1] == "Admit"
    assert at.record is not None
    assert at.record.members == (Member("a", 1), Member("new", 1))


def test_the_step_of_a_restore_says_what_was_written_and_whom_it_is_for() -> None:
    at = leading("a")
    at.hold_writes = True
    at.joins("new", StorageState(None, "", ("unknown",)))
    (w,) = at.held
    step = at.c.written(w.operation_id, 9)[0]
    assert step == Step(
        *("c1", "OpenRestore", w.record.epoch),
        record=w.record,
        revision=9,
        operation_id=w.operation_id,
        members=(Member("new", 1),),
        owners=(OwnerRef("o", 1),),
    )


def restoring_a_holder() -> Leader:
    at = leading("a")
    at.joins("new", StorageState(None, "", ("unknown",)))
    at.prepared("new", V0)  # it learned meanwhile what it holds; but it is fenced, and its gate stays closed
    return at


def test_an_engine_that_turns_out_to_hold_the_version_is_restored_all_the_same() -> None:
    at = restoring_a_holder()
    assert at.take()[-1] == OpenApply("policy", at.epoch)
    assert at.reasons[-1] == "OpenRestore"
    at.seals(D0)
    at.acknowledged("new")
    assert at.reasons[-1] == "Admit"


@pytest.mark.parametrize("rejoins", [False, True])
def test_an_engine_that_was_fenced_in_vain_is_restored_again_even_if_it_holds_the_version(*, rejoins: bool) -> None:
    at = restoring_a_holder()
    at.owner(EmitFailed("o", 1, at.epoch, "the disk is full", fatal=False))
    if rejoins:
        at.joins("new", V0)
    assert at.c.phase is Phase.IDLE
    at.do(at.c.expired(at.timer))
    assert at.reasons[-2:] == ["OpenRestore", "OpenRestore"]
    assert at.reasons.count("Admit") == 1  # of a, at the start


def test_a_member_that_is_prepared_late_gets_the_order_that_it_refused() -> None:
    at = leading("a")
    unknown = StorageState(None, "", ("unknown",))
    at.joins("b", unknown)
    at.prepared("b", unknown)
    assert at.take()[-1] == OpenApply("policy", at.epoch)
    at.prepared("b", unknown)  # its connection was lost in between
    assert at.take() == [OpenApply("policy", at.epoch)]


def test_an_engine_that_is_restored_at_last_is_not_refused_any_more() -> None:
    at = leading("a", restores_max=1)
    unknown = StorageState(None, "", ("unknown",))
    at.joins("new", unknown)
    at.prepared("new", unknown)
    at.do(at.c.member_lost("new", 1))
    at.take()
    at.joins("new", unknown)
    assert [type(o) for o in at.take()] == [Refuse]
    at.joins("new", V0)  # it had everything already, and finished alone
    at.do(at.c.expired(at.timer))
    assert not any(isinstance(o, Refuse) for o in at.take())
    assert Member("new", 1) not in at.record.members  # it acknowledged to nobody: restore it once more, in a new epoch
    assert at.reasons[-1] == "OpenRestore"


def test_restores_that_fail_again_and_again_end_in_a_refusal_that_is_told() -> None:
    at = leading("a")
    unknown = StorageState(None, "", ("unknown",))
    at.joins("new", unknown)
    for _ in range(3):
        assert at.reasons[-1] == "OpenRestore"
        at.take()
        at.prepared("new", unknown)
        at.fails("new", unknown)
        assert at.c.phase is Phase.IDLE  # a pause, so that what ails it may pass
        at.do(at.c.expired(at.timer))
    assert at.c.phase is Phase.IDLE
    (refuse,) = [o for o in at.take() if isinstance(o, Refuse)]
    assert "its restore failed 3 times" in refuse.reason


def test_a_refused_member_that_serves_the_committed_version_after_all_is_not_refused_any_more() -> None:
    at = leading("a", restores_max=1)
    unknown = StorageState(None, "", ("unknown",))
    at.joins("a", unknown)
    at.prepared("a", unknown)
    at.do(at.c.member_lost("a", 1))
    at.take()
    at.joins("a", unknown)
    assert [type(o) for o in at.take()] == [Refuse]
    at.member(Serving("a", 1, at.epoch - 1, 0))  # of the epoch before that restore: what became of it is not told
    at.push()
    assert not at.record.open
    at.member(Serving("a", 1, at.epoch, 0))  # the payloads had all arrived, and K names it
    assert at.reasons[-1] == "OpenAttempt"
    assert [m.engine for m in at.c.session.members] == ["a"]
    assert at.record.open.kind is Kind.RELATIVE


def test_owners_that_cannot_serve_a_restore_are_not_the_engines_fault() -> None:
    at = leading("a")
    unknown = StorageState(None, "", ("unknown",))
    at.joins("new", unknown)
    for _ in range(5):
        assert at.reasons[-1] == "OpenRestore"
        at.owner(EmitFailed("o", 1, at.epoch, "the disk is full", fatal=False))
        at.reasons.append("")
        at.do(at.c.expired(at.timer))
    assert not [o for o in at.take() if isinstance(o, Refuse)]


def test_a_restore_is_not_staged() -> None:
    at = leading("a", gate_mode="async")
    unknown = StorageState(None, "", ("unknown",))
    at.joins("new", unknown)
    assert not at.take()[0].stage  # its gate is closed, so there is nothing to serve meanwhile
    at.prepared("new", unknown)
    assert at.take() == [OpenApply("policy", at.epoch)]


def test_engines_that_nobody_needs_are_forgotten_in_the_order_in_which_they_went() -> None:
    at = leading("member")
    at.do(at.c.member_lost("member", 1))
    refused = {"bias": "unknown operator"}  # so that none of them becomes a member
    for n in range(ENGINES_MAX - 1):
        at.joins(f"e{n}", refused=refused)
    at.do(at.c.member_lost("e7", 1))
    at.do(at.c.member_lost("e3", 1))
    known = at.c.fleet.engines
    assert len(known) == ENGINES_MAX
    at.joins("x", refused=refused)
    assert "e7" not in known
    assert "e3" in known
    at.joins("y", refused=refused)
    assert "e3" not in known
    at.joins("z", refused=refused)
    assert len(known) == ENGINES_MAX + 1  # every other one is connected, but for a member of K
    assert {"member", "x", "y", "z"} <= set(known)


LOADED_NOTHING = StorageState(None, "", ("unknown",))
TORN_BY_A_RESTORE = StorageState(None, "", ("restore", "unknown"))


def test_the_pause_after_a_failed_restore_is_a_pause() -> None:
    at = leading("a")
    at.joins("b", LOADED_NOTHING)
    at.fails("b", TORN_BY_A_RESTORE)
    restores = at.reasons.count("OpenRestore")
    at.do(at.c.expired(at.timer))
    assert at.reasons.count("OpenRestore") == restores + 1


def test_a_push_that_waits_for_engines_does_not_prolong_that_pause() -> None:
    at = leading("a", members_min=2)
    at.joins("b", LOADED_NOTHING)
    at.fails("b", TORN_BY_A_RESTORE)
    at.push()
    restores = at.reasons.count("OpenRestore")
    at.do(at.c.expired(at.timer))
    assert at.reasons.count("OpenRestore") == restores + 1


def test_an_engine_that_never_answers_holds_up_no_other_restore() -> None:
    at = leading()
    at.hold_writes = True
    at.joins("a", LOADED_NOTHING)
    at.joins("mute", LOADED_NOTHING)
    at.write()  # of a alone: mute came meanwhile
    at.hold_writes = False
    at.prepared("a", LOADED_NOTHING)
    at.fails("a", TORN_BY_A_RESTORE)
    at.do(at.c.expired(at.timer))
    assert {m.engine for m in at.c.session.members} == {"a", "mute"}
    at.take()
    at.prepared("a", TORN_BY_A_RESTORE)
    assert OpenApply("policy", at.epoch) in at.take()
