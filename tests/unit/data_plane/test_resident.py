"""The registry of resident storage, its digests, snapshots, and the regions writes land in."""

import struct

import loaders
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcr.data_plane.region import Region, share_memory
from dcr.data_plane.resident import Residents, Snapshot, resident_bits, resident_digests


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = loaders.parameter(4, 3)
        self.register_buffer("kept", torch.zeros(2, dtype=torch.float32))
        self.register_buffer("private", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.plain = torch.zeros(3)
        self.row = [torch.zeros(2), torch.zeros(2)]
        self.table = {"x": torch.zeros(2)}
        self.inner = nn.Linear(2, 2, bias=False)
        self.tied = self.inner.weight


def test_every_tensor_is_found_by_its_address():
    m = Held()
    r = Residents(m)
    assert set(r.by_name) == {
        "weight", "kept", "private", "plain", "row[0]", "row[1]", "table.x", "inner.weight", "tied",
    }  # fmt: skip
    for name in ("weight", "kept", "private", "plain"):
        assert r.owner(getattr(m, name)[1:]) == name
    assert r.owner(m.row[1]) == "row[1]"
    assert r.owner(m.table["x"]) == "table.x"
    assert r.span(m.tied) is r.span(m.inner.weight)
    assert r.span(torch.zeros(3)) is None
    assert r.span(torch.empty(3, device="meta")) is None
    assert r.span(torch.from_numpy(m.plain.numpy())) is r.span(m.plain), "another storage object over the same memory"


@pytest.mark.parametrize("name", ["weight", "kept", "private"])
def test_digests_see_every_bit_of_parameters_and_buffers(name):
    m = Held()
    before, bits = resident_digests(m), resident_bits(m)
    assert set(before) == {"weight", "kept", "private", "inner.weight", "tied"}
    flat = loaders.INTEGERS[getattr(m, name).itemsize]
    getattr(m, name).data.view(flat).view(-1)[1] ^= 1
    after = resident_digests(m)
    assert {n for n in before if before[n] != after[n]} == {name}
    now = resident_bits(m)
    assert {n for n in bits if not torch.equal(bits[n], now[n])} == {name}


def test_digests_tell_negative_zero_shape_and_dtype_but_not_strides():
    def digest(t):
        m = nn.Module()
        m.register_buffer("t", t)
        return resident_digests(m)["t"]

    zero = torch.zeros(2, 3)
    assert digest(zero) != digest(-zero)
    assert digest(zero) != digest(zero.view(3, 2))
    assert digest(zero) != digest(zero.view(torch.int32))
    r = torch.randn(3, 2)
    assert digest(r.t()) == digest(r.t().contiguous())


def test_resident_bits_are_the_stored_bytes():
    m = nn.Module()
    m.register_buffer("t", torch.tensor([1.0, -0.0, float("nan")]))
    assert bytes(resident_bits(m)["t"].tolist()) == struct.pack("<fff", 1.0, -0.0, float("nan"))


def test_a_snapshot_restores_bytes_and_bindings():
    m = Held()
    before, weight, address = loaders.state(m), m.weight, m.weight.data_ptr()
    snapshot = Snapshot(Residents(m))
    assert snapshot.changed() == []
    m.kept.add_(1)
    m.plain.numpy()[:] = 5
    m.weight.data = torch.ones(4, 3, dtype=loaders.BF16)
    m.inner.weight = loaders.parameter(2, 2, dtype=torch.float32)
    m.table["x"] = torch.ones(2)
    assert set(snapshot.changed()) == {"kept", "plain", "weight", "inner.weight", "table.x"}
    snapshot.restore()
    assert snapshot.changed() == []
    assert loaders.same(loaders.state(m), before)
    assert m.weight is weight
    assert m.weight.data_ptr() == address
    assert m.inner.weight is m.tied
    assert not m.table["x"].any()


@st.composite
def blocks(draw, memory):
    """A strided view of a part of some memory, seen as 1, 2 or 4 byte elements."""
    t = memory.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.int32])))
    rows = draw(st.sampled_from([4, 8, 16]))
    t = t.view(rows, -1)
    for dim in (0, 1):
        start = draw(st.integers(0, t.shape[dim] - 1))
        length = draw(st.integers(1, t.shape[dim] - start))
        t = t.narrow(dim, start, length)
    t = t[:: draw(st.integers(1, 3)), :: draw(st.integers(1, 3))]
    return t.t() if draw(st.booleans()) else t


@given(st.data())
def test_shared_memory_is_found_exactly(data):
    memory = torch.zeros(256, dtype=torch.uint8)
    a, b = data.draw(blocks(memory)), data.draw(blocks(memory))
    a.fill_(-1 if a.dtype != torch.uint8 else 255)
    touched = bool((b != 0).any())
    assert share_memory(Region.of(a), Region.of(b)) == touched
    assert share_memory(Region.of(b), Region.of(a)) == touched
    assert not Region.of(a).hits_itself


def test_views_that_hit_themselves():
    t = torch.zeros(12)
    assert Region.of(t[:1].expand(4)).hits_itself
    assert Region.of(t.unfold(0, 3, 1)).hits_itself
    assert not Region.of(t.unfold(0, 3, 3)).hits_itself
    assert not Region.of(t[:1].expand(1)).hits_itself
    assert Region.of(t[2:5]).end - Region.of(t[2:5]).address == 12
