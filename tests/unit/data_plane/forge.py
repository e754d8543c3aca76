"""Small payloads, and payloads forged out of them that are right in everything but what was edited."""

import functools
import struct

import msgspec
import torch
import xxhash
import zstandard

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import encode_payload
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from tests.unit.data_plane.strategies import bits

IDENTITY = PayloadIdentity("run", 8, 3, "rank0", 1, 0)
RELATIVE = Base(Kind.RELATIVE, 7, "00ff", "c")
DENSE = Base(Kind.DENSE, 7, "", "c")


def item(operation=Operation.SET, indices=(1, 4), values=(5, 6), *, name="w", shape=(10,), dtype=torch.bfloat16):
    return Item(
        TensorSpec(name, shape, dtype), operation, torch.tensor(indices, dtype=torch.int64), bits(dtype, list(values))
    )


@functools.cache
def example() -> bytes:
    """One payload that uses every stream, some of them compressed."""
    many = range(0, 40_000, 3)
    return encode_payload(
        IDENTITY,
        RELATIVE,
        [
            item(Operation.ADD, many, [1 + i % 400 for i in many], shape=(200, 200)),
            item(Operation.XOR, (5, 3000, 90_000), (3, 200, 2**63), name="x", shape=(100_000,), dtype=torch.float64),
            item(Operation.SET, (0, 2), (0x7FC1, 0x8000), name="s", shape=(3, 1)),
        ],
    )


def small(**kwargs) -> bytes:
    return encode_payload(IDENTITY, RELATIVE, [item(**kwargs)])


STREAMS = 13
LOW, GAPS, LONG_GAPS, NIBBLES, ESCAPES, PLANE0 = range(6)


def seal(header: bytes, body: bytes, plain_bytes=None) -> bytes:
    """A payload with right lengths and a right wire digest around anything; the header travels as it is given."""
    plain_bytes = len(header) if plain_bytes is None else plain_bytes
    fields = struct.pack("<4sIIIQ", b"DCRP", 1, len(header), plain_bytes, len(body))
    return fields + xxhash.xxh3_128_digest(fields + header + body) + header + body


def split(data: bytes) -> tuple[bytes, bytes]:
    """The header before compression, and the body."""
    wire, plain = struct.unpack("<II", data[8:16])
    header = data[40 : 40 + wire]
    return zstandard.ZstdDecompressor().decompress(header) if wire < plain else header, data[40 + wire :]


def open_up(data: bytes) -> tuple[dict, list[bytes]]:
    """The header, and the raw bytes of all thirteen streams."""
    header, body = split(data)
    header = msgspec.msgpack.decode(header)
    at, raws = 0, [b""] * STREAMS
    for stream, codec, _, wire in header["streams"]:
        frame = body[at : at + wire]
        raws[stream] = zstandard.ZstdDecompressor().decompress(frame) if codec else frame
        at += wire
    return header, raws


def rebuild(data: bytes, edit=lambda header, raws: None, recompress=None) -> bytes:
    """The payload with an edited header and edited raw streams, consistent in everything that was not edited."""
    header, raws = open_up(data)
    edit(header, raws)
    return pack(header, raws, recompress)


def pack(header, raws, recompress=None) -> bytes:
    """A payload of these raw streams; the header's own streams are forgotten."""
    compress = recompress or zstandard.ZstdCompressor(level=1).compress
    header["streams"], body = [], b""
    for k, raw in enumerate(raws):
        frame = compress(raw)
        wire = frame if len(frame) < len(raw) else raw
        if raw:
            header["streams"].append([k, int(wire is frame), len(raw), len(wire)])
        body += wire
    plain = msgspec.msgpack.encode(header)
    short = compress(plain)
    return seal(short if len(short) < len(plain) else plain, body, len(plain))


def frames(header, wires):
    """A payload of these wire bytes, one for each stream of the header, with the header's own sizes before."""
    for k, wire in enumerate(wires):
        header["streams"][k][3] = len(wire)
    return seal(msgspec.msgpack.encode(header), b"".join(wires))
