"""One rank without a process group: save paths, folds, restores, and what is refused."""

import threading

import pytest
import torch
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.nonfinite import NonFinite
from dcr.data_plane.tracker import Tracker
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.share import CandidateChangedError
from dcr.trainer.torch.source import TorchSource


class Net(nn.Module):
    """Several dtypes, a scalar, an integer buffer, and an empty tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 8, 5).bfloat16())
        self.twin = nn.Parameter(torch.randn(3, 8, 5).bfloat16())
        self.q = nn.Parameter(torch.randn(6, 4))
        self.k = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float16))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("steps", torch.tensor([3, 4], dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.zeros(9), persistent=False)


def save_path(state):
    """Splits and transposes experts, joins q and k, renames."""
    out = {}
    for name, tensor in state.items():
        if name == "experts":
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                out[f"experts.{i}.gate"], out[f"experts.{i}.up"] = gate.T.contiguous(), up
        elif name not in {"q", "k"}:
            out[f"model.{name}"] = tensor
    if "q" in state and "k" in state:
        out["qk"] = torch.cat([state["q"], state["k"]])
    return out


def bits_of(checkpoint):
    return {name: bit_view(tensor).reshape(-1).clone() for name, tensor in checkpoint.items()}


def applied(old, changes, *, check_old=True):
    """The checkpoint's bits after the changes, each checked to be in order and against the old bits it names."""
    new = {name: bits.clone() for name, bits in old.items()}
    touched = set()
    for change in changes:
        indices = change.indices.tolist()
        assert indices == sorted(set(indices))
        keys = {(change.spec.name, i) for i in indices}
        assert not keys & touched
        touched |= keys
        if check_old and change.old is not None:
            assert torch.equal(change.old, new[change.spec.name][change.indices])
        new[change.spec.name][change.indices] = change.new
    return new, touched


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def digest_of(source, checkpoint):
    return sum(
        (digest_elements(spec, None, bit_view(checkpoint[spec.name]).reshape(-1)) for spec in source.specs),
        ContentDigest(),
    )


def counted(old, new):
    """Changed and all elements by canonical tensor, from two checkpoints."""
    return {
        name: (int(torch.ne(bit_view(old[name]), bit_view(tensor)).sum()), tensor.numel())
        for name, tensor in new.items()
        if tensor.numel()
    }


def found(source):
    return {name: (count.changed, count.elements) for name, count in source.changes_found.items()}


