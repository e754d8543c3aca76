"""The streams of all items of a payload as bytes: joined item after item, each stream one zstd frame."""

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import xxhash
import zstandard

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.streams import LOW_MAX, ItemStreams
from dcr.protocol.errors import CorruptPayloadError

STREAMS = ("low", "gaps", "long_gaps", "nibbles", "escapes", *(f"plane{p}" for p in range(8)))
"""The streams of a payload in the order in which they travel; plane p holds byte p of every word, least first."""
LAYOUTS = tuple(range(LOW_MAX + 1))
"""The item codecs of wire version 1: the streams of ``dcr.data_plane.streams``, with so many low half bytes apart."""

ZSTD_LEVEL = 1
_SHORT_INDEX_MAX = 1 << 32

Bytes = npt.NDArray[np.uint8]
Counts = tuple[int, int, int, int]
"""What an item's header states of its streams: bytes of gaps, numbers of long gaps, escapes and words."""


class _Contexts(threading.local):
    """A thread's zstd contexts: to make one costs as much as to compress a small stream."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


class StreamCodec(enum.IntEnum):
    """How the bytes of a stream travel."""

    RAW = 0
    ZSTD = 1


def long_gap_bytes(spec: TensorSpec) -> int:
    """Bytes that a long gap takes in an item of this tensor: 4 up to 2**32 elements, else 8."""
    return 4 if spec.numel <= _SHORT_INDEX_MAX else 8


@dataclass(frozen=True)
class ItemBytes:
    """One item as it goes into the streams of a payload.

    Attributes:
        layout: one of LAYOUTS.
        parts: its bytes in each of STREAMS.
    """

    layout: int
    parts: tuple[Bytes, ...]


def stream_sizes(spec: TensorSpec, operation: Operation, layout: int, entries: int, counts: Counts) -> tuple[int, ...]:
    """Bytes that one item takes in each of ``STREAMS``, from the numbers in its header."""
    gap_bytes, long_gaps, escapes, words = counts
    width, pairs = spec.dtype.itemsize, (entries + 1) // 2
    nibbles = 0 if operation is Operation.SET else pairs
    planes = (words,) * width + (0,) * (8 - width)
    return (layout * pairs, gap_bytes, long_gaps * long_gap_bytes(spec), nibbles, escapes, *planes)


def counts_of(spec: TensorSpec, written: ItemBytes) -> Counts:
    """What an item's header states, beside the entries, of its bytes."""
    _, gaps, long_gaps, _, escapes, first, *_ = (part.size for part in written.parts)
    return gaps, long_gaps // long_gap_bytes(spec), escapes, first


def entry_digest(item: Item) -> bytes:
    """XXH3-128 (big-endian) over the indices as int64, then the values, both little-endian."""
    h = xxhash.xxh3_128()
    for tensor in (item.indices, item.values):
        array = tensor.cpu().contiguous().numpy()
        h.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
    return h.digest()


def to_bytes(spec: TensorSpec, layout: int, streams: ItemStreams) -> ItemBytes:
    """One item's bytes for each of ``STREAMS``, little-endian."""
    long_gaps = streams.long_gaps.cpu().numpy().astype(f"<u{long_gap_bytes(spec)}").view(np.uint8)
    words = streams.words.cpu().numpy()
    planes = [((words >> (8 * p)) & 0xFF).astype(np.uint8) for p in range(spec.dtype.itemsize)]
    unused = [np.empty(0, np.uint8)] * (8 - len(planes))
    low, gaps, nibbles, escapes = (
        stream.cpu().numpy() for stream in (streams.low, streams.gaps, streams.nibbles, streams.escapes)
    )
    return ItemBytes(layout, (low, gaps, long_gaps, nibbles, escapes, *planes, *unused))


def from_bytes(spec: TensorSpec, written: ItemBytes) -> ItemStreams:
    """What ``to_bytes`` wrote, as tensors on the CPU."""
    low, gaps, long_gaps, nibbles, escapes, *planes = written.parts
    words = np.zeros(planes[0].size, np.int64)
    for p in range(spec.dtype.itemsize):
        words |= planes[p].astype(np.int64) << (8 * p)
    wide = np.frombuffer(long_gaps.tobytes(), f"<u{long_gap_bytes(spec)}").astype(np.uint64).view(np.int64)
    return ItemStreams(*(torch.from_numpy(part) for part in (low, gaps, wide, nibbles, escapes, words)))


def split(stream: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """A stream cut into its items; the sizes add up to its length."""
    return [stream[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def compress(raw: Bytes) -> tuple[StreamCodec, bytes]:
    """One zstd frame that states its content size, or the bytes as they are where that is no longer."""
    frame = _contexts.compressor.compress(raw.data) if raw.size else b""
    return (StreamCodec.ZSTD, frame) if len(frame) < raw.size else (StreamCodec.RAW, raw.tobytes())


def decompress(codec: StreamCodec, wire: memoryview, raw_bytes: int) -> Bytes:
    """The bytes of a stream; never more than ``raw_bytes`` are allocated, which the caller has checked.

    Raises:
        CorruptPayloadError: not one whole frame of exactly this size.
    """
    if codec is StreamCodec.RAW:
        return np.frombuffer(bytearray(wire), np.uint8)
    try:
        # The library allocates what the frame states, so that has to be compared first.
        stated = zstandard.get_frame_parameters(wire).content_size
        if stated != raw_bytes:
            raise CorruptPayloadError(f"its frame states {stated} bytes, the header {raw_bytes}")
        raw = _contexts.decompressor.decompress(wire, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPayloadError(f"not one whole zstd frame: {error}") from error
    if len(raw) != raw_bytes:
        raise CorruptPayloadError(f"its frame holds {len(raw)} bytes, the header states {raw_bytes}")
    return np.frombuffer(bytearray(raw), np.uint8)
