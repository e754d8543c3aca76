"""Payloads against a second reader, against golden bytes, and against limits and known tensors."""

import struct
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import dtype_of
from dcr.data_plane.header import Limits
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import decode_payload, encode_payload, payload_digest, read_header
from dcr.protocol.errors import CorruptPayloadError, RefusedError
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from tests.unit.data_plane import golden, wire_reader
from tests.unit.data_plane.forge import DENSE, GAPS, IDENTITY, RELATIVE, example, item, rebuild, seal, small, split
from tests.unit.data_plane.strategies import payloads, same

ROOT = Path(__file__).parents[3]


@settings(max_examples=200, deadline=None)
@given(payloads())
def test_both_readers_agree_with_what_was_written(case):
    identity, base, items = case
    data = encode_payload(identity, base, items)
    assert data == encode_payload(identity, base, items)
    header, decoded = decode_payload(data)
    assert (header.identity, header.base) == (identity, base)
    assert header == read_header(memoryview(data))
    assert header.entries == sum(len(i.indices) for i in items)
    assert len(decoded) == len(items)
    assert all(same(a, b) for a, b in zip(items, decoded, strict=True))

    plain, read = wire_reader.read(data)
    assert plain["identity"] == msgspec.to_builtins(identity)
    assert plain["base"] == msgspec.to_builtins(base)
    for (name, _, shape, operation, entries), theirs in zip(read, items, strict=True):
        assert (name, shape, operation) == (theirs.spec.name, theirs.spec.shape, theirs.operation)
        top = 1 << 8 * theirs.values.itemsize
        assert entries == {int(i): int(v) % top for i, v in zip(theirs.indices, theirs.values, strict=True)}


def test_the_worked_example():
    """The bytes in the document, whose header is sent as it is, are read; and are what is written but for that."""
    spec = TensorSpec("x", (2, 2), torch.bfloat16)
    index = torch.tensor([2])
    old, new = (torch.tensor([w], dtype=torch.int16) for w in (0x3F01, 0x3F02))
    items = [
        Item(spec, Operation.XOR, index, old ^ new),
        Item(replace(spec, name="a"), Operation.ADD, index, new - old),
    ]
    identity = PayloadIdentity("example", 8, 3, "rank0", 1, 0)
    page = (ROOT / "docs/wire-format.md").read_text()
    dump = page.split("```hex\n")[1].split("```")[0]
    data = bytes.fromhex(" ".join(line[10:57] for line in dump.splitlines()))
    assert data == (ROOT / "tests/golden/worked_example.dcrp").read_bytes()
    header, decoded = decode_payload(data)
    assert (header.identity, header.base) == (identity, RELATIVE)
    assert all(same(a, b) for a, b in zip(decoded, items, strict=True))
    _, read = wire_reader.read(data)
    assert read == [("x", "bfloat16", (2, 2), "xor", {2: 0x0003}), ("a", "bfloat16", (2, 2), "add", {2: 1})]
    assert data == seal(*split(encode_payload(identity, RELATIVE, items)))


@pytest.mark.parametrize("name", golden.cases())
def test_golden_bytes(name):
    """Neither what is written nor what is read may change; a zstd library that writes other frames needs a word too."""
    identity, base, items = golden.cases()[name]
    data = (golden.FOLDER / f"{name}.dcrp").read_bytes()
    header, decoded = decode_payload(data)
    assert (header.identity, header.base) == (identity, base)
    assert all(same(a, b) for a, b in zip(decoded, items, strict=True))
    assert len(wire_reader.read(data)[1]) == len(items)
    assert encode_payload(identity, base, items) == data


def test_golden_payloads_use_every_codec_and_stream():
    headers = [read_header((golden.FOLDER / f"{name}.dcrp").read_bytes()) for name in golden.cases()]
    assert {i.codec for h in headers for i in h.items} == {0, 1, 2, 3}
    assert {s.stream for h in headers for s in h.streams} == set(range(13))
    assert {s.codec for h in headers for s in h.streams} == {0, 1}


def test_golden_zstd_frames_of_another_library_are_read():
    """Compressed bytes are the sender's choice; this frame is a level 19 one."""
    data = rebuild(example(), recompress=lambda raw: zstandard.ZstdCompressor(level=19).compress(raw))
    assert data != example()
    assert all(same(a, b) for a, b in zip(decode_payload(data)[1], decode_payload(example())[1], strict=True))


def test_digest_is_sha256_of_the_whole_payload():
    assert payload_digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert payload_digest(memoryview(b"abc")) == payload_digest(b"abc")


def test_a_run_of_a_million_costs_bytes():
    def size(n, operation):
        values = torch.full((n,), 0x0003, dtype=torch.int16)
        spec = TensorSpec("w", (2_000_000,), torch.bfloat16)
        return len(encode_payload(IDENTITY, RELATIVE, [Item(spec, operation, torch.arange(7, n + 7), values)]))

    for operation in Operation:
        assert size(1_000_000, operation) - size(1, operation) < 250


