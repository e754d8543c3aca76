"""The bytes of K, manifests and messages are contracts: they change only together with a version number."""

import hashlib
import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from contracts import MANIFEST, ORDERS, RECORD, REPORTS

from dcr.protocol import messages
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import PayloadIdentity, decode_manifest, encode_manifest, manifest_root
from dcr.protocol.messages import decode_order, decode_report, encode_message
from dcr.protocol.record import decode_record, encode_record

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "protocol.json").read_text())


def test_there_is_an_example_of_every_message() -> None:
    assert [type(o) for o in ORDERS] == list(get_args(messages.Order))
    assert [type(r) for r in REPORTS] == list(get_args(messages.Report))
    assert set(GOLDEN) == {"CommitRecord", "Manifest", *(type(x).__name__ for x in ORDERS + REPORTS)}


@pytest.mark.parametrize("message", ORDERS + REPORTS, ids=lambda x: type(x).__name__)
def test_message_bytes(message: messages.Order | messages.Report) -> None:
    data = bytes.fromhex(GOLDEN[type(message).__name__])
    assert encode_message(message) == data
    # Read by a decoder that knows nothing of the types.
    plain = msgspec.msgpack.decode(data)
    assert plain.pop("type") == type(message).__name__
    assert list(plain) == list(type(message).__struct_fields__)
    order = message in ORDERS
    assert (decode_order if order else decode_report)(data) == message
    with pytest.raises(RefusedError, match="not a"):
        (decode_report if order else decode_order)(data)


def test_record_and_manifest_bytes() -> None:
    assert encode_record(RECORD) == bytes.fromhex(GOLDEN["CommitRecord"])
    assert decode_record(bytes.fromhex(GOLDEN["CommitRecord"])) == RECORD
    assert encode_manifest(MANIFEST) == bytes.fromhex(GOLDEN["Manifest"])
    assert decode_manifest(bytes.fromhex(GOLDEN["Manifest"])) == MANIFEST
    assert MANIFEST.digest() == hashlib.sha256(bytes.fromhex(GOLDEN["Manifest"])).hexdigest()


@pytest.mark.parametrize("damage", [b"", b"\x00", b"\xc1", bytes.fromhex(GOLDEN["Prepare"])[:-1]])
def test_other_bytes_are_refused(damage: bytes) -> None:
    for decode in (decode_order, decode_report, decode_record, decode_manifest):
        with pytest.raises(RefusedError):
            decode(damage)


def test_unknown_fields_are_refused() -> None:
    plain = msgspec.msgpack.decode(encode_message(ORDERS[1]))
    with pytest.raises(RefusedError, match="not an order"):
        decode_order(msgspec.msgpack.encode(plain | {"extra": 1}))
    record = msgspec.msgpack.decode(encode_record(RECORD))
    with pytest.raises(RefusedError, match="no commit record"):
        decode_record(msgspec.msgpack.encode(record | {"extra": 1}))


def test_manifest_root_is_of_the_set() -> None:
    assert manifest_root({"a": "1", "b": "2"}) == manifest_root({"b": "2", "a": "1"})
    assert len({manifest_root(d) for d in ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, {"a": "12"}, {"a": "1"})}) == 4
    assert MANIFEST.identity(1) == PayloadIdentity("policy", 7, 10, "o0", 9, 1)


def test_the_root_is_over_names_and_digests_in_the_order_of_the_names() -> None:
    packed = b"\x92\xa1a\xa11" + b"\x92\xa1b\xa12"  # MessagePack: pairs of one-letter strings
    assert manifest_root({"b": "2", "a": "1"}) == hashlib.sha256(packed).hexdigest()


def test_a_reason_that_is_too_long_keeps_its_two_ends() -> None:
    fits = "x" * messages.REASON_CHARS_MAX
    assert messages.cut(fits) is fits
    assert messages.cut("a" + fits + "z") == f"a{'x' * 999} ... (2 characters left out) ... {'x' * 999}z"
