"""The payload container: a preamble, a header, and the streams of all items (docs/wire-format.md)."""

import hashlib
import struct
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

import numpy as np
import xxhash

from dcr.data_plane import codec
from dcr.data_plane.bits import dtype_name
from dcr.data_plane.header import (
    DEFAULT_LIMITS,
    ItemHeader,
    Limits,
    PayloadHeader,
    StreamHeader,
    check_limits,
    decode_header,
    encode_header,
)
from dcr.data_plane.item import Item, TensorSpec
from dcr.data_plane.kernels.stream_choice import stream_kernels
from dcr.data_plane.kernels.stream_kernels import StreamKernels
from dcr.protocol.errors import CorruptPayloadError, RefusedError
from dcr.protocol.identity import Base, PayloadIdentity

MAGIC = b"DCRP"
WIRE_VERSION = 1
_FIELDS = struct.Struct("<4sIIIQ")  # magic, wire version, header bytes as they travel, header bytes, body bytes
_DIGEST_BYTES = 16
PREAMBLE_BYTES = _FIELDS.size + _DIGEST_BYTES
_NOTHING = np.empty(0, np.uint8)


def encode_payload(
    identity: PayloadIdentity, base: Base, items: Sequence[Item], kernels: StreamKernels | None = None
) -> bytes:
    """Write items as one payload; the same input and zstd library give the same bytes, whatever the backend.

    Args:
        identity: who sends it, for which attempt.
        base: what it was made against; only a relative one may hold ``add`` and ``xor`` items.
        items: on any device; items of one tensor have no index in common.
        kernels: the backend; None for the fastest one.

    Raises:
        RefusedError: an item or the whole is not what a receiver would take, whatever its limits.
    """
    kernels = kernels or stream_kernels(i.indices for i in items)

    def write(item: Item) -> tuple[ItemHeader, tuple[codec.Bytes, ...]]:
        written, digest = kernels.encode(item)
        return _item_header(item, written, digest), written.parts

    written = kernels.each(write, items, [item.entries for item in items])
    _check_disjoint(items)
    columns = zip(*(parts for _, parts in written), strict=True)
    raws = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
    raw_bytes = [raw.size for raw in raws]
    streams, wires = [], kernels.each(codec.compress, raws, raw_bytes)
    for k, (how, wire) in enumerate(wires):
        if raw_bytes[k]:
            streams.append(StreamHeader(k, how, raw_bytes[k], len(wire)))
    body = b"".join(wire for _, wire in wires)
    headers = tuple(header for header, _ in written)
    plain = encode_header(PayloadHeader(identity, base, headers, tuple(streams)))
    decode_header(plain, len(body), len(items))  # what no receiver would take is refused here, by the same checks
    header = codec.compress(np.frombuffer(plain, np.uint8))[1]
    fields = _FIELDS.pack(MAGIC, WIRE_VERSION, len(header), len(plain), len(body))
    return b"".join((fields, _wire_digest(fields, header, body), header, body))


def payload_digest(data: bytes | memoryview) -> str:
    """Hexadecimal SHA-256 of the whole payload as it travels: the line of a manifest, which may be signed."""
    return hashlib.sha256(data).hexdigest()


