"""Trees of the relay: everybody is reached once, at the least depth, and the work is shared."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.delivery.relay.tree import Branch, Node, plan
from dcr.protocol.errors import RefusedError


def nodes(count):
    return [Node(f"n{i}", "h", i) for i in range(count)]


def shape(branch: Branch):
    return [branch.node.name, *(shape(b) for b in branch.branches)]


TABLE = [
    (1, 0, 2, ["n0"]),
    (3, 0, 2, ["n0", ["n1"], ["n2"]]),
    (4, 3, 2, ["n3", ["n0", ["n2"]], ["n1"]]),
    (4, 0, 1, ["n0", ["n1", ["n2", ["n3"]]]]),
    (5, 2, 64, ["n2", ["n3"], ["n4"], ["n0"], ["n1"]]),
]


@pytest.mark.parametrize(("count", "root", "fan_out", "expected"), TABLE)
def test_the_tree_is(count, root, fan_out, expected):
    assert shape(plan(nodes(count), root, fan_out)) == expected


def depth(branch):
    return 1 + max((depth(b) for b in branch.branches), default=0)


def each(branch):
    yield branch
    for below in branch.branches:
        yield from each(below)


@given(st.integers(1, 65), st.integers(1, 8), st.data())
def test_everybody_is_reached_once_and_no_tree_is_shallower(count, fan_out, data):
    root = data.draw(st.integers(0, count - 1))
    tree = plan(nodes(count), root, fan_out)
    assert tree.node == nodes(count)[root]
    assert sorted(tree.nodes()) == sorted(nodes(count))
    assert max(len(b.branches) for b in each(tree)) <= fan_out
    fits, levels = 1, 1
    while fits < count:
        fits += fan_out**levels
        levels += 1
    assert depth(tree) == levels
    assert all(branch.height == depth(branch) - 1 for branch in each(tree))


@given(st.integers(1, 30), st.integers(1, 5))
def test_over_all_roots_every_node_passes_on_as_much(count, fan_out):
    sends = Counter()
    for root in range(count):
        for branch in each(plan(nodes(count), root, fan_out)):
            sends[branch.node.name] += len(branch.branches)
    assert set(sends.values()) == {count - 1}


@pytest.mark.parametrize(("count", "fan_out"), [(0, 2), (5000, 2), (3, 0), (3, 65), (66, 1)])
def test_what_is_no_tree_is_refused(count, fan_out):
    with pytest.raises(RefusedError):
        plan(nodes(count), 0, fan_out)
