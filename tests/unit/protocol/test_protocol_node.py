"""The node: when a gate may open, and which orders reach the ranks."""

import copy

import msgspec
import pytest
from member import CLEAN, K0, K1, RESTORE1, TORN, handed, opened, prepare, rank, refused, serving, steps, without_steps

from dcr.protocol.identity import Kind
from dcr.protocol.messages import OpenApply, Published, Refuse, StorageState
from dcr.protocol.node import (
    AskToJoin,
    CloseGate,
    GiveUp,
    LetIn,
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
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, RankState
from dcr.protocol.record import CommitRecord, Member


def fenced(epoch: int = 1) -> Node:
    n = serving()
    order = prepare(epoch)
    effects = handed(n, order, K1)
    assert steps(effects[:1]) == ["CloseGate"]
    assert without_steps(effects) == [CloseGate(epoch)]
    effects = n.gate_closed(epoch)
    assert steps(effects[:1]) == ["GateClosed"]
    assert without_steps(effects) == [ReadRecord()]
    assert n.read(K1) == [StopFetch(epoch - 1), ToRank("0", PrepareRank(order, K1))]
    assert without_steps(n.rank_prepared("0", RankPrepared(epoch, CLEAN))) == [ReportPrepared(epoch, CLEAN)]
    return n


def applying(epoch: int = 1) -> Node:
    n = fenced(epoch)
    order = OpenApply("policy", epoch)
    assert n.order(order) == [ToRank("0", order), StartFetch(prepare(epoch))]
    assert n.applying == epoch
    return n


def test_a_whole_attempt() -> None:
    n = applying()
    assert n.order(OpenApply("policy", 1)) == []  # repeated
    assert n.learned(K1, rank(TORN, 1, epoch=1, stage="applying")) == []
    assert n.rank_acknowledged("0", RankAcknowledged(1, "root")) == [StopFetch(1), ReportAcknowledged(1, "root")]
    assert n.rank_acknowledged("0", RankAcknowledged(1, "root")) == []
    assert n.applying is None
    assert n.learned(K1, rank(TORN, 1, epoch=1, stage="acknowledged")) == []
    done = K1.commit("d1", "root", "op")
    held = StorageState(1, "d1", ())
    assert n.read(done) == []
    assert n.learned(done, rank(held, 1, here=True, epoch=1, stage="acknowledged")) == [StopFetch(1), OpenGate(1, 1)]
    assert n.learned(done, rank(held, 1, here=True, epoch=1, stage="acknowledged")) == []  # it is being opened
    assert without_steps(n.gate_ready(1)) == [LetIn(1), ReportServing(1, 1)]
    assert n.order(prepare(1)) == []  # late, again: the gate stays open
    assert n.read(done) == []
    assert n.gate == "open"


# ---------------------------------------------------------------- orders


@pytest.mark.parametrize("order", [Published("other", 0), Refuse("other", 0, ""), OpenApply("other", 9)])
def test_orders_of_another_record_are_refused(order: Published) -> None:
    refused(serving(), "order", order, why="of record 'other'")
    refused(serving(), "order", msgspec.structs.replace(prepare(1), record_id="other"), why="of record 'other'")
    refused(serving(), "read", msgspec.structs.replace(K0, record_id="other"), why="of record 'other'")


def test_orders_below_the_fence_or_never_prepared_are_refused() -> None:
    n = serving()
    handed(n, prepare(2), opened(K1, 2))
    for order in (prepare(1), OpenApply("policy", 1)):
        refused(n, "order", order, why="fence is at 2")
    refused(n, "order", OpenApply("policy", 2), why="not prepared here")  # the gate is not closed yet


@pytest.mark.parametrize("incarnation", [0, 2])
def test_an_order_for_another_incarnation_is_refused(incarnation: int) -> None:
    n = serving()
    refused(n, "order", prepare(1, incarnation=incarnation), why=f"for incarnation {incarnation} of this engine")
    assert n.read(K1) == [ReportServing(1, 0)]  # nothing was noted


def test_two_orders_for_one_epoch_are_refused_and_a_repeated_one_is_not() -> None:
    n = serving()
    assert n.order(prepare(1)) == [ReadRecord()]
    refused(n, "order", prepare(1, Kind.ABSOLUTE), why="two different prepare orders for epoch 1")
    assert n.order(prepare(1)) == []
    n.read(K1)
    n.gate_closed(1)
    n.read(K1)
    refused(n, "order", prepare(1, Kind.ABSOLUTE), why="two different prepare orders for epoch 1")
    assert n.order(prepare(1)) == []
    assert n.read(K1) == []


def test_an_order_is_only_noted_and_a_later_one_replaces_it() -> None:
    n = serving()
    assert n.order(prepare(1)) == [ReadRecord()]
    assert (n.gate, n.fence, n.serving) == ("open", 0, 0)
    k2 = opened(K1, 2)
    assert n.order(prepare(2, Kind.ABSOLUTE)) == [ReadRecord()]
    assert n.order(prepare(1)) == []  # late
    n.read(k2)
    n.gate_closed(2)
    assert n.read(k2) == [StopFetch(1), ToRank("0", PrepareRank(prepare(2, Kind.ABSOLUTE), k2))]


def test_nothing_reaches_a_rank_before_the_gate_is_closed_and_k_was_read() -> None:
    n = serving()
    n.order(prepare(1))
    assert without_steps(n.read(K1)) == [CloseGate(1)]
    assert n.read(K1) == []
    assert n.learned(K1, rank(CLEAN, 1)) == []
    n.gate_closed(1)
    assert n.read(K1) == [StopFetch(0), ToRank("0", PrepareRank(prepare(1), K1))]


def test_an_order_that_k_does_not_know_is_dropped_and_one_that_it_has_passed_too() -> None:
    n = serving()
    n.order(prepare(1))
    refused(n, "read", K0, why="but the record is at epoch 0: dropped")
    assert n.read(K1) == [ReportServing(1, 0)]
    assert n.gate == "open"
    n = serving()
    n.order(prepare(1))
    assert n.read(opened(K1, 2)) == [ReportServing(2, 0)]
    assert n.read(K1) == []
    assert (n.gate, n.fence) == ("open", 0)


def test_an_order_that_k_passes_while_the_gate_closes_is_dropped_and_the_gate_opens_again() -> None:
    n = serving()
    handed(n, prepare(1), K1)
    n.gate_closed(1)
    k = K1.abandon()
    assert n.read(k) == []
    assert n.learned(k, rank(CLEAN, 2)) == [StopFetch(2), OpenGate(2, 0)]


@pytest.mark.parametrize("failed", [False, True])
def test_open_apply_waits_for_the_ranks(*, failed: bool) -> None:
    n = Node("e", 1, "policy")
    handed(n, prepare(1), K1)
    refused(n, "order", OpenApply("policy", 1), why="not every rank is fenced: rank 0 is handed")
    if failed:
        assert n.rank_failed("0", RankFailed(1, "torn")) == [StopFetch(1), ReportFailed(1, "torn")]
        refused(n, "order", OpenApply("policy", 1), why="rank 0 is failed")
        return
    n.rank_prepared("0", RankPrepared(1, CLEAN))
    assert n.order(OpenApply("policy", 1)) != []


def test_published_and_refuse() -> None:
    n = serving()
    assert n.order(Published("policy", 0)) == [ReadRecord()]
    assert n.order(Refuse("policy", 0, "no")) == [GiveUp("no")]


# ---------------------------------------------------------------- what K says


@pytest.mark.parametrize(
    ("record", "state", "effects"),
    [
        (K0, rank(TORN), [AskToJoin()]),
        (K0, rank(StorageState(None, "d0", ())), [AskToJoin()]),
        (K0, rank(StorageState(1, "d1", ())), [AskToJoin()]),
        (CommitRecord.create("policy", "c", "d0"), rank(CLEAN), [AskToJoin()]),
        (CommitRecord.create("policy", "c", "d0").admit((Member("e", 2),)), rank(CLEAN), [AskToJoin()]),
        (K1, rank(CLEAN), []),
        (K0, rank(CLEAN, 1), []),
        (RESTORE1, rank(CLEAN, 1, epoch=1, stage="fenced"), []),
        (RESTORE1, rank(CLEAN, 1, epoch=1, stage="staged"), []),
        (RESTORE1, rank(TORN, 1, epoch=1, stage="applying"), []),
        (RESTORE1, rank(CLEAN, 1, epoch=1, stage="failed"), [StopFetch(1), OpenGate(1, 0)]),
        (K1.stop(""), rank(CLEAN), [StopFetch(2), OpenGate(2, 0)]),
        (K1.stop(""), rank(TORN), [AskToJoin()]),
        (K0, rank(CLEAN), [StopFetch(0), OpenGate(0, 0)]),
    ],
)
def test_a_closed_gate(record: CommitRecord, state: dict[str, RankState], effects: list) -> None:
    n = Node("e", 1, "policy")
    assert n.learned(record, state) == effects
    assert n.learned(record, state) == []  # once for each state of K
    assert n.gate == "closed"


def test_what_was_acknowledged_is_served_while_the_next_attempt_leaves_this_engine_out() -> None:
    held = StorageState(1, "d1", ())
    k = opened(K1.commit("d1", "root", "op"), members=(Member("f", 1),))
    n = Node("e", 1, "policy")
    assert n.learned(k, rank(held, 2, here=True)) == [StopFetch(1), OpenGate(1, 1)]
    assert without_steps(n.gate_ready(1)) == [LetIn(1), ReportServing(1, 1)]
    assert n.read(k) == [ReportServing(2, 1)]
    n = Node("e", 1, "policy")
    assert n.learned(k, rank(held, 2)) == []  # admitted by nobody
    n = Node("e", 1, "policy")
    assert n.learned(k, rank(held, 2, here=True, epoch=2, stage="failed")) == []  # it takes part in the attempt


def test_an_open_gate_that_a_commit_passed_by_closes() -> None:
    n = serving()
    other = K1.commit("d1", "root", "op")
    effects = n.read(other)
    assert steps(effects) == ["CloseGate"]
    assert without_steps(effects) == [CloseGate(1)]
    assert (n.gate, n.fence) == ("closing", 1)
    assert n.learned(other, rank(CLEAN, 1)) == []
    assert without_steps(n.gate_closed(1)) == [ReadRecord()]
    assert n.learned(other, rank(CLEAN, 1)) == [AskToJoin()]


def test_a_record_that_was_read_before_the_fence_rose_closes_nothing() -> None:
    n = serving()
    k = K1.commit("d1", "root", "op")
    n.read(k)
    n.gate_closed(1)
    n.learned(k, rank(StorageState(1, "d1", ()), 1, here=True))
    n.gate_ready(1)
    assert n.read(K0) == []
    assert n.gate == "open"


def test_a_serving_engine_says_so_again_when_k_has_moved() -> None:
    n = serving()
    assert n.read(K0) == []
    assert n.read(K1) == [ReportServing(1, 0)]
    assert n.read(K1) == []


def test_a_gate_stays_closed_while_a_restore_may_write() -> None:
    n = Node("e", 1, "policy")
    handed(n, prepare(1, Kind.RESTORE), RESTORE1)
    n.rank_prepared("0", RankPrepared(1, CLEAN))
    n.order(OpenApply("policy", 1))
    assert n.learned(RESTORE1, rank(CLEAN, 1, here=True, epoch=1, stage="applying")) == []
    n.rank_failed("0", RankFailed(1, "gone"))
    assert n.learned(RESTORE1, rank(CLEAN, 1, epoch=1, stage="failed")) == [StopFetch(1), OpenGate(1, 0)]


def test_no_join_is_asked_for_while_an_order_is_in_work() -> None:
    n = Node("e", 1, "policy")
    n.order(prepare(1, Kind.RESTORE))
    assert n.learned(RESTORE1, rank(TORN)) == []
    n.read(RESTORE1)
    assert n.learned(RESTORE1, rank(TORN, 1)) == []  # it has not reached the rank
    n.rank_failed("0", RankFailed(1, "gone"))
    assert n.learned(RESTORE1, rank(TORN, 1, epoch=1, stage="failed")) == []  # the leader knows
    k2 = RESTORE1.open_restore()
    assert n.learned(k2, rank(TORN, 2)) == [AskToJoin()]


# ---------------------------------------------------------------- gate orders


def opening() -> Node:
    """The gate of a clean engine was ordered to open at epoch 1; the caches are being reset."""
    n = Node("e", 1, "policy")
    assert n.learned(RESTORE1, rank(CLEAN, 1)) == [StopFetch(1), OpenGate(1, 0)]
    return n


def test_a_late_gate_order_is_refused_after_a_prepare_for_the_same_epoch() -> None:
    n = opening()
    order = prepare(1, Kind.RESTORE)
    assert handed(n, order, RESTORE1) == [StopFetch(0), ToRank("0", PrepareRank(order, RESTORE1))]
    late = copy.deepcopy(n)
    refused(late, "gate_ready", 1, why="a rank was prepared for epoch 1 since")
    assert (late.gate, late.opening) == ("closed", None)
    n.rank_prepared("0", RankPrepared(1, CLEAN))
    n.order(OpenApply("policy", 1))
    late = copy.deepcopy(n)
    refused(late, "gate_ready", 1, why="a rank was prepared for epoch 1 since")
    n.rank_failed("0", RankFailed(1, "gone"))
    assert without_steps(n.gate_ready(1)) == [LetIn(0), ReportServing(1, 0)]


def test_a_gate_order_below_the_fence_is_refused() -> None:
    n = opening()
    handed(n, prepare(2, Kind.RESTORE), RESTORE1.open_restore())
    n.rank_failed("0", RankFailed(2, "gone"))
    refused(n, "gate_ready", 1, why="the gate's fence is at 2")
    assert (n.gate, n.opening) == ("closed", None)


def test_a_gate_that_was_not_ordered_to_open_stays_as_it_is() -> None:
    n = opening()
    refused(n, "gate_ready", 0, why="was not ordered to open for epoch 0")
    assert n.opening == (1, 0)
    n.gate_ready(1)
    refused(n, "gate_ready", 1, why="was not ordered to open for epoch 1")
    assert (n.gate, n.serving) == ("open", 0)


def test_a_prepare_for_the_epoch_in_which_the_gate_opened_after_it_had_closed_for_that_epoch_is_dropped() -> None:
    n = serving()
    committed = K1.commit("d1", "root", "op")
    k = committed.open_restore()  # the leader thinks that this engine needs one
    n.read(k)
    n.gate_closed(2)
    n.learned(k, rank(StorageState(1, "d1", ()), 2, here=True))
    n.gate_ready(2)
    n.order(prepare(2, Kind.RESTORE))
    refused(n, "read", k, why="in which the gate was opened: dropped")
    assert n.read(k) == []
    assert n.gate == "open"


def test_stuck_gates() -> None:
    n = serving()
    handed(n, prepare(1), K1)
    assert without_steps(n.gate_stuck("busy")) == [ReportFailed(1, "busy")]
    assert (n.gate, n.serving) == ("open", 0)
    n = Node("e", 1, "policy")
    assert n.gate_stuck("early") == []
    n.learned(K0, rank(CLEAN))
    assert n.gate_stuck("caches") == [GiveUp("caches")]
    assert n.gate == "closed"
    assert n.learned(K0, rank(CLEAN)) == [StopFetch(0), OpenGate(0, 0)]  # it is tried again


def test_late_answers_change_nothing() -> None:
    n = serving()
    assert n.gate_closed(0) == []
    assert n.rank_prepared("0", RankPrepared(7, CLEAN)) == []
    assert n.rank_staged("0", RankStaged(7)) == []
    assert n.rank_acknowledged("0", RankAcknowledged(7, "root")) == []
    assert n.rank_failed("0", RankFailed(7, "gone")) == []
    assert n.serving == 0
    handed(n, prepare(1), K1)
    assert n.gate_closed(2) == []
    assert n.gate == "closing"


def test_rank_failure_is_reported_once() -> None:
    n = applying()
    assert n.rank_failed("0", RankFailed(1, "gone")) == [StopFetch(1), ReportFailed(1, "gone")]
    assert n.rank_failed("0", RankFailed(1, "again")) == []
    assert n.applying is None


# ---------------------------------------------------------------- K out of reach


def test_a_gate_closes_when_k_is_out_of_reach_and_opens_when_it_is_back() -> None:
    n = serving()
    effects = n.record_lost()
    assert steps(effects) == ["LoseRecord"]
    assert without_steps(effects) == [CloseGate(0)]
    assert n.record_lost() == []
    assert n.learned(K0, rank(CLEAN)) == []  # somebody may still be inside
    n.gate_closed(0)
    assert (n.gate, n.serving, n.fence) == ("closed", None, 0)
    assert n.record_lost() == []
    assert n.read(K0) == []
    assert n.learned(K0, rank(CLEAN)) == [StopFetch(0), OpenGate(0, 0)]
    assert without_steps(n.gate_ready(0)) == [LetIn(0), ReportServing(0, 0)]
