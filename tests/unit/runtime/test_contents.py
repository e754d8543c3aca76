"""What ranks say that they hold, summed: against the digest of the whole tensor, which knows nothing of boxes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.readback import Extent
from dcr.runtime.contents import EngineContents, ReadbackError
from dcr.runtime.rank_messages import Contents, HeldBox

ROWS, COLUMNS = 12, 8
W = TensorSpec("w", (ROWS, COLUMNS), torch.bfloat16)
BITS = torch.randint(-(1 << 15), 1 << 15, (ROWS * COLUMNS,), generator=torch.Generator().manual_seed(3)).to(torch.int16)


def rows(first, count, *, padded=False):
    """A box of whole rows; ``padded``: rows that do not lie one after the other where they are held."""
    return Box.of([count, COLUMNS], [COLUMNS, 1], [COLUMNS + padded, 1], first * COLUMNS)


def columns(first, count):
    return Box.of([ROWS, count], [COLUMNS, 1], [count, 1], first)


def held(box, bits=BITS):
    extent = Extent.of(box)
    return HeldBox(extent.sizes, extent.strides, extent.offset, extent.digest(W, bits).hex())


def ranks_of(*boxes):
    return {str(i): Contents({"w": tuple(map(held, mine))}, {}, ()) for i, mine in enumerate(boxes)}


def whole(bits=BITS):
    return digest_elements(W, None, bits)


def summed(ranks, specs=(W,)):
    return EngineContents.of(specs, ranks, {})


@given(st.sets(st.integers(1, ROWS - 1)), st.booleans(), st.data())
def test_however_a_tensor_is_cut_and_repeated_its_digest_is_that_of_the_whole(cuts, by_rows, data):
    size = ROWS if by_rows else COLUMNS
    edges = [0, *sorted(c for c in cuts if c < size), size]
    parts = [(a, b - a) for a, b in itertools.pairwise(edges)]
    homes = [data.draw(st.sets(st.integers(0, 3), min_size=1)) for _ in parts]
    ranks = ranks_of(
        *(
            [
                rows(*part, padded=data.draw(st.booleans())) if by_rows else columns(*part)
                for part, home in zip(parts, homes, strict=True)
                if rank in home
            ]
            for rank in range(4)
        )
    )
    found = summed(ranks)
    assert found.digests == {"w": whole()}
    assert found.elements == W.numel
    report = found.compare(5, whole().hex(), None)
    assert (report.version, report.compared_with, report.tensors, report.unread) == (5, "record", 1, {})
    assert found.compare(None, "", {"w": whole()}).compared_with == "checkpoint"


def test_one_other_bit_is_named():
    other = BITS.clone()
    other[17] ^= 1
    found = summed(ranks_of([rows(0, 5)], [rows(5, 7)]))
    with pytest.raises(ReadbackError, match=r"w: its bits are not those of the checkpoint.*restart the engine"):
        found.compare(None, "", {"w": whole(other)})
    with pytest.raises(ReadbackError, match=f"all 1 canonical tensors together digest to {whole().hex()}, version 4"):
        found.compare(4, whole(other).hex(), None)


def test_copies_that_differ_name_the_ranks():
    other = BITS.clone()
    other[3] ^= 1
    ranks = ranks_of([rows(0, 5)], [rows(0, 5, padded=True), rows(5, 7)])
    assert summed(ranks).digests == {"w": whole()}
    ranks["1"] = Contents({"w": (held(rows(0, 5), other), held(rows(5, 7)))}, {}, ())
    with pytest.raises(ReadbackError, match="w: ranks 0 and 1 hold different bits of the same 40 elements"):
        summed(ranks)
    twice = {"0": Contents({"w": (held(rows(0, 12)), held(rows(0, 12), other))}, {}, ())}
    with pytest.raises(ReadbackError, match="w: rank 0 holds different bits of the same 96 elements"):
        summed(twice)


def test_elements_that_no_rank_holds_are_counted():
    with pytest.raises(ReadbackError, match="w: 8 of its 96 elements lie on no rank of this engine, and a change"):
        summed(ranks_of([rows(0, 5)], [rows(6, 6)]))
    with pytest.raises(ReadbackError, match="w: 12 of its 96 elements lie on no rank"):
        summed(ranks_of([columns(0, 2)], [columns(4, 4), columns(1, 2)]))


def test_boxes_that_overlap_in_part_are_not_added_up():
    found = summed(ranks_of([rows(0, 7)], [rows(6, 6)]))
    assert found.digests == {}
    assert "overlap in part" in found.unread["w"]
    report = found.compare(1, "0" * 32, None)
    assert (report.compared_with, report.tensors) == ("", 0)


def test_what_cannot_be_read_is_said_and_the_rest_is_compared():
    empty = TensorSpec("empty", (0, 4), torch.bfloat16)
    ranks = {"0": Contents({"w": (held(rows(0, 12)),)}, {}, ("log",))}
    specs = [W, empty, TensorSpec("log", (3,), torch.bfloat16), TensorSpec("mtp", (3,), torch.bfloat16)]
    found = summed(ranks, specs)
    assert found.digests == {"w": whole(), "empty": ContentDigest()}
    assert {n: why[:11] for n, why in found.unread.items()} == {"log": "the loader ", "mtp": "the loader "}
    checkpoint = {"w": whole(), "empty": ContentDigest(), "log": ContentDigest(1), "mtp": ContentDigest(2)}
    assert found.compare(None, "", checkpoint).compared_with == "checkpoint"
    assert found.compare(3, "0" * 32, None).compared_with == ""


def test_what_a_rank_finds_wrong_or_cannot_read_names_the_rank():
    ranks = ranks_of([rows(0, 5)], [rows(5, 7)])
    ranks["1"] = Contents(ranks["1"].held, {"w": "the constant is not there"}, ())
    with pytest.raises(ReadbackError, match="w: rank 1: the constant is not there"):
        summed(ranks)
    with pytest.raises(ReadbackError, match="rank 1: w moved"):
        EngineContents.of([W], {"0": ranks["0"]}, {"1": "w moved"})


def test_an_error_counts_what_it_does_not_name():
    specs = [TensorSpec(f"t{i:02}", (ROWS, COLUMNS), torch.bfloat16) for i in range(11)]
    ranks = {"0": Contents({s.name: (held(rows(0, 3)),) for s in specs}, {}, ())}
    with pytest.raises(ReadbackError, match=r"t00: 72 of.*t07: 72 of.*; and 3 more: if something else"):
        summed(ranks, specs)
