"""Compiled loops over boxes and entries; see :class:`dcr.data_plane.kernels.numba_cpu.NumbaKernels` for their use.

One file, because numba's cache of compiled code looks at the file of a function only: what it calls or takes as a
constant must be in here.  Integers are int64, positions in memory uint64, and the two never meet: NumPy would make
floating-point numbers of them.
"""

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dcr.data_plane.kernels.code_cache import compiled as _compiled

_FAR = np.int64(1 << 62)
AHEAD = np.int64(64)
"""Entries ahead whose places in memory are asked for: the processor looks on for half as many by itself."""
SET, XOR, ADD = 0, 1, 2
"""As :attr:`dcr.data_plane.kernels.records.Records.numbers` has them, which may not be read from here."""


_inlined = nb.njit(nogil=True, error_model="numpy", inline="always")


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), code


@intrinsic
def _prefetch(_context: Any, address: Any) -> Any:
    """Ask for a cache line: nothing is read, nothing can fail."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer, number = builder.inttoptr(args[0], cgutils.voidptr_t), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, number(0), number(2), number(1)])  # to read, second level, data
        return context.get_dummy_value()

    return types.void(address), code


@_inlined
def _memory(address, kind):
    return nb.carray(_pointer(address), (1 << 40,), kind)


@_compiled
def _lower_bound(keys, entries, wanted):
    low, high = np.int64(0), entries
    while low < high:
        middle = (low + high) >> 1
        if keys[np.uint64(middle)] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@_compiled
def disordered(start, stop, ends, indices, numel):
    """Of entries ``start`` to ``stop``: the first item whose indices are not strictly increasing in range, else -1."""
    item = np.searchsorted(ends, start, side="right")
    while start < stop:
        keys = _memory(indices[item], np.int64)
        here = min(stop, ends[item])
        begin = start - (ends[item - 1] if item > 0 else np.int64(0))
        end = begin + here - start
        wrong = np.int64(0)
        if begin < end:
            before = keys[np.uint64(begin - 1)] if begin > 0 else np.int64(-1)
            wrong += np.int64(keys[np.uint64(begin)] <= before) + np.int64(keys[np.uint64(end - 1)] >= numel[item])
        for j in range(begin + 1, end):
            wrong += np.int64(keys[np.uint64(j)] <= keys[np.uint64(j - 1)])
        if wrong:
            return item
        start = here
        item += 1
    return np.int64(-1)


@_compiled
def ranges(pairs, entries, indices, low, high):
    """For every pair of an item and a box: where the entries within the box's bounds begin, and how many they are."""
    for pair in range(pairs.shape[1]):
        item, box = pairs[0, pair], pairs[1, pair]
        keys, n = _memory(indices[item], np.int64), entries[item]
        start, end = np.int64(0), n
        if n > 0 and keys[0] < low[box]:
            start = _lower_bound(keys, n, low[box])
        if n > 0 and keys[np.uint64(n - 1)] > high[box]:
            end = _lower_bound(keys, n, high[box] + 1)
        pairs[2, pair], pairs[3, pair] = start, max(end - start, 0)


@_compiled
def mark(bitmap, keys):
    """Set the bit of every key; whether all of them were clear.  A key that was set ends it."""
    for j in range(keys.size):
        key = np.uint64(keys[j])
        word, bit = key >> np.uint64(6), np.uint64(1) << (key & np.uint64(63))
        if bitmap[word] & bit:
            return False
        bitmap[word] |= bit
    return True


@_inlined
def _common(a, b):
    """Greatest common divisor."""
    while b:
        a, b = b, a % b
    return a


@_compiled
def runs(where, cut, out):
    """Runs of constant step, greedily: start, first value, length and step into ``out`` [4, rows], if it has rows.

    None is longer than ``cut``, if that is above 1.  Returns how many there are, and the common divisor of lengths.
    """
    rows, i, n, common = 0, np.int64(0), where.size, np.int64(0)
    most = cut if cut > 1 else _FAR
    while i < n:
        j, step = i + 1, np.int64(0)
        if j < n:
            step = where[j] - where[i]
            while j < n and j - i < most and where[j] - where[j - 1] == step:
                j += 1
        if out.shape[1] > 0:
            out[0, rows], out[1, rows], out[2, rows], out[3, rows] = i, where[i], j - i, step
        rows += 1
        common = _common(j - i, common)
        i = j
    return rows, common


@_inlined
def _alike(rows, a, b):
    alike = True
    for k in range(2, rows.shape[0]):
        alike &= rows[k, a] == rows[k, b]
    return alike


