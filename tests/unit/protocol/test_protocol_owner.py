"""The owner: once per epoch, one candidate, and a baseline that is marked while it is folded."""

import msgspec
import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest, SealedPayload
from dcr.protocol.messages import Emit, Fold
from dcr.protocol.owner import (
    Again,
    CancelEmission,
    DeliverManifest,
    FoldBaseline,
    Owner,
    ReadRecord,
    ReportEmitFailed,
    ReportFolded,
    ReportSealed,
    StartEmission,
)
from dcr.protocol.record import CommitRecord, Direction, Member, OpenTransition, OwnerRef
from dcr.protocol.step import Step


def order(epoch: int, kind: Kind = Kind.RELATIVE, candidate: str = "w", *, base: int = 0, target: int = 1) -> Emit:
    return Emit("policy", epoch, target, Base(kind, base, "d0", candidate), "add", (), 1)


def roll_back(epoch: int) -> Emit:
    return order(epoch, Kind.ABSOLUTE, target=0)


def manifest(epoch: int, candidate: str = "w", content: str = "d1") -> Manifest:
    return Manifest("policy", 1, epoch, "o", 1, Base(Kind.RELATIVE, 0, "d0", candidate), (), content, 0, 1)


def of_baseline(to: Emit) -> Manifest:
    """What seals a restore or a rollback."""
    return Manifest("policy", to.target, to.epoch, "o", 1, to.base, (), "d0", 0, 1)


def committed(epoch: int, incarnation: int = 1, direction: Direction = Direction.FORWARD) -> CommitRecord:
    k = msgspec.structs.replace(CommitRecord.create("policy", "c", "d0"), epoch=epoch - 1)
    tr = OpenTransition(
        1, "w", 1, Kind.RELATIVE, (OwnerRef("o", incarnation),), 0, ("add",), direction=direction, pushes=(1,)
    )
    content = "d1" if direction is Direction.FORWARD else "d0"
    return k.open_attempt(tr, (Member("e", 1),)).commit(content, "root", "op")


def steps(effects: list) -> list[str]:
    return [e.action for e in effects if isinstance(e, Step)]


def without_steps(effects: list) -> list:
    return [e for e in effects if not isinstance(e, Step)]


def owner(baseline: str = "d0", base: int | None = None) -> Owner:
    return Owner("o", 1, "policy", baseline, base)


def sealed(o: Owner, epoch: int, **manifest_fields: str) -> list:
    assert without_steps(o.emit(order(epoch)))[-1] == StartEmission(order(epoch))
    m = manifest(epoch, **manifest_fields)
    effects = without_steps(o.emitted(m))
    return without_steps(o.sealed(m)) if effects == [DeliverManifest(m)] else effects


def folding(epoch: int = 1) -> Owner:
    o = owner()
    sealed(o, epoch)
    assert o.fold(Fold("policy", epoch)) == [ReadRecord()]
    assert without_steps(o.learned(committed(epoch))) == [FoldBaseline(epoch, "d1")]
    return o


def seen(o: Owner) -> tuple:
    """What the specification sees of an owner."""
    return o.incarnation, o.base, o.baseline_digest, o.folding, o.folded_epoch, o.fence, o.emitting, o.sealed_epochs


def test_emit_once_per_epoch() -> None:
    o = owner()
    assert without_steps(o.emit(order(1))) == [StartEmission(order(1))]
    assert (o.fence, o.emitting) == (1, 1)
    assert o.emit(order(1)) == []
    assert without_steps(o.emit(order(2))) == [CancelEmission(1), StartEmission(order(2))]
    assert o.emitted(manifest(1)) == []
    assert o.sealed(manifest(1)) == []
    assert o.emission_failed(1, "late") == []
    assert o.emitting == 2


def test_refusals_change_nothing() -> None:
    o = owner(base=1)
    o.emit(order(2, base=1, target=2))
    before = seen(o)
    for wrong, why in (
        (order(1), "fence is at 2"),
        (msgspec.structs.replace(order(3), record_id="x"), "of record 'x'"),
        (order(3), "the baseline holds version 1"),
    ):
        with pytest.raises(RefusedError, match=why):
            o.emit(wrong)
        assert seen(o) == before
    with pytest.raises(RefusedError, match="of record 'x'"):
        o.fold(Fold("x", 3))
    assert seen(o) == before


@pytest.mark.parametrize(
    ("kind", "can"), [(Kind.RELATIVE, False), (Kind.ABSOLUTE, False), (Kind.RESTORE, False), (Kind.DENSE, True)]
)
def test_without_a_baseline_only_dense(kind: Kind, *, can: bool) -> None:
    o = owner("")
    effects = o.emit(order(1, kind))
    (effect,) = without_steps(effects)
    assert isinstance(effect, StartEmission if can else ReportEmitFailed)
    assert steps(effects) == ["Emit" if can else "EmitFailed"]
    assert (o.fence, o.emitting) == (1, 1 if can else 0)


