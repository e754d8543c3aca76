"""A rank's host that stages: bytes held in memory, written when it is ordered, dropped when fenced (DESIGN D18)."""

import msgspec
import pytest
from rank import LOADED, Rank, acknowledged, failed

from dcr.data_plane.placement.loader_path import LoaderPath
from dcr.protocol.identity import Kind
from dcr.protocol.messages import OpenApply
from dcr.protocol.receiver import RankStaged
from dcr.protocol.record import CommitRecord
from dcr.runtime.rank_messages import Learn, WriteOn
from tests.faults.models import dense


def staged(answers):
    return [r.epoch for a in answers for r in a.results if isinstance(r, RankStaged)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]])
def test_what_is_staged_is_written_when_it_is_ordered_and_not_before(order):
    rank = Rank()
    rank.prepare(stage=True)
    before = rank.bits
    assert "not staged here yet" in rank.call(OpenApply("r", 1)).refused
    arriving = [rank.requests[n] for n in order]
    answers = [rank.call(r) for r in [*arriving, *arriving]]
    assert staged(answers) == staged(answers[:5]) == [1]
    assert not failed(answers)
    assert not acknowledged(answers)
    assert answers[-1].state.clean
    assert rank.bits == before
    answer = rank.call(OpenApply("r", 1))
    assert [r.root for r in acknowledged([answer])] == [rank.root()]
    assert answer.state.torn_by == ("c",)
    assert rank.bits == dense(rank.new)


def test_a_rank_that_writes_for_long_answers_meanwhile_and_goes_on_when_it_is_told(monkeypatch):
    monkeypatch.setattr("dcr.runtime.rank_host.ANSWER_S", 0.0)
    rank = Rank()
    rank.prepare(stage=True)
    assert [rank.call(r).held for r in rank.requests] == [1, 2, 3, 3, 3]
    assert "may not be written: it is staged" in rank.call(WriteOn(1)).refused
    before = rank.bits
    answers = [rank.call(OpenApply("r", 1))]
    assert "may not be written: it is applying" in rank.call(WriteOn(2)).refused
    assert rank.bits not in (before, dense(rank.new))
    answers += [rank.call(WriteOn(1)) for _ in range(2)]
    assert [a.held for a in answers] == [2, 1, 0]
    assert [len(acknowledged([a])) for a in answers] == [0, 0, 1]
    assert [r.root for r in acknowledged(answers)] == [rank.root()]
    assert rank.bits == dense(rank.new)


def test_a_rank_that_is_fenced_while_it_writes_lets_go_of_the_rest(monkeypatch):
    monkeypatch.setattr("dcr.runtime.rank_host.ANSWER_S", 0.0)
    rank = Rank()
    rank.prepare(stage=True)
    for request in rank.requests:
        rank.call(request)
    assert rank.call(OpenApply("r", 1)).held == 2
    rank.requests = rank.emission(2, Kind.ABSOLUTE)
    rank.prepare(2, kind=Kind.ABSOLUTE, stage=True)
    assert rank.host._held == {}
    assert rank.call(WriteOn(1)).refused
    answers = [rank.call(r) for r in rank.requests]
    answers.append(rank.call(OpenApply("r", 2)))
    while answers[-1].held:
        answers.append(rank.call(WriteOn(2)))
    assert acknowledged(answers)
    assert rank.bits == dense(rank.new)


def test_a_stage_holds_no_more_bytes_than_its_bound_and_is_let_go_of_when_it_does():
    rank = Rank()
    held = [len(r.data) for r in rank.requests[:3]]
    rank.call(msgspec.structs.replace(rank.attach, stage_bytes_max=sum(held) - 1))
    rank.prepare(stage=True)
    before = rank.bits
    answers = [rank.call(r) for r in [rank.requests[3], rank.requests[4], *rank.requests[:3]]]
    (reason,) = failed(answers)
    assert f"{sum(held)} payload bytes in host memory, more than stage_bytes_max = {sum(held) - 1}: raise" in reason
    assert staged(answers) == []
    assert rank.bits == before
    # What was let go of leaves room: the bound is for what is held, not for what ever came.
    emissions = {epoch: rank.emission(epoch, Kind.RELATIVE) for epoch in (2, 3)}
    room = max(sum(len(r.data) for r in requests[:3]) for requests in emissions.values())
    rank.call(msgspec.structs.replace(rank.attach, stage_bytes_max=room))
    for epoch, requests in emissions.items():
        rank.prepare(epoch, stage=True)
        rank.requests = requests
        assert staged([rank.call(r) for r in rank.requests]) == [epoch]
    assert acknowledged([rank.call(OpenApply("r", 3))])
    assert rank.bits == dense(rank.new)


@pytest.mark.parametrize("by", ["prepare", "learn"])
def test_a_stage_that_is_fenced_is_dropped_and_storage_stays_clean(by):
    rank = Rank()
    rank.prepare(stage=True)
    before = rank.bits
    for r in rank.requests:
        rank.call(r)
    if by == "prepare":
        rank.prepare(2, stage=True)
    else:
        rank.call(Learn(CommitRecord("r", 0, 2, "l", 1, LOADED)))
    assert "epoch 1 refused: the fence is at 2" in rank.call(OpenApply("r", 1)).refused
    assert rank.bits == before
    assert rank.host._held == {}
    rank.open(3)  # another mode, another epoch
    rank.requests = rank.emission(3, Kind.RELATIVE)
    assert acknowledged([rank.call(r) for r in rank.requests])
    assert rank.bits == dense(rank.new)


def test_a_loader_that_fails_in_the_middle_of_a_stage_lets_go_of_the_rest():
    rank = Rank(storage=LoaderPath)
    rank.prepare(stage=True)
    for r in rank.requests:
        rank.call(r)
    rank.mood.append("out of luck")
    (reason,) = failed([rank.call(OpenApply("r", 1))])
    assert "the loader raised ValueError: out of luck" in reason
    assert rank.host._held == {}
    rank.mood.clear()
    rank.prepare(2, Kind.ABSOLUTE, stage=True)
    rank.requests = rank.emission(2, Kind.ABSOLUTE)
    assert staged([rank.call(r) for r in rank.requests]) == [2]
    assert acknowledged([rank.call(OpenApply("r", 2))])
    assert rank.bits == dense(rank.new)


def test_held_bytes_that_went_bad_in_memory_fail_the_attempt_by_name():
    rank = Rank()
    rank.prepare(stage=True)
    for r in rank.requests:
        rank.call(r)
    held = rank.host._held
    last = rank.requests[2].identity
    held[last] = held[last][:-1]
    (reason,) = failed([rank.call(OpenApply("r", 1))])
    assert "cut short" in reason


# ---------------------------------------------------------------- shared memory
