"""Elements that two payloads of an epoch name, against plain sets."""

import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.touched import TouchedElements


def item(name, numel, places):
    indices = torch.tensor(sorted(places), dtype=torch.int64)
    return Item(TensorSpec(name, (numel,), torch.int16), Operation.ADD, indices, torch.ones(len(indices)).short())


@st.composite
def payloads(draw):
    """Items of two tensors, some of which meet: runs, strides, and anything."""
    numel = draw(st.sampled_from([1, 7, 64, 65, 900, 5000]))
    shape = st.one_of(
        st.sets(st.integers(0, numel - 1), max_size=12),
        st.builds(
            lambda start, step, n: set(range(start, numel, step)[:n]),
            st.integers(0, numel - 1),
            st.integers(1, 5),
            st.integers(0, 400),
        ),
    )
    one = st.lists(st.tuples(st.sampled_from("ab"), shape), max_size=3, unique_by=lambda x: x[0])
    return numel, draw(st.lists(one, max_size=8))


@given(payloads())
@settings(max_examples=300)
def test_the_first_payload_that_names_an_element_again_is_found(made):
    numel, sent = made
    touched, known = TouchedElements(), {"a": set(), "b": set()}
    for payload in sent:
        twice = [name for name, places in payload if known[name] & places]
        found = touched.add([item(name, numel, places) for name, places in payload])
        assert found == (twice[0] if twice else "")
        if twice:
            return
        for name, places in payload:
            known[name] |= places
    entries = sum(map(len, known.values()))
    assert touched.nbytes <= max(4 * entries, 2 * (numel // 8 + 8))


def test_indices_beyond_32_bits():
    far = 1 << 40
    touched = TouchedElements()
    assert touched.add([item("a", 2 * far, [0, 5, far + 7])]) == ""
    assert touched.add([item("a", 2 * far, [far + 8, far + 10])]) == ""


@pytest.mark.parametrize("numel", [1 << 20])
def test_what_is_held_follows_the_entries_and_never_exceeds_a_bit_an_element(numel):
    few, dense, odd, even = (TouchedElements() for _ in range(4))
    few.add([item("a", numel, range(0, numel, 1000))])
    assert few.nbytes == 4 * len(range(0, numel, 1000))
    for start in range(0, numel, numel // 8):
        dense.add([item("a", numel, range(start, start + numel // 8))])
    assert dense.nbytes == 0  # a restore, cut into payloads: nothing but where each begins and ends
    odd.add([item("a", numel, range(1, numel, 2))])
    assert odd.nbytes == numel // 8
    for n in range(1, 4):
        assert even.add([item("a", numel, range(n, numel, 4))]) == ""
    assert even.nbytes == numel // 8
    assert even.add([item("a", numel, [numel - 1])]) == "a"
    assert even.add([item("a", numel, [numel - 4])]) == ""


def test_items_by_the_ten_thousand_take_no_time_or_memory_each():
    """A payload may cut one tensor into as many items as it has entries."""
    numel, count = 1 << 24, 20_000
    touched, started = TouchedElements(), time.process_time()
    for start in range(0, 4 * count, 4):
        assert touched.add([item("a", numel, [start])]) == ""
    assert time.process_time() - started < 20  # compared with one another they take minutes
    assert touched.add([item("a", numel, [4 * count - 4])]) == "a"
    assert touched.nbytes <= numel // 8
