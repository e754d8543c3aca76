"""Layers and counts of changes, against a reading of names by hand."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from dcr.data_plane.change_counts import ChangeCount, by_layer, in_words, layer_of, reading_order
from dcr.data_plane.item import TensorSpec

REST = "(rest)"


def layers(*names, most=100):
    return layer_of([TensorSpec(n, (1,), torch.bfloat16) for n in names], most, REST)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.gate_proj.weight", "model.layers.12"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3.mlp.experts.7"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("0.weight", "0"),
        ("blocks.5", "blocks.5"),
        ("conv1d.weight2", "conv1d.weight2"),  # a number of its own only
        ("h.٣.weight", "h.٣.weight"),  # digits of other scripts are letters here
        ("a..1..b", "a..1"),
    ],
)
def test_a_layer_ends_in_the_last_number_of_a_name(name, layer):
    assert layers(name) == {name: layer}


def test_too_many_layers_stop_at_an_earlier_number():
    names = [f"model.layers.{i}.mlp.experts.{e}.{w}" for i in range(12) for e in range(9) for w in ("up", "down")]
    names += ["model.layers.0.norm", "head"]
    found = layers(*names, most=12 * 9 + 2)
    assert found["model.layers.3.mlp.experts.7.up"] == "model.layers.3.mlp.experts.7"
    assert found["model.layers.0.norm"] == "model.layers.0"
    found = layers(*names, most=12 * 9 + 1)
    assert set(found.values()) == {*(f"model.layers.{i}" for i in range(12)), "head"}
    assert found["model.layers.3.mlp.experts.7.up"] == "model.layers.3"
    found = layers(*names, most=5)
    # In reading order, so that it is the same everywhere, and layer 10 is not before layer 2.
    assert set(found.values()) == {"head", *(f"model.layers.{i}" for i in range(4)), REST}
    assert {n for n in names if found[n] == REST} == {n for n in names if n.startswith("model.layers.")} - {
        n for n in names if n.startswith(tuple(f"model.layers.{i}." for i in range(4)))
    }


PARTS = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10", "x1"]), min_size=1, max_size=5)


@given(st.lists(PARTS.map(".".join), unique=True, max_size=30), st.integers(1, 8))
def test_every_tensor_has_one_layer_and_layers_are_few(names, most):
    found = layers(*names, most=most)
    assert list(found) == names
    assert len(set(found.values()) - {REST}) <= most
    for name, layer in found.items():
        if layer not in (REST, name):
            assert name.startswith(layer + ".")
            assert layer.split(".")[-1].isdigit()
    assert found == {n: layers(*reversed(names), most=most)[n] for n in names}
    if len({n.split(".")[0] for n in names}) <= most and all(n[0].isdigit() for n in names):
        assert REST not in found.values()


@given(st.lists(st.integers(0, 10**30), unique=True))
def test_reading_order_counts(numbers):
    assert sorted((f"layers.{n}.w" for n in numbers), key=reading_order) == [f"layers.{n}.w" for n in sorted(numbers)]


def test_counts_add_up_by_layer_and_are_told_in_words():
    counts = {
        "l.0.a": ChangeCount(1, 4), "l.0.b": ChangeCount(0, 6), "l.1.a": ChangeCount(2, 5), "head": ChangeCount(0, 5),
    }  # fmt: skip
    found = by_layer(counts, layers(*counts))
    assert found == {"l.0": ChangeCount(1, 10), "l.1": ChangeCount(2, 5), "head": ChangeCount(0, 5)}
    assert [c.rate for c in found.values()] == [0.1, 0.4, 0.0]
    assert ChangeCount(0, 0).rate == 0.0
    said = in_words(counts, found)
    assert said == "3 of 20 elements changed (15 %) in 2 of 4 tensors, most in l.1 (40 %), l.0 (10 %)"
    nothing = {"head": ChangeCount(0, 5)}
    assert in_words(nothing, nothing) == "0 of 5 elements changed (0 %) in 0 of 1 tensors"
