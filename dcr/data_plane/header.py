"""The header of a payload: what it states, and every check that needs no decompression (docs/wire-format.md)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from dcr.data_plane.bits import dtype_of
from dcr.data_plane.codec import LAYOUTS, STREAMS, StreamCodec, stream_sizes
from dcr.data_plane.item import Operation, TensorSpec
from dcr.data_plane.streams import LONG_GAP_MIN
from dcr.protocol.errors import CorruptPayloadError, RefusedError
from dcr.protocol.identity import Base, Kind, PayloadIdentity

INTEGER_MAX = (1 << 63) - 1
"""No number in a header, and no tensor's number of elements, is larger."""
TEXT_MAX = 1024
"""No string in a header has more characters."""
DIMENSIONS_MAX = 32
COUNTS = 4
"""Numbers that the item codecs of this version state: ``codec.Counts``."""
COUNTS_MAX = 16
"""No item codec, known here or later, states more numbers of its streams."""
STREAMS_MAX = 64
"""No payload has more streams."""

Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]


@dataclass(frozen=True)
class Limits:
    """What a receiver is ready to take in one payload."""

    payload_bytes_max: int = 256 << 20
    """The whole payload as it travels."""
    header_bytes_max: int = 16 << 20
    """The header before compression."""
    items_max: int = 1 << 16
    entries_max: int = 1 << 26
    decoded_bytes_max: int = 1 << 30
    """All streams decompressed, and 8 bytes of index and the bytes of the value for every entry.

    Decoding takes at most twice as much for a while, for a refused payload too (numba kernels).
    """


DEFAULT_LIMITS = Limits()


class ItemHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """What the header states of one item."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Count, ...], Meta(max_length=DIMENSIONS_MAX)]
    operation: Operation
    codec: Count
    entries: Count
    counts: Annotated[tuple[Count, ...], Meta(max_length=COUNTS_MAX)]
    """As the codec defines them; for the codecs of this version, ``codec.Counts``."""
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """XXH3-128 (big-endian) over the indices as int64, then the values, both little-endian."""

    @cached_property  # asked for by every check of a payload that may hold thousands of items
    def spec(self) -> TensorSpec:
        """The canonical tensor; RefusedError for a dtype that does not travel."""
        return TensorSpec(self.name, self.shape, dtype_of(self.dtype))

    @cached_property
    def stream_sizes(self) -> tuple[int, ...]:
        """The item's bytes in each of ``codec.STREAMS``."""
        gap_bytes, long_gaps, escapes, words = self.counts
        return stream_sizes(self.spec, self.operation, self.codec, self.entries, (gap_bytes, long_gaps, escapes, words))

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the decoded indices and values."""
        return self.entries * (8 + self.spec.dtype.itemsize)


class StreamHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one stream of the body travels."""

    stream: Count
    """Its place in ``codec.STREAMS``."""
    codec: StreamCodec
    raw_bytes: Count
    wire_bytes: Count


class PayloadHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole header; a stream header for each of ``codec.STREAMS`` that is not empty, in their order."""

    identity: PayloadIdentity
    base: Base
    items: tuple[ItemHeader, ...]
    streams: Annotated[tuple[StreamHeader, ...], Meta(max_length=STREAMS_MAX)]

    @property
    def entries(self) -> int:
        """Entries of all items."""
        return sum(item.entries for item in self.items)

    @property
    def where(self) -> str:
        """The payload's name in messages."""
        i = self.identity
        return (
            f"payload of record {i.record_id!r}, target {i.target}, epoch {i.epoch}, owner {i.owner!r} "
            f"incarnation {i.owner_incarnation}, sequence {i.sequence}"
        )


class _Outline(msgspec.Struct):
    """A header whose items are counted before any of them is made into an object."""

    items: msgspec.Raw


_decoder = msgspec.msgpack.Decoder(PayloadHeader)
_outline_decoder = msgspec.msgpack.Decoder(_Outline)


def encode_header(header: PayloadHeader) -> bytes:
    """The header's canonical bytes; RefusedError for text that is not Unicode or a number beyond 64 bits."""
    try:
        return msgspec.msgpack.encode(header)
    except (ValueError, OverflowError) as error:
        raise RefusedError(f"payload header cannot be written: {error}") from error


def decode_header(data: bytes | memoryview, body_bytes: int, items_max: int) -> PayloadHeader:
    """Read a header and check that it agrees with itself and with the length of the body.

    Raises:
        CorruptPayloadError: the bytes are not the canonical form of a header that agrees.
        RefusedError: more than items_max items, which are not looked at, or an item codec that is not known.
    """
    try:
        count = _array_length(_outline_decoder.decode(data).items)
        if count > items_max:
            raise RefusedError(f"payload header: {count} items, at most {items_max} are allowed")
        header = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptPayloadError(f"payload header: {error}") from error
    _check_identity(header)
    if encode_header(header) != data:
        raise CorruptPayloadError(f"{header.where}: its header is not in canonical form")
    for item in header.items:
        if item.codec not in LAYOUTS:
            raise RefusedError(
                f"{header.where}: item {item.name!r} has item codec {item.codec}, this release knows only "
                f"{', '.join(map(str, LAYOUTS))}: run the release of the trainer"
            )
        problem = _item_problem(item, header.base.kind)
        if problem:
            raise CorruptPayloadError(f"{header.where}: item {item.name!r}: {problem}")
    _check_specs(header)
    _check_streams(header, body_bytes)
    return header


