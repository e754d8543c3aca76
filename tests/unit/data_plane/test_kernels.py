"""Kernels of every backend against dictionaries and plain torch: random boxes, operations, widths, hostile items."""

import random
import threading
from dataclasses import replace

import loaders
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.content_digest import digest_elements
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.choice import kernels_for
from dcr.data_plane.kernels.numba_cpu import NumbaKernels
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.reference import ReferenceKernels
from dcr.data_plane.resident import Span
from dcr.protocol.errors import RefusedError

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]
BACKENDS = ["reference", "numba 1", "numba 3"]


class Memory:
    """Resident memory of one storage, handed out in pieces."""

    def __init__(self, nbytes, seed):
        generator = torch.Generator().manual_seed(seed)
        self.bytes = torch.randint(0, 256, (nbytes,), generator=generator).to(torch.uint8)
        storage = self.bytes.untyped_storage()
        self.start = storage.data_ptr()
        self.span = Span(self.start, storage.nbytes(), storage, ())

    def kernels(self, backend):
        return ReferenceKernels([self.span]) if backend == "reference" else NumbaKernels(int(backend[-1]))


@st.composite
def buckets(draw):
    """A table of tensors in one memory, and items for some of them: everything a kernel can meet."""
    memory, free = Memory(1 << 15, draw(st.integers(0, 99))), 0
    specs, tensors = [], []
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        spec = TensorSpec(f"t{number}", shape, dtype)
        boxes = []
        for _ in range(draw(st.integers(0, 3))):  # several places for an element, or several parts of the tensor
            view = torch.arange(spec.numel).view(shape)
            for dim in range(view.dim()):
                first = draw(st.integers(0, view.shape[dim] - 1))
                view = view[(slice(None),) * dim + (slice(first, None, draw(st.integers(1, 2))),)]
            widened = dtype == torch.bfloat16 and draw(st.booleans())
            unit = dtype.itemsize * (2 if widened else 1)
            free = (free + unit - 1) // unit * unit
            gap = draw(st.integers(0, 3))
            order = draw(st.permutations(range(view.dim())))
            steps, step = [0] * view.dim(), unit
            for dim in order:
                steps[dim] = step
                step *= view.shape[dim] + gap
            box = Box.of(view.shape, view.stride(), steps, view.storage_offset(), memory.start + free)
            boxes.append(PlacedBox(box, widened))
            free += step
        specs.append(spec)
        tensors.append(PlacedTensor(spec.numel, dtype.itemsize, tuple(boxes)))
    assert free <= memory.bytes.numel()
    numbers, items = [], []
    for number, spec in enumerate(specs):
        chosen = sorted(draw(st.sets(st.integers(0, spec.numel - 1))))
        for part in (chosen[0::2], chosen[1::2])[: draw(st.integers(1, 2))]:  # two owners
            words = loaders.raw(loaders.random_bits((len(part),), spec.dtype, len(part)))
            numbers.append(number)
            indices = torch.tensor(part, dtype=torch.int64)
            items.append(Item(spec, draw(st.sampled_from(list(Operation))), indices, words))
    return memory, specs, BoxTable.of(tensors), Records.of(numbers, items)


def by_hand(memory, table, records):
    """Memory and hits after the items, in Python integers over a byte array."""
    held = bytearray(memory.bytes.numpy().tobytes())
    hits = []
    for number, item in zip(records.tensors, records.items, strict=True):
        width, count = item.spec.dtype.itemsize, 0
        values = [v % (1 << (8 * width)) for v in item.values.tolist()]
        entries = dict(zip(item.indices.tolist(), values, strict=True))
        for placed in table.tensors[number].boxes:
            for source, target in zip(*(side.tolist() for side in placed.box.expand()), strict=True):
                if source in entries:
                    count += 1
                    at = target - memory.start + (width if placed.widened else 0)
                    old, value = int.from_bytes(held[at : at + width], "little"), entries[source]
                    new = {"set": value, "xor": old ^ value, "add": (old + value) % (1 << (8 * width))}[item.operation]
                    held[at : at + width] = new.to_bytes(width, "little")
                    if placed.widened and item.operation is Operation.SET:
                        held[at - width : at] = bytes(width)
        hits.append(count)
    return bytes(held), hits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_ends_where_an_outer_dimension_goes_on(backend, dtype):
    """A step of 2 through a middle of 3: rows begin 0, 4, 6, 10, not every 4."""
    shape, memory = (3, 3, 2), Memory(1 << 10, 3)
    view = torch.arange(18).view(shape)[:, ::2]
    box = Box.of(view.shape, view.stride(), [s * dtype.itemsize for s in (4, 2, 1)], 0, memory.start)
    table = BoxTable.of([PlacedTensor(18, dtype.itemsize, (PlacedBox(box, widened=False),))])
    words = loaders.raw(loaders.random_bits((18,), dtype, 5))
    records = Records.of([0], [Item(TensorSpec("t", shape, dtype), Operation.SET, torch.arange(18), words)])
    assert memory.kernels(backend).place(table, records).tolist() == [12]
    assert memory.bytes[: 12 * dtype.itemsize].tolist() == words[view.reshape(-1)].view(torch.uint8).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150)
@given(buckets())
def test_every_place_of_every_entry_is_written_and_nothing_else(backend, bucket):
    memory, specs, table, records = bucket
    expected, hits = by_hand(memory, table, records)
    kernels = memory.kernels(backend)
    before = memory.bytes.clone()
    assert kernels.first_disordered(table, records) is None
    assert kernels.place(table, records).tolist() == hits
    assert memory.bytes.numpy().tobytes() == expected
    contents = kernels.contents(table, specs)
    memory.bytes.copy_(before)  # the strategy's memory is shared by the backends' examples
    assert [c.low_halves_zero for c in contents] == by_hand_low_halves(expected, memory, table)
    assert [c.digest for c in contents] == by_hand_digests(expected, memory, specs, table)


