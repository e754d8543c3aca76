"""Compiled loops over shards and streams; see :class:`dcr.data_plane.kernels.numba_streams.NumbaStreamKernels`.

One file, because numba's cache of compiled code looks at the file of a function only: what it calls or takes as a
constant must be in here.  Everything is unsigned: signed positions would cost a question whether to count from the
end, and a signed number that meets an unsigned one becomes a floating-point number.

Writers trust their input, which is ours; readers trust nothing: no position comes out of a stream unless it was
compared with the length of what it is a position in.
"""

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

U = np.uint64
U0, U1, U2, U4, U15 = U(0), U(1), U(2), U(4), U(15)
GO_ON, LONG, LONG_MIN = U(254), U(255), U(1016)
ESCAPE, WORD_MIN, LONG_CODE = U(15), U(270), U(255)
"""As :mod:`dcr.data_plane.streams` has them, which may not be read from here."""
BAD = U(0xFFFFFFFFFFFFFFFF)
"""More than any gap."""
WORDS = U(1024)
"""Words of 8 bytes looked at together: 8 KiB of each array, so that the lists between the stages stay in cache."""
LINES = U(127)
"""Cache lines that these words take, less 1."""


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call, or take what an earlier process compiled from this very file for this processor."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return nb.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        return nb.njit(**options)(function)


_inlined = nb.njit(nogil=True, error_model="numpy", inline="always")


@intrinsic
def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of an element, which may lie past the end: nothing is read, nothing can fail."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, number(0), number(2), number(1)])  # to read, second level, data
        return context.get_dummy_value()

    return types.void(array, index), code


@_compiled
def differences(old, new, old_words, new_words, layout, resume, positions, before, after):
    """Positions at which two flat arrays differ, and what both hold there, until no more might fit.

    Args:
        old: unsigned integers, shape [n].
        new: the same.
        old_words: uint64, shape [m]: the memory of ``old`` from the first whole word on.
        new_words: the same of ``new``.
        layout: uint64: elements before the words, all of them if there are no words; elements in a word; what to add
            to positions.
        resume: uint64: words that were looked at, and elements that were found, by earlier calls; brought forward.
            When all words have been looked at, one more is counted once the elements after them were.
        positions: uint64, with room for the elements before the words and for a block of words.
        before: as ``old``, the same shape.
        after: as ``new``, the same shape.
    """
    head, lanes, start = layout[0], layout[1], layout[2]
    base, found = resume[0], resume[1]
    if base == U0 and found == U0:
        found = _elements(old, new, U0, head, start, found, positions, before, after)
    mask = np.zeros(WORDS, np.uint8)
    eight = np.empty((WORDS >> U(3)) + U1, np.uint32)
    word = np.empty(WORDS + U1, np.uint32)
    place = np.empty(U(8) * WORDS + U(8), np.uint32)
    words, room = U(old_words.size), U(positions.size)
    while base < words and found + lanes * WORDS <= room:
        count = min(WORDS, words - base)
        differing = _differing(old_words, new_words, base, count, mask, mask.view(np.uint64), eight, word)
        places = _places(old_words, new_words, base, word, differing, lanes, place)
        first = head + base * lanes
        for k in range(places):
            i = first + U(place[k])
            positions[found], before[found], after[found] = start + i, old[i], new[i]
            found += U1
            # Nothing fetches the next block while this one is looked at again, unless it is asked for.
            _prefetch(new_words, base + WORDS + ((k & LINES) << U(3)))
        base += count
    if base == words and found + lanes <= room:
        found = _elements(old, new, head + words * lanes, U(old.size), start, found, positions, before, after)
        base += U1
    resume[0], resume[1] = base, found


@_inlined
def _elements(old, new, begin, end, start, found, positions, before, after):
    """The elements that lie in no word, one by one; returns how many are found now."""
    for i in range(begin, end):
        if old[i] != new[i]:
            positions[found], before[found], after[found] = start + i, old[i], new[i]
            found += U1
    return found


