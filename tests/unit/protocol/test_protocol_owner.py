"""The owner: once per epoch, one candidate, and a baseline that is marked while it is folded."""

import msgspec
import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, Manifest
from dcr.protocol.messages import Emit, Fold
from dcr.protocol.owner import (
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
from dcr.protocol.record import CommitRecord, Member, OpenTransition, OwnerRef
from dcr.protocol.step import Step


def order(epoch: int, kind: Kind = Kind.RELATIVE, candidate: str = "w") -> Emit:
    return Emit("policy", epoch, 1, Base(kind, 0, "d0", candidate), "add", ())


def manifest(epoch: int, kind: Kind = Kind.RELATIVE, candidate: str = "w", content: str = "d1") -> Manifest:
    return Manifest("policy", 1, epoch, "o", 1, Base(kind, 0, "d0", candidate), (), content, 0, 1)


def committed(epoch: int) -> CommitRecord:
    k = msgspec.structs.replace(CommitRecord.create("policy", "c", "d0"), epoch=epoch - 1)
    tr = OpenTransition(1, "w", 1, Kind.RELATIVE, (OwnerRef("o", 1),), 0, ("add",))
    return k.open_attempt(tr, (Member("e", 1),)).commit("d1", "root", "op")


def without_steps(effects: list) -> list:
    return [e for e in effects if not isinstance(e, Step)]


def owner(baseline: str = "d0") -> Owner:
    return Owner("o", 1, "policy", baseline)


def sealed(o: Owner, epoch: int, **manifest_fields: object) -> list:
    assert without_steps(o.emit(order(epoch)))[-1] == StartEmission(order(epoch))
    m = manifest(epoch, **manifest_fields)
    effects = without_steps(o.emitted(m))
    return without_steps(o.sealed(m)) if effects == [DeliverManifest(m)] else effects


def test_emit_once_per_epoch() -> None:
    o = owner()
    assert without_steps(o.emit(order(1))) == [StartEmission(order(1))]
    assert o.emit(order(1)) == []
    assert without_steps(o.emit(order(2))) == [CancelEmission(1), StartEmission(order(2))]
    assert o.emitted(manifest(1)) == []
    assert o.sealed(manifest(1)) == []
    assert o.emission_failed(1, "late") == []


def test_refusals() -> None:
    o = owner()
    o.emit(order(2))
    for wrong, why in (
        (order(1), "fence is at 2"),
        (msgspec.structs.replace(order(3), record_id="x"), "of record 'x'"),
    ):
        with pytest.raises(RefusedError, match=why):
            o.emit(wrong)
    for fold, why in ((Fold("policy", 1), "fence is at 2"), (Fold("x", 3), "of record 'x'")):
        with pytest.raises(RefusedError, match=why):
            o.fold(fold)
    assert without_steps(o.emitted(manifest(2))) == [DeliverManifest(manifest(2))]


@pytest.mark.parametrize(
    ("kind", "can"), [(Kind.RELATIVE, False), (Kind.ABSOLUTE, False), (Kind.RESTORE, False), (Kind.DENSE, True)]
)
def test_without_a_baseline_only_dense(kind: Kind, *, can: bool) -> None:
    (effect,) = without_steps(owner("").emit(order(1, kind)))
    assert isinstance(effect, StartEmission if can else ReportEmitFailed)


def test_a_stepped_candidate_fails_by_name() -> None:
    o = owner()
    assert sealed(o, 1) == [ReportSealed(manifest(1))]
    (failed,) = sealed(o, 2, content="d2")
    assert isinstance(failed, ReportEmitFailed)
    assert failed.fatal
    assert "candidate changed: the weights owned by o" in failed.reason
    assert sealed(o, 3) == [ReportSealed(manifest(3))]  # put back, it is the same candidate again
    o.emit(order(4, candidate="other"))
    other = manifest(4, candidate="other", content="d2")
    assert without_steps(o.emitted(other)) == [DeliverManifest(other)]


def test_fold_only_what_is_committed_and_was_sealed_here() -> None:
    o = owner()
    sealed(o, 1)
    assert o.learned(committed(1)) == []  # nobody ordered it
    assert o.fold(Fold("policy", 1)) == [ReadRecord()]
    assert o.learned(CommitRecord.create("policy", "c", "d0")) == []
    assert o.learned(committed(2)) == []
    assert o.learned(msgspec.structs.replace(committed(1), record_id="x")) == []
    assert not o.folding
    assert without_steps(o.learned(committed(1))) == [FoldBaseline(1, "d1")]
    assert o.folding


def test_a_folding_owner_neither_emits_nor_folds_twice() -> None:
    o = owner()
    sealed(o, 1)
    o.fold(Fold("policy", 1))
    o.learned(committed(1))
    for kind in Kind:
        epoch = o.fence + 1
        (failed,) = without_steps(o.emit(order(epoch, kind)))
        assert isinstance(failed, ReportEmitFailed)
        assert not failed.fatal
    assert o.fold(Fold("policy", o.fence)) == []
    assert o.learned(committed(1)) == []
    assert without_steps(o.folded(1, "d1")) == [ReportFolded(1, "d1", "")]
    assert (o.folding, o.baseline_digest) == (False, "d1")


def test_a_repeated_fold_order_is_answered_again() -> None:
    for fail in (False, True):
        o = owner()
        sealed(o, 1)
        o.fold(Fold("policy", 1))
        o.learned(committed(1))
        effects = without_steps(o.fold_failed(1, "stepped") if fail else o.folded(1, "d1"))
        assert effects == [ReportFolded(1, "" if fail else "d1", "stepped" if fail else "")]
        assert o.baseline_digest == ("" if fail else "d1")
        assert o.fold(Fold("policy", 1)) == effects


def test_emission_failure_is_reported_once() -> None:
    o = owner()
    o.emit(order(1))
    assert without_steps(o.emission_failed(1, "down", fatal=True)) == [ReportEmitFailed(1, "down", fatal=True)]
    assert o.emission_failed(1, "down") == []
