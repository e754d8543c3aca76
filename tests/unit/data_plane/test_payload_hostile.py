"""Payloads against whatever a hostile sender may put on the wire: refusals, and nothing but refusals."""

import struct

import msgspec
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.item import Operation
from dcr.data_plane.payload import decode_payload, encode_payload
from dcr.protocol.errors import CorruptPayloadError, RefusedError
from tests.unit.data_plane import wire_reader
from tests.unit.data_plane.forge import DENSE, IDENTITY, RELATIVE, example, frames, item, open_up, rebuild, seal, small
from tests.unit.data_plane.strategies import payloads


def test_rebuilding_without_an_edit_is_harmless():
    assert rebuild(example()) == example()


NAME, DTYPE, SHAPE, OPERATION, CODEC, ENTRIES, GAP_BYTES, LONG_GAPS, ESCAPES, WORDS, DIGEST = range(11)


def field(position, value):
    def edit(header, raws):
        header["items"][0][position] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (field(DTYPE, "float4"), "unknown dtype name 'float4'"),
        (field(DTYPE, "float32"), "do not match their digest"),
        (field(OPERATION, "mul"), "Invalid enum value"),
        (field(CODEC, 1), "item codec 1"),
        (field(ENTRIES, 3), "gap bytes, not within 3"),
        (field(ENTRIES, 2**40), "entries, not within 0 to 10"),
        (field(ENTRIES, 2**63), "<= 9223372036854775807"),
        (field(ENTRIES, -1), ">= 0"),
        (field(ENTRIES, 2.0), "Expected `int`"),
        (field(GAP_BYTES, 3), "stream gaps: 2 bytes, its items have 3"),
        (field(LONG_GAPS, 1), "1 long gaps, not within 0 to 0"),
        (field(ESCAPES, 1), "stream escapes: 0 bytes, its items have 1"),
        (field(WORDS, 1), "1 words, not within 0 to 0"),
        (field(SHAPE, []), "2 entries, not within 0 to 1"),
        (field(SHAPE, [0]), "2 entries, not within 0 to 0"),
        (field(SHAPE, [2**62, 2**62]), "elements, at most"),
        (field(SHAPE, [4]), "run past the tensor's 4 elements"),
        (field(SHAPE, [1] * 33 + [10]), "length <= 32"),
        (field(DIGEST, b"\0" * 16), "do not match their digest"),
        (field(DIGEST, b""), "length >= 16"),
        (field(NAME, 7), "Expected `str`"),
        (lambda h, r: h["items"][0].append(0), "length 11"),
        (lambda h, r: h["items"][0].pop(), "length 11"),
        (lambda h, r: h["items"].append(h["items"][0]), "stream gaps: 2 bytes, its items have 4"),
        (lambda h, r: h.update(more=1), "unknown field `more`"),
        (lambda h, r: h["identity"].update(more=1), "unknown field `more`"),
        (lambda h, r: h.pop("base"), "missing required field `base`"),
        (lambda h, r: h["base"].update(kind="absolute"), "add entries in a payload of kind absolute"),
        (lambda h, r: h["base"].update(version=-1), "identity or base has -1"),
        (lambda h, r: h["identity"].update(epoch=2**63), "identity or base has 9223372036854775808"),
        (lambda h, r: h["identity"].update(owner="o" * 1025), "1025 characters"),
        (lambda h, r: h.update(base=h.pop("base")), "canonical form"),
        (lambda h, r: (h["streams"].pop(), r.pop()), "11 streams, not 12"),
        (lambda h, r: r.__setitem__(0, b"\x01\xff"), "long gaps: found 0, but 1"),
        (lambda h, r: r.__setitem__(0, b"\x01\xfe"), "1 complete gaps in 2 bytes"),
        (lambda h, r: r.__setitem__(0, b"\x01\x09"), "run past the tensor's 10 elements"),
        (lambda h, r: r.__setitem__(0, b"\x01\x0a"), "gap of 10 runs past"),
        (lambda h, r: r.__setitem__(0, b"\x01\x03"), "do not match their digest"),
        (lambda h, r: r.__setitem__(2, b"\x0f"), "escapes: found 0, but 1"),
        (lambda h, r: r.__setitem__(2, b"\x09"), "do not match their digest"),
    ],
)
def test_edited_headers_and_streams_are_refused_by_name(edit, message):
    data = rebuild(small(operation=Operation.ADD), edit)
    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(data)


def stream(k, value, **counts):
    def edit(header, raws):
        raws[k] = value
        for position, count in counts.items():
            header["items"][0][globals()[position]] = count

    return edit


