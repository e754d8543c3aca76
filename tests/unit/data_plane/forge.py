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


def seal(header: bytes, body: bytes) -> bytes:
    """A payload with right lengths and a right wire digest around anything."""
    fields = struct.pack("<4sIQQ", b"DCRP", 0, len(header), len(body))
    return fields + xxhash.xxh3_128_digest(fields + header + body) + header + body


def open_up(data: bytes) -> tuple[dict, list[bytes]]:
    header_bytes = struct.unpack("<Q", data[8:16])[0]
    header = msgspec.msgpack.decode(data[40 : 40 + header_bytes])
    at = 40 + header_bytes
    raws = []
    for codec, _, wire in header["streams"]:
        frame = data[at : at + wire]
        raws.append(zstandard.ZstdDecompressor().decompress(frame) if codec else frame)
        at += wire
    return header, raws


def rebuild(data: bytes, edit=lambda header, raws: None, recompress=None) -> bytes:
    """The payload with an edited header and edited raw streams, consistent in everything that was not edited."""
    header, raws = open_up(data)
    edit(header, raws)
    body = b""
    for k, raw in enumerate(raws):
        frame = (recompress or zstandard.ZstdCompressor(level=1).compress)(raw)
        wire = frame if len(frame) < len(raw) else raw
        header["streams"][k] = [int(wire is frame), len(raw), len(wire)]
        body += wire
    return seal(msgspec.msgpack.encode(header), body)


def frames(header, wires):
    """A payload of these wire bytes, with the header's own sizes."""
    for k, wire in enumerate(wires):
        header["streams"][k][2] = len(wire)
    return seal(msgspec.msgpack.encode(header), b"".join(wires))