@_compiled
def nest(rows, cut, out):
    """Neighbours alike at constant distance, greedily, into one more dimension; ``cut`` and results as for ``runs``.

    ``rows`` and ``out`` hold source, target, and (size, source stride, target stride) of each dimension, innermost
    first; ``out`` has one dimension more, and no columns if they are only to be counted.
    """
    found, i, n, k, common = 0, np.int64(0), rows.shape[1], rows.shape[0], np.int64(0)
    most = cut if cut > 1 else _FAR
    while i < n:
        j, source, target = i + 1, np.int64(0), np.int64(0)
        if j < n and _alike(rows, i, j):
            source, target = rows[0, j] - rows[0, i], rows[1, j] - rows[1, i]
            while (
                j < n
                and j - i < most
                and _alike(rows, i, j)
                and rows[0, j] - rows[0, j - 1] == source
                and rows[1, j] - rows[1, j - 1] == target
            ):
                j += 1
        if out.shape[1] > 0:
            out[:k, found] = rows[:, i]
            out[k, found], out[k + 1, found], out[k + 2, found] = j - i, source, target
        found += 1
        common = _common(j - i, common)
        i = j
    return found, common


@_inlined
def _store(memory, at, value, action):
    if action == SET:
        memory[at] = value
    elif action == XOR:
        memory[at] ^= value
    else:
        memory[at] += value


@_compiled
def _run_plain(memory, keys, values, begin, end, action, source, step):
    """Entries that all lie in a box of one dimension without gaps: the usual case, without a question an entry."""
    last, width = end - 1, step * memory.itemsize
    start = memory.ctypes.data - source * width
    if action == SET:
        for j in range(begin, end):
            _prefetch(start + keys[np.uint64(min(j + AHEAD, last))] * width)
            memory[np.uint64((keys[np.uint64(j)] - source) * step)] = values[np.uint64(j)]
    elif action == XOR:
        for j in range(begin, end):
            _prefetch(start + keys[np.uint64(min(j + AHEAD, last))] * width)
            memory[np.uint64((keys[np.uint64(j)] - source) * step)] ^= values[np.uint64(j)]
    else:
        for j in range(begin, end):
            _prefetch(start + keys[np.uint64(min(j + AHEAD, last))] * width)
            memory[np.uint64((keys[np.uint64(j)] - source) * step)] += values[np.uint64(j)]
    return end - begin


@_compiled
def _run(memory, keys, values, begin, end, action, source, depth, widened, dims):
    """Entries of one item into one box; returns how many of them lie in it."""
    hits = np.int64(0)
    inner = max(depth - 1, 0)
    size, stride, step = np.int64(1), np.int64(1), np.int64(0)
    if depth > 0:
        size, stride, step = dims[0, inner], dims[1, inner], dims[2, inner]
    if depth == 1 and stride == 1 and widened == 0:
        return _run_plain(memory, keys, values, begin, end, action, source, step)
    reach = stride * (size - 1)  # beyond it, a row holds nothing
    row, row_end, row_target = np.int64(0), np.int64(0), np.int64(0)  # the row that was looked up last
    for j in range(begin, end):
        key = keys[np.uint64(j)] - source
        if key >= row_end:
            rest, target = key, np.int64(0)
            inside, until = True, reach + 1 if inner == 0 else _FAR
            for z in range(inner):
                i = rest // dims[1, z]
                inside &= i < dims[0, z]
                rest -= i * dims[1, z]
                target += i * dims[2, z]
                # Of every dimension: an outer one may go on before an inner one's step is full (stride 6 over 4).
                until = min(until, key - rest + dims[1, z])
            if not inside:
                continue
            row, row_target = key - rest, target
            row_end = until
        x = key - row
        if x > reach:
            continue
        i = x
        if stride != 1:
            i = x // stride
            if i * stride != x:
                continue
        hits += 1
        at = np.uint64(row_target + i * step + widened)
        _store(memory, at, values[np.uint64(j)], action)
        if widened == 1 and action == SET:
            memory[at - np.uint64(1)] = 0
    return hits


