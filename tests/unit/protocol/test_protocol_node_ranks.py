"""The node of several ranks, and of an asynchronous gate: what it asks of ranks, and what it reports of them."""

import pytest
from member import CLEAN, K0, K1, RESTORE1, TORN, handed, opened, prepare, rank, refused, serving, steps, without_steps

from dcr.protocol.identity import Kind
from dcr.protocol.messages import OpenApply, StorageState
from dcr.protocol.node import (
    CloseGate,
    Node,
    OpenGate,
    ReadRecord,
    ReportAcknowledged,
    ReportFailed,
    ReportPrepared,
    ReportStaged,
    StartFetch,
    StopFetch,
    ToRank,
    engine_state,
)
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, RankState
from dcr.protocol.record import Member

# ---------------------------------------------------------------- the asynchronous gate


def staged() -> Node:
    n = serving()
    order = prepare(1, stage=True)
    assert handed(n, order, K1) == [StopFetch(0), ToRank("0", PrepareRank(order, K1))]
    assert (n.gate, n.fence) == ("open", 1)
    refused(n, "order", OpenApply("policy", 1), why="not every rank is staged: rank 0 is handed")
    assert without_steps(n.rank_prepared("0", RankPrepared(1, CLEAN))) == [ReportPrepared(1, CLEAN), StartFetch(order)]
    refused(n, "order", OpenApply("policy", 1), why="not every rank is staged: rank 0 is fenced")
    assert n.rank_staged("0", RankStaged(1)) == [ReportStaged(1)]
    assert n.rank_staged("0", RankStaged(1)) == []
    assert n.gate == "open"
    return n


def test_a_whole_asynchronous_attempt() -> None:
    n = staged()
    order = OpenApply("policy", 1)
    assert n.order(order) == [CloseGate(1)]
    assert (n.gate, n.serving, n.applying) == ("closing", 0, 1)
    assert n.order(order) == []
    effects = n.gate_closed(1)
    assert steps(effects[:1]) == ["GateClosed"]
    assert without_steps(effects) == [ToRank("0", order), ReadRecord()]
    assert n.rank_acknowledged("0", RankAcknowledged(1, "root")) == [StopFetch(1), ReportAcknowledged(1, "root")]


@pytest.mark.parametrize("closed", [False, True])
def test_a_stage_is_applied_behind_a_gate_that_closed_for_another_reason(*, closed: bool) -> None:
    n = staged()
    n.record_lost()
    if closed:
        assert without_steps(n.gate_closed(1)) == [ReadRecord()]
        assert n.order(OpenApply("policy", 1)) == [ToRank("0", OpenApply("policy", 1))]
    else:
        assert n.order(OpenApply("policy", 1)) == []
        assert without_steps(n.gate_closed(1)) == [ToRank("0", OpenApply("policy", 1)), ReadRecord()]


def test_a_gate_that_closed_under_a_stage_waits_for_the_attempt() -> None:
    n = staged()
    n.record_lost()
    n.gate_closed(1)
    assert n.learned(K1, rank(CLEAN, 1, epoch=1, stage="staged")) == []
    k2 = K1.abandon()
    assert n.learned(k2, rank(CLEAN, 2)) == [StopFetch(2), OpenGate(2, 0)]


def test_a_stage_that_k_passed_while_the_gate_closed_is_not_applied() -> None:
    n = staged()
    n.order(OpenApply("policy", 1))
    k2 = K1.abandon()
    n.read(k2)
    n.learned(k2, rank(CLEAN, 2))
    assert without_steps(n.gate_closed(1)) == [ReadRecord()]
    assert n.learned(k2, rank(CLEAN, 2)) == [StopFetch(2), OpenGate(2, 0)]


def test_a_stage_that_the_next_order_replaced_while_the_gate_closed_is_not_applied() -> None:
    n = staged()
    n.order(OpenApply("policy", 1))
    k2 = opened(K1, 2)
    order = prepare(2, Kind.ABSOLUTE, stage=True)
    assert handed(n, order, k2) == [StopFetch(1), ToRank("0", PrepareRank(order, k2))]
    n.rank_prepared("0", RankPrepared(2, CLEAN))
    assert without_steps(n.gate_closed(1)) == [ReadRecord()]
    n.rank_staged("0", RankStaged(2))
    assert n.order(OpenApply("policy", 2)) == [ToRank("0", OpenApply("policy", 2))]


def test_a_gate_that_would_not_close_for_a_stage_fails_the_attempt_and_serves_on() -> None:
    n = staged()
    n.order(OpenApply("policy", 1))
    assert without_steps(n.gate_stuck("busy")) == [ReportFailed(1, "busy")]
    assert (n.gate, n.serving, n.applying) == ("open", 0, None)
    refused(n, "order", OpenApply("policy", 1), why="not every rank is staged")
    assert n.rank_failed("0", RankFailed(1, "too")) == []  # told once


# ---------------------------------------------------------------- two ranks


TWO = ("0", "1")


def two(*, stage: bool = False) -> Node:
    n = Node("e", 1, "policy", TWO)
    order = prepare(1, stage=stage)
    both = [ToRank(r, PrepareRank(order, K1)) for r in TWO]
    assert handed(n, order, K1) == [StopFetch(0), *both]
    return n


