"""Items into streams, compiled, and content digests; see :mod:`dcr.data_plane.kernels.numba_streams`.

64 entries go at once, as vectors; what does not fit into a byte of gap or half a byte of code is looked at alone.
Writers trust the sizes of what they are given, and find out themselves whether indices are in order.

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
ESCAPE, WORD_MIN, LONG_CODE = U(15), U(270), U(255)
"""As :mod:`dcr.data_plane.streams` has them, which may not be read from here."""
BAD = U(0xFFFFFFFFFFFFFFFF)
"""More than any gap or code."""
BLOCK = U(64)
"""Entries written together; slices of an item begin at multiples of it."""
GAP_ROOM = U(256)
"""Gap bytes that a block takes at most."""
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


def _packed(builder: Any, halves: Any) -> Any:
    """64 half bytes, a byte each, as 32 bytes: the first of two in the low half."""
    pairs = builder.bitcast(halves, _vector(32, 16))
    return builder.trunc(builder.or_(pairs, builder.lshr(pairs, _all(pairs.type, 4))), _vector(32, 8))


def _gaps_at(builder: Any, address: Any, free: Any, shift: Any) -> Any:
    """High parts of the gaps before 64 indices, the first of which is at least ``free``."""
    kind = _vector(64, 64)
    indices = _load(builder, address, kind)
    after = builder.add(indices, _all(kind, 1))
    last = builder.insert_element(ir.Constant(kind, ir.Undefined), free, ir.IntType(32)(63))
    order = ir.Constant(_vector(64, 32), [ir.IntType(32)(lane) for lane in (127, *range(63))])
    gaps = builder.sub(indices, builder.shuffle_vector(after, last, order))
    return builder.lshr(gaps, _spread(builder, shift, kind))


@intrinsic
def _lowest(_context: Any, mask: Any) -> Any:
    """The number of the lowest set bit."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.IntType(1)(1))

    return types.uint64(mask), code


