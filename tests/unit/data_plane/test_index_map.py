"""Index maps against dictionaries: every answer is compared with plain Python over all pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.protocol.errors import RefusedError


def pairs_of(index_map):
    source, target = index_map.expand()
    pairs = list(zip(source.tolist(), target.tolist(), strict=True))
    assert len(dict(pairs)) == len(pairs) == index_map.numel
    assert pairs == sorted(pairs)
    return dict(pairs)


def fitted(pairs, **settings_):
    keys = list(pairs)
    return fit(
        torch.tensor(keys, dtype=torch.int64), torch.tensor([pairs[k] for k in keys], dtype=torch.int64), **settings_
    )


def a_view(draw):
    """Elements of a random strided view of a random array, as flat indices in the view's order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    ids = torch.arange(torch.Size(shape).numel()).view(shape)
    for dim in range(ids.dim()):
        start = draw(st.integers(0, ids.shape[dim] - 1))
        ids = ids.narrow(dim, start, draw(st.integers(1, ids.shape[dim] - start)))
        ids = ids[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        if draw(st.booleans()):
            ids = ids.flip(dim)
    return ids.permute(draw(st.permutations(range(ids.dim())))).reshape(-1).tolist()


@st.composite
def layouts(draw):
    """A partial injection: concatenated views on each side, or scattered pairs."""
    if draw(st.booleans()):
        n = draw(st.integers(0, 20))
        numbers = st.lists(st.integers(0, 60), min_size=n, max_size=n, unique=True)
        return dict(zip(draw(numbers), draw(numbers), strict=True))
    sides = []
    for _ in range(2):
        side, base = [], 0
        for _ in range(draw(st.integers(1, 3))):
            view = a_view(draw)
            side += [base + v for v in view]
            base += max(view) + 1 + draw(st.integers(0, 5))
        sides.append(side)
    return dict(zip(*sides, strict=False))


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_fit_holds_exactly_the_pairs(pairs):
    assert pairs_of(fitted(pairs)) == pairs


@settings(max_examples=200, deadline=None)
@given(layouts(), st.sets(st.integers(0, 400)))
def test_apply_maps_what_is_in_the_domain(pairs, wanted):
    index_map = fitted(pairs)
    indices = sorted(wanted | set(list(pairs)[::2]))
    kept, targets = index_map.apply(torch.tensor(indices, dtype=torch.int64))
    got = {indices[k]: t for k, t in zip(kept.tolist(), targets.tolist(), strict=True)}
    assert got == {i: pairs[i] for i in indices if i in pairs}
    assert len(set(kept.tolist())) == kept.numel()


@settings(max_examples=200, deadline=None)
@given(layouts(), layouts())
def test_inverse_composition_and_equality(first, second):
    one, two = fitted(first), fitted(second)
    assert pairs_of(one.inverse()) == {t: s for s, t in first.items()}
    assert one.inverse().inverse() == one
    assert pairs_of(one.then(two)) == {s: second[t] for s, t in first.items() if t in second}
    assert (one == two) is (first == second)
    assert pairs_of(one.moved(3, 5)) == {s + 3: t + 5 for s, t in first.items()}


def test_maps_with_other_boxes_are_equal_if_their_pairs_are():
    whole = IndexMap((Box.of([12], [1], [1]),))
    halves = IndexMap.union([Box.of([6], [2], [2]), Box.of([6], [2], [2], 1, 1)])
    assert whole == halves
    assert hash(whole) == hash(halves)
    assert whole != halves.moved(target=1)


ids = torch.arange(24 * 36)
grid = ids.view(24, 36)


@pytest.mark.parametrize(
    ("target", "boxes"),
    [
        pytest.param(ids, 1, id="identity"),
        pytest.param(grid.T.reshape(-1), 1, id="transpose"),
        pytest.param(ids.view(4, 6, 36).permute(1, 2, 0).reshape(-1), 1, id="permute"),
        pytest.param(grid[3:11, 5:20].reshape(-1), 1, id="slice"),
        pytest.param(grid[:, ::3].reshape(-1), 1, id="strided"),
        pytest.param(ids.view(2, -1).T.reshape(-1), 1, id="interleave"),
        pytest.param(torch.cat([grid[12:], grid[:12]]).reshape(-1), 2, id="swapped halves"),
        pytest.param(ids // 36 * 64 + ids % 36, 1, id="padded rows"),
        pytest.param((ids + 17) // 36 * 64 + (ids + 17) % 36, 3, id="padded rows, shard begins inside one"),
        pytest.param(ids.flip(0), 1, id="reversed"),
        pytest.param((torch.arange(3)[:, None] * 3 + torch.arange(3) * 2).view(-1), 3, id="strides that do not nest"),
        pytest.param(
            torch.cat([torch.cat([g[:4], g[4:5] + 9000, g[5:6] + 19000]) for g in ids.view(12, 6, 12)]).reshape(-1),
            3,
            id="fused groups",
        ),
    ],
)
def test_regular_layouts_need_few_boxes(target, boxes):
    index_map = fit(torch.arange(target.numel()), target)
    assert len(index_map.boxes) <= boxes
    assert torch.equal(index_map.expand()[1], target)


def test_scattered_pairs_need_a_box_for_two_and_are_refused_beyond_the_bound():
    target = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert len(fit(torch.arange(1000), target).boxes) <= 500
    with pytest.raises(RefusedError, match="boxes_max = 100"):
        fit(torch.arange(1000), target, boxes_max=100)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([0, 1, 1], [0, 1, 2]),
        ([0, 1, 2], [5, 6, 5]),
        ([-1, 0], [0, 1]),
        ([0, 1], [0, -1]),
    ],
)
def test_fit_refuses_what_is_not_one_to_one(source, target):
    with pytest.raises(RefusedError):
        fit(torch.tensor(source), torch.tensor(target))


def test_int64_is_the_limit():
    top = (1 << 63) - 1
    edge = fitted({0: top, 1: top - 1})
    assert pairs_of(edge) == {0: top, 1: top - 1}
    with pytest.raises(RefusedError, match="outside"):
        edge.moved(target=1)
    with pytest.raises(RefusedError, match="outside"):
        Box.of([2], [1], [1 << 62], 0, 1 << 62)
    with pytest.raises(RefusedError, match="outside"):
        Box.of([3], [1], [-1], 0, 1)


def test_boxes_that_do_not_decode_or_overlap_are_refused():
    with pytest.raises(RefusedError, match="nested"):
        Box.of([3, 3], [2, 3], [3, 1])
    with pytest.raises(RefusedError, match="at least 1"):
        Box.of([0], [1], [1])
    with pytest.raises(RefusedError, match="share a source"):
        IndexMap.union([Box.of([4], [1], [1]), Box.of([2], [2], [1], 1, 10)])
    with pytest.raises(RefusedError, match="share a target"):
        IndexMap.union([Box.of([4], [1], [2]), Box.of([4], [1], [2], 10, 2)])


@pytest.mark.parametrize("indices", [[3, 2], [2, 2]])
def test_apply_refuses_indices_out_of_order(indices):
    with pytest.raises(RefusedError, match="increasing"):
        fitted({0: 0}).apply(torch.tensor(indices))


def test_the_empty_map():
    empty = fit(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    assert empty.numel == 0
    assert empty == IndexMap()
    assert [t.tolist() for t in empty.apply(torch.arange(3))] == [[], []]
    assert empty.then(fitted({0: 1})) == empty
