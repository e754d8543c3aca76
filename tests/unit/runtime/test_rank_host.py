"""A rank's host, through bytes: what it is sent wrongly is named, never acknowledged, and changes no resident byte."""

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from rank import EMBED, LOADED, OWNERS, Q, Rank, acknowledged, failed

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.placement.loader_path import LoaderPath
from dcr.data_plane.placement.placement import Placement
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import OpenApply, StorageState
from dcr.protocol.receiver import PrepareRank
from dcr.protocol.record import CommitRecord, Committed, OwnerRef
from dcr.runtime.rank_host import RankHost
from dcr.runtime.rank_messages import BeginCatchUp, EndCatchUp, Learn, ReadBack, Undeliverable, decode_answer, encode
from tests.faults.models import BF16, dense

# ---------------------------------------------------------------- refused, and nothing happened


def other(request, **identity):
    return msgspec.structs.replace(request, identity=msgspec.structs.replace(request.identity, **identity))


OLD, STRANGER = OwnerRef("rank-0", 6), OwnerRef("rank-9", 7)
REFUSED = {
    "an owner's other incarnation": (lambda r: r.payload(OLD, 0, []), "rank-0 (incarnation 6), which is not an owner"),
    "no owner of the attempt": (lambda r: r.payload(STRANGER, 0, []), "rank-9 (incarnation 7), which is not an owner"),
    "a manifest of another incarnation": (
        lambda r: r.seal(OLD, r.requests[:2], [35, 50]),
        "rank-0 (incarnation 6), which is not an owner of this attempt",
    ),
    "cut short": (lambda r: msgspec.structs.replace(r.requests[1], data=r.requests[1].data[:-1]), "cut short"),
    "extended": (lambda r: msgspec.structs.replace(r.requests[1], data=r.requests[1].data + b"\0"), "extended"),
    "empty": (lambda r: msgspec.structs.replace(r.requests[1], data=b""), "the preamble alone has"),
    "another payload's bytes": (
        lambda r: msgspec.structs.replace(r.requests[1], data=r.requests[0].data),
        "sequence=0",
    ),
    "another owner's bytes": (lambda r: msgspec.structs.replace(r.requests[0], data=r.requests[2].data), "rank-1"),
    "another record": (
        lambda r: r.payload(OWNERS[0], 1, [r.item(EMBED, 40, 90, r.kind)], record_id="elsewhere"),
        "is of record 'elsewhere'",
    ),
    "an epoch that is not prepared": (
        lambda r: r.payload(OWNERS[0], 1, [r.item(EMBED, 40, 90, r.kind)], epoch=9),
        "came before its epoch was opened",
    ),
    "an unknown tensor": (
        lambda r: r.payload(
            OWNERS[0],
            1,
            [Item(TensorSpec("ghost", (9,), BF16), Operation.SET, torch.arange(1), torch.zeros(1).short())],
        ),
        "the receiver has no tensor 'ghost'",
    ),
    "another shape": (
        lambda r: r.payload(
            OWNERS[0],
            1,
            [Item(TensorSpec("embed", (9,), BF16), Operation.SET, torch.arange(1), torch.zeros(1).short())],
        ),
        "tensor 'embed' comes as bfloat16",
    ),
    "a manifest of another owner": (
        lambda r: msgspec.structs.replace(r.requests[3], owner="rank-1"),
        "manifest fetched for rank-1, epoch 1, is of rank-0",
    ),
    "a manifest of another record": (
        lambda r: r.seal(OWNERS[0], r.requests[:2], [35, 50], record_id="elsewhere"),
        "is of record 'elsewhere'",
    ),
    "a manifest of an epoch that is not prepared": (
        lambda r: r.seal(OWNERS[0], r.requests[:2], [35, 50], epoch=9),
        "for epoch 9, which was not prepared here",
    ),
    "a manifest cut short": (
        lambda r: msgspec.structs.replace(r.requests[3], data=r.requests[3].data[:-1]),
        "no manifest that this version of dcr can read",
    ),
    "a manifest whose digest is none": (
        lambda r: r.seal(OWNERS[0], r.requests[:2], [35, 50], content_digest="not a digest"),
        "a content digest is 32 lower-case hexadecimal digits",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what):
    make, named = REFUSED[what]
    rank = Rank()
    rank.open()
    before = rank.bits
    answer = rank.call(make(rank))
    assert named in answer.refused
    assert answer.results == ()
    assert answer.state.clean
    assert rank.bits == before
    # The attempt goes on as if it had not been sent.
    answers = [rank.call(r) for r in rank.requests]
    assert [r.root for r in acknowledged(answers)] == [rank.root()]
    assert rank.bits == dense(rank.new)


@given(st.integers(0, 10**6), st.sampled_from([0, 1, 2, 3, 4]))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_no_flipped_bit_is_ever_applied_or_acknowledged(position, number):
    rank = Rank()
    rank.open()
    before = rank.bits
    good = rank.requests[number]
    data = bytearray(good.data)
    at = position % (8 * len(data))
    data[at // 8] ^= 1 << at % 8
    answers = [rank.call(msgspec.structs.replace(good, data=bytes(data)))]
    assert not acknowledged(answers)
    if number < 3:
        assert answers[0].refused
    assert rank.bits == before
    if number >= 3 and not answers[0].refused and not failed(answers):
        # A manifest that still reads as one: what it lists is not what was sent, or the root over it is another.
        answers = [rank.call(r) for r in rank.requests if r is not good]
        assert [r.root for r in acknowledged(answers)] != [rank.root()]


@pytest.mark.parametrize("lost", range(5))
def test_nothing_is_acknowledged_while_anything_is_missing(lost):
    rank = Rank()
    rank.open()
    rest = [r for n, r in enumerate(rank.requests) if n != lost]
    answers = [rank.call(r) for r in rest + rest[::-1]]
    assert not acknowledged(answers)
    assert not failed(answers)
    assert acknowledged([rank.call(rank.requests[lost])])
    assert rank.bits == dense(rank.new)


# ---------------------------------------------------------------- failed for good


def twin(r):
    """The same identity with other bytes."""
    return r.payload(OWNERS[0], 0, [r.item(EMBED, 5, 41, r.kind)])


def payload_of(*, base=None, **identity):
    def make(rank):
        against = msgspec.structs.replace(rank.base(rank.kind), **(base or {}))
        return rank.payload(OWNERS[0], 0, [], base=against, **identity)

    return make


def manifest_of(*, base=None, first=0):
    def make(rank):
        against = msgspec.structs.replace(rank.base(rank.kind), **(base or {}))
        return rank.seal(OWNERS[0], rank.requests[first:2], [35, 50][first:], base=against)

    return make


FAILED = {
    "another base version": (payload_of(base={"version": 4}), "made against"),
    "another baseline": (payload_of(base={"baseline_id": "cd" * 16}), "made against"),
    "another candidate": (payload_of(base={"candidate": "d"}), "made against"),
    "another kind": (payload_of(base={"kind": Kind.ABSOLUTE}), "made against"),
    "another target": (payload_of(target=2), "it is for version 2, this attempt for 1"),
    "a manifest against another base": (manifest_of(base={"version": 4}), "made against"),
    "a manifest with a gap": (manifest_of(first=1), "not numbered 0, 1, 2"),
}


@pytest.mark.parametrize("what", FAILED)
def test_what_fails_the_attempt_is_named_before_a_byte_is_written(what):
    make, named = FAILED[what]
    rank = Rank()
    rank.open()
    before = rank.bits
    (reason,) = failed([rank.call(make(rank))])
    assert named in reason
    assert rank.bits == before
    answers = [rank.call(r) for r in rank.requests]
    assert not acknowledged(answers)  # the epoch has failed, whatever comes
    assert answers[-1].state.clean
    assert rank.bits == before


OVERLAPS = {
    "two owners": (1, 0, "payload rank-1/0"),
    "one owner twice": (0, 1, "payload rank-0/1"),
}


@pytest.mark.parametrize("kind", [Kind.RELATIVE, Kind.ABSOLUTE])
@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("which", OVERLAPS)
def test_an_element_in_two_payloads_of_an_epoch_is_refused_by_name_before_it_is_written_twice(which, stage, kind):
    owner, sequence, named = OVERLAPS[which]
    rank = Rank(kind=kind)
    rank.prepare(stage=stage)
    if not stage:
        rank.call(OpenApply("r", 1))
    first = rank.payload(OWNERS[0], 0, [rank.item(EMBED, 5, 60, kind)])
    # The last element of the first payload again, beside others that nobody has named.
    again = rank.payload(OWNERS[owner], sequence, [rank.item(Q, 5, 90, kind), rank.item(EMBED, 59, 90, kind)])
    assert not failed([rank.call(first), rank.call(first)])  # the same payload again is no other payload
    held = rank.bits
    (reason,) = failed([rank.call(again)])
    assert f"{named} of epoch 1 changes elements of embed that another payload of the epoch changes too" in reason
    assert rank.bits == held
    if stage:
        assert decode_answer(rank.host.call(encode(Undeliverable(1, "")))).state.clean
        assert "has failed here" in rank.call(OpenApply("r", 1)).refused
    # An epoch later the same elements are named anew, and once.
    rank.open(2, Kind.ABSOLUTE)
    rank.requests = rank.emission(2, Kind.ABSOLUTE)
    assert acknowledged([rank.call(r) for r in rank.requests])
    assert rank.bits == dense(rank.new)


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (lambda r: [r.requests[0], twin(r)], "came twice with different bytes"),
        (lambda r: [r.requests[3], twin(r)], "is not the one that its owner's manifest lists"),
        (lambda r: [twin(r), r.requests[3]], "is not the one that its owner's manifest lists"),
        (lambda r: [r.requests[3], r.payload(OWNERS[0], 2, [])], "is not the one that its owner's manifest lists"),
        (
            lambda r: [r.requests[3], r.seal(OWNERS[0], r.requests[:2], [35, 50], owned_elements=1)],
            "sealed epoch 1 twice with different manifests",
        ),
        (
            lambda r: [r.seal(OWNERS[0], r.requests[:2], [35, 49]), *r.requests[:2]],
            "is not the one that its owner's manifest lists",
        ),
        (lambda _: [Undeliverable(1, "the store burnt down")], "the store burnt down"),
    ],
)
def test_contradictions_fail_the_attempt_and_the_next_one_repairs_it(sent, named):
    rank = Rank()
    rank.open()
    requests = sent(rank)
    answers = [rank.call(r) for r in requests]
    (reason,) = failed(answers)
    assert named in reason
    answers = [rank.call(r) for r in rank.requests]
    assert not acknowledged(answers)
    rank.open(2, Kind.ABSOLUTE)
    rank.requests = rank.emission(2, Kind.ABSOLUTE)
    assert acknowledged([rank.call(r) for r in rank.requests])
    assert rank.bits == dense(rank.new)