@intrinsic
def _put_gaps(_context: Any, indices: Any, free: Any, shift: Any, target: Any) -> Any:
    """The high parts of 64 gaps as bytes to ``target``; returns a bit each for those that do not fit into one."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        gaps = _gaps_at(builder, *args[:3])
        _store(builder, builder.trunc(gaps, _vector(64, 8)), args[3])
        return _mask(builder, builder.icmp_unsigned(">=", gaps, _all(gaps.type, int(GO_ON))))

    return types.uint64(indices, free, shift, target), code


@intrinsic
def _put_low(_context: Any, indices: Any, free: Any, shift: Any, target: Any) -> Any:
    """One half byte of each of 64 gaps to ``target``, 32 bytes."""

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        low = builder.trunc(_gaps_at(builder, *args[:3]), _vector(64, 8))
        _store(builder, _packed(builder, builder.and_(low, _all(low.type, 15))), args[3])
        return context.get_dummy_value()

    return types.void(indices, free, shift, target), code


@intrinsic
def _put_nibbles(_context: Any, values: Any, adds: Any, target: Any, element: Any) -> Any:
    """Nibbles of 64 values to ``target``, 32 bytes; returns a bit each for codes that do not fit, or values of 0."""

    def code(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = _vector(64, element.bitwidth)
        values = _load(builder, args[0], kind)
        signs = builder.ashr(values, _all(kind, element.bitwidth - 1))
        zigzag = builder.xor(builder.shl(values, _all(kind, 1)), signs)
        adds = builder.icmp_unsigned("!=", args[1], _INT64(0))
        codes = builder.sub(builder.select(adds, zigzag, values), _all(kind, 1))
        far = builder.icmp_unsigned(">=", codes, _all(kind, int(ESCAPE)))
        small = builder.select(far, _all(kind, int(ESCAPE)), codes)
        small = small if element.bitwidth == 8 else builder.trunc(small, _vector(64, 8))
        _store(builder, _packed(builder, small), args[2])
        return _mask(builder, far)

    return types.uint64(values, adds, target, element), code


@_inlined
def _splitmix(x):
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


@_inlined
def _murmur(x):
    x = (x ^ (x >> U(33))) * U(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> U(33))) * U(0xC4CEB9FE1A85EC53)
    return x ^ (x >> U(33))


@_compiled
def digest(indices, bits, keys, totals):
    """Adds elements to the three sums of a content digest: high lanes, upper and lower halves of low lanes."""
    k0, k1, k2, k3 = keys[0], keys[1], keys[2], keys[3]
    high, upper, lower = U0, U0, U0
    for i in range(U(indices.size)):
        index, word = indices[i], U(bits[i])
        low = _splitmix(_splitmix(index ^ k0) ^ k1 ^ word)
        high += _murmur(_murmur(index ^ k2) ^ k3 ^ word)
        upper += low >> U(32)
        lower += low & U(0xFFFFFFFF)
    totals[0] += high
    totals[1] += upper
    totals[2] += lower


@_compiled
def survey(indices, begin, end, counts):
    """Adds to ``counts`` how many gaps before entries ``begin`` to ``end`` are at least 254, 254 * 16 and 254 * 256."""
    far, farther, farthest = U0, U0, U0
    if begin == U0 and end > U0:
        gap = indices[U0]
        far, farther, farthest = U(gap >= GO_ON), U(gap >= GO_ON << U4), U(gap >= GO_ON << U(8))
        begin = U1
    for i in range(begin, end):
        gap = indices[i] - indices[i - U1] - U1
        far += U(gap >= GO_ON)
        farther += U(gap >= GO_ON << U4)
        farthest += U(gap >= GO_ON << U(8))
    counts[0] += far
    counts[1] += farther
    counts[2] += farthest


@_inlined
def _free(indices, i):
    """The least index that entry ``i`` may have."""
    return indices[i - U1] + U1 if i > U0 else U0


@_inlined
def _put_gap(gap, gaps, g, long_gaps, s):
    """Writes what is left of a gap; returns where both streams go on.  Bytes after it may hold anything."""
    if gap >= LONG_MIN:
        long_gaps[s] = gap
        gaps[g] = np.uint8(LONG)
        return g + U1, s + U1
    # Three go-ons in any case: where the last byte comes depends on the gap, whether something is written does not.
    more = U(gap >= GO_ON) + U(gap >= GO_ON * U2) + U(gap >= GO_ON * U3)
    gaps[g] = np.uint8(GO_ON)
    gaps[g + U1] = np.uint8(GO_ON)
    gaps[g + U2] = np.uint8(GO_ON)
    gaps[g + more] = np.uint8(gap - more * GO_ON)
    return g + more + U1, s


@_compiled
def write_gaps(indices, begin, end, low, apart, gaps, long_gaps, ends):
    """Streams of the gaps before entries ``begin``, a multiple of BLOCK, to ``end``.

    Args:
        indices: uint64, shape [n]; the last is below 2**63.
        begin: uint64.
        end: uint64.
        low: uint64: half bytes to keep apart.
        apart: uint8, shape [low, pairs of all entries], zero where the last entries go.
        gaps: uint8, with room for what indices in order take, and for GAP_ROOM more.
        long_gaps: unsigned, with room for what indices in order take, and for BLOCK more.
        ends: uint64: how many gap bytes, long gaps, and gaps of at least 254 there are; brought forward.

    Returns:
        False if indices are not strictly increasing, from the one before the first to none above the very last.
    """
    shift, pairs = U4 * low, U(apart.shape[1])
    g, s, far_count, i = ends[0], ends[1], ends[2], begin
    last = indices[indices.size - 1] if begin < end else U0  # nothing lies beyond, so nothing here wraps around
    source, low_at, gaps_at = U(indices.ctypes.data), U(apart.ctypes.data), U(gaps.ctypes.data)
    while i < end:
        if g + GAP_ROOM > U(gaps.size) or s + BLOCK > U(long_gaps.size):
            return False
        free = _free(indices, i)
        stop, far = end, BAD
        if i + BLOCK <= end:
            stop = i + BLOCK
            far = _put_gaps(source + U(8) * i, free, shift, gaps_at + g)
            for plane in range(low):
                _put_low(source + U(8) * i, free, U4 * plane, low_at + plane * pairs + (i >> U1))
        if far == U0:
            g += BLOCK
        else:
            for k in range(i, stop):
                if indices[k] < free or indices[k] > last:
                    return False
                gap = indices[k] - free
                free = indices[k] + U1
                far_count += U(gap >= GO_ON)
                g, s = _put_gap(gap >> shift, gaps, g, long_gaps, s)
            if i + BLOCK > end:
                _put_last_low(indices, i, end, low, apart)
        i = stop
    ends[0], ends[1], ends[2] = g, s, far_count
    return True


@_inlined
def _put_last_low(indices, begin, end, low, apart):
    """Half bytes of the entries after the last whole block."""
    for k in range(begin, end):
        gap = indices[k] - _free(indices, k)
        for plane in range(low):
            apart[plane, k >> U1] |= np.uint8((gap & U15) << ((k & U1) << U2))
            gap >>= U4


@_compiled
def write_codes(values, begin, end, adds, top, nibbles, escapes, words, ends):
    """Streams of the codes of entries ``begin``, a multiple of BLOCK, to ``end``; False if a value is zero.

    Args:
        values: unsigned, shape [n].
        begin: uint64.
        end: uint64.
        adds: uint64: 1 for differences, 0 for masks.
        top: uint64: the sign bit of the width.
        nibbles: uint8, shape [pairs of all entries], zero where the last entries go.
        escapes: uint8, with room for as many as entries.
        words: as ``values``, with room for as many as entries.
        ends: uint64: gets how many escapes and words there are.
    """
    e, x, i = U0, U0, begin
    width, source, target = U(values.itemsize), U(values.ctypes.data), U(nibbles.ctypes.data)
    while i + BLOCK <= end:
        far = _put_nibbles(source + width * i, adds, target + (i >> U1), values[i])
        while far != U0:
            code = _code(U(values[i + _lowest(far)]), adds, top)
            if code == BAD:
                return False
            e, x = _put_escape(code, escapes, e, words, x)
            far &= far - U1
        i += BLOCK
    for k in range(i, end):
        code = _code(U(values[k]), adds, top)
        if code == BAD:
            return False
        if code >= ESCAPE:
            e, x = _put_escape(code, escapes, e, words, x)
            code = ESCAPE
        nibbles[k >> U1] |= np.uint8(code << ((k & U1) << U2))
    ends[0], ends[1] = e, x
    return True


@_inlined
def _code(value, adds, top):
    """BAD for a value of zero."""
    if adds == U1:
        # Zigzag of the sign-extended difference: 2d for d > 0, -2d - 1 for d < 0; less 1.
        wide = (value ^ top) - top
        return ((wide << U1) ^ (U0 - (wide >> U(63)))) - U1
    return value - U1


@_inlined
def _put_escape(code, escapes, e, words, x):
    if code >= WORD_MIN:
        escapes[e] = np.uint8(LONG_CODE)
        words[x] = code
        return e + U1, x + U1
    escapes[e] = np.uint8(code - ESCAPE)
    return e + U1, x


@_compiled
def split_words(values, rotate, top_shift, planes):
    """Byte p of every word into row p of ``planes``, of words first rotated left by one bit if ``rotate`` is 1."""
    width = U(planes.shape[0])
    for i in range(U(values.size)):
        word = U(values[i])
        if rotate == U1:
            word = (word << U1) | (word >> top_shift)
        for p in range(width):
            planes[p, i] = np.uint8(word & U(0xFF))
            word >>= U(8)
