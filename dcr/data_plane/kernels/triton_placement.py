"""Kernels for boxes in CUDA memory, by Triton: a bucket goes to the device in one copy, and one launch places it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from dcr.data_plane.content_digest import digest_keys
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.kernels import triton_boxes
from dcr.data_plane.kernels.box_table import BoxTable, Ints
from dcr.data_plane.kernels.compiled import ranges
from dcr.data_plane.kernels.interface import BoxContent
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.triton_streams import digest_of
from dcr.data_plane.staging import host_room, on, to_device, to_host
from dcr.protocol.errors import RefusedError

_BLOCK = 1024
"""Entries, or elements, of a program."""
_LOOPS = 16
"""Times as many elements that a program reads for digests."""
_WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_ALIGNED = 8


@dataclass(frozen=True)
class _Staged:
    """The entries of some records on the device.

    Attributes:
        records: whose they are.
        memory: int64: all indices, then all values, each item's values from a whole number of words on.
        index_at: of every item, the position of its first index.
        value_at: of every item, the byte of its first value.
    """

    records: Records
    memory: torch.Tensor
    index_at: Ints
    value_at: Ints


@dataclass(frozen=True)
class _Table:
    """A box table on the device; tensors as its arrays are."""

    table: BoxTable
    address: torch.Tensor
    low: torch.Tensor
    numbers: torch.Tensor
    dims: torch.Tensor

    @property
    def flat(self) -> tuple[torch.Tensor, ...]:
        """What every kernel takes."""
        return self.address, self.low, self.numbers, self.dims


class TritonKernels:
    """Kernels for boxes in the memory of one device.

    Calls come one at a time.  What is staged for ``first_disordered`` is kept for ``place``, and one table is kept on
    the device.

    Args:
        device: where all boxes lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staged: _Staged | None = None
        self._table: _Table | None = None

    def first_disordered(self, table: BoxTable, records: Records) -> int | None:
        """See :meth:`Kernels.first_disordered`.

        Raises:
            RefusedError: a box lies between two elements of its width, where a GPU can neither read nor write.
        """
        self._on_device(table)
        staged = self._stage(records)
        numbers = records.numbers
        item, start = _cut(numbers[1], _BLOCK)
        if not item.size:
            return None
        rows = (staged.index_at[item] + start, numbers[1][item] - start, start == 0, table.numel[numbers[0]][item])
        with on(self._device):
            found = torch.empty(item.size, dtype=torch.int32, device=self._device)
            triton_boxes.first_disorder[(item.size,)](self._send(np.stack(rows, 1)), staged.memory, found, BLOCK=_BLOCK)
            wrong = np.flatnonzero(to_host(found).numpy())
        return int(item[wrong[0]]) if wrong.size else None

    def place(self, table: BoxTable, records: Records) -> Ints:
        """See :meth:`Kernels.place`."""
        on_device, staged = self._on_device(table), self._stage(records)
        self._staged = None
        numbers = records.numbers
        hits = np.zeros(numbers.shape[1], np.int64)
        first = table.first[numbers[0]]
        boxes = table.first[numbers[0] + 1] - first
        pairs = np.zeros((4, int(boxes.sum())), np.int64)
        pairs[0] = np.repeat(np.arange(boxes.size), boxes)
        pairs[1] = np.arange(pairs.shape[1]) - np.repeat(np.cumsum(boxes) - boxes - first, boxes)
        ranges(pairs, numbers[1], numbers[3], table.low, table.high)
        pair, start = _cut(pairs[3], _BLOCK)
        if not pair.size:
            return hits
        item, box = pairs[0][pair], pairs[1][pair]
        entry = pairs[2][pair] + start
        width, action = table.width[numbers[0]][item], numbers[2][item]
        value_at = staged.value_at[item] + entry * width
        rows = np.stack((box, staged.index_at[item] + entry, value_at, pairs[3][pair] - start), 1)
        kind = width * 3 + action
        order = np.argsort(kind, kind="stable")
        kinds, begins, counts = np.unique(kind[order], return_index=True, return_counts=True)
        with on(self._device):
            blocks = self._send(rows[order])
            found = torch.empty(pair.size, dtype=torch.int32, device=self._device)
            for one, begin, count in zip(kinds.tolist(), begins.tolist(), counts.tolist(), strict=True):
                triton_boxes.place[(count,)](
                    blocks[4 * begin :],
                    staged.memory,
                    *on_device.flat,
                    found[begin:],
                    DEPTH=table.dims.shape[2],
                    WORD=_WORDS[one // 3],
                    ACTION=one % 3,
                    BLOCK=_BLOCK,
                )
            np.add.at(hits, item[order], to_host(found).numpy())
        return hits

    def contents(self, table: BoxTable, specs: Sequence[TensorSpec]) -> list[BoxContent]:
        """See :meth:`Kernels.contents`."""
        on_device = self._on_device(table)
        boxes = np.diff(table.first)
        numel = np.array([placed.box.numel for tensor in table.tensors for placed in tensor.boxes], np.int64)
        if not numel.size:
            return []
        width = np.repeat(table.width, boxes)
        keys = np.repeat(np.array([digest_keys(spec) for spec in specs], np.int64).reshape(-1, 4), boxes, axis=0)
        box, start = _cut(numel, _BLOCK * _LOOPS)
        rows = np.stack((box, start, numel[box], np.zeros_like(box)), 1)
        order = np.argsort(width[box], kind="stable")
        kinds, begins, counts = np.unique(width[box][order], return_index=True, return_counts=True)
        with on(self._device):
            blocks, flat_keys = self._send(rows[order]), self._send(keys)
            found = torch.empty(4 * box.size, dtype=torch.int64, device=self._device)
            for one, begin, count in zip(kinds.tolist(), begins.tolist(), counts.tolist(), strict=True):
                triton_boxes.sum_boxes[(count,)](
                    blocks[4 * begin :],
                    *on_device.flat,
                    flat_keys,
                    found[4 * begin :],
                    DEPTH=table.dims.shape[2],
                    WORD=_WORDS[one],
                    WIDTH=one,
                    BLOCK=_BLOCK,
                    LOOPS=_LOOPS,
                )
            sums = np.empty((box.size, 4), np.uint64)
            sums[order] = to_host(found).numpy().view(np.uint64).reshape(-1, 4)
        firsts = np.flatnonzero(start == 0)
        dirty = np.add.reduceat(sums[:, 3], firsts)
        return [
            BoxContent(digest, low_halves_zero=not low)
            for digest, low in zip(digest_of(sums, firsts), dirty.tolist(), strict=True)
        ]

    def _on_device(self, table: BoxTable) -> _Table:
        if self._table is None or self._table.table is not table:
            width = np.repeat(table.width, np.diff(table.first))
            if (between := np.flatnonzero(table.address % width)).size:
                number = int(np.searchsorted(table.first, between[0], side="right")) - 1
                raise RefusedError(
                    f"tensor {number} of the placement lies at address {int(table.address[between[0]])}, between two "
                    f"elements of {int(table.width[number])} bytes, where a GPU cannot write: allocate it whole"
                )
            with on(self._device):
                arrays = (table.address, table.low, table.numbers, table.dims)
                self._table = _Table(table, *(self._send(array) for array in arrays))
        return self._table

    def _stage(self, records: Records) -> _Staged:
        """Entries on the device, by one copy from pinned memory."""
        if self._staged is not None and self._staged.records is records:
            return self._staged
        counts = records.numbers[1]
        sizes = [item.values.nbytes for item in records.items]
        whole = -(-np.array(sizes, np.int64) // _ALIGNED) * _ALIGNED
        entries = int(counts.sum())
        index_at = np.cumsum(counts) - counts
        value_at = _ALIGNED * entries + np.cumsum(whole) - whole
        room = host_room(entries + int(whole.sum()) // _ALIGNED, torch.int64, self._device)
        words, memory = room.numpy(), room.numpy().view(np.uint8)
        for item, index, value, size in zip(records.items, index_at.tolist(), value_at.tolist(), sizes, strict=True):
            words[index : index + item.entries] = item.indices.numpy()
            memory[value : value + size] = item.values.numpy().view(np.uint8)
        with on(self._device):
            self._staged = _Staged(records, to_device(room, self._device), index_at, value_at)
        return self._staged

    def _send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        room = host_room(array.size, torch.int64, self._device)
        room.numpy()[:] = array.reshape(-1)
        return to_device(room, self._device)


def _cut(counts: Ints, size: int) -> tuple[Ints, Ints]:
    """Things with so many parts each, cut into blocks of ``size``: of every block the thing, and its first part."""
    blocks = -(-counts // size)
    thing = np.repeat(np.arange(counts.size), blocks)
    return thing, size * (np.arange(thing.size) - np.repeat(np.cumsum(blocks) - blocks, blocks))