def read_header(data: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> PayloadHeader:
    """Check a payload's bounds, digest and header; nothing is decompressed.

    Args:
        data: the whole payload, which may hold anything.
        limits: what to take at most.

    Raises:
        CorruptPayloadError: not the bytes of a payload, or its header disagrees with itself.
        RefusedError: a wire version that is not known, or more than the limits allow.
    """
    view = memoryview(data).cast("B")
    found = len(view)
    if found > limits.payload_bytes_max:
        raise RefusedError(f"payload of {found} bytes, at most {limits.payload_bytes_max} are allowed")
    if found < PREAMBLE_BYTES:
        raise CorruptPayloadError(f"payload of {found} bytes, the preamble alone has {PREAMBLE_BYTES}")
    magic, version, wire_bytes, header_bytes, body_bytes = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        raise CorruptPayloadError(f"payload begins with {magic!r}, not {MAGIC!r}")
    if version != WIRE_VERSION:
        raise RefusedError(f"payload of wire version {version}, only {WIRE_VERSION} is known: run the same release")
    if header_bytes > limits.header_bytes_max:
        raise RefusedError(f"payload header of {header_bytes} bytes, at most {limits.header_bytes_max} are allowed")
    if PREAMBLE_BYTES + wire_bytes + body_bytes != found:
        raise CorruptPayloadError(
            f"payload of {found} bytes states {PREAMBLE_BYTES} + {wire_bytes} + {body_bytes}: cut short or extended"
        )
    body = PREAMBLE_BYTES + wire_bytes
    header = view[PREAMBLE_BYTES:body]
    digest = view[_FIELDS.size : PREAMBLE_BYTES]
    if _wire_digest(view[: _FIELDS.size], header, view[body:]) != digest:
        raise CorruptPayloadError("payload does not match its own digest: damaged on the way")
    read = decode_header(_plain_header(header, header_bytes), body_bytes, limits.items_max)
    check_limits(read, limits)
    return read


def _plain_header(wire: memoryview, header_bytes: int) -> memoryview:
    """The header before compression, never more than ``header_bytes`` bytes, which the caller has checked."""
    if len(wire) > header_bytes:
        raise CorruptPayloadError(f"payload header of {header_bytes} bytes takes {len(wire)}: never compressed so")
    how = codec.StreamCodec.ZSTD if len(wire) < header_bytes else codec.StreamCodec.RAW
    try:
        return codec.decompress(how, wire, header_bytes).data
    except CorruptPayloadError as error:
        raise CorruptPayloadError(f"payload header: {error}") from error


def decode_payload(
    data: bytes | memoryview,
    limits: Limits = DEFAULT_LIMITS,
    known: Mapping[str, TensorSpec] | None = None,
    skip: Container[str] = frozenset(),
    kernels: StreamKernels | None = None,
) -> tuple[PayloadHeader, list[Item]]:
    """Read a payload.

    Args:
        data: the whole payload, which may hold anything.
        limits: what to take at most.
        known: the canonical tensors that the receiver has, by name; None to take any.
        skip: canonical tensors of which this rank holds nothing: the entries of their items are not decoded.  What
            the header states of them, and the digest of the whole, are checked as for the others.
        kernels: the backend; None for the fastest one.

    Returns:
        The header, and its items in order but for those skipped, on the CPU.

    Raises:
        CorruptPayloadError: not what a sender of this format seals.
        RefusedError: more than the limits allow, or a tensor that is not known; nothing was decompressed.
    """
    header = read_header(data, limits)
    if known is not None:
        _check_known(header, known)
    try:
        items = _decode_items(header, memoryview(data).cast("B"), skip, kernels or stream_kernels())
        _check_disjoint(items)
    except RefusedError as error:
        raise CorruptPayloadError(f"{header.where}: {error}") from error
    return header, items


def _decode_items(header: PayloadHeader, data: memoryview, skip: Container[str], kernels: StreamKernels) -> list[Item]:
    wires = []
    start = len(data) - sum(stream.wire_bytes for stream in header.streams)
    for stream in header.streams:
        wires.append((stream, data[start : start + stream.wire_bytes]))
        start += stream.wire_bytes
    sizes = [item.stream_sizes for item in header.items]
    columns = [[_NOTHING] * len(sizes) for _ in codec.STREAMS]
    raws = kernels.each(_decompressed, wires, [stream.raw_bytes for stream in header.streams])
    for stream, raw in zip(header.streams, raws, strict=True):
        columns[stream.stream] = codec.split(raw, [size[stream.stream] for size in sizes])

    def read(found: tuple[ItemHeader, tuple[codec.Bytes, ...]]) -> Item:
        stated, parts = found
        written = codec.ItemBytes(stated.codec, parts)
        item, digest = kernels.decode(stated.spec, stated.operation, stated.entries, written)
        if digest != stated.digest:
            raise CorruptPayloadError(f"item {stated.name!r}: decoded entries do not match their digest")
        return item

    held = [found for found in zip(header.items, zip(*columns, strict=True), strict=True) if found[0].name not in skip]
    return kernels.each(read, held, [stated.entries for stated, _ in held])


def _decompressed(found: tuple[StreamHeader, memoryview]) -> codec.Bytes:
    stream, wire = found
    try:
        return codec.decompress(stream.codec, wire, stream.raw_bytes)
    except CorruptPayloadError as error:
        raise CorruptPayloadError(f"stream {codec.STREAMS[stream.stream]}: {error}") from error


def _item_header(item: Item, written: codec.ItemBytes, digest: bytes) -> ItemHeader:
    return ItemHeader(
        name=item.spec.name,
        dtype=dtype_name(item.spec.dtype),
        shape=tuple(item.spec.shape),
        operation=item.operation,
        codec=written.layout,
        entries=item.entries,
        counts=codec.counts_of(item.spec, written),
        digest=digest,
    )


def _wire_digest(*parts: bytes | bytearray | memoryview) -> bytes:
    h = xxhash.xxh3_128()
    for part in parts:
        h.update(part)
    return h.digest()


def _check_known(header: PayloadHeader, known: Mapping[str, TensorSpec]) -> None:
    for item in header.items:
        mine = known.get(item.name)
        if mine is None:
            raise RefusedError(f"{header.where}: the receiver has no tensor {item.name!r}")
        if (mine.dtype, tuple(mine.shape)) != (item.spec.dtype, item.shape):
            raise RefusedError(
                f"{header.where}: tensor {item.name!r} comes as {item.dtype} {item.shape}, "
                f"the receiver has {dtype_name(mine.dtype)} {tuple(mine.shape)}"
            )


def _check_disjoint(items: Sequence[Item]) -> None:
    """Two entries for one element would leave its value to the order of application; each item is in order."""
    by_name: dict[str, list[Item]] = {}
    for item in items:
        if item.entries:
            by_name.setdefault(item.spec.name, []).append(item)
    for name, found in by_name.items():
        if len(found) == 1:
            continue  # an index that is read from a device holds up what is done there
        indices = sorted((item.indices for item in found), key=lambda i: int(i[0]))
        if all(int(a[-1]) < int(b[0]) for a, b in pairwise(indices)):
            continue  # as an owner cuts them: one after the other, which need not be merged to be seen
        merged = np.concatenate([i.cpu().numpy() for i in indices])
        merged.sort()  # in place: torch would need three times as much
        if bool((merged[1:] == merged[:-1]).any()):
            raise RefusedError(f"tensor {name!r}: two of its items have an index in common")
