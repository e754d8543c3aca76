"""The way of a payload from bytes to resident memory, against hostile ones: refused, nothing written, bounded."""

import tracemalloc

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.header import Limits
from dcr.data_plane.item import Item, Operation
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import TorchStreamKernels
from dcr.data_plane.payload import decode_payload
from dcr.protocol.errors import RefusedError
from dcr.runtime.rank_messages import Payload
from tests.faults.models import dense
from tests.unit.data_plane import attacks, wire_reader
from tests.unit.data_plane.forge import open_up, pack, seal, split
from tests.unit.data_plane.strategies import bits
from tests.unit.runtime.rank import Rank, bits_of, failed

EXPECTED = msgspec.json.decode((attacks.FOLDER / "expected.json").read_bytes())
HEADROOM = attacks.BOMB // 2
"""Beside the payload; a header of a million items takes some of it."""


def kept(name) -> bytes:
    return (attacks.FOLDER / f"{name}.dcrp").read_bytes()


@pytest.fixture(scope="module")
def rank():
    """A rank that is open for writing; whoever changes its bits puts them back."""
    rank = Rank()
    rank.open()
    return rank


def test_every_attack_is_kept_and_every_kept_file_is_an_attack():
    assert {p.stem for p in attacks.FOLDER.glob("*.dcrp")} == set(EXPECTED) == set(attacks.cases())
    assert decode_payload(attacks.good())[0].entries == 468  # which the attacks are made from


@pytest.mark.parametrize("kernels", [TorchStreamKernels(), stream_kernels()], ids=["reference", "numba"])
@pytest.mark.parametrize("name", EXPECTED)
def test_attacks_are_refused_by_name_within_memory(kernels, name, rank):
    data = kept(name)
    known = {spec.name: spec.spec for spec in rank.attach.specs}
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError, match=EXPECTED[name]):
            decode_payload(data, known=known, kernels=kernels)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < HEADROOM + 2 * len(data)


@pytest.mark.parametrize("name", EXPECTED)
def test_attacks_write_nothing(name, rank):
    before = rank.bits
    answer = rank.call(Payload(attacks.IDENTITY, kept(name)))
    assert answer.refused or failed([answer])
    assert rank.bits == before


def test_attacks_within_narrow_limits_need_no_more_memory_than_those(rank):
    limits = Limits(1 << 20, 1 << 16, 100, 2000, 1 << 16)
    known = {spec.name: spec.spec for spec in rank.attach.specs}
    for name in EXPECTED:
        data = kept(name)
        tracemalloc.start()
        try:
            with pytest.raises(RefusedError):
                decode_payload(data, limits, known)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@st.composite
def changes(draw):
    """Right items of tensors that the rank has, some of them two of one tensor."""
    found = []
    for spec in (attacks.EMBED, attacks.Q):
        chosen = sorted(draw(st.sets(st.integers(0, spec.numel - 1), max_size=40)))
        cut = draw(st.integers(0, len(chosen)))
        for indices in (chosen[:cut], chosen[cut:]):
            value = st.one_of(st.integers(1, 300), st.integers(1, 0xFFFF))
            values = bits(torch.bfloat16, draw(st.lists(value, min_size=len(indices), max_size=len(indices))))
            operation = draw(st.sampled_from(Operation))
            found.append(Item(spec, operation, torch.tensor(indices, dtype=torch.int64), values))
    return found


@st.composite
def hostile(draw):
    """A payload with some edits, or none, of its header, streams or frames, under a right wire digest."""
    data = attacks.good(*draw(changes()))
    edits = draw(st.integers(0, 3))
    if draw(st.booleans()):  # raw streams, compressed again
        header, raws = open_up(data)
        for _ in range(edits):
            k = draw(st.sampled_from([k for k, raw in enumerate(raws) if raw] or [0]))
            at, new = draw(st.integers(0, len(raws[k]))), draw(st.binary(min_size=1, max_size=4))
            raws[k] = (raws[k][:at] + new + raws[k][at + len(new) :])[: len(raws[k])]
        if edits and draw(st.booleans()):
            item = draw(st.sampled_from(header["items"]))
            position = draw(st.sampled_from((1, 2, 3, 4, 5, 6)))
            item[position] = draw(
                st.sampled_from(["bfloat16", "int16", "set", "xor", [64, 24], [1536], 0, 1, 3, [2, 0, 0, 0]])
            )
        return pack(header, raws)
    header, body = map(bytearray, split(data))
    for _ in range(edits):
        part = draw(st.sampled_from([header, body]))
        at = draw(st.integers(0, len(part)))
        part[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return seal(bytes(header), bytes(body))


@settings(max_examples=250)
@given(hostile())
def test_what_is_not_refused_is_applied_as_another_reader_reads_it(rank, data):
    """Otherwise nothing is written.  What a second reader makes of it is applied to the checkpoint by hand."""
    before = rank.bits
    known = {spec.name: spec.spec for spec in rank.attach.specs}
    try:
        items = decode_payload(data, known=known)[1]
        rank.host._storage.apply(items)
    except RefusedError:
        assert rank.bits == before
        return
    new = {name: tensor.clone() for name, tensor in rank.old.items()}
    for name, _, _, operation, entries in wire_reader.read(data)[1]:
        held = bits_of(new)[name]
        for index, value in entries.items():
            old = int(held[index]) & 0xFFFF
            word = {"set": value, "xor": old ^ value, "add": (old + value) & 0xFFFF}[operation]
            held[index] = torch.tensor(word).to(torch.int16)
    try:
        assert rank.bits == dense(new)
    finally:
        rank.model.load_weights(rank.old.items())
    assert rank.bits == before
