"""Triton's box kernels in its interpreter, against dictionaries over raw memory, and against the torch reference."""

import random
from dataclasses import replace

import loaders
import pytest
import test_kernels as boxes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.content_digest import digest_elements
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.triton_placement import TritonKernels
from dcr.protocol.errors import RefusedError

CPU = torch.device("cpu")


def check_bucket(bucket):
    memory, specs, table, records = bucket
    expected, hits = boxes.by_hand(memory, table, records)
    kernels = TritonKernels(CPU)
    before = memory.bytes.clone()
    assert kernels.first_disordered(table, records) is None
    assert kernels.place(table, records).tolist() == hits
    assert memory.bytes.numpy().tobytes() == expected
    contents = kernels.contents(table, specs)
    memory.bytes.copy_(before)  # the strategy's memory outlives an example
    assert [c.low_halves_zero for c in contents] == boxes.by_hand_low_halves(expected, memory, table)
    assert [c.digest for c in contents] == boxes.by_hand_digests(expected, memory, specs, table)


@settings(max_examples=25)
@given(boxes.buckets())
def test_every_place_of_every_entry_is_written_and_nothing_else(bucket):
    check_bucket(bucket)


@pytest.mark.long
@settings(max_examples=200)
@given(boxes.buckets())
def test_more_buckets(bucket):
    check_bucket(bucket)


@pytest.mark.parametrize("dtype", boxes.DTYPES)
def test_strides_that_do_not_divide_each_other(dtype):
    """A step of 2 through a middle of 3: rows begin 0, 4, 6, 10, not every 4."""
    shape, memory = (3, 3, 2), boxes.Memory(1 << 10, 3)
    view = torch.arange(18).view(shape)[:, ::2]
    box = Box.of(view.shape, view.stride(), [s * dtype.itemsize for s in (4, 2, 1)], 0, memory.start)
    table = BoxTable.of([PlacedTensor(18, dtype.itemsize, (PlacedBox(box, widened=False),))])
    words = loaders.raw(loaders.random_bits((18,), dtype, 5))
    records = Records.of([0], [Item(TensorSpec("t", shape, dtype), Operation.SET, torch.arange(18), words)])
    assert TritonKernels(CPU).place(table, records).tolist() == [12]
    assert memory.bytes[: 12 * dtype.itemsize].tolist() == words[view.reshape(-1)].view(torch.uint8).tolist()


