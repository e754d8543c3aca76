"""The rules on destinations, against every pair of writes looked at byte by byte."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.data_plane.placement.rules import Touched, find_clashes
from dcr.data_plane.placement.write_watch import Write
from dcr.data_plane.region import Region

NBYTES = 96
MEMORY = torch.zeros(NBYTES, dtype=torch.uint8)


@st.composite
def regions(draw):
    """A strided view of a part of some memory, seen as 1, 2 or 4 byte elements."""
    t = MEMORY.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.int32])))
    t = t.view(draw(st.sampled_from([2, 4, 6])), -1)
    for dim in (0, 1):
        start = draw(st.integers(0, t.shape[dim] - 1))
        t = t.narrow(dim, start, draw(st.integers(1, t.shape[dim] - start)))
    t = t[:, :: draw(st.integers(1, 3))]
    return Region.of(t.t() if draw(st.booleans()) else t)


writes = st.builds(Write, regions(), st.sampled_from([None, None, None, 0, 1]))
programs = st.dictionaries(st.sampled_from("abcde"), st.lists(writes, min_size=1, max_size=3).map(tuple), min_size=1)


def addresses(region):
    """Every byte of a region."""
    found = {region.address}
    for size, stride in zip(region.size, region.stride, strict=True):
        found = {a + i * stride * region.dtype.itemsize for a in found for i in range(size)}
    return {a + k for a in found for k in range(region.dtype.itemsize)}


def may_share(one, other):
    (at, name, a), (bt, mate, b) = one, other
    if a.constant is not None and b.constant is not None:
        return (a.constant, a.region.dtype) == (b.constant, b.region.dtype)
    if name != mate:
        return False
    if a.constant is None and b.constant is None:
        return a.region == b.region
    return at < bt if a.constant is not None else bt < at


def pairs(program):
    uses = [(at, name, w, addresses(w.region)) for name, ws in program.items() for at, w in enumerate(ws)]
    for (*one, mine), (*other, theirs) in itertools.combinations(uses, 2):
        if mine & theirs and not may_share(one, other):
            yield one[1], other[1]


@settings(max_examples=500)
@given(programs)
def test_what_may_not_share_memory_is_refused_and_nothing_else(program):
    wrong = {name for pair in pairs(program) for name in pair}
    found = find_clashes(program)
    assert found.keys() <= wrong
    assert bool(found) == bool(wrong)
    # Learning also refuses what touches the memory of a refused tensor: then nothing is left that may not be.
    touched = set().union(*(addresses(w.region) for name in found for w in program[name]))
    left = {
        name: ws
        for name, ws in program.items()
        if name not in found and not any(touched & addresses(w.region) for w in ws)
    }
    assert list(pairs(left)) == []


@settings(max_examples=300)
@given(st.lists(st.tuples(regions(), st.sampled_from("abc"))), regions())
def test_who_touches_a_region(known, asked):
    named = dict(known)
    toucher = Touched(known).by(asked)
    sharing = {name for region, name in named.items() if addresses(region) & addresses(asked)}
    assert (toucher in sharing) if sharing else (toucher is None)