def test_a_loader_that_fails_midway_tears_and_is_named_and_a_later_epoch_repairs():
    rank = Rank(storage=LoaderPath)
    rank.open()
    rank.call(rank.requests[0])
    rank.mood.append("out of luck")
    (reason,) = failed([rank.call(rank.requests[1])])
    assert "embed: the loader raised ValueError: out of luck" in reason
    rank.mood.clear()
    answers = [rank.call(r) for r in rank.requests]  # never tried again in its epoch
    assert not acknowledged(answers)
    assert answers[-1].state.torn_by == ("c",)

    before = rank.bits
    (reason,) = failed([rank.call(rank.order(2, rank.base(Kind.RELATIVE)))])  # a relative attempt cannot repair it
    assert "a relative payload against version 0 was refused: storage holds version 0, torn by c" in reason
    for request in [OpenApply("r", 2), *rank.emission(2, Kind.RELATIVE)[:3]]:
        assert rank.call(request).refused
    assert rank.bits == before

    rank.open(3, Kind.ABSOLUTE)
    rank.requests = rank.emission(3, Kind.ABSOLUTE)
    assert acknowledged([rank.call(r) for r in rank.requests])
    assert rank.bits == dense(rank.new)


def test_an_absolute_attempt_of_another_candidate_is_not_taken_for_a_repair():
    rank = Rank()
    rank.open()
    rank.call(rank.requests[0])
    base = msgspec.structs.replace(rank.base(Kind.ABSOLUTE), candidate="another")
    (reason,) = failed([rank.call(rank.order(2, base))])
    assert "storage holds version 0, torn by c" in reason


