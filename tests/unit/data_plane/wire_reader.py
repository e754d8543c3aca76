"""A second reader of payloads, written from docs/wire-format.md alone: plain loops over Python integers, no torch."""

import struct

import msgspec
import xxhash
import zstandard

NAMES = {
    1: "bool float8_e4m3fn float8_e5m2 float8_e8m0fnu int8 uint8",
    2: "bfloat16 float16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64",
}
WIDTHS = {name: width for width, names in NAMES.items() for name in names.split()}


def read(data: bytes):
    """(header as plain maps and arrays, [(name, dtype, shape, operation, {index: unsigned value})])."""
    magic, version, wire_bytes, header_bytes, body_bytes = struct.unpack("<4sIIIQ", data[:24])
    assert (magic, version) == (b"DCRP", 1)
    assert len(data) == 40 + wire_bytes + body_bytes
    assert wire_bytes <= header_bytes
    assert xxhash.xxh3_128_digest(data[:24] + data[40:]) == data[24:40]
    header = data[40 : 40 + wire_bytes]
    header = zstandard.ZstdDecompressor().decompress(header) if wire_bytes < header_bytes else header
    assert len(header) == header_bytes
    header = msgspec.msgpack.decode(header)
    at = 40 + wire_bytes
    streams = [iter(b"") for _ in range(13)]
    before = -1
    for number, codec, raw_bytes, wire_bytes in header["streams"]:
        assert before < number
        before = number
        wire = data[at : at + wire_bytes]
        at += wire_bytes
        raw = zstandard.ZstdDecompressor().decompress(wire) if codec == 1 else wire
        assert len(raw) == raw_bytes > 0
        streams[number] = iter(raw)
    assert at == len(data)
    items = [_item(fields, streams) for fields in header["items"]]
    assert all(next(stream, None) is None for stream in streams)
    return header, items


def _item(fields, streams):
    low, gaps, longs, nibbles, escapes, *planes = streams
    name, dtype, shape, operation, codec, entries, _counts, digest = fields
    assert codec in (0, 1, 2, 3)
    width = WIDTHS[dtype]
    numel = 1
    for n in shape:
        numel *= n
    long_bytes = 8 if numel > 2**32 else 4

    lows = [0] * entries
    for plane in range(codec):
        for k, half in enumerate(_halves(entries, low)):
            lows[k] += half * 16**plane
    indices, index = [], -1
    for k in range(entries):
        high = 0
        byte = next(gaps)
        while byte == 254:
            high += 254
            byte = next(gaps)
        high += int.from_bytes(bytes(next(longs) for _ in range(long_bytes)), "little") if byte == 255 else byte
        index += high * 16**codec + lows[k] + 1
        indices.append(index)

    if operation == "set":
        values = _set_values(entries, width, planes)
    else:
        values = [_value(operation, c, width) for c in _codes(entries, nibbles, escapes, planes[:width])]
    canonical = b"".join(struct.pack("<q", i) for i in indices) + b"".join(v.to_bytes(width, "little") for v in values)
    assert xxhash.xxh3_128_digest(canonical) == digest
    return name, dtype, tuple(shape), operation, dict(zip(indices, values, strict=True))


def _halves(entries, pairs):
    halves = []
    while len(halves) < entries:
        byte = next(pairs)
        halves += [byte % 16, byte // 16]
    assert not any(halves[entries:])
    return halves[:entries]


def _word(planes):
    return sum(next(plane) << (8 * p) for p, plane in enumerate(planes))


def _set_values(entries, width, planes):
    rotated = [_word(planes[:width]) for _ in range(entries)]
    return [(r >> 1) | ((r & 1) << (8 * width - 1)) for r in rotated]


def _codes(entries, nibbles, escapes, planes):
    for half in _halves(entries, nibbles):
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
