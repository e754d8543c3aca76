"""Payloads that somebody made to do harm, for the policy of ``tests.faults.models``; right in all but the one thing.

``python -m tests.unit.data_plane.attacks`` writes those that are missing from tests/attacks, and no others: what is
kept there stays as it is, whatever later releases write.
"""

import struct
from pathlib import Path

import msgspec
import torch
import zstandard

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.payload import encode_payload
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from tests.unit.data_plane.forge import (
    ESCAPES,
    GAPS,
    LONG_GAPS,
    LOW,
    NIBBLES,
    PLANE0,
    open_up,
    pack,
    rebuild,
    seal,
    split,
)

FOLDER = Path(__file__).parents[3] / "tests/attacks"
IDENTITY = PayloadIdentity("r", 1, 1, "rank-0", 7, 0)
BASE = Base(Kind.RELATIVE, 0, "ab" * 16, "c")
BOMB = 32 << 20
"""Zeros in a frame of a kilobyte."""
EMBED, Q = TensorSpec("embed", (64, 24), torch.bfloat16), TensorSpec("q", (24, 24), torch.bfloat16)

DTYPE, SHAPE, CODEC, ENTRIES, COUNTS = 1, 2, 4, 5, 6


def item(spec, indices, operation=Operation.ADD):
    values = torch.arange(1, len(indices) + 1).remainder(300).add(1).to(torch.int16)
    return Item(spec, operation, torch.tensor(indices, dtype=torch.int64), values)


def good(*items, base=BASE) -> bytes:
    return encode_payload(IDENTITY, base, items or [item(EMBED, range(5, 1400, 3)), item(Q, [7, 8, 500])])


def edited(edit, *items) -> bytes:
    return rebuild(good(*items), edit)


def zeros(n: int) -> bytes:
    return zstandard.ZstdCompressor().compress(b"\0" * n)


def bomb(header_says: int, frame_says: int | None = None) -> bytes:
    """1,536 gaps, of which the frame holds more."""
    header, raws = open_up(good(item(EMBED, range(1536), Operation.SET)))
    frame = bytearray(zeros(BOMB))
    if frame_says is not None:
        at = frame.index(struct.pack("<I", BOMB))
        frame[at : at + 4] = struct.pack("<I", frame_says)
    wires = [bytes(frame), raws[PLANE0], raws[PLANE0 + 1]]
    header["streams"] = [
        [GAPS, 1, header_says, len(frame)],
        [PLANE0, 0, 1536, 1536],
        [PLANE0 + 1, 0, 1536, 1536],
    ]
    return seal(msgspec.msgpack.encode(header), b"".join(wires))


def many_entries() -> bytes:
    """A tensor nobody has, with more entries than any receiver takes, in a few kilobytes."""
    n = 1 << 27
    header, _ = open_up(good(item(EMBED, [1], Operation.SET)))
    header["items"][0][0:3] = ["embed", "uint8", [n]]
    header["items"][0][ENTRIES], header["items"][0][COUNTS] = n, [n, 0, 0, n]
    frame = zeros(n)
    header["streams"] = [[GAPS, 1, n, len(frame)], [PLANE0, 1, n, len(frame)]]
    return seal(msgspec.msgpack.encode(header), frame + frame)


def two_items(first, second) -> bytes:
    """Two items of one tensor, which the encoder refuses to write together."""
    header, raws = open_up(good(first))
    others, more = open_up(good(second))
    header["items"] += others["items"]
    return pack(header, [a + b for a, b in zip(raws, more, strict=True)])


def put(stream, value, **counts):
    where = {"gap_bytes": 0, "long_gaps": 1, "escapes": 2, "words": 3}

    def edit(header, raws):
        raws[stream] = value
        for name, count in counts.items():
            header["items"][0][COUNTS][where[name]] = count

    return edit


def field(position, value, which=0):
    def edit(header, raws):
        header["items"][which][position] = value

    return edit


def low_gaps(low: bytes, gaps: bytes):
    """One entry in codec 1."""

    def edit(header, raws):
        header["items"][0][CODEC] = 1
        raws[LOW], raws[GAPS] = low, gaps

    return edit


def long_gap(gap: int):
    """One entry whose gap is a long one."""

    def edit(header, raws):
        header["items"][0][COUNTS][1] = 1
        raws[GAPS], raws[LONG_GAPS] = b"\xff", struct.pack("<I", gap)

    return edit


