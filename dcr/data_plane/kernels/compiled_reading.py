"""Streams into items, compiled; see :mod:`dcr.data_plane.kernels.numba_streams`.

Readers trust nothing: no position comes out of a stream unless it was compared with the length of what it is a
position in.  64 bytes or entries go at once where none is special; what is special is read alone.

One file, because numba's cache of compiled code looks at the file of a function only: what it calls or takes as a
constant must be in here.  Everything is unsigned: signed positions would cost a question whether to count from the
end, and a signed number that meets an unsigned one becomes a floating-point number.
"""

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from dcr.data_plane.kernels.code_cache import compiled as _compiled

U = np.uint64
U0, U1, U2, U3, U4, U15 = U(0), U(1), U(2), U(3), U(4), U(15)
GO_ON, LONG, LONG_MIN = U(254), U(255), U(1016)
ESCAPE, WORD_MIN = U(15), U(270)
"""As :mod:`dcr.data_plane.streams` has them, which may not be read from here."""
BAD = U(0xFFFFFFFFFFFFFFFF)
"""More than any gap."""
BLOCK = U(64)
"""Bytes or entries read together; slices of an item's values begin at multiples of it."""
_INT64 = ir.IntType(64)


_inlined = nb.njit(nogil=True, error_model="numpy", inline="always")


def _vector(lanes: int, width: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(width), lanes)


def _load(builder: Any, address: Any, kind: ir.VectorType) -> Any:
    found = builder.load(builder.inttoptr(address, kind.as_pointer()))
    found.align = 1
    return found


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def _all(kind: ir.VectorType, number: int) -> ir.Constant:
    return ir.Constant(kind, [kind.element(number)] * kind.count)


def _spread(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, _all(_vector(kind.count, 32), 0))


def _mask(builder: Any, answers: Any) -> Any:
    return builder.bitcast(answers, _INT64)


@intrinsic
def _lowest(_context: Any, mask: Any) -> Any:
    """The number of the lowest set bit."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(mask), code


@intrinsic
def _count(_context: Any, mask: Any) -> Any:
    """How many bits are set."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(mask), code


@intrinsic
def _highest_clear(_context: Any, mask: Any) -> Any:
    """The number of the highest bit that is not set; 63 if none is."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        clear = builder.not_(args[0])
        return builder.sub(_INT64(63), builder.and_(builder.ctlz(clear, ir.IntType(1)(0)), _INT64(63)))

    return types.uint64(mask), code


@intrinsic
def _equal(_context: Any, address: Any, byte: Any) -> Any:
    """Of the 64 bytes at an address, a bit each: whether they are ``byte``."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = _vector(64, 8)
        wanted = _spread(builder, builder.trunc(args[1], kind.element), kind)
        return _mask(builder, builder.icmp_unsigned("==", _load(builder, args[0], kind), wanted))

    return types.uint64(address, byte), code


