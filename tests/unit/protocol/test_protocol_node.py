"""The node: when a gate may open, and which orders reach the rank."""

import msgspec
import pytest

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import OpenApply, Prepare, Published, Refuse, StorageState
from dcr.protocol.node import (
    AskToJoin,
    CloseGate,
    GiveUp,
    Node,
    OpenGate,
    ReadRecord,
    ReportAcknowledged,
    ReportFailed,
    ReportPrepared,
    ReportServing,
    StartFetch,
    StopFetch,
    ToRank,
)
from dcr.protocol.receiver import RankAcknowledged, RankFailed, RankPrepared, RankState
from dcr.protocol.record import CommitRecord, Member, OpenTransition, OwnerRef
from dcr.protocol.step import Step

OWNERS = (OwnerRef("o", 1),)
ME = (Member("e", 1),)
CLEAN = StorageState(0, "d0", ())
TORN = StorageState(0, "d0", ("w",))
K0 = CommitRecord.create("policy", "c", "d0").admit(ME)


def opened(k: CommitRecord, attempts: int = 1) -> CommitRecord:
    return k.open_attempt(OpenTransition(k.version + 1, "w", attempts, Kind.RELATIVE, OWNERS, 0, ("add",)), ME)


def prepare(epoch: int, kind: Kind = Kind.RELATIVE) -> Prepare:
    return Prepare("policy", epoch, 1, Base(kind, 0, "d0", "w"), OWNERS)


def rank(state: StorageState, fence: int = 0, *, here: bool = False) -> RankState:
    return RankState(state, fence, here)


def without_steps(effects: list) -> list:
    return [e for e in effects if not isinstance(e, Step)]


def serving() -> Node:
    n = Node("e", 1, "policy")
    assert n.learned(K0, rank(CLEAN)) == [StopFetch(0), OpenGate(0, 0)]
    assert without_steps(n.gate_opened(0, 0)) == [ReportServing(0, 0)]
    return n


def applying(epoch: int = 1) -> Node:
    n = serving()
    assert without_steps(n.order(prepare(epoch))) == [StopFetch(epoch - 1), CloseGate(epoch)]
    assert without_steps(n.gate_closed(epoch)) == [ReadRecord()]
    assert n.learned(opened(K0), rank(CLEAN)) == [ToRank(prepare(epoch))]
    assert without_steps(n.rank_prepared(RankPrepared(epoch, CLEAN))) == [ReportPrepared(epoch, CLEAN)]
    order = OpenApply("policy", epoch)
    assert n.order(order) == [ToRank(order), StartFetch(prepare(epoch))]
    return n


def test_a_whole_attempt() -> None:
    n = applying()
    k1 = opened(K0)
    assert n.learned(k1, rank(TORN, 1)) == []
    assert n.rank_acknowledged(RankAcknowledged(1, "root")) == [StopFetch(1), ReportAcknowledged(1, "root")]
    assert n.learned(k1, rank(TORN, 1)) == []
    done = k1.commit("d1", "root", "op")
    held = StorageState(1, "d1", ())
    assert n.learned(done, rank(held, 1, here=True)) == [StopFetch(1), OpenGate(1, 1)]


@pytest.mark.parametrize("order", [Published("other", 0), Refuse("other", 0, ""), OpenApply("other", 9)])
def test_orders_of_another_record_are_refused(order: Published) -> None:
    with pytest.raises(RefusedError, match="of record 'other'"):
        serving().order(order)
    with pytest.raises(RefusedError, match="of record 'other'"):
        serving().order(msgspec.structs.replace(prepare(1), record_id="other"))


def test_orders_below_the_fence_or_never_prepared_are_refused() -> None:
    n = serving()
    n.order(prepare(2))
    for order in (prepare(1), OpenApply("policy", 1)):
        with pytest.raises(RefusedError, match="fence is at 2"):
            n.order(order)
    with pytest.raises(RefusedError, match="not prepared here"):
        n.order(OpenApply("policy", 2))  # the gate is not closed yet


