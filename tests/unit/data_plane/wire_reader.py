"""A second reader of payloads, written from docs/wire-format.md alone: plain loops over Python integers, no torch."""

import struct

import msgspec
import xxhash
import zstandard

WIDTHS = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8}


def read(data: bytes):
    """(header as plain maps and arrays, [(name, dtype, shape, operation, {index: unsigned value})])."""
    magic, version, header_bytes, body_bytes = struct.unpack("<4sIQQ", data[:24])
    assert (magic, version) == (b"DCRP", 0)
    assert len(data) == 40 + header_bytes + body_bytes
    assert xxhash.xxh3_128_digest(data[:24] + data[40:]) == data[24:40]
    header = msgspec.msgpack.decode(data[40 : 40 + header_bytes])
    at = 40 + header_bytes
    streams = []
    for codec, raw_bytes, wire_bytes in header["streams"]:
        wire = data[at : at + wire_bytes]
        at += wire_bytes
        raw = zstandard.ZstdDecompressor().decompress(wire) if codec == 1 else wire
        assert len(raw) == raw_bytes
        streams.append(iter(raw))
    assert len(streams) == 12
    assert at == len(data)
    items = [_item(fields, streams) for fields in header["items"]]
    assert all(next(stream, None) is None for stream in streams)
    return header, items


def _item(fields, streams):
    gaps, longs, nibbles, escapes, *planes = streams
    name, dtype, shape, operation, codec, entries, *_counts, digest = fields
    assert codec == 0
    width = WIDTHS[dtype]
    numel = 1
    for n in shape:
        numel *= n
    long_bytes = 8 if numel > 2**32 else 4

    indices, index = [], -1
    for _ in range(entries):
        gap = 0
        byte = next(gaps)
        while byte == 254:
            gap += 254
            byte = next(gaps)
        gap += int.from_bytes(bytes(next(longs) for _ in range(long_bytes)), "little") if byte == 255 else byte
        index += gap + 1
        indices.append(index)

    if operation == "set":
        values = _set_values(entries, width, planes)
    else:
        values = [_value(operation, c, width) for c in _codes(entries, nibbles, escapes, planes[:width])]
    canonical = b"".join(struct.pack("<q", i) for i in indices) + b"".join(v.to_bytes(width, "little") for v in values)
    assert xxhash.xxh3_128_digest(canonical) == digest
    return name, dtype, tuple(shape), operation, dict(zip(indices, values, strict=True))


def _word(planes):
    return sum(next(plane) << (8 * p) for p, plane in enumerate(planes))


def _set_values(entries, width, planes):
    rotated = [_word(planes[:width]) for _ in range(entries)]
    return [(r >> 1) | ((r & 1) << (8 * width - 1)) for r in rotated]


def _codes(entries, nibbles, escapes, planes):
    halves = []
    while len(halves) < entries:
        byte = next(nibbles)
        halves += [byte % 16, byte // 16]
    assert not any(halves[entries:])
    for half in halves[:entries]:
        if half < 15:
            yield half
        else:
            escape = next(escapes)
            yield _word(planes) if escape == 255 else escape + 15


def _value(operation, code, width):
    if operation == "xor":
        return code + 1
    z = code + 1
    return (z // 2 if z % 2 == 0 else -(z + 1) // 2) % (1 << 8 * width)
