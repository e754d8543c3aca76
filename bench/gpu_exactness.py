"""Triton's kernels on one device against the torch reference on the host: every dtype, operation and shape of box."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcr.data_plane.bits import bits_dtype, dtype_of
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, PlacedBox, PlacedTensor
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.reference import ReferenceKernels
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import StreamKernels, TorchStreamKernels
from dcr.data_plane.resident import Span

DTYPES = ("bfloat16", "bool", "float16", "float32", "float64", "float8_e4m3fn", "int64", "uint8", "uint16")
"""All widths, and both signs of the words; the kernels know of a dtype no more than its width."""
REFERENCE = TorchStreamKernels()


@dataclass(frozen=True)
class Sizes:
    """How much is compared.

    Attributes:
        shard: numbers of elements.
        rates: shares that differ.
        rows: of the boxes: a box has a few times as many elements as its square.
    """

    shard: tuple[int, ...]
    rates: tuple[float, ...]
    rows: int


FULL = Sizes((1, 4095, 4097, 1_000_001), (0.0, 0.0003, 0.03, 1.0), 300)
TINY = Sizes((1, 1030), (0.0, 0.03, 1.0), 9)


def noise(elements: int, kind: torch.dtype, seed: int) -> torch.Tensor:
    """Words of which every bit is random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (elements * kind.itemsize,), dtype=torch.uint8, generator=generator).view(kind)


def of_streams(device: torch.device, sizes: Sizes, dtypes: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Cases of finding, hashing and writing changes: what each is, and whether bits and bytes are the reference's."""
    from dcr.data_plane.kernels.triton_streams import TritonStreamKernels  # noqa: PLC0415 - after the interpreter is set

    kernels = TritonStreamKernels(device, stream_kernels())
    for name in dtypes:
        kind = bits_dtype(dtype_of(name))
        for elements in sizes.shard:
            for rate in sizes.rates:
                old = noise(elements, kind, 1)
                changed = torch.rand(elements, generator=torch.Generator().manual_seed(3)) < rate
                # A third of the changes is small, so that all forms of codes occur.
                near = old ^ torch.where(torch.arange(elements) % 3 == 0, 1, noise(elements, kind, 4)).to(kind)
                new = torch.where(changed, near, old)
                for offset in (0, 1):
                    where = f"{name}, {elements - offset} elements from {offset}, {100 * rate:g} % drawn"
                    spec = TensorSpec("w", (1 << 40 if offset else elements,), dtype_of(name))  # gaps of 8 bytes, or 4
                    live = new.to(device)[offset:]  # which begins between two words of the device
                    yield from _of_change(kernels, where, spec, (old[offset:], new[offset:]), live)


def _of_change(
    kernels: StreamKernels, where: str, spec: TensorSpec, shards: Sequence[torch.Tensor], live: torch.Tensor
) -> Iterator[tuple[str, bool]]:
    (old, new), device = shards, live.device
    found, expected = kernels.differences(old, live), REFERENCE.differences(old, new)
    pairs = ((found.positions, expected.positions), (found.old, expected.old), (found.new, expected.new))
    yield f"differences: {where}", all(torch.equal(a.cpu(), b) for a, b in pairs)
    digest = kernels.digest(spec, expected.positions.to(device), expected.new.to(device))
    yield f"digest: {where}", digest == REFERENCE.digest(spec, expected.positions, expected.new)
    values = {
        Operation.SET: expected.new,
        Operation.XOR: expected.new ^ expected.old,
        Operation.ADD: expected.new - expected.old,
    }
    for operation, words in values.items():
        item = Item(spec, operation, expected.positions, words)
        ours, found_digest = kernels.encode(Item(spec, operation, item.indices.to(device), words.to(device)))
        theirs, expected_digest = REFERENCE.encode(item)
        same = (
            found_digest == expected_digest
            and ours.layout == theirs.layout
            and [p.tobytes() for p in ours.parts] == [p.tobytes() for p in theirs.parts]
        )
        yield f"{operation}: {where}", same


def of_boxes(device: torch.device, sizes: Sizes, dtypes: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Cases of placing entries and reading boxes: what each is, and whether memory, hits and digests are the same."""
    from dcr.data_plane.kernels.triton_placement import TritonKernels  # noqa: PLC0415 - after the interpreter is set

    for name in dtypes:
        for operation in Operation:
            results: list[tuple[Any, ...]] = []
            for where in (torch.device("cpu"), device):
                memory = noise(40 * sizes.rows**2, torch.int64, 5).view(torch.uint8).to(where, copy=True)
                storage = memory.untyped_storage()
                span = Span(storage.data_ptr(), storage.nbytes(), storage, ())
                specs, table = _table(name, sizes.rows, span.start)
                kernels = TritonKernels(device) if results else ReferenceKernels([span])
                items = [_item(spec, operation) for spec in specs]
                records = Records.of(range(len(items)), items)
                order = kernels.first_disordered(table, records)
                hits = kernels.place(table, records).tolist()
                results.append((order, hits, kernels.contents(table, specs), memory.cpu()))
            (*first, host), (*second, ours) = results
            yield f"boxes: {name}, {operation}", first == second and torch.equal(host, ours)


def _item(spec: TensorSpec, operation: Operation) -> Item:
    chosen = torch.rand(spec.numel, generator=torch.Generator().manual_seed(6)) < 0.3
    indices = chosen.nonzero().flatten()
    return Item(spec, operation, indices, noise(indices.numel(), bits_dtype(spec.dtype), 7))


def _table(name: str, rows: int, start: int) -> tuple[list[TensorSpec], BoxTable]:
    """Boxes that are plain, transposed, strided with steps that do not divide each other, a point, and widened."""
    dtype = dtype_of(name)
    width, across = dtype.itemsize, rows - rows % 3
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = [
        ((rows * rows,), (1,), (1,), rows * rows),
        ((rows, rows), (rows, 1), (1, rows), rows * rows),
        ((rows // 3, 2, 2), (6, 4, 1), (4, 2, 1), 2 * across),
        ((), (), (), 1),
    ]
    specs, tensors, free = [], [], start
    for number, (size, source, target, numel) in enumerate(shapes):
        specs.append(TensorSpec(f"{name} {number}", (numel,), dtype))
        box = Box.of(size, source, [step * width for step in target], 0, free)
        tensors.append(PlacedTensor(numel, width, (PlacedBox(box),)))
        free += 8 * rows * rows
    if name == "bfloat16":
        specs.append(TensorSpec("widened", (rows * rows,), dtype))
        box = Box.of([rows * rows], [1], [4], 0, free)
        tensors.append(PlacedTensor(rows * rows, width, (PlacedBox(box, widened=True),)))
    return specs, BoxTable.of(tensors)