def cases() -> dict[str, tuple[bytes, str]]:
    """Name -> (bytes, what the refusal says)."""
    one = item(EMBED, [5])
    body = split(good())[1]
    nested = b"\x81\xa5items" + b"\x91" * 100_000
    million = msgspec.msgpack.encode({"items": [0] * 1_000_000})
    return {
        "cut_short": (good()[:-3], "cut short or extended"),
        "extended": (good() + b"\0", "cut short or extended"),
        "header_length_past_the_end": (good()[:8] + b"\xff\xff\xff\xff" + good()[12:], "cut short or extended"),
        "header_of_4_gib": (good()[:12] + b"\xff\xff\xff\xff" + good()[16:], "header of 4294967295 bytes"),
        "body_length_of_64_bits": (good()[:16] + b"\xff" * 8 + good()[24:], "cut short or extended"),
        "header_bomb": (seal(zeros(BOMB), body, 4000), "payload header: its frame states 33554432 bytes"),
        "header_bomb_stated": (seal(zeros(BOMB), body, BOMB), "header of 33554432 bytes"),
        "header_of_millions_of_items": (
            seal(zstandard.ZstdCompressor().compress(million), b"", len(million)),
            "1000000 items, at most 65536",
        ),
        "header_nested": (seal(nested, b""), "payload header"),
        "header_array_of_4_billion": (seal(b"\x81\xa5items\xdd\xff\xff\xff\xff", b""), "payload header"),
        "header_with_another_field": (edited(lambda h, r: h.update(code="print(1)")), "unknown field `code`"),
        "gaps_bomb": (bomb(1536), "stream gaps: its frame states 33554432 bytes"),
        "gaps_bomb_that_lies": (bomb(1536, 1536), "stream gaps: not one whole zstd frame"),
        "gaps_bomb_stated": (bomb(BOMB), "stream gaps: 33554432 bytes, its items have 1536"),
        "entries_bomb": (many_entries(), "134217728 entries, at most 67108864"),
        "wrong_dtype": (edited(field(DTYPE, "float16")), "comes as float16"),
        "wrong_width": (edited(field(DTYPE, "float32"), item(EMBED, [5])), "comes as float32"),
        "wrong_shape": (edited(field(SHAPE, [24, 64])), r"comes as bfloat16 \(24, 64\)"),
        "larger_shape": (edited(field(SHAPE, [640, 24])), r"comes as bfloat16 \(640, 24\)"),
        "unknown_tensor": (edited(field(0, "lm_head")), "no tensor 'lm_head'"),
        "unknown_codec": (edited(field(CODEC, 4)), "item codec 4"),
        "zero_gap_bytes": (edited(field(COUNTS, [0, 0, 0, 0]), one), "0 gap bytes, not within 1 to 4"),
        "index_past_the_end": (
            edited(long_gap(1536), one),
            "gap of 1536 runs past",
        ),
        "index_past_the_end_by_low": (
            edited(low_gaps(b"\xf0", b"\x00\x5f"), item(EMBED, [5, 6])),
            "run past the tensor's 1536 elements",
        ),
        "index_of_32_bits": (edited(long_gap(2**32 - 1), one), "gap of 4294967295 runs past"),
        "gap_that_never_ends": (edited(put(GAPS, b"\xfe\xfe\xfe\xfe", gap_bytes=4), one), "0 complete gaps in 4 bytes"),
        "gap_in_a_longer_form": (edited(put(GAPS, b"\xfe\xff", gap_bytes=2), one), "long gaps: found 0, but 1"),
        "low_half_byte_too_many": (edited(low_gaps(b"\x15", b"\x00"), one), "low: the half byte after the last one"),
        "escapes_that_are_not_there": (edited(put(NIBBLES, b"\x0f"), one), "escapes: found 0, but 1 are asked for"),
        "words_that_are_not_there": (
            edited(lambda h, r: (put(NIBBLES, b"\x0f", escapes=1)(h, r), put(ESCAPES, b"\xff")(h, r)), one),
            "words: found 0, but 1 are asked for",
        ),
        "another_value": (edited(put(NIBBLES, b"\x07"), one), "do not match their digest"),
        "another_index": (edited(put(GAPS, b"\x06"), one), "do not match their digest"),
        "index_twice_in_two_items": (
            two_items(item(EMBED, [5, 6]), item(EMBED, [6, 7])),
            "two of its items have an index in common",
        ),
        "operation_of_another_kind": (
            rebuild(good(), lambda h, r: h["base"].update(kind="absolute")),
            "add entries in a payload of kind absolute",
        ),
        "streams_that_overlap": (
            _streams(lambda s: s[1].__setitem__(3, s[1][3] + 1)),
            "a body of|bytes of codec",
        ),
    }


def _streams(edit) -> bytes:
    header, body = split(good())
    plain = msgspec.msgpack.decode(header)
    edit(plain["streams"])
    return seal(msgspec.msgpack.encode(plain), body)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    expected = FOLDER / "expected.json"
    known = msgspec.json.decode(expected.read_bytes()) if expected.exists() else {}
    for name, (data, says) in cases().items():
        if name not in known:
            (FOLDER / f"{name}.dcrp").write_bytes(data)
            known[name] = says
    expected.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n")


if __name__ == "__main__":
    main()