def _array_length(raw: msgspec.Raw) -> int:
    """What a MessagePack array states as its length; 0 for anything else, which the whole decoder refuses."""
    head = bytes(memoryview(raw)[:5])
    if head[0] in range(0x90, 0xA0):
        return head[0] - 0x90
    return int.from_bytes(head[1 : {0xDC: 3, 0xDD: 5}.get(head[0], 1)], "big")


def check_limits(header: PayloadHeader, limits: Limits) -> None:
    """Raise RefusedError where a checked header states more to decode than a receiver is ready to take."""
    decoded = sum(item.decoded_bytes for item in header.items) + sum(s.raw_bytes for s in header.streams)
    for what, found, allowed in (
        ("entries", header.entries, limits.entries_max),
        ("decoded bytes", decoded, limits.decoded_bytes_max),
    ):
        if found > allowed:
            raise RefusedError(f"{header.where}: {found} {what}, at most {allowed} are allowed")


def _check_identity(header: PayloadHeader) -> None:
    i, b = header.identity, header.base
    for text in (i.record_id, i.owner, b.baseline_id, b.candidate):
        if len(text) > TEXT_MAX:
            raise CorruptPayloadError(f"payload header: a name of {len(text)} characters, at most {TEXT_MAX}")
    for number in (i.target, i.epoch, i.owner_incarnation, i.sequence, b.version):
        if not 0 <= number <= INTEGER_MAX:
            raise CorruptPayloadError(f"payload header: identity or base has {number}, not within 0 to {INTEGER_MAX}")


def _item_problem(item: ItemHeader, kind: Kind) -> str:
    """What is wrong with an item's header, or nothing."""
    try:
        spec = item.spec
    except RefusedError as error:
        return str(error)
    is_set = item.operation is Operation.SET
    if spec.numel > INTEGER_MAX:
        return f"{spec.numel} elements, at most {INTEGER_MAX} are allowed"
    if len(item.counts) != COUNTS:
        return f"{len(item.counts)} counts, item codec {item.codec} has {COUNTS}"
    if not is_set and kind is not Kind.RELATIVE:
        return f"{item.operation} entries in a payload of kind {kind}, which only sets"
    gap_bytes, long_gaps, escapes, words = item.counts
    ranges = {
        "entries": (item.entries, 0, spec.numel),
        "gap bytes": (gap_bytes, item.entries, 4 * item.entries),
        "long gaps": (long_gaps, 0, min(item.entries, (spec.numel >> 4 * item.codec) // LONG_GAP_MIN)),
        "escapes": (escapes, 0, 0 if is_set else item.entries),
        "words": (words, item.entries if is_set else 0, item.entries if is_set else escapes),
    }
    for what, (found, low, high) in ranges.items():
        if not low <= found <= high:
            return f"{found} {what}, not within {low} to {high}"
    return ""


def _check_specs(header: PayloadHeader) -> None:
    seen: dict[str, ItemHeader] = {}
    for item in header.items:
        first = seen.setdefault(item.name, item)
        if (first.dtype, first.shape) != (item.dtype, item.shape):
            raise CorruptPayloadError(
                f"{header.where}: tensor {item.name!r} is {first.dtype} {first.shape} and {item.dtype} {item.shape}"
            )


def _check_streams(header: PayloadHeader, body_bytes: int) -> None:
    stated = [sum(sizes) for sizes in zip(*(i.stream_sizes for i in header.items), strict=True)]
    present = [k for k, raw in enumerate(stated) if raw]
    found = [stream.stream for stream in header.streams]
    if found != present:
        raise CorruptPayloadError(f"{header.where}: it has streams {found}, its items are in streams {present}")
    for stream in header.streams:
        name, raw = STREAMS[stream.stream], stated[stream.stream]
        if stream.raw_bytes != raw:
            raise CorruptPayloadError(f"{header.where}: stream {name}: {stream.raw_bytes} bytes, its items have {raw}")
        shorter = stream.wire_bytes < stream.raw_bytes
        if stream.wire_bytes > raw or shorter != (stream.codec is StreamCodec.ZSTD):
            raise CorruptPayloadError(
                f"{header.where}: stream {name}: {stream.wire_bytes} bytes of codec {stream.codec.name} for {raw}"
            )
    wire = sum(stream.wire_bytes for stream in header.streams)
    if wire != body_bytes:
        raise CorruptPayloadError(f"{header.where}: a body of {body_bytes} bytes, its streams have {wire}")