@_compiled
def place(start, stop, ends, pairs, records, width, address, low, numbers, dims, hits):
    """Entries ``start`` to ``stop``, counted through all pairs; adds to ``hits`` of their items."""
    pair = np.searchsorted(ends, start, side="right")
    while start < stop:
        item, box = pairs[0, pair], pairs[1, pair]
        here = min(stop, ends[pair])
        first = pairs[2, pair] + start - (ends[pair] - pairs[3, pair])
        last = first + here - start
        action, keys, data, to = records[2, item], _memory(records[3, item], np.int64), records[4, item], address[box]
        depth, widened, source, d = numbers[box, 0], numbers[box, 1], low[box], dims[box]
        w = width[records[0, item]]
        if w == 1:
            v, m = _memory(data, np.uint8), _memory(to, np.uint8)
            hits[item] += _run(m, keys, v, first, last, action, source, depth, widened, d)
        elif w == 2:
            v, m = _memory(data, np.uint16), _memory(to, np.uint16)
            hits[item] += _run(m, keys, v, first, last, action, source, depth, widened, d)
        elif w == 4:
            v, m = _memory(data, np.uint32), _memory(to, np.uint32)
            hits[item] += _run(m, keys, v, first, last, action, source, depth, widened, d)
        else:
            v, m = _memory(data, np.uint64), _memory(to, np.uint64)
            hits[item] += _run(m, keys, v, first, last, action, source, depth, widened, d)
        start = here
        pair += 1


@_inlined
def _splitmix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@_inlined
def _murmur(x):
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@_compiled
def _sum_row(memory, at, step, index, stride, count, widened, keys, total):
    """Adds a row to ``total``: the high lane, the upper and the lower halves of the low lane, all low halves or-ed."""
    k0, k1, k2, k3 = keys[0], keys[1], keys[2], keys[3]
    high, upper, lower, dirty = total[0], total[1], total[2], total[3]
    half = np.uint64(0xFFFFFFFF)
    if step == 1 and stride == 1 and widened == 0:  # the usual row, which vectorises
        for i in range(count):
            word, number = np.uint64(memory[np.uint64(at + i)]), np.uint64(index + i)
            low = _splitmix(_splitmix(number ^ k0) ^ k1 ^ word)
            high += _murmur(_murmur(number ^ k2) ^ k3 ^ word)
            upper += low >> np.uint64(32)
            lower += low & half
    else:
        for i in range(count):
            place = at + i * step
            word, number = np.uint64(memory[np.uint64(place + widened)]), np.uint64(index + i * stride)
            low = _splitmix(_splitmix(number ^ k0) ^ k1 ^ word)
            high += _murmur(_murmur(number ^ k2) ^ k3 ^ word)
            upper += low >> np.uint64(32)
            lower += low & half
            if widened == 1:
                dirty |= np.uint64(memory[np.uint64(place)])
    total[0], total[1], total[2], total[3] = high, upper, lower, dirty


@_compiled
def _sum_box(memory, start, stop, source, depth, widened, dims, keys, total):
    """Adds elements ``start`` to ``stop`` of a box, in order of its source indices, to ``total``."""
    inner = max(depth - 1, 0)
    size, stride, step = np.int64(1), np.int64(1), np.int64(1)
    if depth > 0:
        size, stride, step = dims[0, inner], dims[1, inner], dims[2, inner]
    while start < stop:
        row = start // size
        i = start - row * size
        count = min(size - i, stop - start)
        at, index = i * step, source + i * stride
        for z in range(inner - 1, -1, -1):
            outer = row // dims[0, z]
            place = row - outer * dims[0, z]
            index += place * dims[1, z]
            at += place * dims[2, z]
            row = outer
        _sum_row(memory, at, step, index, stride, count, widened, keys, total)
        start += count


@_compiled
def contents(start, stop, ends, box_width, address, low, numbers, dims, keys, totals):
    """Elements ``start`` to ``stop``, counted through all boxes; adds to ``totals`` of the boxes."""
    box = np.searchsorted(ends, start, side="right")
    while start < stop:
        here = min(stop, ends[box])
        begin = start - (ends[box - 1] if box > 0 else np.int64(0))
        end = begin + here - start
        depth, widened, source, d, to = numbers[box, 0], numbers[box, 1], low[box], dims[box], address[box]
        if box_width[box] == 1:
            _sum_box(_memory(to, np.uint8), begin, end, source, depth, widened, d, keys[box], totals[box])
        elif box_width[box] == 2:
            _sum_box(_memory(to, np.uint16), begin, end, source, depth, widened, d, keys[box], totals[box])
        elif box_width[box] == 4:
            _sum_box(_memory(to, np.uint32), begin, end, source, depth, widened, d, keys[box], totals[box])
        else:
            _sum_box(_memory(to, np.uint64), begin, end, source, depth, widened, d, keys[box], totals[box])
        start = here
        box += 1