@_inlined
def _differing(old_words, new_words, base, count, mask, masks, eight, word):
    """Words that differ, counted from the block's first; returns how many.

    Branch-free: where to write depends on what was found, whether to write does not.  All words are compared at once,
    and where changes are rare most eights of them need no second look.
    """
    differing = U0
    if count < WORDS:
        for k in range(count):
            word[differing] = np.uint32(k)
            differing += U(old_words[base + k] != new_words[base + k])
        return differing
    for k in range(WORDS):
        mask[k] = np.uint8(old_words[base + k] != new_words[base + k])
    eights = U0
    for k in range(WORDS >> U(3)):
        eight[eights] = np.uint32(k << U(3))
        eights += U(masks[k] != U0)
    for e in range(eights):
        first = U(eight[e])
        for k in range(first, first + U(8)):
            word[differing] = np.uint32(k)
            differing += U(mask[k])
    return differing


@_inlined
def _places(old_words, new_words, base, word, differing, lanes, place):
    """Elements that differ in the words that do, counted from the block's first; returns how many."""
    n = U0
    if lanes == U4:
        for k in range(differing):
            i = U(word[k])
            _prefetch(old_words, base + WORDS + ((k & LINES) << U(3)))
            bits, first = old_words[base + i] ^ new_words[base + i], np.uint32(i << U2)
            place[n] = first
            n += U((bits & U(0xFFFF)) != U0)
            place[n] = first + np.uint32(1)
            n += U((bits & U(0xFFFF0000)) != U0)
            place[n] = first + np.uint32(2)
            n += U((bits & U(0xFFFF00000000)) != U0)
            place[n] = first + np.uint32(3)
            n += U((bits >> U(48)) != U0)
    elif lanes == U2:
        for k in range(differing):
            i = U(word[k])
            _prefetch(old_words, base + WORDS + ((k & LINES) << U(3)))
            bits, first = old_words[base + i] ^ new_words[base + i], np.uint32(i << U1)
            place[n] = first
            n += U((bits & U(0xFFFFFFFF)) != U0)
            place[n] = first + np.uint32(1)
            n += U((bits >> U(32)) != U0)
    elif lanes == U1:
        for k in range(differing):
            place[n] = word[k]
            n += U1
    else:
        for k in range(differing):
            i = U(word[k])
            _prefetch(old_words, base + WORDS + ((k & LINES) << U(3)))
            bits = old_words[base + i] ^ new_words[base + i]
            for lane in range(U(8)):
                place[n] = np.uint32((i << U(3)) + lane)
                n += U((bits & U(0xFF)) != U0)
                bits >>= U(8)
    return n


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
def survey(indices, numel, counts):
    """Counts gaps of at least 254, 254 * 16 and 254 * 256; False unless indices are strictly increasing in range."""
    far, farther, farthest = U0, U0, U0
    before, good = U0, True  # the least index that may come
    for i in range(U(indices.size)):
        index = indices[i]
        good &= (index >= before) & (index < numel)
        gap = index - before
        far += U(gap >= GO_ON)
        farther += U(gap >= GO_ON << U4)
        farthest += U(gap >= GO_ON << U(8))
        before = index + U1
    counts[0], counts[1], counts[2] = far, farther, farthest
    return good


@_compiled
def write_gaps(indices, low, apart, gaps, long_gaps, ends):
    """Streams of gaps; ``ends`` gets how many gap bytes and long gaps there are.

    ``apart`` is [low, pairs] and zero; the others are long enough for the gaps of these indices.
    """
    shift = U4 * low
    g, s, before = U0, U0, U0
    for i in range(U(indices.size)):
        gap = indices[i] - before
        before = indices[i] + U1
        for plane in range(low):
            apart[plane, i >> U1] |= np.uint8((gap & U15) << ((i & U1) << U2))
            gap >>= U4
        if gap >= GO_ON:
            if gap >= LONG_MIN:
                long_gaps[s] = gap
                s += U1
                gap = LONG
            else:
                while gap >= GO_ON:
                    gaps[g] = np.uint8(GO_ON)
                    g += U1
                    gap -= GO_ON
        gaps[g] = np.uint8(gap)
        g += U1
    ends[0], ends[1] = g, s
    return shift


