"""Kernels for shards and streams on the CPU, compiled by numba; what they refuse, the reference refuses by name."""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.codec import Bytes, ItemBytes, long_gap_bytes
from dcr.data_plane.content_digest import ContentDigest, digest_keys
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels import compiled_streams as compiled
from dcr.data_plane.kernels.stream_kernels import A, B, Difference, TorchStreamKernels
from dcr.data_plane.streams import encode_streams, low_count
from dcr.protocol.errors import DcrError

Words = npt.NDArray[Any]  # of some unsigned width

_GRAIN = 1 << 16
"""Elements, entries or bytes below which a thread of its own does not pay."""
_SLICES = 4
"""Slices a thread: enough that threads which do not get a core all the time still end together."""
_BLOCK = int(compiled.WORDS) + 1
_WORD = 8
_REFERENCE = TorchStreamKernels()


class NumbaStreamKernels:
    """Stream kernels for host memory.

    Args:
        threads: how many work at a time; by default as many as the process may use cores.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dcr-streams")

    def differences(self, old: torch.Tensor, new: torch.Tensor) -> Difference:
        """See :meth:`StreamKernels.differences`."""
        ours, theirs = _words(old), _words(new)
        found = self._map(lambda span: _differences(ours, theirs, *span), self._cuts(ours.size))
        positions, before, after = (
            part[0] if len(part) == 1 else np.concatenate(part) for part in zip(*found, strict=True)
        )
        return Difference(torch.from_numpy(positions.view(np.int64)), _bits(before, old.dtype), _bits(after, old.dtype))

    def digest(self, spec: TensorSpec, indices: torch.Tensor, bits: torch.Tensor) -> ContentDigest:
        """See :meth:`StreamKernels.digest`."""
        keys = np.array(digest_keys(spec), np.int64).view(np.uint64)
        places, words = _words(indices), _words(bits)

        def work(span: tuple[int, int]) -> list[int]:
            totals = np.zeros(3, np.uint64)
            compiled.digest(places[slice(*span)], words[slice(*span)], keys, totals)
            return [int(total) for total in totals]

        parts = self._map(work, self._cuts(places.size))
        high, upper, lower = (sum(column) for column in zip(*parts, strict=True))
        return ContentDigest(((high << 64) + (upper << 32) + lower) % (1 << 128))

    def encode(self, item: Item) -> ItemBytes:
        """See :meth:`StreamKernels.encode`."""
        spec, indices, values = item.spec, _words(item.indices), _words(item.values)
        counts = np.zeros(3, np.uint64)
        if not compiled.survey(indices, np.uint64(min(spec.numel, 1 << 63)), counts):
            return _refused(item)
        layout = low_count([int(count) for count in counts], indices.size)
        gaps = _write_gaps(spec, indices, layout)
        if item.operation is Operation.SET:
            nothing = np.empty(0, np.uint8)
            return ItemBytes(layout, (*gaps, nothing, nothing, *_planes(values, values.itemsize, rotate=True)))
        codes = _write_codes(values, item.operation)
        if codes is None:
            return _refused(item)
        nibbles, escapes, words = codes
        return ItemBytes(layout, (*gaps, nibbles, escapes, *_planes(words, values.itemsize, rotate=False)))

    def decode(self, spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes) -> Item:
        """See :meth:`StreamKernels.decode`."""
        indices = np.empty(entries, np.uint64)
        values = np.empty(entries, f"u{spec.dtype.itemsize}")
        if not _read(spec, operation, written, indices, values):
            item = _REFERENCE.decode(spec, operation, entries, written)
            raise DcrError(
                f"the compiled kernels refuse what the reference reads in item {item.spec.name}: report this"
            )
        bits = _bits(values, bits_dtype(spec.dtype))
        return Item(spec, operation, torch.from_numpy(indices.view(np.int64)), bits)

    def each(self, work: Callable[[A], B], things: Sequence[A], sizes: Sequence[int]) -> list[B]:
        """See :meth:`StreamKernels.each`."""
        share = max(sum(sizes) // (self._threads * _SLICES), _GRAIN)
        groups: list[list[A]] = [[]]
        filled = 0
        for thing, size in zip(things, sizes, strict=True):
            if filled >= share:
                groups.append([])
                filled = 0
            groups[-1].append(thing)
            filled += size
        return [result for results in self._map(lambda group: [work(t) for t in group], groups) for result in results]

    def _cuts(self, total: int) -> list[tuple[int, int]]:
        """Slices of what is counted from 0 up to ``total``; at least one."""
        slices = max(1, min(-(-total // _GRAIN), self._threads * _SLICES if self._threads > 1 else 1))
        bounds = [*(total * k // slices for k in range(slices)), total]
        return list(itertools.pairwise(bounds))

    def _map(self, work: Callable[[A], B], things: Sequence[A]) -> list[B]:
        if len(things) == 1 or self._threads == 1:
            return [work(thing) for thing in things]
        return list(self._pool.map(work, things))


def _words(tensor: torch.Tensor) -> Words:
    """Stored bits as unsigned integers; a copy only if they are not contiguous, or lie between two elements."""
    array = tensor.detach().contiguous().numpy()
    unsigned = array.view(f"u{array.itemsize}")
    return unsigned if unsigned.flags.aligned else unsigned.copy()


def _bits(words: Words, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(f"u{words.itemsize}" if dtype == torch.uint8 else f"i{words.itemsize}"))


def _differences(old: Words, new: Words, start: int, stop: int) -> tuple[Words, Words, Words]:
    old, new = old[start:stop], new[start:stop]
    phase = old.ctypes.data % _WORD
    lanes = _WORD // old.itemsize
    head = min((_WORD - phase) % _WORD // old.itemsize, old.size)
    if new.ctypes.data % _WORD != phase:  # no word begins in both
        head = old.size
    whole = (old.size - head) // lanes
    words = [array[head : head + whole * lanes].view(np.uint64) for array in (old, new)]
    layout, resume = np.array([head, lanes, start], np.uint64), np.zeros(2, np.uint64)
    room = head + max(old.size // 16, lanes * _BLOCK)
    found = tuple(np.empty(room, kind) for kind in (np.uint64, old.dtype, old.dtype))
    compiled.differences(old, new, *words, layout, resume, *found)
    while resume[0] <= whole:
        room *= 4
        found = tuple(np.concatenate((part, np.empty(room - part.size, part.dtype))) for part in found)
        compiled.differences(old, new, *words, layout, resume, *found)
    count = int(resume[1])
    positions, before, after = (part[:count] if 4 * count > room else part[:count].copy() for part in found)
    return positions, before, after


def _refused(item: Item) -> ItemBytes:
    encode_streams(item, 0)  # says why
    raise DcrError(f"the compiled kernels refuse item {item.spec.name}, the reference does not: report this")


def _write_gaps(spec: TensorSpec, indices: Words, layout: int) -> tuple[Bytes, Bytes, Bytes]:
    """Streams low, gaps and long_gaps."""
    entries = indices.size
    reach = (int(indices[-1]) + 1 if entries else 0) >> 4 * layout  # all high parts together are no more
    apart = np.zeros((layout, (entries + 1) // 2), np.uint8)
    gaps = np.empty(entries + min(3 * entries, reach // 254), np.uint8)
    long_gaps = np.empty(min(entries, reach // 1016), f"u{long_gap_bytes(spec)}")
    ends = np.zeros(2, np.uint64)
    compiled.write_gaps(indices, np.uint64(layout), apart, gaps, long_gaps, ends)
    return apart.reshape(-1), gaps[: ends[0]], long_gaps[: ends[1]].view(np.uint8)


def _write_codes(values: Words, operation: Operation) -> tuple[Bytes, Bytes, Words] | None:
    """Streams nibbles and escapes, and the words; None if a value is zero."""
    entries = values.size
    nibbles = np.empty((entries + 1) // 2, np.uint8)
    escapes, words, ends = np.empty(entries, np.uint8), np.empty(entries, values.dtype), np.zeros(2, np.uint64)
    adds, top = np.uint64(operation is Operation.ADD), np.uint64(1 << 8 * values.itemsize - 1)
    if not compiled.write_codes(values, adds, top, nibbles, escapes, words, ends):
        return None
    return nibbles, escapes[: ends[0]], words[: ends[1]]


def _planes(words: Words, width: int, *, rotate: bool) -> Iterable[Bytes]:
    planes = np.empty((width, words.size), np.uint8)
    compiled.split_words(words, np.uint64(rotate), np.uint64(8 * width - 1), planes)
    return (*planes, *[np.empty(0, np.uint8)] * (8 - width))


def _read(spec: TensorSpec, operation: Operation, written: ItemBytes, indices: Words, values: Words) -> bool:
    """Fill indices and values from streams that may hold anything; False unless they are those of an item."""
    low, gaps, long_bytes, nibbles, escapes, *planes = written.parts
    entries, pairs, width = indices.size, (indices.size + 1) // 2, spec.dtype.itemsize
    is_set = operation is Operation.SET
    count = planes[0].size
    if (
        (low.size, nibbles.size) != (written.layout * pairs, 0 if is_set else pairs)
        or any(plane.size != count for plane in planes[:width])
        or (is_set and (count, escapes.size) != (entries, 0))
        or long_bytes.size % long_gap_bytes(spec)
    ):
        return False
    # Copied, since a stream may be cut between two numbers.
    long_gaps = np.array(long_bytes).view(f"u{long_gap_bytes(spec)}")
    apart, layout = low.reshape(written.layout, pairs), np.uint64(written.layout)
    if not compiled.read_gaps(apart, layout, gaps, long_gaps, np.uint64(spec.numel), indices):
        return False
    words = np.zeros(count, values.dtype)
    for p, plane in enumerate(planes[:width]):
        compiled.join_words(plane, np.uint64(p), words)
    if is_set:
        compiled.rotate_right(words, np.uint64(8 * width - 1), values)
        return True
    adds, most = np.uint64(operation is Operation.ADD), np.uint64((1 << 8 * width) - 2)
    return bool(compiled.read_codes(nibbles, escapes, words, adds, most, values))
