"""Resident memory while a payload is decoded: at most twice what ``decoded_bytes_max`` counts, refused or not."""

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import decode_payload, encode_payload
from dcr.protocol.errors import CorruptPayloadError
from tests.peak_memory import peak_of
from tests.unit.data_plane.forge import DENSE, GAPS, IDENTITY, NIBBLES, PLANE0, RELATIVE, item, open_up, seal

ENTRIES = 3 << 20
NOISE = 6 << 20
DTYPE, SHAPE, ENTRIES_AT, COUNTS, DIGEST = 1, 2, 5, 6, 7


def every_element(operation, *, last_gap=0, last_nibble=0):
    """A kilobyte that holds each element of a tensor of bytes; digests are those of an honest one."""
    header, _ = open_up(encode_payload(IDENTITY, RELATIVE, [item(operation, (1,), (1,), dtype=torch.uint8)]))
    gaps = np.zeros(ENTRIES, np.uint8)
    gaps[-1] = last_gap
    digest = xxhash.xxh3_128(np.arange(ENTRIES, dtype="<i8"))
    if operation is Operation.SET:
        raws = {GAPS: gaps.tobytes(), PLANE0: bytes(ENTRIES)}
        digest.update(bytes(ENTRIES))
    else:
        raws = {GAPS: gaps.tobytes(), NIBBLES: bytes(ENTRIES // 2 - 1) + bytes([last_nibble])}
        digest.update(b"\1" * ENTRIES)
    one = header["items"][0]
    one[SHAPE], one[ENTRIES_AT], one[DIGEST] = [ENTRIES], ENTRIES, digest.digest()
    one[COUNTS] = [ENTRIES, 0, 0, ENTRIES if operation is Operation.SET else 0]
    frames = [zstandard.ZstdCompressor().compress(raw) for raw in raws.values()]
    header["streams"] = [[k, 1, len(r), len(f)] for (k, r), f in zip(raws.items(), frames, strict=True)]
    return seal(msgspec.msgpack.encode(header), b"".join(frames))


def two_items():
    """Of one tensor, each between the entries of the other."""
    spec = TensorSpec("w", (ENTRIES,), torch.uint8)
    places = torch.arange(ENTRIES).view(-1, 2)
    values = torch.zeros(ENTRIES // 2, dtype=torch.uint8)
    return encode_payload(IDENTITY, DENSE, [Item(spec, Operation.SET, places[:, k], values) for k in range(2)])


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda: every_element(Operation.SET), ""),
        (lambda: every_element(Operation.XOR), ""),
        (two_items, ""),
        (lambda: every_element(Operation.SET, last_gap=1), "its indices are not written as the format asks"),
        (lambda: every_element(Operation.XOR, last_nibble=0xF0), "its values are not written as the format asks"),
    ],
    ids=["set", "xor", "two items", "indices past the end", "an escape that is not there"],
)
def test_decoding_takes_at_most_twice_what_is_declared(make, refused):
    data = make()
    declared = ENTRIES * (8 + 1) + ENTRIES + ENTRIES // (1 if b"set" in data else 2)

    def decode():
        if not refused:
            assert decode_payload(data)[0].entries == ENTRIES
            return
        with pytest.raises(CorruptPayloadError, match=refused):
            decode_payload(data)

    assert peak_of(decode) < 2 * declared + NOISE