@pytest.mark.parametrize(
    ("operation", "dtype", "edit", "message"),
    [
        ("add", torch.bfloat16, stream(2, b"\x15"), "half byte after the last one"),
        ("add", torch.bfloat16, stream(0, b"\xfe" * 4 + b"\0", GAP_BYTES=5), "5 gap bytes, not within 1 to 4"),
        ("add", torch.bfloat16, stream(0, b"\xfe" * 4, GAP_BYTES=4), "0 complete gaps"),
        ("add", torch.bfloat16, stream(2, b"\x0f", ESCAPES=1), "stream escapes: 0 bytes, its items have 1"),
        (
            "xor",
            torch.uint8,
            lambda h, r: (stream(2, b"\x0f", ESCAPES=1)(h, r), stream(3, b"\xf0")(h, r)),
            "past its width",
        ),
        ("xor", torch.bfloat16, lambda h, r: escape_word(h, r, 269, 2), "one form"),
        ("xor", torch.bfloat16, lambda h, r: escape_word(h, r, 2**16 - 1, 2), "past its width"),
        ("add", torch.float64, lambda h, r: escape_word(h, r, 2**64 - 1, 8), "past its width"),
        ("add", torch.float64, lambda h, r: escape_word(h, r, 2**64 - 2, 8), "do not match their digest"),
        ("add", torch.uint8, lambda h, r: escape_word(h, r, 255, 1), "one form"),
    ],
)
def test_codes_in_another_form_or_past_the_width_are_refused(operation, dtype, edit, message):
    data = encode_payload(IDENTITY, RELATIVE, [item(Operation(operation), (3,), (4,), dtype=dtype, shape=(2000,))])
    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(rebuild(data, edit))


def escape_word(header, raws, word, width):
    header["items"][0][ESCAPES] = header["items"][0][WORDS] = 1
    raws[2], raws[3] = b"\x0f", b"\xff"
    for p in range(width):
        raws[4 + p] = bytes([word >> (8 * p) & 255])


@pytest.mark.parametrize(
    ("shape", "gaps", "longs", "message"),
    [
        ((2000,), b"\xff\x00", struct.pack("<I", 1015), "one form"),
        ((2000,), b"\xff\x00", struct.pack("<I", 2000), "gap of 2000 runs past"),
        ((2000,), b"\xff\x00", struct.pack("<I", 2**32 - 1), "runs past"),
        ((2000,), b"\xff\x00", struct.pack("<I", 1999), "run past"),
        ((2**33,), b"\xff\x00", struct.pack("<Q", 2**63), "one form"),
        ((2**33,), b"\xff\x00", struct.pack("<Q", 2**64 - 1), "one form"),
        ((2**63 - 1,), b"\xff\xff", struct.pack("<QQ", 2**63 - 2, 2**63 - 2), "run past"),
        ((2**63 - 1,), b"\xff\xff", struct.pack("<QQ", 2**63 - 1, 2000), "runs past"),
        ((2**63 - 1,), b"\xff\x05", struct.pack("<Q", 2**63 - 6), "run past"),
    ],
)
def test_gaps_past_the_tensor_or_past_64_bits_are_refused(shape, gaps, longs, message):
    data = encode_payload(IDENTITY, DENSE, [item(indices=(1, 4), shape=shape)])
    count = len(longs) // (4 if shape == (2000,) else 8)

    def edit(header, raws):
        raws[0], raws[1] = gaps, longs
        header["items"][0][LONG_GAPS] = count

    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(rebuild(data, edit))


@pytest.mark.parametrize(
    ("index", "gaps", "longs", "message"),
    [
        (1016, b"\xfe\xfe\xfe\xfe\x00\x00", (), "one form"),
        (1270, b"\xfe\xff\x00", (1016,), "one form"),
        (1270, b"\xff\x00\xfe", (1270,), "2 complete gaps in 3 bytes"),
    ],
)
def test_right_indices_in_another_form_are_refused(index, gaps, longs, message):
    """The entry digest has nothing to say against these."""
    data = encode_payload(IDENTITY, DENSE, [item(indices=(index, index + 1), shape=(5000,))])

    def edit(header, raws):
        raws[0], raws[1] = gaps, b"".join(struct.pack("<I", g) for g in longs)
        header["items"][0][GAP_BYTES], header["items"][0][LONG_GAPS] = len(gaps), len(longs)

    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(rebuild(data, edit))