def test_storage_that_moved_is_refused_before_a_byte_is_written():
    rank = Rank()
    rank.open()
    rank.model.qk = torch.nn.Parameter(rank.model.qk.clone(), requires_grad=False)
    before = rank.bits
    (reason,) = failed([rank.call(rank.requests[0])])
    assert re.search("qk:? moved, .*since prewarm", reason)
    assert rank.bits == before


# ---------------------------------------------------------------- restores


def test_a_restore_is_held_to_the_digest_of_the_version():
    rank = Rank(kind=Kind.RESTORE, loaded="")
    rank.open()
    share = f"{int(LOADED, 16) - 5:032x}"
    manifests = [
        rank.seal(OWNERS[0], rank.requests[:2], [35, 50], content_digest=share),
        rank.seal(OWNERS[1], rank.requests[2:3], [85], content_digest=f"{4:032x}"),
    ]
    answers = [rank.call(r) for r in [*rank.requests[:3], *manifests]]
    (reason,) = failed(answers)
    assert f"the restored content is not that of version 0: digest {int(LOADED, 16) - 1:032x}" in reason
    assert not answers[-1].state.clean

    rank.requests = rank.emission(2, Kind.RESTORE)
    rank.open(2)
    manifests = [
        rank.seal(OWNERS[0], rank.requests[:2], [35, 50], content_digest=share),
        rank.seal(OWNERS[1], rank.requests[2:3], [85], content_digest=f"{5:032x}"),
    ]
    answers = [rank.call(r) for r in [*rank.requests[:3], *manifests]]
    assert acknowledged(answers)
    assert (answers[-1].state.version, answers[-1].state.clean) == (0, True)


