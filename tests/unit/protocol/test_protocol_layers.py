"""Counts by layer on their way from owners to every push."""

from collections import Counter

import hypothesis.strategies as st
import msgspec
import pytest
from contracts import REPORTS
from hypothesis import given
from leader import Leader

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import manifest_root
from dcr.protocol.layer_changes import LAYERS_MAX, LAYERS_REST, LayerChanges, add_layers
from dcr.protocol.messages import (
    Acknowledged,
    CandidateReady,
    Folded,
    Outcome,
    OwnerJoin,
    Sealed,
    decode_report,
    encode_message,
)

HALF = f"{5:032x}"


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["", "a", "b", "l.0"]), st.tuples(st.integers(0, 9), st.integers(9, 99))),
        max_size=5,
    )
)
def test_the_layers_of_all_owners_add_up(shares):
    expected_changed, expected_elements = Counter(), Counter()
    for share in shares:
        for layer, (changed, elements) in share.items():
            expected_changed[layer] += changed
            expected_elements[layer] += elements
    found = add_layers(tuple(LayerChanges(layer, *n) for layer, n in share.items()) for share in shares)
    assert {one.layer: one.elements for one in found} == expected_elements
    assert all(one.changed == expected_changed[one.layer] for one in found)
    assert len({one.layer for one in found}) == len(found)
    assert [one.layer for one in found][:-1].count(LAYERS_REST) == 0


def test_owners_that_name_too_many_layers_between_them_are_still_counted_in_full():
    shares = [
        (*(LayerChanges(f"{owner}.{i}", 1, 10) for i in range(LAYERS_MAX)), LayerChanges(LAYERS_REST, 2, 20))
        for owner in "ab"
    ]
    found = add_layers(shares)
    assert len(found) == LAYERS_MAX + 1
    assert sum(one.changed for one in found) == 2 * (LAYERS_MAX + 2)
    assert sum(one.elements for one in found) == 2 * (10 * LAYERS_MAX + 20)
    assert found[-1] == LayerChanges(LAYERS_REST, LAYERS_MAX + 4, 10 * LAYERS_MAX + 40)


def test_a_report_with_more_layers_than_the_bound_is_refused():
    (sealed,) = [r for r in REPORTS if isinstance(r, Sealed)]
    most = tuple(LayerChanges(f"l.{i}", 0, 1) for i in range(LAYERS_MAX + 1))
    assert decode_report(encode_message(msgspec.structs.replace(sealed, layers=most))).layers == most
    more = (*most, LayerChanges("x", 0, 1))
    with pytest.raises(RefusedError, match="length <= 257"):
        decode_report(encode_message(msgspec.structs.replace(sealed, layers=more)))


def test_every_owner_hears_what_all_of_them_changed():
    at = Leader(owners=("o", "p"))
    for owner in "op":
        at.owner(OwnerJoin(owner, 1, 1, HALF))
    at.joins("a")
    for owner in "op":
        at.owner(CandidateReady(owner, 1, 1))
    at.prepared("a")
    counts = {"o": (LayerChanges("l.0", 1, 10), LayerChanges("l.1", 0, 5)), "p": (LayerChanges("l.0", 2, 10),)}
    for owner, layers in counts.items():
        at.owner(Sealed(owner, 1, at.epoch, "digest", HALF, 1, 8, 1, 3, {}, layers))
    at.member(Acknowledged("a", 1, at.epoch, manifest_root({"o": "digest", "p": "digest"}), {}))
    at.take()
    for owner in "op":
        at.owner(Folded(owner, 1, at.epoch, HALF, "", {}))
    outcomes = [o for o in at.take() if isinstance(o, Outcome)]
    assert len(outcomes) == 2
    assert all(o.layers == (LayerChanges("l.0", 3, 20), LayerChanges("l.1", 0, 5)) for o in outcomes)


def test_of_each_stage_the_longest_time_is_told() -> None:
    at = Leader()
    at.owner_joins()
    at.joins("a")
    at.push()
    at.prepared("a")
    root = manifest_root({"o": "digest"})
    at.owner(Sealed("o", 1, at.epoch, "digest", HALF, 1, 8, 1, 3, {"encode": 0.5, "deliver": 0.25}))
    at.member(Acknowledged("a", 1, at.epoch, root, {"apply": 1.0, "deliver": 2.0}))
    at.owner(Folded("o", 1, at.epoch, HALF, "", {"fold": 0.125, "encode": 0.25}))
    told = at.take()[-1].summary
    seconds = {name: s for name, s in told.items() if name.startswith("seconds_")}
    assert seconds == {"seconds_apply": 1.0, "seconds_deliver": 2.0, "seconds_encode": 0.5, "seconds_fold": 0.125}
