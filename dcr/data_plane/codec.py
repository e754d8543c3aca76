"""The streams of all items of a payload as bytes: joined item after item, each stream one zstd frame."""

import enum
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from dcr.data_plane.item import TensorSpec
from dcr.data_plane.streams import ItemStreams
from dcr.protocol.errors import CorruptPayloadError

STREAMS = ("gaps", "long_gaps", "nibbles", "escapes", *(f"plane{p}" for p in range(8)))
"""The streams of a payload in the order in which they travel; plane p holds byte p of every word, least first."""

ZSTD_LEVEL = 1
_SHORT_INDEX_MAX = 1 << 32

Bytes = npt.NDArray[np.uint8]


class StreamCodec(enum.IntEnum):
    """How the bytes of a stream travel."""

    RAW = 0
    ZSTD = 1


def long_gap_bytes(spec: TensorSpec) -> int:
    """Bytes that a long gap takes in an item of this tensor: 4 up to 2**32 elements, else 8."""
    return 4 if spec.numel <= _SHORT_INDEX_MAX else 8


def stream_sizes(
    spec: TensorSpec, *, entries: int, gap_bytes: int, long_gaps: int, escapes: int, words: int, is_set: bool
) -> tuple[int, ...]:
    """Bytes that one item takes in each of ``STREAMS``, from the counts in its header."""
    width = spec.dtype.itemsize
    nibbles = 0 if is_set else (entries + 1) // 2
    planes = (words,) * width + (0,) * (8 - width)
    return (gap_bytes, long_gaps * long_gap_bytes(spec), nibbles, escapes, *planes)


def to_bytes(spec: TensorSpec, streams: ItemStreams) -> list[Bytes]:
    """One item's bytes for each of ``STREAMS``, little-endian."""
    long_gaps = streams.long_gaps.cpu().numpy().astype(f"<u{long_gap_bytes(spec)}").view(np.uint8)
    words = streams.words.cpu().numpy()
    planes = [((words >> (8 * p)) & 0xFF).astype(np.uint8) for p in range(spec.dtype.itemsize)]
    unused = [np.empty(0, np.uint8)] * (8 - len(planes))
    small = (streams.gaps.cpu().numpy(), long_gaps, streams.nibbles.cpu().numpy(), streams.escapes.cpu().numpy())
    return [*small, *planes, *unused]


def from_bytes(spec: TensorSpec, parts: Sequence[Bytes]) -> ItemStreams:
    """What ``to_bytes`` wrote, as tensors on the CPU."""
    gaps, long_gaps, nibbles, escapes, *planes = parts
    words = np.zeros(planes[0].size, np.int64)
    for p in range(spec.dtype.itemsize):
        words |= planes[p].astype(np.int64) << (8 * p)
    wide = np.frombuffer(long_gaps.tobytes(), f"<u{long_gap_bytes(spec)}").astype(np.uint64).view(np.int64)
    return ItemStreams(*(torch.from_numpy(part) for part in (gaps, wide, nibbles, escapes, words)))


def split(stream: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """A stream cut into its items; the sizes add up to its length."""
    return [stream[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def compress(raw: Bytes) -> tuple[StreamCodec, bytes]:
    """One zstd frame that states its content size, or the bytes as they are where that is no longer."""
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw.data) if raw.size else b""
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
        raw = zstandard.ZstdDecompressor().decompress(wire, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptPayloadError(f"not one whole zstd frame: {error}") from error
    if len(raw) != raw_bytes:
        raise CorruptPayloadError(f"its frame holds {len(raw)} bytes, the header states {raw_bytes}")
    return np.frombuffer(bytearray(raw), np.uint8)