def test_a_restore_with_a_manifest_whose_digest_is_none_is_refused():
    rank = Rank(kind=Kind.RESTORE, loaded="")
    rank.open()
    for r in rank.requests[:3]:
        rank.call(r)
    for owner, payloads, entries in ((OWNERS[0], rank.requests[:2], [35, 50]), (OWNERS[1], rank.requests[2:3], [85])):
        answer = rank.call(rank.seal(owner, payloads, entries, content_digest="not a digest"))
        assert answer.corrupt
        assert f"manifest of {owner.owner}: a content digest is 32 lower-case hexadecimal digits" in answer.refused


# ---------------------------------------------------------------- orders


def test_orders_before_an_agent_attached_are_refused():
    host = RankHost(lambda _: pytest.fail("no storage was asked for"), state_incarnation=1)
    answer = decode_answer(host.call(encode(OpenApply("r", 1))))
    assert "before a node agent attached" in answer.refused
    assert "no request of this version" in decode_answer(host.call(b"\xc1")).refused
    assert not decode_answer(host.call(b"")).state.clean


def test_a_second_agent_finds_the_storage_as_it_was_left_and_another_engine_does_not():
    rank = Rank()
    rank.open()
    rank.call(rank.requests[0])
    again = rank.call(rank.attach)
    assert again.results == (rank.attached,)
    assert again.state.torn_by == ("c",)
    for other_attach in (
        msgspec.structs.replace(rank.attach, engine="b"),
        msgspec.structs.replace(rank.attach, record_id="s"),
        msgspec.structs.replace(rank.attach, specs=rank.attach.specs[1:]),
    ):
        assert "a node agent is attached already" in rank.call(other_attach).refused
    assert rank.call(msgspec.structs.replace(rank.attach, stage_bytes_max=1)).results == (rank.attached,)


def test_orders_below_the_fence_and_of_another_record_are_refused():
    rank = Rank()
    rank.open()
    rank.prepare(5)
    for order, named in [
        (rank.order(4, rank.base(Kind.RELATIVE)), "epoch 4 refused: the fence is at 5"),
        (PrepareRank(rank.order(6, rank.base(Kind.RELATIVE)).order, CommitRecord("r", 0, 5, "l", 1, LOADED)), "older"),
        (PrepareRank(rank.order(6, rank.base(Kind.RELATIVE)).order, CommitRecord("r", 0, 7, "l", 1, LOADED)), "newer"),
        (OpenApply("r", 1), "epoch 1 refused: the fence is at 5"),
        (OpenApply("r", 6), "was not prepared here"),
        (rank.order(9, rank.base(Kind.RELATIVE), record_id="s"), "order of record 's'"),
        (rank.order(5, rank.base(Kind.ABSOLUTE)), "two different prepare orders for epoch 5"),
        (Learn(CommitRecord("s", 0, 9, "l", 1, LOADED)), "record 's' is not 'r'"),
    ]:
        before = rank.bits
        assert named in rank.call(order).refused
        assert rank.bits == before


def test_payloads_of_a_fenced_epoch_are_dropped_without_a_word():
    rank = Rank()
    rank.open()
    before = rank.bits
    rank.open(2)
    answers = [rank.call(r) for r in rank.requests]
    assert all(a.results == () and not a.refused for a in answers)
    assert rank.bits == before


