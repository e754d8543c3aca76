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
from tests.unit.data_plane.forge import (
    DENSE,
    ESCAPES,
    GAPS,
    IDENTITY,
    LONG_GAPS,
    LOW,
    NIBBLES,
    PLANE0,
    RELATIVE,
    example,
    frames,
    item,
    open_up,
    rebuild,
    seal,
    small,
    split,
)
from tests.unit.data_plane.strategies import payloads


def test_rebuilding_without_an_edit_is_harmless():
    assert rebuild(example()) == example()


NAME, DTYPE, SHAPE, OPERATION, CODEC, ENTRIES, COUNTS, DIGEST = range(8)
GAP_BYTES, N_LONG_GAPS, N_ESCAPES, N_WORDS = range(4)


def field(position, value):
    def edit(header, raws):
        header["items"][0][position] = value

    return edit


def count(position, value):
    def edit(header, raws):
        header["items"][0][COUNTS][position] = value

    return edit


def small_streams(data, edit):
    """Rebuild with edited stream headers, which ``rebuild`` makes anew."""
    header, raws = open_up(data)
    edit(header["streams"])
    return seal(msgspec.msgpack.encode(header), b"".join(raws))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (field(DTYPE, "float4"), "unknown dtype name 'float4'"),
        (field(DTYPE, "float32"), "do not match their digest"),
        (field(OPERATION, "mul"), "Invalid enum value"),
        (field(CODEC, 1), "it has streams"),
        (field(ENTRIES, 3), "gap bytes, not within 3"),
        (field(ENTRIES, 2**40), "entries, not within 0 to 10"),
        (field(ENTRIES, 2**63), "<= 9223372036854775807"),
        (field(ENTRIES, -1), ">= 0"),
        (field(ENTRIES, 2.0), "Expected `int`"),
        (count(GAP_BYTES, 3), "stream gaps: 2 bytes, its items have 3"),
        (count(N_LONG_GAPS, 1), "1 long gaps, not within 0 to 0"),
        (count(N_ESCAPES, 1), r"it has streams \[1, 3\], its items are in streams \[1, 3, 4\]"),
        (count(N_WORDS, 1), "1 words, not within 0 to 0"),
        (field(SHAPE, []), "2 entries, not within 0 to 1"),
        (field(SHAPE, [0]), "2 entries, not within 0 to 0"),
        (field(SHAPE, [2**62, 2**62]), "elements, at most"),
        (field(SHAPE, [4]), "run past the tensor's 4 elements"),
        (field(SHAPE, [1] * 33 + [10]), "length <= 32"),
        (field(COUNTS, [2, 0, 0]), "3 counts, item codec 0 has 4"),
        (field(COUNTS, [0] * 17), "length <= 16"),
        (field(DIGEST, b"\0" * 16), "do not match their digest"),
        (field(DIGEST, b""), "length >= 16"),
        (field(NAME, 7), "Expected `str`"),
        (lambda h, r: h["items"][0].append(0), "length 8"),
        (lambda h, r: h["items"][0].pop(), "length 8"),
        (lambda h, r: h["items"].append(h["items"][0]), "stream gaps: 2 bytes, its items have 4"),
        (lambda h, r: h.update(more=1), "unknown field `more`"),
        (lambda h, r: h["identity"].update(more=1), "unknown field `more`"),
        (lambda h, r: h.pop("base"), "missing required field `base`"),
        (lambda h, r: h["base"].update(kind="absolute"), "add entries in a payload of kind absolute"),
        (lambda h, r: h["base"].update(version=-1), "identity or base has -1"),
        (lambda h, r: h["identity"].update(epoch=2**63), "identity or base has 9223372036854775808"),
        (lambda h, r: h["identity"].update(owner="o" * 1025), "1025 characters"),
        (lambda h, r: h.update(base=h.pop("base")), "canonical form"),
        (lambda h, r: r.__setitem__(0, b"\x01"), r"it has streams \[0, 1, 3\], its items are in streams \[1, 3\]"),
        (lambda h, r: r.__setitem__(GAPS, b"\x01\xff"), "long gaps: found 0, but 1"),
        (lambda h, r: r.__setitem__(GAPS, b"\x01\xfe"), "1 complete gaps in 2 bytes"),
        (lambda h, r: r.__setitem__(GAPS, b"\x01\x09"), "run past the tensor's 10 elements"),
        (lambda h, r: r.__setitem__(GAPS, b"\x01\x0a"), "gap of 10 runs past"),
        (lambda h, r: r.__setitem__(GAPS, b"\x01\x03"), "do not match their digest"),
        (lambda h, r: r.__setitem__(NIBBLES, b"\x0f"), "escapes: found 0, but 1"),
        (lambda h, r: r.__setitem__(NIBBLES, b"\x09"), "do not match their digest"),
    ],
)
def test_edited_headers_and_streams_are_refused_by_name(edit, message):
    data = rebuild(small(operation=Operation.ADD), edit)
    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(data)


