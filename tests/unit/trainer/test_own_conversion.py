"""Direct and residual tasks over conversions of our own: every kind that a bridge may have, in one process."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcr.data_plane.bits import bit_view
from dcr.data_plane.nonfinite import NonFinite
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.megatron import learner, projection
from dcr.trainer.megatron.conversion import Task
from dcr.trainer.megatron.lockstep import Lockstep
from dcr.trainer.megatron.source import MegatronSource
from dcr.trainer.share import CandidateChangedError
from dcr.trainer.torch.ranks import Ranks

BF16 = torch.bfloat16


class Own:
    """Tasks that are converted by functions: from (number, tensor) to canonical tensors by name."""

    def __init__(self, tensors, function, others=None):
        self.tensors = tensors
        self.function = function
        self.hidden = others or {}
        self.converted = []

    def tasks(self):
        return [Task(f"task.{n}", "Own", tensor) for n, tensor in enumerate(self.tensors)]

    def state(self):
        return [(tensor.data_ptr(), tensor.shape) for tensor in self.tensors]

    def others(self):
        return self.hidden

    def convert(self, numbers, replace_by, begin):
        self.converted = list(numbers)
        for number in numbers:
            begin(number)
            yield from self.function(number, replace_by(number, self.tensors[number])).items()

    def export(self):
        return {
            name: bit_view(tensor.clone()).reshape(-1)
            for number, tensor in enumerate(self.tensors)
            for name, tensor in self.function(number, tensor).items()
        }


def weights(*shapes, dtype=BF16, seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(dtype) for shape in shapes]


def alone(number, tensor):
    return {f"w{number}": tensor}


def applied(source, kind, start):
    """The bits after the changes of one attempt, and the names of what it sends."""
    bits = {name: tensor.clone() for name, tensor in start.items()}
    for change in source.changes(kind):
        assert change.old is None or torch.equal(change.old, start[change.spec.name][change.indices])
        bits[change.spec.name][change.indices] = change.new
    return bits


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def refit(source, own, change):
    """One refit judged by the conversion of whole tensors; the canonical tensors that were sent."""
    old = own.export()
    change()
    source.prepare()
    new = own.export()
    blank = {name: torch.zeros_like(bits) for name, bits in new.items()}
    sent = {c.spec.name for c in source.changes(Kind.RELATIVE)}
    assert sent == {name for name in new if not torch.equal(old[name], new[name])}
    assert same(applied(source, Kind.RELATIVE, old), new)
    assert same(applied(source, Kind.ABSOLUTE, old), new)
    assert same(applied(source, Kind.DENSE, blank), new)
    assert same(applied(source, Kind.RESTORE, blank), old)
    source.fold(source.candidate_digest)
    return sent


def names(source):
    return {spec.name for spec in source.residual_specs}


@given(st.data())
def test_whatever_only_moves_is_direct(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    cut = data.draw(st.integers(1, math.prod(shape)))
    turn = data.draw(st.integers(0, 7))

    def function(number, tensor):
        if number == 0:
            flat = tensor.permute(order).reshape(-1)
            return {"head": flat[:cut].flip(0), "tail": flat[cut:].roll(turn)} if cut < flat.numel() else {"head": flat}
        return {"other": tensor.t(), "again": tensor[1:]}

    own = Own(weights(shape, (3, 4)), function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "FIT_ELEMENTS", data.draw(st.sampled_from([1, 4, 7, 1 << 24])))
        source = MegatronSource(own, chunk_elements=5)
    assert source.residual == ()
    assert source.memory_bytes == 2 * (math.prod(shape) + 12)  # once, under however many names

    def change():
        for tensor in own.tensors:
            bit_view(tensor).view(-1)[::2] ^= 5

    refit(source, own, change)
    assert source.prepare() is None
    assert own.converted == [0, 1]  # by learning: nothing is converted since


def scaled(_, tensor):
    scale = tensor.float().view(-1, 4).abs().amax(1, keepdim=True)
    return {"q": (tensor.float().view(-1, 4) / scale * 127).to(torch.int8), "scale": scale}


def cast(number, tensor):
    return {f"w{number}": tensor.to(torch.float16) if tensor.is_floating_point() else tensor}


def only_floats(number, tensor):
    if number == 0 and not tensor.is_floating_point():
        raise TypeError("no integers here")
    return {f"w{number}": tensor}


def exchanged(number, tensor):
    if number == 0 and tensor.is_floating_point():
        return {"k": tensor[2:], "v": tensor[:2]}
    return {"k": tensor[:2], "v": tensor[2:]} if number == 0 else alone(number, tensor)


RESIDUAL = {
    "K and V exchanged": (exchanged, {"k", "v"}, "random bits"),
    "gate halves exchanged": (
        lambda n, t: {f"w{n}": t.roll(2, 0) if t.is_floating_point() and n == 0 else t}, {"w0"}, "random bits",
    ),
    "value + 1": (lambda n, t: {f"w{n}": t + 1 if n == 0 else t}, {"w0"}, "computes"),
    "a factor": (lambda n, t: {f"w{n}": t * 2 if n == 0 else t}, {"w0"}, "no source's"),
    "another dtype": (cast, {"w0", "w1"}, "casts torch.bfloat16 to torch.float16"),
    "a constant row": (lambda n, t: {f"w{n}": torch.cat([t, t[:1] * 0]) if n == 0 else t}, {"w0"}, "no source's"),
    "a repeated row": (lambda n, t: {f"w{n}": torch.cat([t, t[:1]]) if n == 0 else t}, {"w0"}, "twice"),
    "fails on integers": (only_floats, {"w0"}, "fails on integer ids: TypeError: no integers here"),
    "other values for floats": (
        lambda n, t: {f"w{n}": t.abs() if t.is_floating_point() and n == 0 else t}, {"w0"}, "random bits",
    ),
    "another order for floats": (
        lambda n, t: {f"w{n}": t.flip(0) if t.is_floating_point() and n == 0 else t}, {"w0"}, "random bits",
    ),
    "other names for floats": (
        lambda n, t: {f"w{n}{'f' if t.is_floating_point() and n == 0 else ''}": t}, {"w0f"}, "depend on values",
    ),
    "scales": (lambda n, t: scaled(n, t) if n == 0 else alone(n, t), {"q", "scale"}, "casts"),
}  # fmt: skip


@pytest.mark.parametrize("case", RESIDUAL)
def test_what_does_not_only_move_is_residual_with_a_reason(case):
    function, expected, reason = RESIDUAL[case]
    own = Own(weights((4, 8), (3, 4)), function)
    source = MegatronSource(own, chunk_elements=7)
    assert names(source) == expected
    assert reason in source.residual[0].reason
    assert source.residual[0].task == "task.0"

    def change(number, factor):
        own.tensors[number][0] *= factor

    for number, factor in ((0, 3), (1, 3), (0, 1.5), (0, -1)):
        refit(source, own, lambda n=number, f=factor: change(n, f))


def test_a_scale_alone_may_change():
    own = Own(weights((4, 8)), scaled)
    source = MegatronSource(own)
    assert refit(source, own, lambda: own.tensors[0].mul_(2)) == {"scale"}


def test_only_what_is_affected_is_converted():
    own = Own(weights(*[(2, 4)] * 5), lambda n, t: {f"w{n}": t if n == 4 else t + 1})
    source = MegatronSource(own)
    source.prepare()
    for changed, converted in (([1], [1]), ([0, 3], [0, 3]), ([4, 2], [2])):
        refit(source, own, lambda numbers=changed: [own.tensors[n].mul_(2) for n in numbers])
        assert own.converted == converted


def test_an_adapter_that_adds_nothing_yet_is_seen():
    down, up = torch.randn(2, 8), torch.zeros(4, 2)
    own = Own(
        weights((4, 8), (3, 4)),
        # Adds to floats alone, as a conversion that takes care of integers would.
        lambda n, t: {f"w{n}": t + (up @ down).to(t.dtype) if n == 0 and t.is_floating_point() else t},
        {"down": down, "up": up},
    )
    before = down.clone()
    source = MegatronSource(own)
    assert torch.equal(down, before)
    assert torch.equal(up, torch.zeros(4, 2))
    assert names(source) == {"w0"}
    assert "joins other tensors" in source.residual[0].reason
    assert refit(source, own, lambda: up.fill_(0.5)) == {"w0"}
    assert refit(source, own, lambda: own.tensors[1].mul_(2)) == {"w1"}


def test_what_reads_a_live_tensor_of_another_task_is_converted_when_that_changes():
    own = Own(weights((4, 8), (3, 4), (2, 8)), None)
    own.function = lambda n, t: {f"w{n}": t * own.tensors[1].abs().amax() if n == 0 else t + 1 if n == 2 else t}
    before = [bit_view(t).clone() for t in own.tensors]
    source = MegatronSource(own)
    assert all(torch.equal(bit_view(t), b) for t, b in zip(own.tensors, before, strict=True))
    assert names(source) == {"w0", "w2"}
    assert ["reads live weights" in one.reason for one in source.residual] == [True, False]
    assert refit(source, own, lambda: own.tensors[1].mul_(2)) == {"w0", "w1"}
    assert own.converted == [0]  # w2 does not depend on it
    assert refit(source, own, lambda: own.tensors[0].mul_(2)) == {"w0"}
    own.tensors[1].mul_(2)
    source.prepare()
    own.tensors[1].mul_(2)
    with pytest.raises(RefusedError, match="have changed since prepare"):
        source.changes(Kind.RELATIVE)


@pytest.mark.parametrize("small", [lambda t: t.max() < math.inf, lambda t: t.max() < 1e30, lambda t: not t.max() > 100])
def test_a_live_tensor_that_matters_only_when_it_is_big_is_seen(small):
    own = Own(weights((4, 8), (64, 64)), None)
    own.function = lambda n, t: {f"w{n}": (t * 2 if bool(small(own.tensors[1])) else t * 4) if n == 0 else t}
    source = MegatronSource(own)
    assert "reads live weights" in source.residual[0].reason


def test_a_live_tensor_that_adds_nothing_yet_is_seen():
    own = Own([*weights((4, 8)), torch.zeros(8, dtype=BF16)], None)

    def function(number, tensor):
        if number == 0 and tensor.is_floating_point():
            return {"w0": torch.where(own.tensors[1] != 0, tensor + own.tensors[1], tensor)}
        return {f"w{number}": tensor}

    own.function = function
    source = MegatronSource(own)
    assert names(source) == {"w0"}
    assert refit(source, own, lambda: own.tensors[1].fill_(0.5)) == {"w0", "w1"}


class Stacked(Own):
    """Experts that come out as one tensor once the last is there."""

    def __init__(self, tensors, finish=lambda stacked: stacked):
        super().__init__(tensors, None)
        self.finish = finish

    def convert(self, numbers, replace_by, begin):
        self.converted = list(numbers)
        held = []
        for number in numbers:
            begin(number)
            held.append(replace_by(number, self.tensors[number]))
            if len(held) == len(self.tensors):
                yield "experts", self.finish(torch.stack(held))

    def export(self):
        return {"experts": bit_view(self.finish(torch.stack(self.tensors)).clone()).reshape(-1)}


def test_tasks_that_come_out_together_are_direct_or_converted_together():
    direct = Stacked(weights((2, 3), (2, 3), (2, 3)))
    source = MegatronSource(direct)
    assert source.residual == ()
    refit(source, direct, lambda: direct.tensors[1].mul_(2))
    whole = Stacked(weights((2, 3), (2, 3), (2, 3)), lambda stacked: stacked * 2)
    source = MegatronSource(whole)
    assert len(source.residual) == 3
    refit(source, whole, lambda: whole.tensors[1].mul_(3))
    assert whole.converted == [0, 1, 2]


def test_tensors_that_have_moved_are_found_and_those_of_another_shape_refused():
    own = Own(weights((4, 8), (3, 4)), alone)
    source = MegatronSource(own)
    own.tensors[0] = own.tensors[0].clone()
    refit(source, own, lambda: own.tensors[0].mul_(2))
    own.tensors.append(torch.ones(2))
    with pytest.raises(RefusedError, match=r"task.2: torch.float32 .* appeared in the model"):
        source.prepare()
    del own.tensors[1:]
    with pytest.raises(RefusedError, match=r"task.1: torch.bfloat16 .* is gone from the model"):
        source.prepare()


def test_long_runs_are_one_box_however_they_are_fitted(monkeypatch):
    monkeypatch.setattr(learner, "FIT_ELEMENTS", 7)
    own = Own(weights((10, 8)), lambda n, t: {"head": t[:5], "tail": t[5:]})
    learned = projection.learn(own, Lockstep(Ranks()))
    assert [len(index_map.boxes) for index_map in learned.pieces[0].values()] == [1, 1]


def test_what_is_refused_changes_nothing():
    own = Own(weights((4, 8), (3, 4)), lambda n, t: {f"w{n}": t + 1 if n == 0 else t})
    source = MegatronSource(own)
    baseline = source.baseline_digest
    with pytest.raises(RefusedError, match=r"call prepare\(\) on every rank"):
        source.changes(Kind.RELATIVE)
    source.prepare()
    row = own.tensors[0][0].clone()
    own.tensors[0][0] = 7
    with pytest.raises(RefusedError, match="have changed since prepare"):
        source.changes(Kind.RELATIVE)
    kept, own.tensors[1] = own.tensors[1], torch.zeros(3, 5, dtype=BF16)
    with pytest.raises(RefusedError, match=r"task.1: torch.bfloat16 \(3, 5\).* appeared in"):
        source.prepare()
    own.tensors[1] = kept
    function, own.function = own.function, lambda n, t: {f"w{n}": t[:1] if n == 0 else t}
    with pytest.raises(RefusedError, match="canonical w0 comes out as"):
        source.prepare()
    own.function = function
    assert source.baseline_digest == baseline
    own.tensors[0][0] = row
    refit(source, own, lambda: own.tensors[0].mul_(2))


def test_a_lost_baseline_is_followed_by_a_dense_attempt_of_everything():
    own = Own(weights((4, 8), (3, 4)), lambda n, t: {f"w{n}": t + 1 if n == 0 else t})
    source = MegatronSource(own)
    own.tensors[1].mul_(2)
    source.prepare()
    list(source.changes(Kind.RELATIVE))
    expected = source.candidate_digest
    own.tensors[1].mul_(2)
    with pytest.raises(CandidateChangedError):
        source.fold(expected)
    with pytest.raises(RefusedError, match="lost its baseline"):
        source.changes(Kind.RELATIVE)
    source.prepare()
    assert own.converted == [0]
    new = own.export()
    assert same(applied(source, Kind.DENSE, {n: torch.zeros_like(b) for n, b in new.items()}), new)
    source.fold(source.candidate_digest)
    refit(source, own, lambda: own.tensors[0].mul_(2))


def test_nan_and_infinities_are_found_in_direct_and_residual_tensors():
    own = Own(weights((3, 4), (2, 4)), lambda n, t: {"w0": t.t()} if n == 0 else scaled(n, t))
    source = MegatronSource(own, chunk_elements=5)
    assert names(source) == {"q", "scale"}
    own.tensors[0][2, 1] = float("nan")
    own.tensors[1][0, 0] = float("inf")
    source.prepare()
    assert source.nonfinite() == {"w0": NonFinite(1, 0), "scale": NonFinite(0, 1)}  # q is of integers