def test_a_commit_of_other_manifests_does_not_make_storage_clean():
    rank = Rank()
    rank.open()
    for r in rank.requests:
        rank.call(r)
    other_root = Committed(1, 1, "c", (), "0" * 64, "op")
    assert not rank.call(Learn(CommitRecord("r", 1, 1, "l", 1, "ee" * 16, committed=other_root))).state.clean
    committed = Committed(1, 1, "c", (), rank.root(), "op")
    state = rank.call(Learn(CommitRecord("r", 1, 1, "l", 1, "ee" * 16, committed=committed))).state
    assert (state.version, state.content_digest, state.clean) == (1, "ee" * 16, True)


@pytest.mark.parametrize("seed", range(6))
def test_threads_that_call_a_rank_at_once_take_turns(seed):
    """Everything of an attempt several times, from several threads, in any order: as if it had come in one."""

    class Slow(Placement):
        def apply(self, items):
            time.sleep(0.005)  # long enough for another call to come meanwhile
            return super().apply(items)

    rank = Rank(storage=Slow)
    rank.open()
    calls = [r for r in rank.requests for _ in range(4)]
    random.Random(seed).shuffle(calls)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(rank.call, calls))
    assert not failed(answers)
    assert not any(a.refused for a in answers)
    assert [r.root for r in acknowledged(answers)] == [rank.root()]
    assert rank.bits == dense(rank.new)


# ---------------------------------------------------------------- catching up

NOTHING = StorageState(None, "", ("unknown",))


def behind():
    """A rank that catches up, and the record after what it is behind in: its candidate was committed in epoch 1."""
    rank = Rank()
    assert rank.call(BeginCatchUp()).state == NOTHING
    rank.open()
    c = Committed(1, 1, "c", (), rank.root(), "op")
    return rank, CommitRecord("r", 1, 1, "l", 1, "cd" * 16, committed=c)


def test_while_it_catches_up_nothing_is_known_of_storage_and_then_it_is_as_loaded():
    rank, record = behind()
    answers = [rank.call(r) for r in rank.requests]
    assert {a.state for a in answers} == {NOTHING}
    assert rank.call(Learn(record)).results[0].state == StorageState(1, "cd" * 16, ())
    assert rank.bits == dense(rank.new)
    assert rank.call(EndCatchUp("cd" * 16)).state == StorageState(None, "cd" * 16, ())
    (state,) = rank.call(Learn(record)).results  # to the record it is one that was loaded so, and acknowledged nothing
    assert (state.state, state.fence, state.committed_here) == (StorageState(1, "cd" * 16, ()), 1, False)


def test_it_cannot_end_with_what_storage_does_not_hold():
    rank, _ = behind()
    assert "does not hold content cdcd" in rank.call(EndCatchUp("cd" * 16)).refused
    rank.call(rank.requests[0])
    assert "does not hold content" in rank.call(EndCatchUp(LOADED)).refused
    assert rank.call(EndCatchUp("")).state == NOTHING
    assert "does not catch up" in rank.call(EndCatchUp("")).refused


def test_payloads_against_another_version_are_refused_while_it_catches_up():
    rank = Rank()
    rank.call(BeginCatchUp())
    order = rank.order(1, Base(Kind.RELATIVE, 0, "ef" * 16, "c"))
    record = msgspec.structs.replace(order.record, baseline_id="ef" * 16)
    (result,) = rank.call(msgspec.structs.replace(order, record=record)).results
    assert "a relative payload against version 0 was refused: storage holds no known version" in result.reason
    assert rank.bits == dense(rank.old)


def test_a_rank_that_takes_part_does_not_catch_up():
    rank = Rank()
    rank.prepare()
    before = rank.call(ReadBack()).state
    assert "this rank takes part already" in rank.call(BeginCatchUp()).refused
    assert rank.call(ReadBack()).state == before


def test_an_agent_that_attaches_anew_finds_nothing_known_and_the_rank_obeys_the_record_again():
    rank, _ = behind()
    rank.call(rank.requests[0])
    assert rank.call(rank.attach).state == NOTHING
    (result,) = rank.call(rank.order(4, rank.base(Kind.RELATIVE))).results
    assert "was refused: storage holds no known version, torn by unknown" in result.reason