def check_large(dtype, n, rate):
    """Many blocks, in a plain box and in one of two dimensions, with an item of another width beside it."""
    spec, width = TensorSpec("w", (n,), dtype), dtype.itemsize
    memory = boxes.Memory(2 * n * width + 256, 1)
    halves = [
        PlacedBox(Box.of([n // 2], [1], [2 * width], half * (n // 2), memory.start + width * half)) for half in (0, 1)
    ]
    other = PlacedBox(Box.of([64], [1], [1], 0, memory.start + 2 * n * width))
    table = BoxTable.of([PlacedTensor(n, width, tuple(halves)), PlacedTensor(64, 1, (other,))])
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(2)) < rate).nonzero().flatten()
    values = loaders.raw(loaders.random_bits(indices.shape, dtype, 3))
    expected = memory.bytes[: n * width].view(bits_dtype(dtype)).view(n // 2, 2).T.flatten()
    expected[indices] += values
    small = Item(
        TensorSpec("s", (64,), torch.uint8), Operation.SET, torch.arange(64), torch.arange(64, dtype=torch.uint8)
    )
    kernels, records = TritonKernels(CPU), Records.of([0, 1], [Item(spec, Operation.ADD, indices, values), small])
    assert kernels.first_disordered(table, records) is None
    assert kernels.place(table, records).tolist() == [indices.numel(), 64]
    assert torch.equal(memory.bytes[: n * width].view(bits_dtype(dtype)).view(n // 2, 2).T.flatten(), expected)
    assert memory.bytes[2 * n * width :][:64].tolist() == list(range(64))
    found = kernels.contents(table, [spec, small.spec])
    assert found[0].digest + found[1].digest == digest_elements(spec, None, expected)
    assert found[2].digest == digest_elements(small.spec, None, small.values)


@pytest.mark.parametrize("dtype", boxes.DTYPES)
def test_items_of_several_blocks(dtype):
    check_large(dtype, 36_000, 0.1)  # of which a program of contents() reads less than half


@pytest.mark.long
@pytest.mark.parametrize("dtype", boxes.DTYPES)
@pytest.mark.parametrize("rate", [0.003, 0.5, 1.0])
def test_items_of_many_blocks(dtype, rate):
    check_large(dtype, 200_000, rate)


def check_order(seed, fault, where, n):
    specs = [TensorSpec(f"w{i}", (3 * n,), torch.uint8) for i in range(3)]
    table = BoxTable.of([PlacedTensor(3 * n, 1, ())] * 3)
    nothing = torch.zeros(n, dtype=torch.uint8)
    items = [Item(spec, Operation.SET, torch.arange(0, 3 * n, 3), nothing) for spec in specs]
    bad = random.Random(seed).randrange(3)
    indices = items[bad].indices.clone()
    if fault in ("twice", "back"):
        where = max(where, 1)
        indices[where] = int(indices[where - 1]) - (fault == "back")
    elif fault == "below":
        indices[0] = -1 - where
    else:
        indices[-1] = 3 * n + where
    kernels = TritonKernels(CPU)
    assert kernels.first_disordered(table, Records.of([0, 1, 2], items)) is None
    items[bad] = replace(items[bad], indices=indices)
    assert kernels.first_disordered(table, Records.of([0, 1, 2], items)) == bad


@pytest.mark.parametrize("fault", ["twice", "back", "below", "beyond"])
@pytest.mark.parametrize("where", [0, 1023, 1024, 2999])
def test_indices_out_of_order_are_found_wherever_they_are(fault, where):
    check_order(where, fault, where, 3000)


@pytest.mark.long
@settings(max_examples=25)
@given(st.integers(0, 9), st.sampled_from(["twice", "back", "below", "beyond"]), st.integers(0, 49_999))
def test_indices_out_of_order_are_found_in_large_items(seed, fault, where):
    check_order(seed, fault, where, 50_000)


def test_what_is_placed_is_what_was_given_not_what_was_checked_before():
    """Entries stay on the device between check and placement, for the very records that were checked alone."""
    spec, memory = TensorSpec("w", (8,), torch.uint8), boxes.Memory(64, 1)
    table = BoxTable.of([PlacedTensor(8, 1, (PlacedBox(Box.of([8], [1], [1], 0, memory.start)),))])
    first, second = (
        Records.of([0], [Item(spec, Operation.SET, torch.arange(8), torch.arange(8, dtype=torch.uint8) + k)])
        for k in (1, 100)
    )
    kernels = TritonKernels(CPU)
    assert kernels.first_disordered(table, first) is None
    kernels.place(table, second)
    assert memory.bytes[:8].tolist() == list(range(100, 108))
    kernels.place(table, first)
    assert memory.bytes[:8].tolist() == list(range(1, 9))


def test_boxes_of_another_table_are_other_boxes():
    spec, memory = TensorSpec("w", (8,), torch.uint8), boxes.Memory(64, 1)
    records = Records.of([0], [Item(spec, Operation.SET, torch.arange(8), torch.full((8,), 7, dtype=torch.uint8))])
    kernels, before = TritonKernels(CPU), memory.bytes.clone()
    for at in (0, 32):
        box = PlacedBox(Box.of([8], [1], [1], 0, memory.start + at))
        kernels.place(BoxTable.of([PlacedTensor(8, 1, (box,))]), records)
        before[at : at + 8] = 7
        assert torch.equal(memory.bytes, before)


def test_memory_between_two_elements_is_refused_before_anything_is_written():
    spec, memory = TensorSpec("w", (8,), torch.float32), boxes.Memory(64, 1)
    table = BoxTable.of([PlacedTensor(8, 4, (PlacedBox(Box.of([8], [1], [4], 0, memory.start + 2)),))])
    records = Records.of([0], [Item(spec, Operation.SET, torch.arange(8), torch.zeros(8, dtype=torch.int32))])
    before = memory.bytes.clone()
    for call in (TritonKernels(CPU).first_disordered, TritonKernels(CPU).place):
        with pytest.raises(RefusedError, match="between two elements of 4 bytes"):
            call(table, records)
    assert torch.equal(memory.bytes, before)
