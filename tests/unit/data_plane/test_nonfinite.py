"""NaN and infinities are found where the bits of the format say so, by arithmetic on bits alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr.data_plane import nonfinite
from dcr.data_plane.bits import bit_view, bits_dtype
from dcr.data_plane.nonfinite import NonFinite, count_nonfinite, listed, nonfinite_positions
from dcr.data_plane.tracker import Tracker

# Exponent bits and fraction bits of each format, whose exponent of ones is not finite: IEEE 754 and OCP.
IEEE = {
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float32: (8, 23),
    torch.float64: (11, 52),
    torch.float8_e5m2: (5, 2),
}
ONLY_NAN = {torch.float8_e4m3fn: (0x7F, 0xFF), torch.float8_e8m0fnu: (0xFF,)}


def told(bits, dtype):
    """'nan', 'inf' or ''."""
    if dtype in ONLY_NAN:
        return "nan" if bits in ONLY_NAN[dtype] else ""
    exponent, fraction = IEEE[dtype]
    if (bits >> fraction) & ((1 << exponent) - 1) != (1 << exponent) - 1:
        return ""
    return "nan" if bits & ((1 << fraction) - 1) else "inf"


def stored(words, dtype):
    width = 8 * dtype.itemsize
    whole = bits_dtype(dtype)
    signed = [w - (1 << width) if whole != torch.uint8 and w >> (width - 1) else w for w in words]
    return torch.tensor(signed, dtype=whole)


@st.composite
def shards(draw):
    """Bits of a format, special ones more often than chance has it."""
    dtype = draw(st.sampled_from([*IEEE, *ONLY_NAN]))
    width = 8 * dtype.itemsize
    special = list(ONLY_NAN.get(dtype, ()))
    if dtype in IEEE:
        exponent, fraction = IEEE[dtype]
        ones = ((1 << exponent) - 1) << fraction
        special = [ones, ones | 1, ones | 1 << (width - 1), ones - 1, ones | 1 << (fraction - 1)]
    word = st.one_of(st.integers(0, (1 << width) - 1), st.sampled_from([0, 1 << (width - 1), *special]))
    return dtype, draw(st.lists(word, max_size=40))


@given(shards(), st.integers(1, 7))
def test_what_is_found_is_what_the_format_says(shard, tile):
    dtype, words = shard
    kinds = [told(w, dtype) for w in words]
    bits = stored(words, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "_TILE", tile)
        found = [int(p) for part in nonfinite_positions(bits, dtype) for p in part]
    assert found == [i for i, kind in enumerate(kinds) if kind]
    assert count_nonfinite(bits, dtype) == NonFinite(kinds.count("nan"), kinds.count("inf"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_that_overflows_is_no_infinity(dtype):
    values = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert list(nonfinite_positions(bit_view(values), dtype)) == []
    values[7] = float("inf")
    values[8] = -float("inf")
    assert torch.cat(list(nonfinite_positions(bit_view(values), dtype))).tolist() == [7, 8]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_integers_have_nothing_to_find(dtype):
    assert list(nonfinite_positions(torch.full((4,), -1).to(bits_dtype(dtype)), dtype)) == []


def test_a_tracker_looks_at_the_live_tensor_in_chunks_whatever_its_strides():
    live = torch.zeros(9, 6, dtype=torch.bfloat16).T
    tracker = Tracker("w", live, chunk_elements=7)
    assert list(tracker.nonfinite(live)) == []
    live[2, 3], live[5, 8], live[0, 0] = float("nan"), float("inf"), float("-inf")
    positions, bits = (torch.cat(parts) for parts in zip(*tracker.nonfinite(live), strict=True))
    assert positions.tolist() == [0, 2 * 9 + 3, 5 * 9 + 8]
    assert count_nonfinite(bits, torch.bfloat16) == NonFinite(1, 2)
    assert len(list(tracker.fold(live))) > 1
    assert list(tracker.nonfinite(live)) == []  # committed: engines have them
    live[2, 3], live[5, 8] = float("inf"), float("-inf")
    positions, bits = (torch.cat(parts) for parts in zip(*tracker.nonfinite(live), strict=True))
    assert positions.tolist() == [2 * 9 + 3, 5 * 9 + 8]
    assert count_nonfinite(bits, torch.bfloat16) == NonFinite(0, 2)


def test_the_worst_tensors_are_named_first_and_not_all_of_many():
    found = {f"t{i:02d}": NonFinite(i, 1) for i in range(10)}
    text = listed(found)
    assert text.startswith("45 NaN, 10 infinite elements in 10 tensors: t09 (9 NaN, 1 infinite), t08 (")
    assert text.endswith("t02 (2 NaN, 1 infinite) and 2 more")
