"""Candidates pinned by a copy: what is sent and folded is what was there when it was taken, whatever happens then."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_own_conversion import Own, weights
from test_own_conversion import applied as applied_to
from test_source import Net, applied, bits_of, digest_of, same, save_path, scramble
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.nonfinite import NonFinite
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.megatron.source import MegatronSource
from dcr.trainer.snapshot import Snapshot
from dcr.trainer.torch.source import TorchSource
from tests.peak_memory import peak_of

FORWARD = (Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE)


def rebind(model, seed):
    """Other tensors in place of the parameters and buffers, with other bits; the old ones get other bits, too."""
    scramble(model, seed, rate=1.0)
    old = dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for number, (name, tensor) in enumerate(old.items()):
            new = tensor.detach().clone()
            if number % 3 == 0 and isinstance(tensor, nn.Parameter):
                tensor.data = new
            elif isinstance(tensor, nn.Parameter):
                setattr(model, name, nn.Parameter(new))
            else:
                model.register_buffer(name, new)
    scramble(model, seed + 1, rate=1.0)


def change(model, step):
    how, seed = step
    (rebind if how == "rebind" else scramble)(model, seed)


STEPS = st.lists(st.tuples(st.sampled_from(["in place", "rebind"]), st.integers(0, 99)), max_size=2)
REFITS = st.fixed_dictionaries(
    {
        "copied": st.booleans(),
        "before": STEPS,
        "attempts": st.lists(st.tuples(st.sampled_from(FORWARD), STEPS), min_size=1, max_size=3),
        "folds": st.integers(0, 2),
    }
)


CASES = (st.lists(REFITS, min_size=1, max_size=3), st.sampled_from([29, 1 << 22]))


@settings(max_examples=4)
@given(*CASES)
def test_steps_between_refits_and_within_them(refits, chunk_elements):
    judge(refits, chunk_elements)


@pytest.mark.long
@settings(max_examples=300)
@given(*CASES)
def test_many_steps_between_refits_and_within_them(refits, chunk_elements):
    judge(refits, chunk_elements)


def judge(refits, chunk_elements):
    model = Net()
    source = TorchSource(model, save_path=save_path, chunk_elements=chunk_elements)
    committed = bits_of(source.gather_state())
    blank = {name: torch.zeros_like(bits) for name, bits in committed.items()}
    for refit in refits:
        for step in refit["before"]:
            change(model, step)
        checkpoint = source.gather_state()
        pushed, digest = bits_of(checkpoint), digest_of(source, checkpoint)
        source.snapshot() if refit["copied"] else source.hold()
        for kind, steps in refit["attempts"]:
            for step in steps if refit["copied"] else ():
                change(model, step)
            sent, _ = applied(blank if kind is Kind.DENSE else committed, source.changes(kind))
            assert same(sent, pushed)
            assert source.candidate_digest == digest
            assert same(applied(blank, source.changes(Kind.RESTORE))[0], committed)
        for _ in range(refit["folds"]):  # none: it was not committed
            if refit["copied"]:
                scramble(model, 7)
            source.fold(digest)
            committed = pushed
        assert same(applied(blank, source.changes(Kind.RESTORE))[0], committed)


def test_residual_tensors_are_in_the_copy_and_nowhere_else():
    own = Own(weights((4, 8), (3, 4), (2, 6)), lambda n, t: {f"w{n}": t.t() if n == 0 else t + n})
    source = MegatronSource(own, chunk_elements=5)
    assert {spec.name for spec in source.residual_specs} == {"w1", "w2"}
    with pytest.raises(RefusedError, match=r"call prepare\(\) on every rank"):
        source.snapshot()
    for changed in ((0, 1), (2,), (0, 1, 2), ()):
        old = own.export()
        blank = {name: torch.zeros_like(bits) for name, bits in old.items()}
        for number in changed:
            own.tensors[number].mul_(3)
        new = own.export()
        kept = [tensor.clone() for tensor in own.tensors]
        source.prepare()
        source.snapshot()
        assert source._candidates == {}
        for number, tensor in enumerate(own.tensors):
            tensor.fill_(7.0 + number)  # under hold it would be refused
            own.tensors[number] = weights(tensor.shape, seed=number)[0]
        for kind in FORWARD:
            assert same(applied_to(source, kind, blank if kind is Kind.DENSE else old), new)
        source.fold(source.candidate_digest)
        assert same(applied_to(source, Kind.RESTORE, blank), new)
        own.tensors = kept


def test_numbers_are_looked_for_in_the_copy():
    model = Net()
    source = TorchSource(model, save_path=save_path)
    with torch.no_grad():
        model.q[2, 1] = float("inf")
        source.snapshot()
        model.k[0, 0] = float("nan")
        model.q[2, 1] = 0.0
    assert source.nonfinite() == {"qk": NonFinite(0, 1)}
    source.hold()
    assert source.nonfinite() == {"qk": NonFinite(1, 0)}


def test_a_model_that_is_no_longer_the_same_is_refused_and_the_copy_before_stays():
    model = Net()
    source = TorchSource(model, save_path=save_path)
    with torch.no_grad():
        model.scale += 1
    source.snapshot()
    kept, model.q = model.q, nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(RefusedError, match=r"q: torch.float32 \(6, 4\).* is gone from"):
        source.snapshot()
    with torch.no_grad():
        kept[0, 0] += 1
    model.q = kept
    assert [change.spec.name for change in source.changes(Kind.RELATIVE)] == ["model.scale"]
    source.snapshot()
    assert [change.spec.name for change in source.changes(Kind.RELATIVE)] == ["qk", "model.scale"]


def test_a_copy_that_ends_half_way_pins_nothing(monkeypatch):
    model = Net()
    source = TorchSource(model, save_path=save_path)
    source.snapshot()
    copy, copied = Tracker.copy, []

    def out_of_memory(self, live, room):
        if len(copied) == 3:
            raise MemoryError
        copied.append(copy(self, live, room))

    monkeypatch.setattr(Tracker, "copy", out_of_memory)
    scramble(model, 1)
    with pytest.raises(MemoryError):
        source.snapshot()
    new = source.gather_state()
    list(source.changes(Kind.RELATIVE))  # of the live weights, all of them
    assert source.candidate_digest == digest_of(source, new)


def tracked(*tensors, chunk_elements=1 << 20):
    return [(n, Tracker(f"t{n}", t, chunk_elements=chunk_elements)) for n, t in enumerate(tensors)]


def test_memory_is_taken_once_and_tensors_that_are_one_are_copied_once():
    a, b = torch.randn(3, 4), torch.randn(12, dtype=torch.float64)
    live = [a, a.view(3, 4), b, a.t()]  # the last has the same elements in another order
    shards = tracked(*live, chunk_elements=5)
    snapshot = Snapshot()
    snapshot.take(shards, live.__getitem__)
    assert snapshot.nbytes == a.nbytes + b.nbytes + a.nbytes
    held = [snapshot.tensor(n).data_ptr() for n in range(4)]
    assert held[0] == held[1] != held[3]
    wanted = [t.clone() for t in live]
    for t in (a, b):
        t.zero_()
    for n, t in enumerate(wanted):
        assert torch.equal(snapshot.tensor(n), t.reshape(-1))
    snapshot.take(shards, live.__getitem__)
    assert [snapshot.tensor(n).data_ptr() for n in range(4)] == held
    assert all(not snapshot.tensor(n).any() for n in range(4))
    live[1] = torch.randn(3, 4)  # tied no more
    snapshot.take(shards, live.__getitem__)
    assert torch.equal(snapshot.tensor(1), live[1].reshape(-1))
    assert torch.equal(snapshot.tensor(0), a.reshape(-1))
    assert snapshot.nbytes == 3 * a.nbytes + b.nbytes
    live[1], live[2] = a, None  # tied again; and one whose committed bits stand
    snapshot.take(shards, live.__getitem__)
    assert snapshot.tensor(1).data_ptr() == snapshot.tensor(0).data_ptr()
    assert snapshot.tensor(2) is None
    assert snapshot.nbytes == 2 * a.nbytes + b.nbytes


LONG = [pytest.param(layout, marks=pytest.mark.long) for layout in ("whole", "a slice")]


@pytest.mark.parametrize("layout", ["transposed", *LONG])
def test_the_copy_needs_its_own_size_and_no_more(layout):
    rows = {"whole": (2048, 2048), "transposed": (2048, 2048), "a slice": (2048, 4096)}[layout]
    weight = torch.zeros(rows, dtype=torch.bfloat16)
    weight = {"whole": weight, "transposed": weight.t(), "a slice": weight[:, ::2]}[layout]
    bit_view(weight).copy_(torch.arange(weight.numel()).view(weight.shape) % 30011)
    size, chunk = weight.numel() * 2, 1 << 19
    shards = tracked(weight, chunk_elements=chunk)
    snapshot = Snapshot()
    snapshot.take(tracked(weight[:8]), lambda _: weight[:8])  # whatever a first copy needs besides
    taken = peak_of(lambda: snapshot.take([(1, shards[0][1])], lambda _: weight))
    assert size <= taken + (2 << 20)
    assert taken <= size + 4 * chunk * 2 + (2 << 20)
    assert peak_of(lambda: snapshot.take([(1, shards[0][1])], lambda _: weight)) <= 4 * chunk * 2 + (2 << 20)
    assert torch.equal(bit_view(snapshot.tensor(1)), bit_view(weight).reshape(-1))
