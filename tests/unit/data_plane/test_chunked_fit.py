"""Maps that are fitted chunk by chunk have the pairs of those fitted at once, and for regular layouts as few boxes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.bits import row_chunks
from dcr.data_plane.chunked_fit import ChunkedFit, maps_exactly
from dcr.data_plane.index_map import fit
from dcr.protocol.errors import RefusedError


def chunked(source, target, size, **bounds):
    found = ChunkedFit(**bounds)
    for start in range(0, source.numel(), size):
        found.add(source[start : start + size], target[start : start + size])
    return found.result()


@st.composite
def layouts(draw):
    """Flat indices of a tensor after some permutes, flips, splits and joins, in the order of the result."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    ids = torch.arange(torch.Size(shape).numel()).view(shape)
    for _ in range(draw(st.integers(0, 3))):
        kind, dim = draw(st.sampled_from("pfsg")), draw(st.integers(0, ids.dim() - 1))
        if kind == "p":
            ids = ids.permute(draw(st.permutations(range(ids.dim()))))
        elif kind == "f":
            ids = ids.flip(dim)
        else:  # every other one, first or last
            parts = [ids[(slice(None),) * dim + (slice(k, None, 2),)] for k in range(2)]
            ids = torch.cat(parts[::-1] if kind == "g" else parts, dim)
    return ids.reshape(-1)


@settings(max_examples=120, deadline=None)
@given(layouts(), st.integers(1, 40), st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_the_pairs_are_those_of_one_fit(ids, size, far, rng):
    target = torch.arange(ids.numel()) + far
    if rng.random() < 0.3:  # some elements are elsewhere
        kept = torch.tensor([rng.random() < 0.8 for _ in range(ids.numel())], dtype=torch.bool)
        ids, target = ids[kept], target[kept]
    for source, aim in ((ids, target), (target, ids)):
        found = chunked(source, aim, size)
        assert found == fit(source, aim)
        ordered, order = source.sort()
        assert maps_exactly(found, ordered, aim[order])
        if ordered.numel() > 1:
            assert not maps_exactly(found, ordered, aim[order].roll(1))


@pytest.mark.parametrize("size", [1000, 4096, 40_000])
@pytest.mark.parametrize(
    ("layout", "boxes"),
    [
        (lambda ids: ids, 1),
        (lambda ids: ids.T, 1),
        (lambda ids: ids.flip(0), 1),
        (lambda ids: ids.view(8, 3, 10, 200).permute(1, 0, 3, 2), 1),
        (lambda ids: torch.cat([ids[::2], ids[1::2]]), 2),
        (lambda ids: torch.cat([ids[:, 64:], ids[:, :64]], 1), 2),
    ],
)
def test_regular_layouts_have_as_few_boxes(layout, boxes, size):
    ids = layout(torch.arange(48_000).view(240, 200))
    found = ChunkedFit()
    for start, chunk in row_chunks(ids, size):
        found.add(torch.arange(start, start + chunk.numel()), chunk)
    assert found.result() == fit(torch.arange(ids.numel()), ids.reshape(-1))
    assert len(found.result().boxes) <= boxes


def test_scattered_elements_are_refused_before_they_take_memory():
    scattered = torch.randperm(4_000, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RefusedError, match="more than boxes_max = 600"):
        chunked(scattered, torch.arange(4_000), 500, boxes_max=600)
    assert len(chunked(scattered, torch.arange(4_000), 500, boxes_max=4_000).boxes) > 600
