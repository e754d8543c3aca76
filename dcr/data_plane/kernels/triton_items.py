"""Triton kernels over the entries of one item: from indices and values to the streams of the wire format.

The numbers are those of :mod:`dcr.data_plane.streams`.  As with shards, a survey counts block by block, a prefix sum
says where each block writes, and a second kernel writes.
"""

import triton
import triton.language as tl

from dcr.data_plane.kernels.triton_words import code_of, widened

SET, XOR, ADD = 0, 1, 2
"""Actions."""
ROW_DISORDERED, ROW_FAR, ROW_GAP_BYTES, ROW_LONG, ROW_ZERO, ROW_ESCAPES, ROW_WORDS = 0, 1, 4, 8, 12, 13, 14
ROWS = 15
"""What a survey counts: entries out of order or range; gaps of at least 254, 254 * 16 and 254 * 256; bytes of gaps and
long gaps for each of four layouts; values that are zero; escapes; words."""


@triton.jit
def _gap_bytes(high):
    """Bytes of the high part of a gap, and whether it is a long one."""
    is_long = high >= 1016
    return tl.where(is_long, 1, tl.minimum(high, 1016).to(tl.int32) // 254 + 1), is_long


@triton.jit
def _sum_into(sums, row, block, blocks, flags):
    tl.store(sums + row * blocks + block, tl.sum(flags.to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize=("entries", "numel", "blocks"))
def survey(
    indices,
    values,
    sums,
    entries: tl.int64,
    numel: tl.int64,
    blocks: tl.int64,
    ACTION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts of every block: ``sums`` int64, shape [ROWS, blocks]; what is said of disordered entries means nothing."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    index = tl.load(indices + at, mask=inside, other=0)
    before = tl.load(indices + at - 1, mask=inside & (at > 0), other=-1)
    gap = index - before - 1
    _sum_into(sums, 0, block, blocks, inside & ((index <= before) | (index >= numel)))
    for layout in tl.static_range(4):
        if layout < 3:
            _sum_into(sums, 1 + layout, block, blocks, inside & (gap >= 254 << (4 * layout)))
        size, is_long = _gap_bytes(gap >> (4 * layout))
        _sum_into(sums, 4 + layout, block, blocks, tl.where(inside, size, 0))
        _sum_into(sums, 8 + layout, block, blocks, inside & is_long)
    word = tl.load(values + at, mask=inside, other=0)
    code = code_of(word, ACTION == 2, WIDTH)
    codes = inside & (ACTION != 0)
    _sum_into(sums, 12, block, blocks, codes & (word == 0))
    _sum_into(sums, 13, block, blocks, codes & (code >= 15))
    _sum_into(sums, 14, block, blocks, codes & (code >= 270))


@triton.jit
def _write_gaps(indices, block, blocks, ends, out, gaps_at, at, inside, LOW: tl.constexpr, LONG_BYTES: tl.constexpr):
    index = tl.load(indices + at, mask=inside, other=0)
    before = tl.load(indices + at - 1, mask=inside & (at > 0), other=-1)
    high = (index - before - 1) >> (4 * LOW)
    size, is_long = _gap_bytes(high)
    size = tl.where(inside, size, 0)
    is_long &= inside
    end = tl.load(ends + (4 + LOW) * blocks + block) - tl.sum(size, 0) + tl.cumsum(size, 0)
    last = tl.where(is_long, 255, high - 254 * (size - 1))
    tl.store(out + gaps_at + end - 1, last.to(tl.uint8), mask=inside)
    for k in tl.static_range(1, 4):
        tl.store(out + gaps_at + end - 1 - k, (tl.zeros_like(size) + 254).to(tl.uint8), mask=size > k)
    one = is_long.to(tl.int32)
    to = tl.load(ends + (8 + LOW) * blocks + block) - tl.sum(one, 0) + tl.cumsum(one, 0) - 1
    if LONG_BYTES == 4:
        tl.store(out.to(tl.pointer_type(tl.int32)) + to, high.to(tl.int32), mask=is_long)
    else:
        tl.store(out.to(tl.pointer_type(tl.int64)) + to, high, mask=is_long)


@triton.jit
def _write_low(indices, out, low_at, pair, entries, LOW: tl.constexpr):
    pairs = (entries + 1) // 2
    here, both = pair < pairs, 2 * pair + 1 < entries
    before = tl.load(indices + 2 * pair - 1, mask=here & (pair > 0), other=-1)
    first = tl.load(indices + 2 * pair, mask=here, other=0)
    second = tl.load(indices + 2 * pair + 1, mask=both, other=0)
    left, right = first - before - 1, tl.where(both, second - first - 1, 0)
    for plane in tl.static_range(LOW):
        halves = ((left >> (4 * plane)) & 15) | (((right >> (4 * plane)) & 15) << 4)
        tl.store(out + low_at + plane * pairs + pair, halves.to(tl.uint8), mask=here)


@triton.jit
def _nibble(values, at, here, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    code = code_of(tl.load(values + at, mask=here, other=0), ADDS, WIDTH)
    return tl.where(here, tl.minimum(code, 15).to(tl.int32), 0)


@triton.jit
def _write_codes(
    values, block, blocks, ends, out, nibbles_at, escapes_at, planes_at, at, pair, entries, words, inside,
    ADDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    pairs = (entries + 1) // 2
    left = _nibble(values, 2 * pair, pair < pairs, ADDS, WIDTH)
    right = _nibble(values, 2 * pair + 1, 2 * pair + 1 < entries, ADDS, WIDTH)
    tl.store(out + nibbles_at + pair, (left | (right << 4)).to(tl.uint8), mask=pair < pairs)
    code = code_of(tl.load(values + at, mask=inside, other=0), ADDS, WIDTH)
    escaped, is_word = inside & (code >= 15), inside & (code >= 270)
    one = escaped.to(tl.int32)
    to = tl.load(ends + 13 * blocks + block) - tl.sum(one, 0) + tl.cumsum(one, 0) - 1
    byte = tl.where(is_word, 255, (tl.minimum(code, 270) - 15).to(tl.int32))
    tl.store(out + escapes_at + to, byte.to(tl.uint8), mask=escaped)
    one = is_word.to(tl.int32)
    to = tl.load(ends + 14 * blocks + block) - tl.sum(one, 0) + tl.cumsum(one, 0) - 1
    for p in tl.static_range(WIDTH):
        tl.store(out + planes_at + p * words + to, ((code >> (8 * p)) & 0xFF).to(tl.uint8), mask=is_word)


_SIZES = ("entries", "blocks", "words", "low_at", "gaps_at", "nibbles_at", "escapes_at", "planes_at")


@triton.jit(do_not_specialize=_SIZES)
def write(
    indices,
    values,
    ends,
    out,
    entries: tl.int64,
    blocks: tl.int64,
    words: tl.int64,
    low_at: tl.int64,
    gaps_at: tl.int64,
    nibbles_at: tl.int64,
    escapes_at: tl.int64,
    planes_at: tl.int64,
    LOW: tl.constexpr,
    LONG_BYTES: tl.constexpr,
    ACTION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All streams of an item into ``out``, uint8: long gaps at its beginning, the others where ``*_at`` says.

    ``ends`` is the prefix sum of what the survey counted; ``words`` how many words there are, which is how far apart
    two planes lie.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pair = block.to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    inside = at < entries
    _write_gaps(indices, block, blocks, ends, out, gaps_at, at, inside, LOW, LONG_BYTES)
    if LOW > 0:
        _write_low(indices, out, low_at, pair, entries, LOW)
    if ACTION == 0:
        word = widened(tl.load(values + at, mask=inside, other=0), WIDTH)
        word = (word << 1) | (word >> (8 * WIDTH - 1))
        for p in tl.static_range(WIDTH):
            tl.store(out + planes_at + p * words + at, ((word >> (8 * p)) & 0xFF).to(tl.uint8), mask=inside)
    else:
        _write_codes(
            values, block, blocks, ends, out, nibbles_at, escapes_at, planes_at, at, pair, entries, words, inside,
            ACTION == 2, WIDTH,
        )  # fmt: skip
