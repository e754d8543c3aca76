"""Kernels for the CPU, compiled by numba: one pass over flat arrays, split among threads by the number of entries.

The threads are ours, not those of numba's parallel mode: that ends the process when two threads of it enter at once
under its default layer, and a process may hold several ranks.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dcr.data_plane.content_digest import ContentDigest, digest_keys
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.kernels import compiled
from dcr.data_plane.kernels.box_table import BoxTable, Ints
from dcr.data_plane.kernels.interface import BoxContent
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.threads import Threads

T = TypeVar("T")

_GRAIN = 1 << 13
"""Entries, or elements, below which a thread of its own does not pay."""
_SLICES = 4
"""Slices a thread: enough that threads which do not get a core all the time still end together."""


class NumbaKernels:
    """Kernels for boxes in host memory.

    Args:
        threads: how many work at a time; by default as many as the process may use cores.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = Threads("dcr-kernels", threads)

    def first_disordered(self, table: BoxTable, records: Records) -> int | None:
        """See :meth:`Kernels.first_disordered`."""
        numbers = records.numbers
        ends = np.cumsum(numbers[1])
        numel = table.numel[numbers[0]]
        found = [
            f
            for f in self._over(ends, lambda *span: int(compiled.disordered(*span, ends, numbers[3], numel)))
            if f >= 0
        ]
        return min(found, default=None)

    def place(self, table: BoxTable, records: Records) -> Ints:
        """See :meth:`Kernels.place`."""
        numbers = records.numbers
        first = table.first[numbers[0]]
        boxes = table.first[numbers[0] + 1] - first
        pairs = np.zeros((4, int(boxes.sum())), np.int64)
        pairs[0] = np.repeat(np.arange(boxes.size), boxes)
        pairs[1] = np.arange(pairs.shape[1]) - np.repeat(np.cumsum(boxes) - boxes - first, boxes)
        compiled.ranges(pairs, numbers[1], numbers[3], table.low, table.high)
        ends = np.cumsum(pairs[3])

        def work(start: int, stop: int) -> Ints:
            hits = np.zeros(boxes.size, np.int64)
            flat = (table.width, table.address, table.low, table.numbers, table.dims)
            compiled.place(start, stop, ends, pairs, numbers, *flat, hits)
            return hits

        hits = np.zeros(boxes.size, np.int64)
        for part in self._over(ends, work):
            hits += part
        return hits

    def contents(self, table: BoxTable, specs: Sequence[TensorSpec]) -> list[BoxContent]:
        """See :meth:`Kernels.contents`."""
        boxes = np.diff(table.first)
        ends = np.cumsum([placed.box.numel for tensor in table.tensors for placed in tensor.boxes], dtype=np.int64)
        width = np.repeat(table.width, boxes)
        keys = np.repeat(np.array([digest_keys(spec) for spec in specs], np.int64).reshape(-1, 4), boxes, axis=0)

        def work(start: int, stop: int) -> npt.NDArray[np.uint64]:
            totals = np.zeros((ends.size, 4), np.uint64)
            flat = (width, table.address, table.low, table.numbers, table.dims)
            compiled.contents(start, stop, ends, *flat, keys.view(np.uint64), totals)
            return totals

        totals = np.zeros((ends.size, 4), np.uint64)
        for part in self._over(ends, work):
            totals[:, :3] += part[:, :3]
            totals[:, 3] |= part[:, 3]
        return [
            BoxContent(ContentDigest(((high << 64) + (upper << 32) + lower) % (1 << 128)), low_halves_zero=not dirty)
            for high, upper, lower, dirty in totals.tolist()
        ]

    def _over(self, ends: Ints, work: Callable[[int, int], T]) -> list[T]:
        """What ``work`` gives for slices of what ``ends`` counts through; every thread gets as many entries."""
        total = int(ends[-1]) if ends.size else 0
        slices = min(-(-total // _GRAIN), self._threads.count * _SLICES if self._threads.count > 1 else 1)
        spans = [(total * k // slices, total * (k + 1) // slices) for k in range(slices)]
        return self._threads.map(lambda span: work(*span), spans)