def stream(k, value, **counts):
    def edit(header, raws):
        raws[k] = value
        for position, number in counts.items():
            header["items"][0][COUNTS][globals()[position]] = number

    return edit


@pytest.mark.parametrize(
    ("operation", "dtype", "edit", "message"),
    [
        ("add", torch.bfloat16, stream(NIBBLES, b"\x15"), "half byte after the last one"),
        ("add", torch.bfloat16, stream(GAPS, b"\xfe" * 4 + b"\0", GAP_BYTES=5), "5 gap bytes, not within 1 to 4"),
        ("add", torch.bfloat16, stream(GAPS, b"\xfe" * 4, GAP_BYTES=4), "0 complete gaps"),
        ("add", torch.bfloat16, stream(NIBBLES, b"\x0f", N_ESCAPES=1), "it has streams"),
        (
            "xor",
            torch.uint8,
            lambda h, r: (stream(NIBBLES, b"\x0f", N_ESCAPES=1)(h, r), stream(ESCAPES, b"\xf0")(h, r)),
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
    header["items"][0][COUNTS][N_ESCAPES:] = [1, 1]
    raws[NIBBLES], raws[ESCAPES] = b"\x0f", b"\xff"
    for p in range(width):
        raws[PLANE0 + p] = bytes([word >> (8 * p) & 255])


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
    found = len(longs) // (4 if shape == (2000,) else 8)

    def edit(header, raws):
        header["items"][0][CODEC] = 0
        header["items"][0][COUNTS][:2] = len(gaps), found
        raws[LOW], raws[GAPS], raws[LONG_GAPS] = b"", gaps, longs

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
        raws[LOW], raws[GAPS], raws[LONG_GAPS] = b"", gaps, b"".join(struct.pack("<I", g) for g in longs)
        header["items"][0][CODEC] = 0
        header["items"][0][COUNTS][:2] = len(gaps), len(longs)

    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(rebuild(data, edit))


def test_an_index_twice_in_two_items_is_refused():
    two = encode_payload(IDENTITY, DENSE, [item(indices=(1, 4)), item(indices=(2, 5), values=(5, 6))])
    wanted = encode_payload(IDENTITY, DENSE, [item(indices=(1, 4))])

    def edit(header, raws):
        raws[GAPS] = b"\x01\x02\x01\x02"
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
    header, wires = four_thousand()
    assert decode_payload(frames(header, wires))[0].entries == 4000
    wires[1] = frame
    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(frames(header, wires))


def four_thousand():
    """A header of streams gaps, plane0 and plane1, 4000 bytes each, and their frames."""
    n = 4000
    header, raws = open_up(encode_payload(IDENTITY, DENSE, [item(indices=range(n), values=[0] * n, shape=(n,))]))
    assert [s[0] for s in header["streams"]] == [GAPS, PLANE0, PLANE0 + 1]
    return header, [zstandard.ZstdCompressor().compress(raw) for raw in raws if raw]


def test_wire_bytes_that_do_not_fit_their_codec_or_the_body():
    """Streams gaps, plane0 and plane1 of a small payload are two raw bytes each."""
    header, raws = open_up(small(operation=Operation.SET))
    raws = [raw for raw in raws if raw]
    long_way = zstandard.ZstdCompressor().compress(raws[1])
    for codec, wire in ((1, long_way), (1, raws[1]), (0, raws[1][:1]), (0, raws[1] + b"\0")):
        header["streams"][1][1] = codec
        with pytest.raises(CorruptPayloadError, match=f"stream plane0: {len(wire)} bytes of codec"):
            decode_payload(frames(header, [raws[0], wire, raws[2]]))
    header, _ = open_up(small(operation=Operation.SET))
    for body in (b"".join(raws) + b"\0", b"".join(raws)[:-1]):
        with pytest.raises(CorruptPayloadError, match=f"a body of {len(body)} bytes, its streams have 6"):
            decode_payload(seal(msgspec.msgpack.encode(header), body))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s.reverse(), r"it has streams \[3, 1\], its items are in streams \[1, 3\]"),
        (lambda s: s.append(s[-1]), r"\[1, 3, 3\]"),
        (lambda s: s.append([13, 0, 0, 0]), r"\[1, 3, 13\]"),
        (lambda s: s.append([4, 0, 0, 0]), r"\[1, 3, 4\]"),
        (lambda s: s.pop(), r"it has streams \[1\]"),
        (lambda s: s.extend([[99, 0, 0, 0]] * 99), "length <= 64"),
        (lambda s: s[0].__setitem__(1, 2), "Invalid enum value 2"),
        (lambda s: s[0].__setitem__(2, 3), "stream gaps: 3 bytes, its items have 2"),
    ],
)
def test_streams_that_are_not_those_of_the_items(edit, message):
    with pytest.raises(CorruptPayloadError, match=message):
        decode_payload(small_streams(small(operation=Operation.ADD), edit))


