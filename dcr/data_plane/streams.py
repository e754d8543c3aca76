"""One item as streams of small numbers: the torch reference, for any device (DESIGN section 5, docs/wire-format.md).

Gaps between indices and values go to streams of their own, because they compress apart:

- ``low``: the lowest half bytes of every gap, as many as the layout says, since these are noise where gaps are long.
- ``gaps``: one byte for the rest of a gap; 254 adds 254 and goes on, 255 takes the next of ``long_gaps``.
- ``nibbles``: for ``add`` and ``xor``, two codes a byte; 15 takes the next of ``escapes``.
- ``escapes``: one byte a code of 15 to 269; 255 takes the next of ``words``.
- ``words``: the codes beyond, and for ``set`` every value.

There is exactly one way to write an item in a layout, and everything else is refused when read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcr.data_plane.bits import bits_dtype, unsigned
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.protocol.errors import CorruptPayloadError, RefusedError

GO_ON, LONG = 254, 255
"""The two gap bytes that are no gap."""
LONG_GAP_MIN = 4 * GO_ON
"""The smallest high part of a gap that is a long one; below, at most three bytes of 254 and a last one are as short."""
LOW_MAX = 3
"""Most low half bytes of a gap that a layout keeps apart."""
NIBBLE_ESCAPE, BYTE_ESCAPE = 15, 255
WORD_MIN = NIBBLE_ESCAPE + BYTE_ESCAPE
"""The smallest code that takes a whole word."""

_SIGN = -(1 << 63)


@dataclass(frozen=True)
class ItemStreams:
    """The streams of one item, all one-dimensional and on one device.

    Attributes:
        low: uint8, shape [L * ceil(entries / 2)] for a layout of L low half bytes: half byte 0 of all gaps, two a byte
            with the first in the low half; then half byte 1 of all gaps, and so on.
        gaps: uint8.
        long_gaps: int64.
        nibbles: uint8, shape [ceil(entries / 2)] for ``add`` and ``xor``, else [0]; low nibble first.
        escapes: uint8.
        words: int64, the low ``width`` bytes of which hold an unsigned word; for 8 bytes the sign is a bit like others.
    """

    low: torch.Tensor
    gaps: torch.Tensor
    long_gaps: torch.Tensor
    nibbles: torch.Tensor
    escapes: torch.Tensor
    words: torch.Tensor


def gaps_of(indices: torch.Tensor) -> torch.Tensor:
    """Elements skipped before each of some strictly increasing indices; int64, the same shape."""
    return torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1


def low_count(far: Sequence[int], entries: int) -> int:
    """How many low half bytes of a gap are worth keeping apart: a layout of ``encode_streams``.

    One more, as long as more than a quarter of the gaps would not fit into one byte without it: at uniform positions
    the sizes cross near there, and rows that change as a whole, with few long gaps between, stay compressible.

    Args:
        far: how many gaps are at least 254, 254 * 16 and 254 * 256.
        entries: how many there are.
    """
    return sum(4 * count > entries for count in far)


def choose_low(indices: torch.Tensor) -> int:
    """The layout for an item with these indices; any is right, this one is small."""
    gap = gaps_of(indices)
    return low_count([int((gap >= GO_ON << 4 * k).sum()) for k in range(LOW_MAX)], gap.numel())


def encode_streams(item: Item, low: int) -> ItemStreams:
    """Write an item as streams.

    Args:
        item: on any device.
        low: how many low half bytes of a gap are kept apart, 0 to LOW_MAX.

    Raises:
        RefusedError: indices are not strictly increasing inside the tensor, or an ``add`` or ``xor`` entry is zero.
    """
    item.check_indices()
    apart, gaps, long_gaps = _encode_gaps(gaps_of(item.indices), low)
    if item.operation is Operation.SET:
        nothing = gaps.new_empty(0)
        words = _rotate_left(unsigned(item.values), item.values.itemsize)
        return ItemStreams(apart, gaps, long_gaps, nothing, nothing, words)
    if bool((item.values == 0).any()):
        raise RefusedError(f"item {item.spec.name}: a zero {item.operation} entry changes nothing and is never sent")
    code = _code(item.operation, item.values)
    in_nibble = _below(code, NIBBLE_ESCAPE)
    nibbles = _pairs(torch.where(in_nibble, code, NIBBLE_ESCAPE))
    code = code[~in_nibble]
    in_byte = _below(code, WORD_MIN)
    escapes = torch.where(in_byte, code - NIBBLE_ESCAPE, BYTE_ESCAPE).to(torch.uint8)
    return ItemStreams(apart, gaps, long_gaps, nibbles, escapes, code[~in_byte])


def decode_streams(spec: TensorSpec, operation: Operation, low: int, entries: int, streams: ItemStreams) -> Item:
    """Read an item from its streams, which may hold anything.

    Raises:
        CorruptPayloadError: the streams are not what ``encode_streams`` writes for some item of this tensor,
            operation, layout and number of entries.
    """
    try:
        indices = _decode_gaps(streams, low, entries, spec.numel)
        values = _decode_values(spec, operation, entries, streams)
    except CorruptPayloadError as error:
        raise CorruptPayloadError(f"item {spec.name}: {error}") from None
    return Item(spec, operation, indices, values.to(bits_dtype(spec.dtype)))


def _encode_gaps(gap: torch.Tensor, low: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    planes = [_pairs(gap >> 4 * plane & 15) for plane in range(low)]
    high = gap >> 4 * low
    is_long = high >= LONG_GAP_MIN
    last = torch.where(is_long, LONG, high % GO_ON).to(torch.uint8)
    size = torch.where(is_long, 0, high // GO_ON) + 1
    end = torch.cumsum(size, 0)
    gaps = last.new_full((int(end[-1]) if end.numel() else 0,), GO_ON)
    gaps[end - 1] = last
    return torch.cat((last[:0], *planes)), gaps, high[is_long]


def _decode_gaps(streams: ItemStreams, low: int, entries: int, numel: int) -> torch.Tensor:
    gaps, long_gaps = streams.gaps, streams.long_gaps
    _expect("low", streams.low, low * _half(entries))
    parts = [_halves("low", part, entries) for part in streams.low.view(low, _half(entries))]
    end = torch.nonzero(gaps != GO_ON).flatten()
    if end.numel() != entries or (gaps.numel() and int(gaps[-1]) == GO_ON):
        raise CorruptPayloadError(f"gaps: {end.numel()} complete gaps in {gaps.numel()} bytes for {entries} entries")
    last = gaps[end]
    go_ons = torch.diff(end, prepend=end.new_full((1,), -1)) - 1
    is_long = last == LONG
    if int(is_long.sum()) != long_gaps.numel():
        raise CorruptPayloadError(f"long gaps: found {long_gaps.numel()}, but {int(is_long.sum())} are asked for")
    # A long gap from 2**63 up has come as a negative number.
    if bool((long_gaps < LONG_GAP_MIN).any()) or bool((go_ons >= torch.where(is_long, 1, 4)).any()):
        raise CorruptPayloadError("gaps: a gap is not written in its one form")
    gap = last.to(torch.int64) + GO_ON * go_ons
    gap[is_long] = long_gaps
    # Before the low parts come in: what is shifted stays within 63 bits.
    if bool((gap > numel - 1 >> 4 * low).any()):
        raise CorruptPayloadError(f"gaps: a gap of {int(gap.max()) << 4 * low} runs past the tensor's {numel} elements")
    gap <<= 4 * low
    for plane, part in enumerate(parts):
        gap |= part << 4 * plane
    # Each step is in [1, 2**63], so a sum that leaves int64 shows as a negative index where it first does.
    indices = torch.cumsum(gap + 1, 0) - 1
    if bool(((indices < 0) | (indices >= numel)).any()):
        raise CorruptPayloadError(f"gaps: they run past the tensor's {numel} elements")
    return indices


def _half(entries: int) -> int:
    return (entries + 1) // 2


def _pairs(halves: torch.Tensor) -> torch.Tensor:
    """Half bytes packed two a byte, the first in the low half; the last high half may be 0."""
    halves = halves.to(torch.uint8)
    if halves.numel() % 2:
        halves = torch.cat((halves, halves.new_zeros(1)))
    return halves[0::2] | (halves[1::2] << 4)


def _halves(stream: str, pairs: torch.Tensor, entries: int) -> torch.Tensor:
    """What ``_pairs`` packed, as int64."""
    halves = torch.stack((pairs & 15, pairs >> 4), 1).flatten()
    if bool(halves[entries:].any()):
        raise CorruptPayloadError(f"{stream}: the half byte after the last one is not 0")
    return halves[:entries].to(torch.int64)


def _decode_values(spec: TensorSpec, operation: Operation, entries: int, streams: ItemStreams) -> torch.Tensor:
    """The values as int64, to be cut to the width."""
    width = spec.dtype.itemsize
    _expect("nibbles", streams.nibbles, 0 if operation is Operation.SET else _half(entries))
    if operation is Operation.SET:
        _expect("escapes", streams.escapes, 0)
        _expect("words", streams.words, entries)
        return _rotate_right(streams.words, width)
    code = _halves("nibbles", streams.nibbles, entries)
    escaped = torch.nonzero(code == NIBBLE_ESCAPE).flatten()
    _expect("escapes", streams.escapes, escaped.numel())
    code[escaped] = streams.escapes.to(torch.int64) + NIBBLE_ESCAPE
    far = escaped[streams.escapes == BYTE_ESCAPE]
    _expect("words", streams.words, far.numel())
    code[far] = streams.words
    if bool(_below(streams.words, WORD_MIN).any()) or not bool(_below(code, (1 << 8 * width) - 1).all()):
        raise CorruptPayloadError(f"words: a code of {operation} is not written in its one form, or past its width")
    return _value(operation, code)


def _below(code: torch.Tensor, bound: int) -> torch.Tensor:
    """Compares as unsigned words: a negative int64 is one from 2**63 up."""
    return (code ^ _SIGN) < bound + _SIGN


def _expect(stream: str, found: torch.Tensor, count: int) -> None:
    if found.numel() != count:
        raise CorruptPayloadError(f"{stream}: found {found.numel()}, but {count} are asked for")


def _code(operation: Operation, values: torch.Tensor) -> torch.Tensor:
    """Codes from 0 up, small ones for small changes, as int64: unsigned where the width is 8 bytes."""
    if operation is Operation.XOR:
        return unsigned(values) - 1
    signed = (values.view(torch.int8) if values.dtype == torch.uint8 else values).to(torch.int64)
    return ((signed << 1) ^ (signed >> 63)) - 1  # zigzag: -1, 1, -2, 2, ... have codes 0, 1, 2, 3, ...


def _value(operation: Operation, code: torch.Tensor) -> torch.Tensor:
    zigzag = code + 1
    if operation is Operation.XOR:
        return zigzag
    return ((zigzag >> 1) & ((1 << 63) - 1)) ^ -(zigzag & 1)


def _rotate_left(words: torch.Tensor, width: int) -> torch.Tensor:
    """By one bit: the sign goes last, so that the exponent of a bfloat16 or float32 fills the top byte."""
    top = 8 * width - 1
    return ((words & ((1 << top) - 1)) << 1) | ((words >> top) & 1)


def _rotate_right(words: torch.Tensor, width: int) -> torch.Tensor:
    top = 8 * width - 1
    return ((words >> 1) & ((1 << top) - 1)) | ((words & 1) << top)