def scramble(model, seed, rate=0.3):
    """Random bits, NaN payloads and -0.0 among them, in some elements of every floating tensor; flips in the rest."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if not tensor.is_floating_point():
                tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
                continue
            bits = bit_view(tensor)
            info = torch.iinfo(bits.dtype)
            noise = torch.randint(info.min, info.max, bits.shape, dtype=bits.dtype, generator=random)
            noise.view(-1)[:1] = info.min  # -0.0
            bits.copy_(torch.where(torch.rand(bits.shape, generator=random) < rate, noise, bits))


@pytest.mark.parametrize("chunk_elements", [7, 1 << 22])
def test_what_changed_is_counted_by_canonical_tensor(chunk_elements):
    model = Net()
    source = TorchSource(model, save_path=save_path, chunk_elements=chunk_elements)
    old = source.gather_state()
    assert found(source) == {}
    with torch.no_grad():
        model.experts[1, :3, 2] += 1.0
        model.twin.view(-1)[0] = -0.0
        model.k[2, 1] = float("nan")
    changes = source.changes(Kind.RELATIVE)
    next(changes)
    assert found(source) == {}  # not before the end
    list(changes)
    first = counted(old, source.gather_state())
    assert first["experts.1.gate"] == (3, 20)
    assert first["experts.0.up"] == (0, 20)
    assert first["qk"] == (1, 36)
    assert found(source) == first
    list(source.changes(Kind.RESTORE))
    list(source.changes(Kind.ABSOLUTE))  # the next attempt finds the same again, and does not add to it
    assert found(source) == first
    source.fold(source.candidate_digest)
    assert found(source) == first
    middle = source.gather_state()
    scramble(model, 1)
    list(source.changes(Kind.RELATIVE))
    assert found(source) == counted(middle, source.gather_state())
    list(source.changes(Kind.DENSE))
    assert found(source) == {}  # nothing was compared


@pytest.mark.parametrize("path", [save_path, None])
@pytest.mark.parametrize("chunk_elements", [7, 1 << 22])
def test_a_refit_from_detection_to_fold(path, chunk_elements):
    model = Net()
    source = TorchSource(model, save_path=path, chunk_elements=chunk_elements)
    old = source.gather_state()
    expected_names = set((path or dict)(model.state_dict()))
    assert [spec.name for spec in source.specs] == sorted(expected_names)
    assert {s.name: (s.shape, s.dtype) for s in source.specs} == {n: (tuple(t.shape), t.dtype) for n, t in old.items()}
    assert source.owner == "rank-0"
    assert source.owned_elements == sum(t.numel() for t in old.values())
    assert source.baseline_digest == digest_of(source, old)
    assert list(source.changes(Kind.RELATIVE)) == []
    assert source.candidate_digest == source.baseline_digest

    scramble(model, 1)
    new = source.gather_state()
    for kind in (Kind.RELATIVE, Kind.ABSOLUTE):
        result, touched = applied(bits_of(old), source.changes(kind))
        assert same(result, bits_of(new))
        assert len(touched) == sum(int((bits_of(old)[n] != b).sum()) for n, b in bits_of(new).items())
        assert source.candidate_digest == digest_of(source, new)
    dense, touched = applied({n: torch.zeros_like(b) for n, b in bits_of(old).items()}, source.changes(Kind.DENSE))
    assert same(dense, bits_of(new))
    assert len(touched) == source.owned_elements
    assert source.candidate_digest == digest_of(source, new)
    blank = {n: torch.zeros_like(b) for n, b in bits_of(old).items()}
    restored, touched = applied(blank, source.changes(Kind.RESTORE))
    assert same(restored, bits_of(old))
    assert len(touched) == source.owned_elements

    for _ in range(2):  # idempotent
        source.fold(digest_of(source, new))
        assert source.baseline_digest == digest_of(source, new)
        assert not source.folding
    assert list(source.changes(Kind.RELATIVE)) == []
    assert same(applied(blank, source.changes(Kind.RESTORE))[0], bits_of(new))


def test_gathered_state_and_baseline_are_copies():
    model = Net()
    source = TorchSource(model, save_path=save_path)
    old = source.gather_state()
    kept = bits_of(old)
    scramble(model, 2)
    assert same(bits_of(old), kept)
    assert same(applied({n: torch.zeros_like(b) for n, b in kept.items()}, source.changes(Kind.RESTORE))[0], kept)


def test_weights_stepped_between_detection_and_fold_are_caught_and_dense_recovers():
    model = Net()
    source = TorchSource(model, save_path=save_path)
    scramble(model, 1)
    list(source.changes(Kind.RELATIVE))
    expected = source.candidate_digest
    with torch.no_grad():
        model.q[0, 0] += 1
    with pytest.raises(CandidateChangedError, match="rank-0"):
        source.fold(expected)
    assert source.baseline_digest is None
    for kind in (Kind.RELATIVE, Kind.ABSOLUTE, Kind.RESTORE):
        with pytest.raises(RefusedError, match="dense"):
            source.changes(kind)
    list(source.changes(Kind.DENSE))
    source.fold(source.candidate_digest)
    assert source.baseline_digest == digest_of(source, source.gather_state())
    assert list(source.changes(Kind.RELATIVE)) == []


@pytest.mark.parametrize("kind", [Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE])
@pytest.mark.parametrize("meanwhile", ["nothing", "another element", "the same element", "back to the old bits"])
def test_a_fold_takes_what_was_detected_and_nothing_else(kind, meanwhile):
    model = Net()
    source = TorchSource(model, save_path=save_path, chunk_elements=7)
    with torch.no_grad():
        old = model.q[0, 0].clone()
        model.q[0, 0] += 1
        model.k[1, 1] += 1
    list(source.changes(kind))
    expected, new = source.candidate_digest, source.gather_state()
    with torch.no_grad():
        if meanwhile == "another element":
            model.q[5, 3] += 1
        elif meanwhile == "the same element":
            model.q[0, 0] += 1
        elif meanwhile == "back to the old bits":
            model.q[0, 0] = old
    if meanwhile == "nothing":
        source.fold(expected)
        assert source.baseline_digest == expected == digest_of(source, new)
        by_tensor = {spec.name: digest_elements(spec, None, bits_of(new)[spec.name]) for spec in source.specs}
        assert source.baseline_digests == {name: by_tensor[name] for name in source.baseline_digests}
        assert sum(source.baseline_digests.values(), ContentDigest()) == expected
    else:
        with pytest.raises(CandidateChangedError):
            source.fold(expected)
        assert source.baseline_digest is None


def test_a_fold_of_something_else_than_what_was_detected_last_is_refused():
    model = Net()
    source = TorchSource(model, save_path=save_path)
    scramble(model, 1)
    list(source.changes(Kind.RELATIVE))
    wrong = source.candidate_digest + source.baseline_digest
    with pytest.raises(CandidateChangedError):
        source.fold(wrong)


@pytest.mark.parametrize("kind", [Kind.RELATIVE, Kind.DENSE])
@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_fold_cut_short_blocks_emission_and_is_finished_by_another(monkeypatch, kind, written):
    model = Net()
    source = TorchSource(model, save_path=save_path, chunk_elements=7)
    scramble(model, 1)
    list(source.changes(kind))
    expected = source.candidate_digest
    parts = []
    fold = Tracker.fold

    def interrupted(tracker, live):
        for difference in fold(tracker, live):
            if len(parts) == written:
                raise KeyboardInterrupt
            parts.append(difference)
            yield difference

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "fold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.fold(expected)
    assert source.folding
    for refused in Kind:
        with pytest.raises(RefusedError, match="folding"):
            source.changes(refused)
    source.fold(expected)
    assert not source.folding
    assert source.baseline_digest == expected == digest_of(source, source.gather_state())


def test_a_restore_goes_on_while_the_model_trains_and_stops_at_a_fold():
    model = Net()
    source = TorchSource(model, save_path=save_path, chunk_elements=7)
    old = bits_of(source.gather_state())
    stop = threading.Event()

    def train():
        while not stop.is_set():
            scramble(model, 3)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(5):
            result, _ = applied({n: torch.zeros_like(b) for n, b in old.items()}, source.changes(Kind.RESTORE))
            assert same(result, old)
    finally:
        stop.set()
        trainer.join()
    restore = source.changes(Kind.RESTORE)
    next(restore)
    list(source.changes(Kind.RELATIVE))
    source.fold(source.candidate_digest)
    with pytest.raises(RefusedError, match="folded during a restore"):
        list(restore)


def test_a_model_that_is_no_longer_the_same_is_refused_by_name():
    model = Net()
    source = TorchSource(model, save_path=save_path)
    model.q = nn.Parameter(torch.zeros(7, 4))
    with pytest.raises(RefusedError, match=r"\[q: .*is gone"):
        source.changes(Kind.RELATIVE)
    with pytest.raises(RefusedError, match="q"):
        source.fold(source.baseline_digest)
    assert not source.folding
    model = Net()
    source = TorchSource(model)
    model.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(RefusedError, match=r"\[extra: .*appeared"):
        source.changes(Kind.DENSE)
    del model.extra
    model.q = nn.Parameter(torch.ones(6, 4))  # another object, the same layout
    assert {c.spec.name for c in source.changes(Kind.RELATIVE)} == {"q"}


def on_q(function):
    """A save path that does something to q and nothing else."""
    return lambda state: {n: function(t) if n == "q" else t for n, t in state.items()}


def tell_by_dtype(tensor):
    """Moves ids one way and weights another."""
    return tensor.flip(0) if tensor.is_floating_point() else tensor


def only_without_nan(tensor):
    """Moves the live weights another way than anything with a NaN in it."""
    return tensor.flip(0) if tensor.is_floating_point() and not tensor.isnan().any() else tensor


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        pytest.param(on_q(only_without_nan), "canonical q: the live bits of q", id="swapped halves for live weights"),
        pytest.param(on_q(lambda t: t + 1), r"canonical q2?: .*no source element", id="adds"),
        pytest.param(on_q(lambda t: t * 2), r"canonical q2?: .*no source element", id="scales"),
        pytest.param(on_q(lambda t: -t), r"canonical q2?: .*no source element", id="negates"),
        pytest.param(on_q(lambda t: t.to(torch.float64)), r"canonical q2?: .*casts", id="casts"),
        pytest.param(
            on_q(lambda t: t.bfloat16() if t.is_floating_point() else t),
            r"canonical q2?: .*casts",
            id="casts weights only",
        ),
        pytest.param(on_q(lambda t: torch.cat([t, t])), r"canonical q2?: .*repeats", id="repeats"),
        pytest.param(on_q(lambda t: nn.functional.pad(t, (0, 1))), r"canonical q2?: .*no source element", id="pads"),
        pytest.param(on_q(lambda t: t.nan_to_num() + 0), r"canonical q2?: .*random bits", id="reads values"),
        pytest.param(on_q(lambda t: t + 0), r"canonical q: .*random bits", id="loses the sign of zero"),
        pytest.param(on_q(tell_by_dtype), r"canonical q2?: .*random bits", id="swapped halves for weights"),
        pytest.param(
            lambda s: s | {"experts": s["twin"], "twin": s["experts"]} if "twin" in s and "experts" in s else s,
            "canonical experts: .*from experts alone, but from other",
            id="swapped in the whole",
        ),
        pytest.param(
            lambda s: s | {"q2": s["q"]} if "q" in s else s,
            r"canonical q2?: .*repeats",
            id="one source under two names",
        ),
        pytest.param(lambda s: s | {"q": s["q"].tolist()} if "q" in s else s, "not tensors", id="no tensors"),
        pytest.param(lambda s: [*s], "returned a list, not", id="no dict"),
        pytest.param(lambda s: {n: s[n] for n in (*s, "lost")}, "KeyError.*lost", id="raises"),
        pytest.param(
            lambda s: {n: t.T if n == "q" and len(s) == 1 else t for n, t in s.items()},
            "canonical q: .*shape",
            id="other in parts",
        ),
        pytest.param(
            lambda s: {n: t for n, t in s.items() if n != "q" or len(s) > 1}, "canonical q", id="absent in parts"
        ),
        pytest.param(
            lambda s: {("q" if t.is_floating_point() else "r") if n == "q" else n: t for n, t in s.items()},
            "canonical q: whether",
            id="other names for weights",
        ),
    ],
)
def test_save_paths_that_do_more_than_move_are_refused_by_name(path, reason):
    with pytest.raises(RefusedError, match=reason):
        TorchSource(Net(), save_path=path)


def test_what_a_save_path_leaves_out_is_not_owned():
    model = Net()
    source = TorchSource(
        model, save_path=lambda s: {n: t[:4] if n == "q" else t for n, t in s.items() if n not in {"experts", "twin"}}
    )
    assert source.owned_elements == 4 * 4 + 3 * 4 + 1 + 2 + 3
    with torch.no_grad():
        model.experts.zero_()
        model.q.zero_()
    (change,) = source.changes(Kind.RELATIVE)
    assert change.spec.name == "q"
    assert change.indices.tolist() == list(range(16))


def test_tied_tensors_need_a_save_path_that_keeps_one():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(RefusedError, match=r"1\.weight.*repeats"):
        TorchSource(model)
    source = TorchSource(model, save_path=lambda s: {n: t for n, t in s.items() if n != "1.weight"})
    assert [spec.name for spec in source.specs] == ["0.weight"]
    assert source.owned_elements == 9


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.register_parameter("q", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))), "complex64"),
        (lambda m: m.register_parameter("q", nn.Parameter(torch.zeros(2, device="meta"))), "q: it is on the meta"),
        (lambda m: setattr(type(m), "get_extra_state", lambda _self: {"a": 1}), "_extra_state: it is a dict"),
    ],
)
def test_states_that_cannot_travel_are_refused(change, reason):
    class Own(Net):
        """So that a class attribute does not leak."""

    model = Own()
    change(model)
    with pytest.raises(RefusedError, match=reason):
        TorchSource(model)


def test_nan_and_infinities_are_found_in_owned_elements_by_canonical_tensor():
    net = Net()
    source = TorchSource(net, save_path=save_path, chunk_elements=7)
    assert source.nonfinite() == {}
    with torch.no_grad():
        net.experts[1, 5, 2] = float("nan")
        net.q[2, 1] = float("inf")
        net.k[0, 0] = float("-inf")
        net.k[2, 3] = float("nan")
        net.scale.fill_(float("nan"))
        net.cache[3] = float("nan")  # in no checkpoint
    assert source.nonfinite() == {
        "experts.1.up": NonFinite(1, 0),
        "qk": NonFinite(1, 2),
        "model.scale": NonFinite(1, 0),
    }