def test_the_version_of_a_baseline_is_adopted_once() -> None:
    o = owner()
    assert o.base is None
    o.emit(order(1, Kind.DENSE, base=4))
    assert o.base is None
    o.emit(order(2, base=4))
    assert o.base == 4
    (failed,) = without_steps(o.emit(order(3, base=5)))[1:]
    assert isinstance(failed, ReportEmitFailed)
    assert "its baseline holds version 4, not 5" in failed.reason


def test_a_stepped_candidate_fails_by_name() -> None:
    o = owner()
    assert sealed(o, 1) == [ReportSealed(manifest(1))]
    (failed,) = sealed(o, 2, content="d2")
    assert isinstance(failed, ReportEmitFailed)
    assert (failed.fatal, failed.given_up) == (True, 0)
    assert "candidate changed: the weights owned by o" in failed.reason
    assert sealed(o, 3) == [ReportSealed(manifest(3))]  # put back, it is the same candidate again
    o.emit(order(4, candidate="other"))
    other = manifest(4, candidate="other", content="d2")
    assert without_steps(o.emitted(other)) == [DeliverManifest(other)]


def test_a_rollback_carries_the_baseline_and_compares_the_weights() -> None:
    o = owner()
    sealed(o, 1)
    o.emit(roll_back(2))
    m = of_baseline(roll_back(2))
    assert without_steps(o.emitted(m, "d1")) == [DeliverManifest(m)]
    assert without_steps(o.sealed(m)) == [ReportSealed(m)]
    assert o.sealed_epochs == (1,)  # nothing that could be folded
    o.emit(roll_back(3))
    (failed,) = without_steps(o.emitted(of_baseline(roll_back(3)), "d2"))
    assert isinstance(failed, ReportEmitFailed)
    assert "candidate changed" in failed.reason


def test_a_restore_is_not_compared_with_the_candidate() -> None:
    o = owner()
    sealed(o, 1)
    restore = order(2, Kind.RESTORE, candidate="", target=0)
    o.emit(restore)
    m = of_baseline(restore)
    assert without_steps(o.emitted(m)) == [DeliverManifest(m)]
    o.sealed(m)
    assert o.sealed_epochs == (1,)


def test_a_candidate_whose_push_was_given_up_is_emitted_no_more() -> None:
    o = owner()
    o.emit(order(1))
    cancel, failed = without_steps(o.give_up(7))
    assert cancel == CancelEmission(1)
    assert isinstance(failed, ReportEmitFailed)
    assert (failed.fatal, failed.given_up) == (True, 7)
    for epoch, again in ((2, order(2, Kind.ABSOLUTE)), (3, order(3, Kind.DENSE)), (4, roll_back(4))):
        (failed,) = without_steps(o.emit(again))
        assert isinstance(failed, ReportEmitFailed)
        assert (failed.epoch, failed.fatal, failed.given_up) == (epoch, True, 7)
        assert "its push was given up" in failed.reason
    assert without_steps(o.emit(order(5, candidate="next"))) == [StartEmission(order(5, candidate="next"))]


def test_a_restore_goes_on_when_a_push_is_given_up() -> None:
    o = owner()
    o.emit(order(1, Kind.RESTORE, candidate="", target=0))
    assert o.give_up(7) == []
    assert o.emitting == 1


def test_fold_only_what_is_committed_and_was_sealed_here() -> None:
    o = owner()
    sealed(o, 1)
    assert o.learned(committed(1)) == []  # nobody ordered it
    assert o.fold(Fold("policy", 1)) == [ReadRecord()]
    assert o.learned(CommitRecord.create("policy", "c", "d0")) == []
    assert o.learned(committed(2)) == []
    assert o.learned(msgspec.structs.replace(committed(1), record_id="x")) == []
    assert o.learned(committed(1, incarnation=2)) == []  # another incarnation's seal, of other weights
    assert o.learned(committed(1, direction=Direction.BACK)) == []
    assert not o.folding
    effects = o.learned(committed(1))
    assert effects == [Step("o", "BeginFold", 1), FoldBaseline(1, "d1")]
    assert (o.folding, o.base, o.folded_epoch) == (True, 1, 1)


def test_a_commit_stands_whatever_the_fence() -> None:
    o = owner()
    sealed(o, 1)
    o.emit(order(7, Kind.RESTORE, candidate="", target=0))
    assert o.fold(Fold("policy", 1)) == [ReadRecord()]
    assert without_steps(o.learned(committed(1))) == [FoldBaseline(1, "d1")]


def test_an_epoch_that_was_not_sealed_here_is_not_folded() -> None:
    o = owner()
    sealed(o, 1)
    o.fold(Fold("policy", 2))
    assert o.learned(committed(2)) == []
    assert not o.folding


