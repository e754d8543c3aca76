"""The reference: torch, on any device, one box at a time.  What every faster backend has to equal."""

import bisect
from collections.abc import Sequence

import numpy as np
import torch

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.content_digest import digest_elements
from dcr.data_plane.encode import apply_operation
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable, Ints, PlacedBox
from dcr.data_plane.kernels.interface import BoxContent
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.resident import Span
from dcr.protocol.errors import RefusedError


class ReferenceKernels:
    """Kernels in plain torch.

    Args:
        spans: the resident memory, by address; every box lies inside one of them.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._starts = [span.start for span in spans]

    def first_disordered(self, table: BoxTable, records: Records) -> int | None:
        """See :meth:`Kernels.first_disordered`."""
        del table  # an item states its tensor
        for position, item in enumerate(records.items):
            try:
                item.check_indices()
            except RefusedError:
                return position
        return None

    def place(self, table: BoxTable, records: Records) -> Ints:
        """See :meth:`Kernels.place`."""
        hits = np.zeros(len(records.items), np.int64)
        for position, (tensor, item) in enumerate(zip(records.tensors, records.items, strict=True)):
            for placed in table.tensors[tensor].boxes:
                hits[position] += self._place(placed, item)
        return hits

    def _place(self, placed: PlacedBox, item: Item) -> int:
        memory, at, values = self.located(placed, item)
        if placed.widened and item.operation is Operation.SET:
            memory[at - 1] = 0
        memory[at] = apply_operation(memory[at], item.operation, values)
        return at.numel()

    def located(self, placed: PlacedBox, item: Item) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where a box has an item's entries: memory as elements of their width, positions in it, and their values.

        The position of a widened element is that of its high half; its low half lies before it.
        """
        low, high = placed.box.source_bounds
        near = (item.indices >= low) & (item.indices <= high)
        target, inside = placed.box.decode(item.indices[near])
        values = item.values[near]
        if inside is not None:
            target, values = target[inside], values[inside]
        memory, at = self._memory(placed, target, values.dtype)
        return memory, at + placed.widened, values.to(memory.device)

    def _memory(self, placed: PlacedBox, target: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory around a box, and positions of byte addresses in it, as elements of ``dtype``."""
        span = self._spans[bisect.bisect_right(self._starts, placed.box.target_bounds[0]) - 1]
        phase = placed.box.target_offset % dtype.itemsize  # a storage may begin, or end, between two elements
        start = (phase - span.start) % dtype.itemsize
        whole = (span.nbytes - start) // dtype.itemsize * dtype.itemsize
        memory = span.bytes()[start : start + whole].view(dtype)
        return memory, ((target - span.start - start) // dtype.itemsize).to(memory.device)

    def contents(self, table: BoxTable, specs: Sequence[TensorSpec]) -> list[BoxContent]:
        """See :meth:`Kernels.contents`."""
        return [
            self._content(placed, spec)
            for spec, tensor in zip(specs, table.tensors, strict=True)
            for placed in tensor.boxes
        ]

    def _content(self, placed: PlacedBox, spec: TensorSpec) -> BoxContent:
        source, target = placed.box.expand()
        memory, at = self._memory(placed, target, bits_dtype(spec.dtype))
        low_halves_zero = not placed.widened or not bool(memory[at].any())
        bits = memory[at + placed.widened]
        return BoxContent(digest_elements(spec, source.to(bits.device), bits), low_halves_zero)