@pytest.mark.parametrize("codec", [4, 255, 2**63 - 1])
def test_an_unknown_item_codec_is_refused_by_name_whatever_its_counts_and_streams(codec):
    def edit(header, raws):
        header["items"][1][CODEC], header["items"][1][COUNTS] = codec, [1, 2, 3, 4, 5]

    with pytest.raises(RefusedError, match=f"item 'x' has item codec {codec}, this release knows only 0, 1, 2, 3") as e:
        decode_payload(rebuild(example(), edit))
    assert not isinstance(e.value, CorruptPayloadError)  # nothing is damaged, to fetch it again is of no use


def test_a_frame_whose_content_size_lies():
    """The stated size agrees with the header, the content does not."""
    header, wires = four_thousand()
    bomb = bytearray(zstandard.ZstdCompressor().compress(b"\0" * (1 << 24)))
    at = bomb.index(struct.pack("<I", 1 << 24))
    bomb[at : at + 4] = struct.pack("<I", 4000)
    assert zstandard.get_frame_parameters(bytes(bomb)).content_size == 4000
    wires[1] = bytes(bomb)
    with pytest.raises(CorruptPayloadError, match="stream plane0: not one whole zstd frame"):
        decode_payload(frames(header, wires))


def test_headers_that_are_not_what_the_preamble_states():
    plain, body = split(example())
    short = zstandard.ZstdCompressor().compress(plain)
    assert decode_payload(seal(short, body, len(plain)))[0].entries == 13_339
    assert decode_payload(seal(plain, body))[0].entries == 13_339
    for header, stated, message in (
        (short, len(plain) + 1, "its frame states"),
        (short, len(short), "payload header"),  # taken as it is, it is no header
        (short, len(short) - 1, "never compressed so"),
        (short[:-1], len(plain), "not one whole zstd frame"),
        (short + b"\0", len(plain), "not one whole zstd frame"),
        (plain[:-1], len(plain), "payload header"),
        (zstandard.ZstdCompressor().compress(b"\0" * (16 << 20)), 16 << 20, "payload header"),
    ):
        with pytest.raises(CorruptPayloadError, match=message):
            decode_payload(seal(header, body, stated))
    with pytest.raises(RefusedError, match="payload header of 16777217 bytes, at most 16777216"):
        decode_payload(seal(zstandard.ZstdCompressor().compress(b"\0" * (16 << 20)), body, (16 << 20) + 1))


def test_items_are_counted_before_they_are_read():
    """A header of a few kilobytes on the wire may state millions of items."""
    many = msgspec.msgpack.encode({"items": [0] * 5_000_000})
    with pytest.raises(RefusedError, match="5000000 items, at most 65536"):
        decode_payload(seal(zstandard.ZstdCompressor().compress(many), b"", len(many)))
    with pytest.raises(CorruptPayloadError, match="payload header"):
        decode_payload(seal(msgspec.msgpack.encode({"items": {}}), b""))


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
    header, body = map(bytearray, split(base))
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