@_compiled
def write_codes(values, adds, top, nibbles, escapes, words, ends):
    """Streams of codes; ``ends`` gets how many escapes and words there are.  False if a value is zero.

    ``adds``: 1 for differences, 0 for masks.  ``top``: the sign bit of the width, as uint64.
    """
    e, x, half, good = U0, U0, U0, True
    n = U(values.size)
    for i in range(n):
        value = U(values[i])
        good &= value != U0
        if adds == U1:
            # Zigzag of the sign-extended difference: 2d for d > 0, -2d - 1 for d < 0; less 1.  Signs are as good as
            # random, so a question about them would be guessed wrong every other time.
            wide = (value ^ top) - top
            code = ((wide << U1) ^ (U0 - (wide >> U(63)))) - U1
        else:
            code = value - U1
        if code >= ESCAPE:
            if code >= WORD_MIN:
                escapes[e] = np.uint8(LONG_CODE)
                words[x] = code
                x += U1
            else:
                escapes[e] = np.uint8(code - ESCAPE)
            e += U1
            code = ESCAPE
        if i & U1:
            nibbles[i >> U1] = np.uint8(half | (code << U4))
        else:
            half = code
    if n & U1:
        nibbles[n >> U1] = np.uint8(half)
    ends[0], ends[1] = e, x
    return good


@_inlined
def _high_part(gaps, g, long_gaps, s):
    """The next high part of a gap, and where the streams go on; BAD if it is not there in its one form."""
    high, byte = U0, GO_ON
    while byte == GO_ON:
        if g >= U(gaps.size) or high >= LONG_MIN:
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
def read_gaps(apart, low, gaps, long_gaps, numel, indices):
    """Indices out of streams that may hold anything; False unless they are what ``write_gaps`` writes.

    ``apart`` is [low, pairs] with a pair for every two of ``indices``.
    """
    n, shift = U(indices.size), U4 * low
    if numel == U0:
        return n + U(gaps.size) + U(long_gaps.size) == U0
    most = (numel - U1) >> shift
    g, s, free = U0, U0, U0  # free: the least index that may come
    for i in range(n):
        gap, g, s = _high_part(gaps, g, long_gaps, s)
        if gap > most:
            return False
        gap <<= shift
        for plane in range(low):
            gap |= ((U(apart[plane, i >> U1]) >> ((i & U1) << U2)) & U15) << (plane << U2)
        if free >= numel or gap >= numel - free:
            return False
        indices[i] = free + gap
        free += gap + U1
    if n & U1:
        for plane in range(low):
            if apart[plane, n >> U1] > U15:
                return False
    return g == U(gaps.size) and s == U(long_gaps.size)


@_compiled
def read_codes(nibbles, escapes, words, adds, most, values):
    """Values out of streams that may hold anything; False unless they are what ``write_codes`` writes.

    ``most`` is the largest code of the width; ``nibbles`` has one for every two of ``values``.
    """
    e, x = U0, U0
    e_end, x_end = U(escapes.size), U(words.size)
    n = U(values.size)
    for i in range(n):
        code = (U(nibbles[i >> U1]) >> ((i & U1) << U2)) & U15
        if code == ESCAPE:
            if e >= e_end:
                return False
            code = U(escapes[e]) + ESCAPE
            e += U1
            if code == WORD_MIN:
                if x >= x_end:
                    return False
                code = U(words[x])
                x += U1
                if code < WORD_MIN:
                    return False
            if code > most:
                return False
        code += U1
        values[i] = (code >> U1) ^ (U0 - (code & U1)) if adds == U1 else code
    if n & U1 and nibbles[n >> U1] > U15:
        return False
    return e == e_end and x == x_end


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