def by_hand_digests(held, memory, specs, table):
    found = []
    for spec, tensor in zip(specs, table.tensors, strict=True):
        width = spec.dtype.itemsize
        for placed in tensor.boxes:
            source, target = placed.box.expand()
            at = [t - memory.start + (width if placed.widened else 0) for t in target.tolist()]
            raw = np.frombuffer(b"".join(held[a : a + width] for a in at), f"<u{width}").copy()
            bits = torch.from_numpy(raw.view(f"<i{width}") if width > 1 else raw)
            found.append(digest_elements(spec, source, bits))
    return found


def by_hand_low_halves(held, memory, table):
    return [
        not placed.widened
        or not any(any(held[t - memory.start :][: tensor.width]) for t in placed.box.expand()[1].tolist())
        for tensor in table.tensors
        for placed in tensor.boxes
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_items_are_split_among_threads_without_a_seam(backend, dtype):
    n = 200_000
    spec, width = TensorSpec("w", (n,), dtype), dtype.itemsize
    memory = Memory(n * width + 64, 1)
    table = BoxTable.of([PlacedTensor(n, width, (PlacedBox(Box.of([n], [1], [width], 0, memory.start)),))])
    indices = (torch.rand(n, generator=torch.Generator().manual_seed(2)) < 0.4).nonzero().flatten()
    values = loaders.raw(loaders.random_bits(indices.shape, dtype, 3))
    expected = memory.bytes[: n * width].view(bits_dtype(dtype)).clone()
    expected[indices] += values
    kernels = memory.kernels(backend)
    records = Records.of([0], [Item(spec, Operation.ADD, indices, values)])
    assert kernels.first_disordered(table, records) is None
    assert kernels.place(table, records).tolist() == [indices.numel()]
    assert torch.equal(memory.bytes[: n * width].view(bits_dtype(dtype)), expected)
    assert kernels.contents(table, [spec])[0].digest == digest_elements(spec, None, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@example(seed=0, fault="twice", where=20_000)
@example(seed=0, fault="back", where=16_384)  # where one thread's entries end and another's begin
@given(st.integers(0, 9), st.sampled_from(["twice", "back", "below", "beyond"]), st.integers(0, 49_999))
@settings(max_examples=40)
def test_indices_out_of_order_are_found_wherever_they_are(backend, seed, fault, where):
    n = 50_000
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
    kernels = Memory(64, 0).kernels(backend)
    assert kernels.first_disordered(table, Records.of([0, 1, 2], items)) is None
    items[bad] = replace(items[bad], indices=indices)
    assert kernels.first_disordered(table, Records.of([0, 1, 2], items)) == bad


def test_two_threads_may_call_at_once():
    """Two ranks of one process share the compiled backend."""
    kernels = kernels_for([])
    n = 60_000
    spec = TensorSpec("w", (n,), torch.bfloat16)
    memories = [Memory(2 * n + 64, 5) for _ in range(2)]
    indices = torch.arange(n)
    item = Item(spec, Operation.ADD, indices, torch.ones(n, dtype=torch.int16))

    def work(memory):
        table = BoxTable.of([PlacedTensor(n, 2, (PlacedBox(Box.of([n], [1], [2], 0, memory.start)),))])
        for _ in range(20):
            kernels.place(table, Records.of([0], [item]))

    expected = memories[0].bytes[: 2 * n].view(torch.int16) + 20
    threads = [threading.Thread(target=work, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(memory.bytes[: 2 * n].view(torch.int16), expected) for memory in memories)


def test_items_that_are_not_contiguous_are_copied():
    spec = TensorSpec("w", (100,), torch.bfloat16)
    memory = Memory(256, 7)
    table = BoxTable.of([PlacedTensor(100, 2, (PlacedBox(Box.of([100], [1], [2], 0, memory.start)),))])
    item = Item(spec, Operation.SET, torch.arange(100)[::2], torch.arange(100, dtype=torch.int16)[::2])
    assert memory.kernels("numba 1").place(table, Records.of([0], [item])).tolist() == [50]
    assert memory.bytes.view(torch.int16)[:100:2].tolist() == list(range(0, 100, 2))


@pytest.mark.parametrize(
    ("boxes", "places", "absent"),
    [
        ([], 0, [0, 1, 2, 3]),
        ([Box.of([4], [1], [1])], 1, []),
        ([Box.of([4], [1], [1]), Box.of([2, 2], [1, 2], [2, 1], 0, 9)], 2, []),
        ([Box.of([2], [2], [1]), Box.of([2], [2], [1], 1, 9)], 1, []),
        ([Box.of([2], [1], [1])], 0, [2, 3]),
        ([Box.of([2], [1], [1]), Box.of([2], [1], [1], 0, 9)], 0, [2, 3]),  # as many places as elements, yet not all
    ],
)
def test_how_many_places_an_element_has(boxes, places, absent):
    tensor = PlacedTensor(4, 1, tuple(PlacedBox(box) for box in boxes))
    assert tensor.places == places
    for some in range(16):
        chosen = [i for i in range(4) if some >> i & 1]
        assert tensor.absent(torch.tensor(chosen, dtype=torch.int64)) == len(set(chosen) & set(absent))


def test_strides_that_are_no_whole_elements_are_refused():
    with pytest.raises(RefusedError, match="no multiples of 4 bytes"):
        BoxTable.of([PlacedTensor(4, 4, (PlacedBox(Box.of([4], [1], [6])),))])
