"""Kernels for shards and streams on the CPU, compiled by numba; what they refuse, the reference refuses by name.

Shards and items are cut into slices, however few they are, so that one large item keeps every thread busy.  A slice of
an item begins at a multiple of 64 entries, where half bytes and vectors begin; what its gaps and codes take in the
streams is written apart and joined, or counted first where it is read, so that the bytes do not depend on the cuts.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dcr.data_plane.bits import bits_dtype
from dcr.data_plane.codec import Bytes, ItemBytes, long_gap_bytes
from dcr.data_plane.content_digest import ContentDigest, digest_keys
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels import compiled_reading as reading
from dcr.data_plane.kernels import compiled_scan as scan
from dcr.data_plane.kernels import compiled_streams as compiled
from dcr.data_plane.kernels.stream_kernels import A, B, Difference, TorchStreamKernels
from dcr.data_plane.kernels.threads import Threads
from dcr.data_plane.streams import BYTE_ESCAPE, GO_ON, LONG_GAP_MIN, encode_streams, low_count
from dcr.protocol.errors import CorruptPayloadError, DcrError

Words = npt.NDArray[Any]  # of some unsigned width
Span = tuple[int, int]

_GRAIN = 1 << 16
"""Elements, entries or bytes below which a thread of its own does not pay."""
_SLICES = 4
"""Slices a thread: enough that threads which do not get a core all the time still end together."""
_BLOCK = int(compiled.BLOCK)
_SPARSE = 183
"""Elements a change above which, at uniform positions, more than a quarter of the gaps exceed a byte."""
_RUN = 4
"""Bytes of 254 in a row that are no gap."""
_HALF = 15
"""The most that half a byte holds."""
_PIECE = 1 << 15
"""Entries written or read before they go into the digest: 256 KiB of indices, a multiple of a block."""
_TOLD_MAX = 1 << 18
"""Entries of an item whose refusal is explained to the byte."""
_NOTHING = np.empty(0, np.uint8)
_REFERENCE = TorchStreamKernels()


class NumbaStreamKernels:
    """Stream kernels for host memory.

    Args:
        threads: how many work at a time, the caller's included; by default as many as the process may use cores.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = Threads("dcr-streams", threads)

    def differences(self, old: torch.Tensor, new: torch.Tensor, start: int = 0) -> Difference:
        """See :meth:`StreamKernels.differences`."""
        ours, theirs = _words(old), _words(new)
        found = self._threads.map(lambda span: _differences(ours, theirs, start, *span), self._cuts(ours.size))
        positions, before, after = (_joined(part) for part in zip(*found, strict=True))
        return Difference(torch.from_numpy(positions.view(np.int64)), _bits(before, old.dtype), _bits(after, old.dtype))

    def digest(self, spec: TensorSpec, indices: torch.Tensor, bits: torch.Tensor) -> ContentDigest:
        """See :meth:`StreamKernels.digest`."""
        keys = np.array(digest_keys(spec), np.int64).view(np.uint64)
        places, words = _words(indices), _words(bits)

        def work(span: tuple[int, int]) -> list[int]:
            totals = np.zeros(3, np.uint64)
            compiled.digest(places[slice(*span)], words[slice(*span)], keys, totals)
            return [int(total) for total in totals]

        parts = self._threads.map(work, self._cuts(places.size))
        high, upper, lower = (sum(column) for column in zip(*parts, strict=True))
        return ContentDigest(((high << 64) + (upper << 32) + lower) % (1 << 128))

    def encode(self, item: Item) -> tuple[ItemBytes, bytes]:
        """See :meth:`StreamKernels.encode`."""
        spec, indices, values = item.spec, _words(item.indices), _words(item.values)
        digest = EntryDigest()
        if indices.size and int(indices[-1]) >= spec.numel:
            _refused(item)
        written = self._write_gaps(spec, indices, digest)
        if written is None:
            _refused(item)
        layout, gaps = written
        digest.add(values)
        if item.operation is Operation.SET:
            planes = _planes(values, values.itemsize, rotate=True)
            return ItemBytes(layout, (*gaps, _NOTHING, _NOTHING, *planes)), digest.bytes()
        codes = self._write_codes(values, item.operation)
        if codes is None:
            _refused(item)
        nibbles, escapes, words = codes
        planes = _planes(words, values.itemsize, rotate=False)
        return ItemBytes(layout, (*gaps, nibbles, escapes, *planes)), digest.bytes()

    def decode(self, spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes) -> tuple[Item, bytes]:
        """See :meth:`StreamKernels.decode`."""
        digest = EntryDigest()
        indices = self._read_gaps(spec, entries, written, digest)
        values = None if indices is None else self._read_values(spec, operation, entries, written)
        if indices is None or values is None:
            _unreadable(spec, operation, entries, written, "indices" if indices is None else "values")
        digest.add(values)
        bits = _bits(values, bits_dtype(spec.dtype))
        return Item(spec, operation, torch.from_numpy(indices.view(np.int64)), bits), digest.bytes()

    def each(self, work: Callable[[A], B], things: Sequence[A], sizes: Sequence[int]) -> list[B]:
        """See :meth:`StreamKernels.each`."""
        share = max(sum(sizes) // (self._threads.count * _SLICES), _GRAIN)
        groups: list[list[A]] = [[]]
        filled = 0
        for thing, size in zip(things, sizes, strict=True):
            if filled >= share:
                groups.append([])
                filled = 0
            groups[-1].append(thing)
            filled += size
        return [
            result
            for results in self._threads.map(lambda group: [work(t) for t in group], groups)
            for result in results
        ]

    def _cuts(self, total: int) -> list[Span]:
        """Slices of what is counted from 0 up to ``total``, at multiples of a block; at least one."""
        if self._threads.count == 1 or total <= _GRAIN:
            return [(0, total)]
        slices = min(-(-total // _GRAIN), self._threads.count * _SLICES)
        bounds = [*(total * k // slices // _BLOCK * _BLOCK for k in range(slices)), total]
        return list(itertools.pairwise(bounds))

    def _write_gaps(
        self, spec: TensorSpec, indices: Words, digest: "EntryDigest"
    ) -> tuple[int, tuple[Bytes, Bytes, Bytes]] | None:
        """Layout, and streams low, gaps and long_gaps; None unless indices are strictly increasing."""
        entries = indices.size
        layout = 0
        if entries and int(indices[-1]) - int(indices[0]) > _SPARSE * entries:
            layout = self._layout(indices)
        found = self._write_gaps_in(spec, indices, layout, digest)
        if found is None:
            return None
        far, gaps = found
        if layout == 0 and low_count([far], entries):  # not found to be worth a look before
            layout = self._layout(indices)
            found = self._write_gaps_in(spec, indices, layout, EntryDigest())
            assert found is not None, "the indices changed while they were written"
            gaps = found[1]
        return layout, gaps

    def _layout(self, indices: Words) -> int:
        def work(span: Span) -> Words:
            counts = np.zeros(3, np.uint64)
            compiled.survey(indices, np.uint64(span[0]), np.uint64(span[1]), counts)
            return counts

        counts = sum(self._threads.map(work, self._cuts(indices.size)), np.zeros(3, np.uint64))
        return low_count([int(count) for count in counts], indices.size)

    def _write_gaps_in(
        self, spec: TensorSpec, indices: Words, layout: int, digest: "EntryDigest"
    ) -> tuple[int, tuple[Bytes, Bytes, Bytes]] | None:
        """How many gaps are at least 254, and the streams in a layout."""
        apart = np.zeros((layout, (indices.size + 1) // 2), np.uint8)
        cuts = self._cuts(indices.size)

        def work(span: Span) -> tuple[int, Bytes, Bytes] | None:
            begin, end = span
            entries = end - begin
            # All high parts of a slice together are no more, if indices increase; the kernel stops where they do not.
            reach = int(indices[end - 1]) + 1 - (int(indices[begin - 1]) + 1 if begin else 0) if entries else 0
            reach = max(reach, 0) >> 4 * layout
            gaps = np.empty(entries + min(3 * entries, reach // GO_ON) + int(compiled.GAP_ROOM), np.uint8)
            long_gaps = np.empty(min(entries, reach // LONG_GAP_MIN) + _BLOCK, f"u{long_gap_bytes(spec)}")
            ends = np.zeros(3, np.uint64)
            for first, last in _pieces(begin, end):
                bounds = np.uint64(first), np.uint64(last), np.uint64(layout)
                if not compiled.write_gaps(indices, *bounds, apart, gaps, long_gaps, ends):
                    return None
                if len(cuts) == 1:
                    digest.add(indices[first:last])
            return int(ends[2]), gaps[: ends[0]], long_gaps[: ends[1]].view(np.uint8)

        if len(cuts) == 1:
            found = [work(cuts[0])]
        else:
            # The digest goes through all entries in order, so it is one more slice beside the others.
            *found, _ = self._threads.map(lambda span: work(span) if span else digest.add(indices), [*cuts, None])
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        far, gaps, long_gaps = zip(*parts, strict=True)
        return sum(far), (apart.reshape(-1), _joined(gaps), _joined(long_gaps))

    def _write_codes(self, values: Words, operation: Operation) -> tuple[Bytes, Bytes, Words] | None:
        """Streams nibbles and escapes, and the words; None if a value is zero."""
        nibbles = np.zeros((values.size + 1) // 2, np.uint8)
        adds, top = np.uint64(operation is Operation.ADD), np.uint64(1 << 8 * values.itemsize - 1)

        def work(span: Span) -> tuple[Bytes, Words] | None:
            begin, end = span
            escapes, words = np.empty(end - begin, np.uint8), np.empty(end - begin, values.dtype)
            ends, bounds = np.zeros(2, np.uint64), (np.uint64(begin), np.uint64(end))
            if not compiled.write_codes(values, *bounds, adds, top, nibbles, escapes, words, ends):
                return None
            return escapes[: ends[0]], words[: ends[1]]

        found = self._threads.map(work, self._cuts(values.size))
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        escapes, words = zip(*parts, strict=True)
        return nibbles, _joined(escapes), _joined(words)

    def _read_gaps(self, spec: TensorSpec, entries: int, written: ItemBytes, digest: "EntryDigest") -> Words | None:
        """Indices from streams that may hold anything; None unless they are those of an item."""
        low, gaps, long_bytes = written.parts[:3]
        layout, pairs = written.layout, (entries + 1) // 2
        if low.size != layout * pairs or long_bytes.size % long_gap_bytes(spec):
            return None
        apart = low.reshape(layout, pairs)
        if layout and entries % 2 and bool((apart[:, -1] > _HALF).any()):
            return None
        # Copied, since a stream may be cut between two numbers.
        long_gaps = np.array(long_bytes).view(f"u{long_gap_bytes(spec)}")
        if not (entries and spec.numel):
            return None if gaps.size or long_gaps.size or entries else np.empty(0, np.uint64)
        spans = self._gap_spans(gaps, entries, long_gaps.size)
        if spans is None:
            return None
        indices = np.empty(entries, np.uint64)
        fixed = long_gaps, np.uint64(spec.numel), indices

        def work(span: Words) -> bool:
            for first, last in _pieces(int(span[4]), int(span[5])):
                if not reading.read_gaps(apart, np.uint64(layout), gaps, span, np.uint64(last), *fixed):
                    return False
                if len(spans) == 1:
                    digest.add(indices[first:last])
            return bool(span[0] == span[1] and span[2] == span[3])

        if len(spans) == 1:
            return indices if work(spans[0]) else None
        slices = [(int(span[4]), int(span[5])) for span in spans]
        if not all(self._threads.map(work, spans)):
            return None
        bases = [0, *itertools.accumulate(int(span[6]) for span in spans)]
        if bases[-1] > spec.numel:
            return None
        moves = [(*span, base) for span, base in zip(slices, bases, strict=False) if base]
        self._threads.map(lambda move: reading.move_on(indices, *map(np.uint64, move)), moves)
        digest.add(indices)
        return indices

    def _gap_spans(self, gaps: Bytes, entries: int, long_gaps: int) -> list[Words] | None:
        """What each slice of the gap bytes reads, for ``read_gaps``; None if they are not of so many gaps."""
        bounds = self._cuts(gaps.size)
        if len(bounds) == 1:
            return [np.array([0, gaps.size, 0, long_gaps, 0, entries, 0], np.uint64)]
        starts = [0, *(_gap_end(gaps, begin) for begin, _ in bounds[1:]), gaps.size]
        slices = list(itertools.pairwise(starts))

        def work(span: Span) -> Words:
            counts = np.zeros(2, np.uint64)
            reading.count_gaps(gaps, np.uint64(span[0]), np.uint64(span[1]), counts)
            return counts

        counts = np.cumsum([np.zeros(2, np.uint64), *self._threads.map(work, slices)], axis=0)
        if counts[-1].tolist() != [entries, long_gaps]:
            return None
        return [
            np.array([*span, before[1], after[1], before[0], after[0], 0], np.uint64)
            for span, (before, after) in zip(slices, itertools.pairwise(counts), strict=True)
        ]

    def _read_values(self, spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes) -> Words | None:
        """Values from streams that may hold anything; None unless they are those of an item."""
        nibbles, escapes, *planes = written.parts[3:]
        width, count = spec.dtype.itemsize, planes[0].size
        is_set = operation is Operation.SET
        if any(plane.size != count for plane in planes[:width]) or nibbles.size != (
            0 if is_set else (entries + 1) // 2
        ):
            return None
        words = np.zeros(count, f"u{width}")
        for p, plane in enumerate(planes[:width] if count else ()):
            reading.join_words(plane, np.uint64(p), words)
        values = np.empty(entries, words.dtype)
        if is_set:
            if (count, escapes.size) != (entries, 0):
                return None
            reading.rotate_right(words, np.uint64(8 * width - 1), values)
            return values
        if entries % 2 and nibbles[-1] > _HALF:
            return None
        return values if self._read_codes(nibbles, escapes, words, operation, values) else None

    def _read_codes(self, nibbles: Bytes, escapes: Bytes, words: Words, operation: Operation, values: Words) -> bool:
        slices = self._cuts(values.size)
        adds, most = np.uint64(operation is Operation.ADD), np.uint64((1 << 8 * values.itemsize) - 2)
        if len(slices) == 1:
            span = np.array([0, values.size, 0, escapes.size, 0], np.uint64)
            good = reading.read_codes(nibbles, escapes, words, span, adds, most, values)
            return bool(good) and int(span[4]) == words.size
        counted = self._threads.map(lambda s: int(reading.count_codes(nibbles, *map(np.uint64, s))), slices[:-1])
        starts = [0, *itertools.accumulate(counted)]
        if max(starts) > escapes.size:
            return False
        starts.append(escapes.size)
        long_codes = np.cumsum(
            [0, *(np.count_nonzero(escapes[a:b] == BYTE_ESCAPE) for a, b in itertools.pairwise(starts))]
        )

        def work(k: int) -> bool:
            span = np.array([*slices[k], *starts[k : k + 2], long_codes[k]], np.uint64)
            return bool(reading.read_codes(nibbles, escapes, words, span, adds, most, values))

        return all(self._threads.map(work, range(len(slices)))) and long_codes[-1] == words.size


class EntryDigest:
    """The ``entry_digest`` of entries that come in parts: indices in order, then values."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, words: Words) -> None:
        """The next words; little-endian, as the host is."""
        self._hash.update(words.data)

    def bytes(self) -> bytes:
        """Of everything that was added."""
        return self._hash.digest()


def _pieces(begin: int, end: int) -> Iterator[Span]:
    """A slice in pieces that are still in the processor's cache when they are looked at again."""
    for first in range(begin, end, _PIECE):
        yield first, min(first + _PIECE, end)


def _words(tensor: torch.Tensor) -> Words:
    """Stored bits as unsigned integers; a copy only if they are not contiguous, or lie between two elements."""
    array = tensor.detach().contiguous().numpy()
    unsigned = array.view(f"u{array.itemsize}")
    return unsigned if unsigned.flags.aligned else unsigned.copy()


def _bits(words: Words, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(f"u{words.itemsize}" if dtype == torch.uint8 else f"i{words.itemsize}"))


def _joined(parts: Sequence[Words]) -> Words:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _differences(old: Words, new: Words, first: int, start: int, stop: int) -> tuple[Words, Words, Words]:
    old, new = old[start:stop], new[start:stop]
    resume, base = np.zeros(2, np.uint64), np.uint64(first + start)
    room = max(old.size // 16, 16 * _BLOCK)
    found = tuple(np.empty(room, kind) for kind in (np.uint64, old.dtype, old.dtype))
    scan.differences(old, new, base, resume, *found)
    while resume[0] < old.size:
        room *= 4
        found = tuple(np.concatenate((part, np.empty(room - part.size, part.dtype))) for part in found)
        scan.differences(old, new, base, resume, *found)
    count = int(resume[1])
    positions, before, after = (part[:count] if 4 * count > room else part[:count].copy() for part in found)
    return positions, before, after


def _gap_end(gaps: Bytes, at: int) -> int:
    """Where the next gap begins at or soon after a place; what goes on for longer is no gap, and cut anywhere."""
    for _ in range(_RUN):
        if at < gaps.size and gaps[at - 1] == GO_ON:
            at += 1
    return at


def _refused(item: Item) -> NoReturn:
    encode_streams(item, 0)  # says why
    raise DcrError(f"the compiled kernels refuse item {item.spec.name}, the reference does not: report this")


def _unreadable(spec: TensorSpec, operation: Operation, entries: int, written: ItemBytes, what: str) -> NoReturn:
    """Says why, as the reference does; not for a large item, of which that takes many times the memory."""
    if entries > _TOLD_MAX:
        raise CorruptPayloadError(f"item {spec.name}: its {what} are not written as the format asks")
    item = _REFERENCE.decode(spec, operation, entries, written)[0]
    raise DcrError(f"the compiled kernels refuse what the reference reads in item {item.spec.name}: report this")


def _planes(words: Words, width: int, *, rotate: bool) -> tuple[Bytes, ...]:
    if not words.size:
        return (_NOTHING,) * 8
    planes = np.empty((width, words.size), np.uint8)
    compiled.split_words(words, np.uint64(rotate), np.uint64(8 * width - 1), planes)
    return (*planes, *[_NOTHING] * (8 - width))