@pytest.mark.parametrize("kind", Kind)
def test_an_order_that_comes_during_a_fold_is_given_back_after_it(kind: Kind) -> None:
    o = folding()
    before = seen(o)
    late = order(2, kind, base=1, target=2)
    assert o.emit(late) == []
    assert o.emit(order(3, kind, base=1, target=2)) == []  # the last one counts
    assert o.emit(late) == []
    assert seen(o) == before
    assert o.fold(Fold("policy", 1)) == []
    assert o.learned(committed(1)) == []
    again = order(3, kind, base=1, target=2)
    assert o.folded(1, "d1") == [Step("o", "EndFold", 1), ReportFolded(1, "d1", ""), Again(again)]
    assert (o.folding, o.baseline_digest, o.base) == (False, "d1", 1)
    assert without_steps(o.emit(again)) == [StartEmission(again)]


def test_an_order_against_a_version_that_is_still_to_be_folded_waits_for_it() -> None:
    o = owner()
    sealed(o, 1)
    restore = order(2, Kind.RESTORE, candidate="", base=1)
    before = seen(o)
    assert o.emit(restore) == []
    assert seen(o) == before
    o.fold(Fold("policy", 1))
    o.learned(committed(1))
    assert without_steps(o.folded(1, "d1"))[-1] == Again(restore)
    assert without_steps(o.emit(restore)) == [StartEmission(restore)]


def test_an_order_that_waited_is_given_back_when_the_baseline_is_lost() -> None:
    o = folding()
    o.emit(order(2, base=1, target=2))
    lost, again = without_steps(o.fold_failed(1, "stepped"))
    assert lost == ReportFolded(1, "", "stepped")
    assert isinstance(again, Again)
    assert (o.base, o.baseline_digest) == (None, "")
    assert steps(o.emit(again.order)) == ["EmitFailed"]


def test_what_was_folded_must_be_what_was_committed() -> None:
    o = folding()
    effects = o.folded(1, "d2")
    assert steps(effects) == ["LoseBaseline"]
    assert (o.folding, o.baseline_digest, o.base, o.folded_epoch) == (False, "", None, 1)


@pytest.mark.parametrize("fail", [False, True])
def test_a_repeated_fold_order_is_answered_again(*, fail: bool) -> None:
    o = folding()
    effects = without_steps(o.fold_failed(1, "stepped") if fail else o.folded(1, "d1"))
    assert effects == [ReportFolded(1, "" if fail else "d1", "stepped" if fail else "")]
    assert o.baseline_digest == ("" if fail else "d1")
    assert o.fold(Fold("policy", 1)) == effects
    assert o.learned(committed(1)) == []


def test_emission_failure_is_reported_once() -> None:
    o = owner()
    o.emit(order(1))
    assert without_steps(o.emission_failed(1, "down", fatal=True)) == [ReportEmitFailed(1, "down", fatal=True)]
    assert o.emission_failed(1, "down") == []


def test_a_restore_of_what_it_sealed_waits_for_the_fold_even_if_nobody_has_named_the_version_of_its_baseline() -> None:
    o = owner()
    dense = order(1, Kind.DENSE)
    o.emit(dense)  # needs no baseline, and tells nothing of it
    m = msgspec.structs.replace(manifest(1), base=dense.base)
    o.emitted(m)
    o.sealed(m)
    restore = order(2, Kind.RESTORE, "", base=1, target=1)
    assert o.emit(restore) == []
    assert (o.fence, o.base) == (1, None)
    o.fold(Fold("policy", 1))
    o.learned(committed(1))
    assert without_steps(o.folded(1, "d1"))[-1] == Again(restore)


def test_the_trail_of_a_seal_says_how_much_and_what() -> None:
    o, m = owner(), manifest(1)
    assert o.emit(order(1))[0] == Step("o", "Emit", 1, "relative")
    o.emitted(m)
    assert o.sealed(m) == [Step("o", "Seal", 1, payloads=0, content_digest="d1"), ReportSealed(m)]


@pytest.mark.parametrize("kind", [Kind.RELATIVE, Kind.ABSOLUTE, Kind.RESTORE])
def test_an_order_for_another_incarnation_emits_nothing_against_a_baseline(kind: Kind) -> None:
    """The leader knew the baseline of the one that died; this one's may be another, of which nobody was told yet."""
    o = owner(base=None)
    found = o.emit(msgspec.structs.replace(order(3, kind), incarnation=7))
    assert [type(e) for e in without_steps(found)] == [ReportEmitFailed]
    assert o.emitting == 0
    assert o.base is None
    assert without_steps(o.emit(order(4, kind)))[-1] == StartEmission(order(4, kind))


