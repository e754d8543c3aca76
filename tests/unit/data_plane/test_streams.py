"""The streams of an item, against forms worked out by hand from docs/wire-format.md."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.streams import LOW_MAX, ItemStreams, choose_low, decode_streams, encode_streams
from dcr.protocol.errors import CorruptPayloadError, RefusedError
from tests.unit.data_plane.strategies import bits, items, same


def item(operation, indices, values, dtype=torch.bfloat16, numel=100_000):
    spec = TensorSpec("w", (numel,), dtype)
    return Item(spec, operation, torch.tensor(indices, dtype=torch.int64), bits(dtype, values))


@pytest.mark.parametrize(
    ("indices", "gaps", "long_gaps"),
    [
        ([], [], []),
        ([0], [0], []),
        ([253], [253], []),
        ([254], [254, 0], []),
        ([255], [254, 1], []),
        ([507], [254, 253], []),
        ([508], [254, 254, 0], []),
        ([1015], [254, 254, 254, 253], []),
        ([1016], [255], [1016]),
        ([5, 6, 7, 8], [5, 0, 0, 0], []),
        ([3, 2000, 2255], [3, 255, 254, 0], [1996]),
    ],
)
def test_gaps(indices, gaps, long_gaps):
    streams = encode_streams(item(Operation.SET, indices, [0] * len(indices)), 0)
    assert streams.low.tolist() == []
    assert streams.gaps.tolist() == gaps
    assert streams.long_gaps.tolist() == long_gaps


@pytest.mark.parametrize(
    ("low", "indices", "apart", "gaps", "long_gaps"),
    [
        (1, [0], [0x00], [0], []),
        (1, [0x21, 0x21 + 0xF], [0xE1], [2, 0], []),  # gaps 0x21 and 0xE
        (1, [253 * 16 + 7], [0x07], [253], []),
        (1, [254 * 16 + 7], [0x07], [254, 0], []),
        (1, [1016 * 16 - 1], [0x0F], [254, 254, 254, 253], []),
        (1, [1016 * 16 + 15], [0x0F], [255], [1016]),
        (2, [0x123, 0x123 + 0x457, 0x123 + 0x457 + 1], [0x63, 0x00, 0x52, 0x00], [1, 4, 0], []),
        (3, [0x5432], [0x02, 0x03, 0x04], [5], []),
        (3, [(1016 << 12) + 0xABC], [0x0C, 0x0B, 0x0A], [255], [1016]),
        (3, [], [], [], []),
    ],
)
def test_low_half_bytes_apart(low, indices, apart, gaps, long_gaps):
    streams = encode_streams(item(Operation.SET, indices, [0] * len(indices), numel=10**7), low)
    assert streams.low.tolist() == apart
    assert streams.gaps.tolist() == gaps
    assert streams.long_gaps.tolist() == long_gaps


@pytest.mark.parametrize(
    ("gaps", "low"),
    [
        ([], 0),
        ([253] * 9, 0),
        ([254, 253, 253, 253], 0),  # a quarter, and not more
        ([254, 254, 253, 253, 253], 1),
        ([4063] * 9, 1),
        ([4064] * 9, 2),
        ([254 * 256 - 1] * 9, 2),
        ([254 * 256] * 9, 3),
        ([2**40] * 9, 3),
        ([0] * 100 + [100_000] * 33, 0),  # rows as a whole, far apart
    ],
)
def test_the_layout_that_is_chosen(gaps, low):
    assert choose_low((torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0) - 1) == low


@pytest.mark.parametrize(
    ("operation", "dtype", "values", "streams"),
    [
        # differences 1, -1, 2 have codes 1, 0, 3
        (Operation.ADD, torch.bfloat16, [1, 0xFFFF, 2], ([0x01, 0x03], [], [])),
        # 8 and -8: codes 15 and 14
        (Operation.ADD, torch.bfloat16, [8, 0xFFF8], ([0xEF], [0], [])),
        # 135 and -135: codes 269 and 268; 136: code 271, past a byte
        (Operation.ADD, torch.bfloat16, [135, 0xFFFF - 134, 136], ([0xFF, 0x0F], [254, 253, 255], [271])),
        # -2**15 has the largest code
        (Operation.ADD, torch.bfloat16, [0x8000], ([0x0F], [255], [2**16 - 2])),
        (Operation.ADD, torch.uint8, [0x80, 0x7F], ([0xFF], [239, 238], [])),
        (Operation.ADD, torch.float64, [2**63, 2**63 - 1], ([0xFF], [255, 255], [-2, -3])),
        (Operation.XOR, torch.bfloat16, [1, 15, 16], ([0xE0, 0x0F], [0], [])),
        (Operation.XOR, torch.float32, [270, 271, 2**32 - 1], ([0xFF, 0x0F], [254, 255, 255], [270, 2**32 - 2])),
        (Operation.XOR, torch.float64, [2**64 - 1], ([0x0F], [255], [-2])),
        (Operation.SET, torch.bfloat16, [0x8000, 0x3F80, 0x7FC1], ([], [], [1, 0x7F00, 0xFF82])),
        (Operation.SET, torch.uint8, [0xC1], ([], [], [0x83])),
        (Operation.SET, torch.float32, [0x80000001], ([], [], [3])),
        (Operation.SET, torch.float64, [2**63 + 1, 2**62], ([], [], [3, -(2**63)])),
    ],
)
def test_codes(operation, dtype, values, streams):
    """Streams are nibbles, escapes and words."""
    found = encode_streams(item(operation, list(range(len(values))), values, dtype), 0)
    assert (found.nibbles.tolist(), found.escapes.tolist(), found.words.tolist()) == streams


@settings(max_examples=200, deadline=None)
@given(items(), st.integers(0, LOW_MAX))
def test_round_trip_in_every_layout(written, low):
    streams = encode_streams(written, low)
    read = decode_streams(written.spec, written.operation, low, written.entries, streams)
    assert same(read, written)


@pytest.mark.parametrize("operation", list(Operation))
def test_all_bfloat16_bit_patterns_and_a_whole_tensor(operation):
    values = list(range(operation is not Operation.SET, 1 << 16))
    written = item(operation, list(range(len(values))), values, numel=len(values))
    streams = encode_streams(written, choose_low(written.indices))
    assert not streams.gaps.any()
    assert same(decode_streams(written.spec, operation, 0, len(values), streams), written)


def test_refusals_when_written():
    for operation in (Operation.ADD, Operation.XOR):
        with pytest.raises(RefusedError, match=f"item w: a zero {operation} entry"):
            encode_streams(item(operation, [1, 2], [7, 0]), 0)
    with pytest.raises(RefusedError, match="strictly increasing"):
        encode_streams(item(Operation.SET, [2, 2], [7, 7]), 0)


def test_streams_of_one_item_are_refused_for_another():
    spec = TensorSpec("w", (100_000,), torch.bfloat16)
    streams = encode_streams(item(Operation.ADD, [1, 2, 3], [1, 9, 500]), 0)
    for operation, entries, low in (
        (Operation.SET, 3, 0),
        (Operation.ADD, 2, 0),
        (Operation.ADD, 4, 0),
        (Operation.ADD, 3, 1),
    ):
        with pytest.raises(CorruptPayloadError, match="item w"):
            decode_streams(spec, operation, low, entries, streams)
    without = ItemStreams(
        streams.low, streams.gaps, streams.long_gaps, streams.nibbles, streams.escapes, streams.words[:0]
    )
    with pytest.raises(CorruptPayloadError, match="words: found 0, but 1"):
        decode_streams(spec, Operation.ADD, 0, 3, without)