def test_an_index_twice_in_two_items_is_refused():
    two = encode_payload(IDENTITY, DENSE, [item(indices=(1, 4)), item(indices=(2, 5), values=(5, 6))])
    wanted = encode_payload(IDENTITY, DENSE, [item(indices=(1, 4))])

    def edit(header, raws):
        raws[0] = b"\x01\x02\x01\x02"
        header["items"][1] = open_up(wanted)[0]["items"][0]

    assert len(decode_payload(two)[1]) == 2
    with pytest.raises(CorruptPayloadError, match="tensor 'w': two of its items have an index in common"):
        decode_payload(rebuild(two, edit))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (zstandard.ZstdCompressor().compress(b"\0" * (1 << 26)), "its frame states 67108864 bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 4000), "its frame states"),
        (zstandard.ZstdCompressor().compress(b"\0" * 3999), "its frame states 3999 bytes"),
        (zstandard.ZstdCompressor().compress(b"\0" * 4000)[:-1], "not one whole zstd frame"),
        (zstandard.ZstdCompressor().compress(b"\0" * 4000) + b"\0", "not one whole zstd frame"),
        (zstandard.ZstdCompressor().compress(b"\0" * 4000) * 2, "not one whole zstd frame"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd", "stream plane0"),
        (b"not a frame", "not one whole zstd frame"),
        (b"", "not one whole zstd frame"),
    ],
)
def test_frames_that_are_not_exactly_what_the_header_states(frame, message):
    n = 4000
    header, raws = open_up(encode_payload(IDENTITY, DENSE, [item(indices=range(n), values=[0] * n, shape=(n,))]))
    wires = [zstandard.ZstdCompressor().compress(raw) if len(raw) == n else raw for raw in raws]
    assert decode_payload(frames(header, wires))[0].entries == n
    wires[4] = frame
    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(frames(header, wires))


def test_wire_bytes_that_do_not_fit_their_codec_or_the_body():
    """Streams 0 and 4 of a small payload are two raw bytes each."""
    header, raws = open_up(small(operation=Operation.SET))
    long_way = zstandard.ZstdCompressor().compress(raws[4])
    for codec, wire in ((1, long_way), (1, raws[4]), (0, raws[4][:1]), (0, raws[4] + b"\0")):
        header["streams"][4][0] = codec
        with pytest.raises(CorruptPayloadError, match=f"stream plane0: {len(wire)} bytes of codec"):
            decode_payload(frames(header, [*raws[:4], wire, *raws[5:]]))
    header, raws = open_up(small(operation=Operation.SET))
    for body in (b"".join(raws) + b"\0", b"".join(raws)[:-1]):
        with pytest.raises(CorruptPayloadError, match=f"a body of {len(body)} bytes, its streams have 6"):
            decode_payload(seal(msgspec.msgpack.encode(header), body))


def test_a_frame_whose_content_size_lies():
    """The stated size agrees with the header, the content does not."""
    n = 4000
    header, raws = open_up(encode_payload(IDENTITY, DENSE, [item(indices=range(n), values=[0] * n, shape=(n,))]))
    bomb = bytearray(zstandard.ZstdCompressor().compress(b"\0" * (1 << 24)))
    honest = zstandard.ZstdCompressor().compress(b"\0" * n)
    size = struct.pack("<I", 1 << 24)
    at = bomb.index(size)
    bomb[at : at + 4] = struct.pack("<I", n)
    assert zstandard.get_frame_parameters(bytes(bomb)).content_size == n
    wires = [honest if len(raw) == n else raw for raw in raws]
    wires[4] = bytes(bomb)
    with pytest.raises(CorruptPayloadError, match="stream plane0: not one whole zstd frame"):
        decode_payload(frames(header, wires))


def test_every_truncation_extension_and_bit_flip_is_refused():
    data = small(operation=Operation.ADD)
    for end in range(len(data)):
        with pytest.raises(CorruptPayloadError):
            decode_payload(data[:end])
    for tail in (b"\0", data):
        with pytest.raises(CorruptPayloadError):
            decode_payload(data + tail)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RefusedError):
            decode_payload(bytes(flipped))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_hostile_bytes_raise_nothing_but_refusals(data):
    """Edits under a right wire digest: everything behind the digest sees them, too."""
    base = example() if data.draw(st.booleans()) else data.draw(payloads().map(lambda case: encode_payload(*case)))
    header_bytes = struct.unpack("<Q", base[8:16])[0]
    header, body = bytearray(base[40 : 40 + header_bytes]), bytearray(base[40 + header_bytes :])
    for _ in range(data.draw(st.integers(1, 4))):
        part = header if not body or data.draw(st.booleans()) else body
        at = data.draw(st.integers(0, max(len(part) - 1, 0)))
        part[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=9))
    hostile = seal(bytes(header), bytes(body))
    try:
        found, items = decode_payload(hostile)
    except RefusedError:
        return
    for item_, stated in zip(items, found.items, strict=True):
        item_.check_indices()
        assert (item_.spec, item_.entries) == (stated.spec, stated.entries)
    assert [i[4] for i in wire_reader.read(hostile)[1]] == [
        {int(i): int(v) % (1 << 8 * x.values.itemsize) for i, v in zip(x.indices, x.values, strict=True)} for x in items
    ]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_raise_nothing_but_refusals(noise, sealed):
    with pytest.raises(RefusedError):
        decode_payload(seal(noise, b"") if sealed else noise)


def test_deeply_nested_and_huge_headers_are_refused():
    for header in (b"\x81\xa5items" + b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x81\xa5items\xdd\xff\xff\xff\xff"):
        with pytest.raises(CorruptPayloadError, match="payload header"):
            decode_payload(seal(header, b""))
