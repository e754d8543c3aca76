"""Triton kernels over boxes: entries into resident memory, order of indices, and what boxes hold.

Resident memory is reached by the addresses of a :class:`dcr.data_plane.kernels.box_table.BoxTable`.  No two threads
write the same word, since boxes share no memory and the indices of a tensor are distinct.
"""

import triton
import triton.language as tl

from dcr.data_plane.kernels.triton_words import hashed, widened


@triton.jit
def first_disorder(blocks, staged, found, BLOCK: tl.constexpr):
    """How many entries of every block are out of order or range.

    Args:
        blocks: int64, shape [blocks, 4]: position of the first index in ``staged``, entries left in the item from
            there, 1 if the item begins here, elements of the tensor.
        staged: int64: indices of all items, one after the other.
        found: int32, shape [blocks], to be filled.
        BLOCK: most entries of a block.
    """
    block = tl.program_id(0)
    row = blocks + 4 * block
    start, left, begins, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    at = tl.arange(0, BLOCK)
    inside = at < left
    index = tl.load(staged + start + at, mask=inside, other=0)
    before = tl.load(staged + start + at - 1, mask=inside & (at >= begins), other=-1)
    wrong = inside & ((index <= before) | (index >= numel))
    tl.store(found + block, tl.sum(wrong.to(tl.int32), 0))


@triton.jit
def place(
    blocks, staged, address, low, numbers, dims, hits,
    DEPTH: tl.constexpr, WORD: tl.constexpr, ACTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries into their places.

    A target is found by dividing the key by each source stride in turn, outermost first: what is left over by one
    dimension belongs to the next, and an index past a dimension's size, or a rest at the end, lies in no box.  So no
    stride need divide another.

    Args:
        blocks: int64, shape [blocks, 4]: box; position of the first index in ``staged``, in words of 8 bytes; byte of
            the first value in ``staged``; entries of the item from there on that may lie in the box.
        staged: int64: indices, then values, of all items.
        address: see ``BoxTable``.
        low: the same.
        numbers: the same.
        dims: the same.
        hits: int32, shape [blocks], to be filled: how many entries of a block lie in its box.
        DEPTH: last size of ``dims``.
        WORD: unsigned type of the words in the launched blocks.
        ACTION: 0 sets, 1 is exclusive or, 2 adds.
        BLOCK: most entries of a block.
    """
    block = tl.program_id(0)
    row = blocks + 4 * block
    box, start, values_at, left = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    at = tl.arange(0, BLOCK)
    inside = at < left
    rest = tl.load(staged + start + at, mask=inside, other=0) - tl.load(low + box)
    values = staged.to(tl.pointer_type(tl.uint8)) + values_at
    value = tl.load(values.to(tl.pointer_type(WORD)) + at, mask=inside, other=0)
    depth, is_wide = tl.load(numbers + 2 * box), tl.load(numbers + 2 * box + 1)
    dim = dims + 3 * DEPTH * box
    target = tl.zeros([BLOCK], tl.int64)
    for z in range(depth):
        size, stride, step = tl.load(dim + z), tl.load(dim + DEPTH + z), tl.load(dim + 2 * DEPTH + z)
        i = rest
        if stride != 1:
            i = rest // stride
        inside &= i < size
        rest -= i * stride
        target += i * step
    inside &= rest == 0
    tl.store(hits + block, tl.sum(inside.to(tl.int32), 0))
    memory = tl.load(address + box).to(tl.pointer_type(WORD)) + target
    if ACTION == 0:
        if is_wide != 0:
            tl.store(memory, tl.zeros_like(value), mask=inside)
        tl.store(memory + is_wide, value, mask=inside)
    else:
        old = tl.load(memory + is_wide, mask=inside, other=0)
        if ACTION == 1:
            tl.store(memory + is_wide, old ^ value, mask=inside)
        else:
            tl.store(memory + is_wide, old + value, mask=inside)


@triton.jit
def sum_boxes(
    blocks, address, low, numbers, dims, keys, sums,
    DEPTH: tl.constexpr, WORD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Sums of the hashes of a block's elements.

    Args:
        blocks: int64, shape [blocks, 4]: box; first element in order of source indices; elements of the box; 0.
        address: see ``BoxTable``.
        low: the same.
        numbers: the same.
        dims: the same.
        keys: int64, shape [boxes, 4]: see ``hashed``.
        sums: int64, shape [blocks, 4], to be filled: high lanes, upper and lower halves of low lanes, and 1 if a low
            half of a widened element is not 0.
        DEPTH: last size of ``dims``.
        WORD: unsigned type of the words in the launched blocks.
        WIDTH: their bytes.
        BLOCK: elements read at a time.
        LOOPS: how often at most.
    """
    block = tl.program_id(0)
    row = blocks + 4 * block
    box, first, elements = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    depth, is_wide = tl.load(numbers + 2 * box), tl.load(numbers + 2 * box + 1)
    dim = dims + 3 * DEPTH * box
    memory = tl.load(address + box).to(tl.pointer_type(WORD))
    source = tl.load(low + box)
    outer_stride, outer_step = tl.load(dim + DEPTH), tl.load(dim + 2 * DEPTH)
    high, upper, lower = tl.zeros([BLOCK], tl.uint64), tl.zeros([BLOCK], tl.uint64), tl.zeros([BLOCK], tl.uint64)
    dirty = tl.zeros([BLOCK], tl.uint64)
    for k in range(tl.cdiv(tl.minimum(elements - first, LOOPS * BLOCK), BLOCK)):
        rest = first + k * BLOCK + tl.arange(0, BLOCK)
        inside = rest < elements
        index, at = source + tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for y in range(1, depth):  # innermost first
            z = depth - y
            outer = rest // tl.load(dim + z)
            i = rest - outer * tl.load(dim + z)
            index += i * tl.load(dim + DEPTH + z)
            at += i * tl.load(dim + 2 * DEPTH + z)
            rest = outer
        index += rest * outer_stride  # the outermost needs no division; without dimensions its strides are 0
        at += rest * outer_step
        word = widened(tl.load(memory + at + is_wide, mask=inside, other=0), WIDTH)
        here_high, here_low = hashed(keys + 4 * box, index, word, inside)
        high += here_high
        upper += here_low >> 32
        lower += here_low & 0xFFFFFFFF
        if is_wide != 0:
            dirty |= widened(tl.load(memory + at, mask=inside, other=0), WIDTH)
    tl.store(sums + 4 * block, tl.sum(high, 0).to(tl.int64, bitcast=True))
    tl.store(sums + 4 * block + 1, tl.sum(upper, 0).to(tl.int64, bitcast=True))
    tl.store(sums + 4 * block + 2, tl.sum(lower, 0).to(tl.int64, bitcast=True))
    tl.store(sums + 4 * block + 3, tl.max((dirty != 0).to(tl.int32), 0).to(tl.int64))