@intrinsic
def _take_nibbles(_context: Any, nibbles: Any, adds: Any, target: Any, element: Any) -> Any:
    """64 values out of 32 bytes to ``target``; returns a bit each for those that escape, which are not right yet."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind, pair = _vector(64, element.bitwidth), _vector(32, 16)
        pairs = builder.zext(_load(builder, args[0], _vector(32, 8)), pair)
        pairs = builder.and_(builder.or_(pairs, builder.shl(pairs, _all(pair, 4))), _all(pair, 0x0F0F))
        codes = builder.bitcast(pairs, _vector(64, 8))
        more = builder.add(codes if element.bitwidth == 8 else builder.zext(codes, kind), _all(kind, 1))
        signs = builder.neg(builder.and_(more, _all(kind, 1)))
        signed = builder.xor(builder.lshr(more, _all(kind, 1)), signs)
        adds = builder.icmp_unsigned("!=", args[1], _INT64(0))
        _store(builder, builder.select(adds, signed, more), args[2])
        return _mask(builder, builder.icmp_unsigned("==", codes, _all(codes.type, int(ESCAPE))))

    return types.uint64(nibbles, adds, target, element), code


@_inlined
def _high_part(gaps, g, end, long_gaps, s):
    """The next high part of a gap, and where the streams go on; BAD if it is not there in its one form."""
    high, byte = U0, GO_ON
    while byte == GO_ON:
        if g >= end or high >= LONG_MIN:
            return BAD, g, s
        byte = U(gaps[g])
        g += U1
        high += byte
    if byte == LONG:
        if high != LONG or s >= U(long_gaps.size):
            return BAD, g, s
        high = U(long_gaps[s])
        s += U1
        if high < LONG_MIN:
            return BAD, g, s
    elif high >= LONG_MIN:
        return BAD, g, s
    return high, g, s


@_compiled
def count_gaps(gaps, begin, end, counts):
    """Of gap bytes ``begin`` to ``end``: how many end a gap, and how many of these are long."""
    i, complete, far = begin, U0, U0
    source = U(gaps.ctypes.data)
    while i + BLOCK <= end:
        complete += BLOCK - _count(_equal(source + i, GO_ON))
        far += _count(_equal(source + i, LONG))
        i += BLOCK
    for k in range(i, end):
        complete += U(gaps[k] != GO_ON)
        far += U(gaps[k] == LONG)
    counts[0], counts[1] = complete, far


@_compiled
def read_gaps(apart, low, gaps, spans, stop_at, long_gaps, numel, indices):
    """Indices out of streams that may hold anything; False unless they are what ``write_gaps`` writes.

    Args:
        apart: uint8, shape [low, pairs of all entries].
        low: uint64: half bytes kept apart.
        gaps: uint8.
        spans: uint64: where gap bytes begin and end, and long gaps, and entries; then the least index that may come.
            All but the ends are brought forward.  Indices count from the end of the entry before the slice.
        stop_at: uint64: the entry before which to stop, at most where they end.
        long_gaps: unsigned.
        numel: uint64: elements of the tensor, at least 1.
        indices: uint64, shape [n].
    """
    g, g_end, s, i, free = spans[0], spans[1], spans[2], spans[4], spans[6]
    shift = U4 * low
    most, source = (numel - U1) >> shift, U(gaps.ctypes.data)
    while i < stop_at:
        stop = min(g + BLOCK, g_end)
        if low == U0 and g + BLOCK <= g_end and i + BLOCK <= stop_at:
            go_on = _equal(source + g, GO_ON)
            too_far = go_on & (go_on >> U1) & (go_on >> U2) & (go_on >> U3)
            if too_far | _equal(source + g, LONG) == U0:
                g, i, free = _short_gaps(gaps, g, go_on, indices, i, free)
                if free > numel:
                    return False
                continue
        while True:
            gap, g, s = _high_part(gaps, g, g_end, long_gaps, s)
            if gap > most:
                return False
            gap <<= shift
            for plane in range(low):
                gap |= ((U(apart[plane, i >> U1]) >> ((i & U1) << U2)) & U15) << (plane << U2)
            if free >= numel or gap >= numel - free:
                return False
            indices[i] = free + gap
            free += gap + U1
            i += U1
            if i >= stop_at or g >= stop:
                break
    spans[0], spans[2], spans[4], spans[6] = g, s, i, free
    return True


@_inlined
def _short_gaps(gaps, g, go_on, indices, i, free):
    """Reads a block of gap bytes up to the last that ends a gap; none is of a long one."""
    if go_on == U0:
        for k in range(BLOCK):
            free += U(gaps[g + k]) + U1
            indices[i + k] = free - U1
        return g + BLOCK, i + BLOCK, free
    count = _highest_clear(go_on) + U1
    for k in range(count):
        byte = U(gaps[g + k])
        whole = U(byte != GO_ON)
        free += byte + whole
        indices[i] = free - U1  # what is not the end of a gap is written over
        i += whole
    return g + count, i, free


@_compiled
def move_on(indices, begin, end, base):
    """Adds ``base`` to some indices."""
    for i in range(begin, end):
        indices[i] += base


@_compiled
def count_codes(nibbles, begin, end):
    """Of entries ``begin`` to ``end``, both multiples of 2: how many escape."""
    escapes = U0
    for i in range(begin >> U1, end >> U1):
        escapes += U(U(nibbles[i]) & U15 == ESCAPE) + U(U(nibbles[i]) >> U4 == ESCAPE)
    return escapes


@_compiled
def read_codes(nibbles, escapes, words, spans, adds, most, values):
    """Values out of streams that may hold anything; False unless they are what ``write_codes`` writes.

    Args:
        nibbles: uint8, one for every two of all entries.
        escapes: uint8.
        words: as ``values``.
        spans: uint64: the entries, the first a multiple of BLOCK, and escapes to read, from and to each, and the first
            word; then gets the word after the last.
        adds: uint64: 1 for differences, 0 for masks.
        most: uint64: the largest code of the width.
        values: unsigned, shape [n].
    """
    i, i_end, e, e_end, x = spans[0], spans[1], spans[2], spans[3], spans[4]
    width, source, target = U(values.itemsize), U(nibbles.ctypes.data), U(values.ctypes.data)
    while i < i_end:
        stop, escaped = min(i + BLOCK, i_end), U0
        if i + BLOCK <= i_end:
            escaped = _take_nibbles(source + (i >> U1), adds, target + width * i, values[i])
        else:
            for k in range(i, stop):
                code = (U(nibbles[k >> U1]) >> ((k & U1) << U2)) & U15
                values[k] = _value(code, adds)
                escaped |= U(code == ESCAPE) << (k - i)
        if e + _count(escaped) > e_end:
            return False
        while escaped != U0:
            code = U(escapes[e]) + ESCAPE
            e += U1
            if code == WORD_MIN:
                if x >= U(words.size):
                    return False
                code = U(words[x])
                x += U1
                if code < WORD_MIN:
                    return False
            if code > most:
                return False
            values[i + _lowest(escaped)] = _value(code, adds)
            escaped &= escaped - U1
        i = stop
    spans[4] = x
    return e == e_end


@_inlined
def _value(code, adds):
    code += U1
    return (code >> U1) ^ (U0 - (code & U1)) if adds == U1 else code


@_compiled
def join_words(plane, p, words):
    """Puts byte p into every word; as many as words."""
    shift = U(8) * p
    for i in range(U(words.size)):
        words[i] |= U(plane[i]) << shift


@_compiled
def rotate_right(words, top_shift, values):
    """Words rotated right by one bit within their width."""
    for i in range(U(words.size)):
        word = U(words[i])
        values[i] = (word >> U1) | ((word & U1) << top_shift)