def test_two_ranks_report_with_the_last_of_them() -> None:
    n = two(stage=True)
    assert n.rank_prepared("1", RankPrepared(1, CLEAN)) == []
    assert n.rank_prepared("1", RankPrepared(1, CLEAN)) == []
    effects = n.rank_prepared("0", RankPrepared(1, StorageState(0, "d0", ("w",))))
    assert steps(effects) == ["Prepare"]
    assert without_steps(effects) == [
        ReportPrepared(1, StorageState(0, "d0", ("w",))),
        StartFetch(prepare(1, stage=True)),
    ]
    assert n.rank_staged("0", RankStaged(1)) == []
    refused(n, "order", OpenApply("policy", 1), why="rank 0 is staged, rank 1 is fenced")
    assert n.rank_staged("1", RankStaged(1)) == [ReportStaged(1)]
    assert n.order(OpenApply("policy", 1)) == [ToRank(r, OpenApply("policy", 1)) for r in TWO]
    assert n.rank_acknowledged("0", RankAcknowledged(1, "root")) == []
    assert n.applying == 1
    assert n.rank_acknowledged("1", RankAcknowledged(1, "root")) == [StopFetch(1), ReportAcknowledged(1, "root")]


def test_one_of_two_ranks_fails() -> None:
    n = two()
    failure = [StopFetch(1), ReportFailed(1, "rank 1: torn by w")]
    assert n.rank_failed("1", RankFailed(1, "torn by w")) == failure
    assert n.rank_prepared("0", RankPrepared(1, CLEAN)) == []
    assert n.rank_failed("0", RankFailed(1, "too")) == []
    n = two()
    for r in TWO:
        n.rank_prepared(r, RankPrepared(1, CLEAN))
    n.order(OpenApply("policy", 1))
    assert n.rank_acknowledged("0", RankAcknowledged(1, "root")) == []
    assert n.rank_failed("1", RankFailed(1, "torn by w")) == failure
    assert n.applying is None


def test_a_rank_that_may_still_write_keeps_the_gate_closed() -> None:
    n = Node("e", 1, "policy", TWO)
    clean = rank(CLEAN, 1)["0"]
    assert n.learned(RESTORE1, {"0": clean, "1": clean}) == [StopFetch(1), OpenGate(1, 0)]
    handed(n, prepare(1, Kind.RESTORE), RESTORE1)
    n.rank_failed("0", RankFailed(1, "gone"))
    n.rank_prepared("1", RankPrepared(1, CLEAN))
    refused(n, "gate_ready", 1, why="a rank was prepared for epoch 1 since")


def test_two_ranks_with_different_roots_fail_the_attempt() -> None:
    n = two()
    for r in TWO:
        n.rank_prepared(r, RankPrepared(1, CLEAN))
    n.order(OpenApply("policy", 1))
    assert n.rank_acknowledged("0", RankAcknowledged(1, "root")) == []
    effects = n.rank_acknowledged("1", RankAcknowledged(1, "other"))
    assert steps(effects) == ["FailAttempt"]
    stop, failed = without_steps(effects)
    assert stop == StopFetch(1)
    assert "rank 0: root, rank 1: other" in failed.reason
    assert n.rank_failed("0", RankFailed(1, "too")) == []


@pytest.mark.parametrize(
    "other",
    [
        RankState(TORN, 0, False, 0, "idle"),
        RankState(StorageState(None, "d0", ()), 0, False, 0, "idle"),
        RankState(CLEAN, 1, False, 0, "idle"),
    ],
)
def test_the_gate_opens_only_if_every_rank_may(other: RankState) -> None:
    n = Node("e", 1, "policy", TWO)
    clean = rank(CLEAN)["0"]
    for states in ({"0": clean, "1": other}, {"0": other, "1": clean}):
        assert OpenGate(0, 0) not in n.learned(K0, states)
    assert n.learned(K0, {"0": clean, "1": clean}) == [StopFetch(0), OpenGate(0, 0)]


def test_an_engine_is_committed_here_only_if_every_rank_is() -> None:
    held = StorageState(1, "d1", ())
    k = opened(K1.commit("d1", "root", "op"), members=(Member("f", 1),))
    n = Node("e", 1, "policy", TWO)
    here, not_here = rank(held, 2, here=True)["0"], rank(held, 2)["0"]
    assert n.learned(k, {"0": here, "1": not_here}) == []
    assert n.learned(k, {"0": here, "1": here}) == [StopFetch(1), OpenGate(1, 1)]


@pytest.mark.parametrize(
    ("a", "b", "whole"),
    [
        (CLEAN, CLEAN, CLEAN),
        (CLEAN, TORN, TORN),
        (StorageState(0, "d0", ("w", "x")), TORN, StorageState(0, "d0", ("w", "x"))),
        (CLEAN, StorageState(1, "d1", ()), StorageState(None, "", ())),
        (CLEAN, StorageState(None, "d0", ()), StorageState(None, "d0", ())),
        (CLEAN, StorageState(None, "", ("unknown",)), StorageState(None, "", ("unknown",))),
    ],
)
def test_the_state_of_an_engine(a: StorageState, b: StorageState, whole: StorageState) -> None:
    assert engine_state([a, b]) == engine_state([b, a]) == whole
    assert engine_state([a]) == a