def test_a_dense_order_for_another_incarnation_needs_no_baseline() -> None:
    o = owner(base=None)
    dense = msgspec.structs.replace(order(3, Kind.DENSE), incarnation=7)
    assert without_steps(o.emit(dense))[-1] == StartEmission(dense)


def test_what_cannot_be_emitted_is_said_with_its_epoch_and_is_not_taken_for_a_push_that_was_given_up() -> None:
    o = owner("")
    o.emit(order(1, Kind.DENSE))
    o.give_up(1)
    step, report = o.emit(order(2, candidate="next"))
    why = "o cannot emit: it has no baseline, and a relative order needs one"
    assert step == Step("o", "EmitFailed", 2, why)
    assert report == ReportEmitFailed(2, why, fatal=False)
    (report,) = without_steps(o.emit(order(3, Kind.DENSE)))  # of the candidate that was given up
    assert (report.fatal, report.given_up) == (True, 1)


def test_a_failure_to_deliver_may_not_come_again() -> None:
    o = owner()
    o.emit(order(1))
    assert without_steps(o.emission_failed(1, "down")) == [ReportEmitFailed(1, "down", fatal=False)]


def test_a_push_that_was_given_up_before_anything_was_ordered_says_nothing_of_the_next() -> None:
    o = owner()
    assert o.give_up(1) == []
    assert without_steps(o.emit(order(1))) == [StartEmission(order(1))]


def test_an_owner_without_a_baseline_has_no_version_of_it() -> None:
    assert owner("", 3).base is None
    assert owner("d3", 3).base == 3


def test_the_seals_of_one_candidate_are_kept_and_those_of_the_last_are_not() -> None:
    o = owner()
    sealed(o, 1)
    sealed(o, 2)
    assert o.sealed_epochs == (1, 2)
    o.emit(order(3, candidate="next"))
    m = msgspec.structs.replace(manifest(3, "next"), payloads=(SealedPayload(0, "x", 1, 8),))
    o.emitted(m)
    assert o.sealed(m)[0] == Step("o", "Seal", 3, payloads=1, content_digest="d1")
    assert o.sealed_epochs == (3,)


def test_a_stepped_candidate_fails_its_epoch() -> None:
    o = owner()
    sealed(o, 1)
    (failed,) = sealed(o, 2, content="d2")
    assert failed.epoch == 2


def test_a_rollback_whose_weights_nobody_looked_at_is_not_compared() -> None:
    o = owner()
    sealed(o, 1)
    o.emit(roll_back(2))
    m = of_baseline(roll_back(2))
    assert o.emitted(m) == [DeliverManifest(m)]


@pytest.mark.parametrize("kind", [Kind.ABSOLUTE, Kind.RESTORE])
def test_of_what_waits_for_a_fold_a_restore_alone_outlives_the_push(kind: Kind) -> None:
    o = folding()
    waits = order(2, kind, "" if kind is Kind.RESTORE else "v", base=1, target=2)
    o.emit(waits)
    assert o.give_up(1) == []
    again = [Again(waits)] if kind is Kind.RESTORE else []
    assert without_steps(o.folded(1, "d1")) == [ReportFolded(1, "d1", ""), *again]


def test_a_baseline_that_was_lost_is_said_with_its_epoch() -> None:
    o = folding(3)
    why = "what was folded is not what was committed"
    assert o.folded(3, "d2") == [Step("o", "LoseBaseline", 3, why), ReportFolded(3, "", why)]


def test_a_candidate_is_needed_until_k_and_the_fold_are_past_it() -> None:
    o = owner()
    nothing = CommitRecord.create("policy", "c", "d0")
    tr = OpenTransition(1, "w", 1, Kind.RELATIVE, (OwnerRef("o", 1),), 0, ("add",), pushes=(1,))
    open_ = nothing.open_attempt(tr, (Member("e", 1),))
    assert o.needs_candidate(open_) == ""  # another owner's, or another incarnation's
    sealed(o, 1)
    assert o.needs_candidate(nothing) == ""
    assert o.needs_candidate(open_) == "its transition to version 1 is open"
    assert o.needs_candidate(msgspec.structs.replace(open_, open=msgspec.structs.replace(tr, candidate="x"))) == ""
    assert o.needs_candidate(open_.stop("d1")) == ""  # its last attempt is fenced
    assert o.needs_candidate(open_.stop("d1").abandon()) == ""
    assert o.needs_candidate(committed(1, direction=Direction.BACK)) == ""  # nothing is folded
    assert o.needs_candidate(committed(1)) == "epoch 1 was committed and is not folded yet"
    assert o.needs_candidate(committed(2)) == ""  # it is not what was sealed here
    o.fold(Fold("policy", 1))
    o.learned(committed(1))
    assert o.needs_candidate(committed(1)) == "epoch 1 is being folded"
    o.folded(1, "d1")
    assert o.needs_candidate(committed(1)) == ""