def test_nothing_reaches_the_rank_before_the_gate_is_closed_and_k_was_read() -> None:
    n = serving()
    n.order(prepare(1))
    assert n.learned(opened(K0), rank(CLEAN)) == []
    n.gate_closed(1)
    assert n.learned(K0, rank(CLEAN)) == [ReadRecord()]  # older than the order
    assert n.learned(opened(K0), rank(CLEAN)) == [ToRank(prepare(1))]


def test_published_and_refuse() -> None:
    n = serving()
    assert n.order(Published("policy", 0)) == [ReadRecord()]
    assert n.order(Refuse("policy", 0, "no")) == [GiveUp("no")]


@pytest.mark.parametrize(
    ("record", "state", "effects"),
    [
        (K0, rank(TORN), [AskToJoin()]),
        (K0, rank(StorageState(None, "d0", ())), [AskToJoin()]),
        (K0, rank(StorageState(1, "d1", ())), [AskToJoin()]),
        (CommitRecord.create("policy", "c", "d0"), rank(CLEAN), [AskToJoin()]),
        (CommitRecord.create("policy", "c", "d0").admit((Member("e", 2),)), rank(CLEAN), [AskToJoin()]),
        (opened(K0), rank(CLEAN), []),
        (K0, rank(CLEAN, 1), []),
        (opened(K0).stop(""), rank(CLEAN), [StopFetch(2), OpenGate(2, 0)]),
        (opened(K0).stop(""), rank(TORN), [AskToJoin()]),
        (K0, rank(CLEAN), [StopFetch(0), OpenGate(0, 0)]),
    ],
)
def test_a_closed_gate(record: CommitRecord, state: RankState, effects: list) -> None:
    n = Node("e", 1, "policy")
    assert n.learned(record, state) == effects
    if effects == [AskToJoin()]:
        assert n.learned(record, state) == []  # once for each state of K


def test_an_open_gate_that_a_commit_passed_by_closes() -> None:
    n = serving()
    other = opened(K0).commit("d1", "root", "op")
    assert without_steps(n.learned(other, rank(CLEAN))) == [CloseGate(1)]
    assert n.gate == "closing"


def test_a_serving_engine_says_so_again_when_k_has_moved() -> None:
    n = serving()
    assert n.learned(K0, rank(CLEAN)) == []
    assert n.learned(opened(K0), rank(CLEAN)) == [ReportServing(1, 0)]
    assert n.learned(opened(K0), rank(CLEAN)) == []


def test_a_gate_stays_closed_while_a_restore_may_write() -> None:
    n = Node("e", 1, "policy")
    k = K0.open_restore()
    n.order(prepare(1, Kind.RESTORE))
    n.learned(k, rank(CLEAN))
    n.order(OpenApply("policy", 1))
    assert n.learned(k, rank(CLEAN, 1, here=True)) == []
    n.rank_failed(RankFailed(1, "gone"))
    assert n.learned(k, rank(CLEAN, 1)) == [StopFetch(1), OpenGate(1, 0)]


def test_stuck_gates() -> None:
    n = serving()
    n.order(prepare(1))
    assert without_steps(n.gate_stuck("busy")) == [ReportFailed(1, "busy")]
    assert n.gate == "open"
    n = Node("e", 1, "policy")
    assert n.gate_stuck("early") == []
    n.learned(K0, rank(CLEAN))
    assert n.gate_stuck("caches") == [GiveUp("caches")]
    assert n.gate == "closed"


def test_late_answers_change_nothing() -> None:
    n = serving()
    assert n.gate_closed(0) == []
    assert n.gate_opened(0, 5) == []
    assert n.rank_prepared(RankPrepared(7, CLEAN)) == []
    assert n.serving == 0
    n.order(prepare(1))
    assert n.gate_closed(2) == []
    assert n.gate == "closing"


def test_rank_failure_is_reported() -> None:
    assert applying().rank_failed(RankFailed(1, "gone")) == [StopFetch(1), ReportFailed(1, "gone")]
