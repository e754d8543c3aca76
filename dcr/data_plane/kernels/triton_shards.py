"""Triton kernels over shards: where two differ, and the content digest of some elements.

Both write in an order that the input alone decides: a first kernel counts block by block, a prefix sum says where each
block writes, a second kernel writes.
"""

import triton
import triton.language as tl

from dcr.data_plane.kernels.triton_words import hashed, widened


@triton.jit(do_not_specialize=("elements",))
def count_differences(old, new, counts, elements: tl.int64, BLOCK: tl.constexpr):
    """How many words differ in every block: ``counts`` int64, shape [blocks]."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    differ = tl.load(old + at, mask=inside, other=0) != tl.load(new + at, mask=inside, other=0)
    tl.store(counts + block, tl.sum(differ.to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize=("start", "elements"))
def compact_differences(
    old, new, ends, positions, before, after, start: tl.int64, elements: tl.int64, BLOCK: tl.constexpr
):
    """The words that differ, and where: block by block up to ``ends``, which is the prefix sum of the counts.

    Positions are counted from ``start``.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    ours = tl.load(old + at, mask=inside, other=0)
    theirs = tl.load(new + at, mask=inside, other=0)
    differ = ours != theirs
    one = differ.to(tl.int32)
    to = tl.load(ends + block) - tl.sum(one, 0) + tl.cumsum(one, 0) - 1
    tl.store(positions + to, start + at, mask=differ)
    tl.store(before + to, ours, mask=differ)
    tl.store(after + to, theirs, mask=differ)


@triton.jit(do_not_specialize=("entries",))
def digest_entries(indices, bits, keys, sums, entries: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of a block's hashes, int64 of shape [blocks, 3]: high lanes, upper and lower halves of low lanes."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    index = tl.load(indices + at, mask=inside, other=0)
    word = widened(tl.load(bits + at, mask=inside, other=0), WIDTH)
    high, low = hashed(keys, index, word, inside)
    tl.store(sums + 3 * block, tl.sum(high, 0).to(tl.int64, bitcast=True))
    tl.store(sums + 3 * block + 1, tl.sum(low >> 32, 0).to(tl.int64, bitcast=True))
    tl.store(sums + 3 * block + 2, tl.sum(low & 0xFFFFFFFF, 0).to(tl.int64, bitcast=True))