@pytest.mark.parametrize(
    ("items", "base", "message"),
    [
        ([item(Operation.ADD, values=(1, 0))], RELATIVE, "zero add entry"),
        ([item(Operation.XOR, values=(0, 1))], RELATIVE, "zero xor entry"),
        ([item(Operation.ADD)], DENSE, "kind dense"),
        ([item(Operation.XOR)], Base(Kind.ABSOLUTE, 7, "", ""), "kind absolute"),
        ([item(indices=(4, 1))], DENSE, "strictly increasing"),
        ([item(indices=(1, 10))], DENSE, "strictly increasing"),
        ([item(), item(indices=(4, 5))], DENSE, "index in common"),
        ([item(), item(indices=(2, 5), shape=(5, 2))], DENSE, "'w' is bfloat16"),
        ([item(name="n" * 1025)], DENSE, "length <= 1024"),
        ([item(name="\ud800")], DENSE, "cannot be written"),
        ([item(shape=(10,) + (1,) * 32)], DENSE, "length <= 32"),
        ([item(shape=(2**62, 2))], DENSE, "elements, at most"),
    ],
)
def test_what_no_receiver_would_take_cannot_be_written(items, base, message):
    with pytest.raises(RefusedError, match=message):
        encode_payload(IDENTITY, base, items)


def test_numbers_beyond_the_format_cannot_be_written():
    for number in (-1, 2**63, 2**64):
        with pytest.raises(RefusedError):
            encode_payload(PayloadIdentity("r", number, 0, "o", 0, 0), DENSE, [])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(payload_bytes_max=100), "payload of .* bytes, at most 100"),
        (Limits(header_bytes_max=50), "header of .* bytes, at most 50"),
        (Limits(items_max=2), "3 items, at most 2"),
        (Limits(entries_max=10), "13339 entries, at most 10"),
        (Limits(decoded_bytes_max=100_000), "decoded bytes, at most 100000"),
    ],
)
def test_limits(limits, message):
    with pytest.raises(RefusedError, match=message):
        read_header(example(), limits)


def test_limits_are_inclusive():
    data = small()
    raw = 2 + 2 + 2  # two gaps, two words in two planes
    exact = Limits(len(data), struct.unpack("<I", data[12:16])[0], 1, 2, raw + 2 * (8 + 2))
    assert read_header(data, exact).entries == 2
    with pytest.raises(RefusedError, match="decoded bytes"):
        read_header(data, replace(exact, decoded_bytes_max=exact.decoded_bytes_max - 1))
    with pytest.raises(RefusedError, match="payload header of"):
        read_header(data, replace(exact, header_bytes_max=exact.header_bytes_max - 1))


def test_another_wire_version_or_magic_is_named():
    data = small()
    with pytest.raises(RefusedError, match="wire version 2"):
        read_header(data[:4] + b"\x02" + data[5:])
    with pytest.raises(RefusedError, match="wire version 0"):
        read_header(data[:4] + b"\x00" + data[5:])
    with pytest.raises(CorruptPayloadError, match="begins with"):
        read_header(b"PK\3\4" + data[4:])


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({}, "no tensor 'w'"),
        ({"w": TensorSpec("w", (5, 2), torch.bfloat16)}, r"comes as bfloat16 \(10,\).*bfloat16 \(5, 2\)"),
        ({"w": TensorSpec("w", (10,), torch.float16)}, "float16"),
    ],
)
def test_tensors_that_are_not_known_are_refused_before_decompression(known, message):
    def spoil(header, raws):
        raws[GAPS] = b"\xff\xff"

    data = rebuild(small(), spoil)
    with pytest.raises(CorruptPayloadError, match="long gaps"):
        decode_payload(data)
    with pytest.raises(RefusedError, match=message) as refused:
        decode_payload(data, known=known)
    assert "record 'run', target 8, epoch 3, owner 'rank0' incarnation 1, sequence 0" in str(refused.value)
    assert decode_payload(small(), known={"w": TensorSpec("w", (10,), torch.bfloat16), "v": None})[0].entries == 2


@settings(max_examples=100, deadline=None)
@given(payloads(), st.randoms(use_true_random=False))
def test_items_that_are_skipped_are_left_out_and_the_others_are_as_before(case, rng):
    identity, base, items = case
    data = encode_payload(identity, base, items)
    names = sorted({i.spec.name for i in items})
    skip = set(rng.sample(names, rng.randint(0, len(names))))
    header, decoded = decode_payload(data, skip=skip)
    assert header == read_header(data)
    held = [i for i in items if i.spec.name not in skip]
    assert len(decoded) == len(held)
    assert all(same(a, b) for a, b in zip(held, decoded, strict=True))


def test_a_skipped_item_is_checked_but_for_its_entries():
    """Its spec, its counts and lengths, and the bytes as they travelled; its decoded entries are nobody's here."""
    data = small()
    skip = {"w"}
    assert decode_payload(data, skip=skip)[1] == []
    with pytest.raises(RefusedError, match="the receiver has no tensor 'w'"):
        decode_payload(data, known={}, skip=skip)
    with pytest.raises(CorruptPayloadError, match="does not match its own digest"):
        decode_payload(data[:-1] + bytes([data[-1] ^ 1]), skip=skip)

    def longer(header, _):
        header["items"][0][6][0] += 1  # a gap byte that no stream has

    with pytest.raises(CorruptPayloadError):
        decode_payload(rebuild(data, longer), skip=skip)


def test_dtypes_are_those_of_the_page():
    assert {name: dtype_of(name).itemsize for name in wire_reader.WIDTHS} == wire_reader.WIDTHS
    with pytest.raises(RefusedError) as refused:
        dtype_of("complex64")
    assert str(refused.value).endswith(f"supported: {', '.join(sorted(wire_reader.WIDTHS))}")
