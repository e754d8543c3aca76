"""Several canonical tensors under one loader, and loaders of the shapes that serving runtimes have."""

import loaders
import pytest
import torch
from storages import boxes, every, hooked
from torch import nn

from dcr.data_plane.item import Operation, TensorSpec
from dcr.data_plane.placement.prewarm import LoaderClass
from dcr.data_plane.resident import PartialWriteError
from dcr.protocol.errors import RefusedError


class TwoNames:
    """A model of parameters x [8, 6] and y [8, 6] under a loader of several canonical tensors."""

    def __init__(self, place, names, dtypes=None, storage=boxes):
        self.place, self.names = place, names
        self.specs = [TensorSpec(n, loaders.SHAPE, (dtypes or {}).get(n, loaders.BF16)) for n in names]
        self.weights = {s.name: loaders.random_bits(s.shape, s.dtype, i) for i, s in enumerate(self.specs)}
        self.model = self.dense(self.weights)
        self.path = storage(self.model, lambda ws: place(self.model, ws), self.specs)

    def dense(self, weights):
        model = loaders.Model()
        with torch.no_grad():
            self.place(model, list(weights.items()))
        return model

    def prewarm(self):
        before = loaders.state(self.model)
        learned = self.path.prewarm()
        assert loaders.same(loaders.state(self.model), before)
        return learned

    def refit(self, name, operation=Operation.SET):
        """Apply a change of one tensor; whether the bits are those of a dense load of all tensors."""
        a = self.weights[name]
        b = loaders.changed(a, {Operation.SET: 7, Operation.ADD: 17, Operation.XOR: 27}[operation], 0.4)
        self.path.apply([loaders.item(name, a, b, operation)])
        self.weights[name] = b
        return loaders.same(loaders.state(self.model), loaders.state(self.dense(self.weights)))


def each(model, weights):
    where = {"a": model.p, "b": model.big[:8]}
    for n, w in weights:
        where[n].data.copy_(w)
    return {"p", "big"}


def materialising(model, weights):
    every = dict(weights)
    if "a" in every:
        model.p.data.copy_(every["a"])
    if "b" in every:
        model.big.data[:8].copy_(every["b"])
    return {"p"} if "a" in every else {"big"} if "b" in every else set()


def weight_with_scale(model, weights):
    every = dict(weights)
    model.p.data.copy_(every["a"] * every["b"])
    return {"p"}


def weight_with_optional_scale(model, weights):
    every = dict(weights)
    if "a" in every:
        model.p.data.copy_(every["a"] * every["b"] if "b" in every else every["a"])
    return {"p"}


def scale_as_number(model, weights):
    every = dict(weights)
    if {"a", "b"} <= every.keys():
        model.p.data.copy_(every["a"] * every["b"][0, 0].item())
        return {"p"}
    return set()


def only_together(model, weights):
    every = dict(weights)
    if {"a", "b"} <= every.keys():
        model.p.data.copy_(every["a"])
        model.big.data[:8].copy_(every["b"])
        return {"p", "big"}
    return set()


def stacked_together(model, weights):
    every = dict(weights)
    if {"a", "b"} <= every.keys():
        model.p.data.copy_(torch.cat([every["a"][:4], every["b"][:4]]))
        return {"p"}
    return set()


def across_calls(model, weights):
    kept = model.__dict__.setdefault("kept", {})
    for n, w in weights:
        kept[n] = w
    if {"a", "b"} <= kept.keys():
        model.p.data[:4].copy_(kept["a"][:4])
        model.p.data[4:].copy_(kept["b"][:4])
        kept.clear()
        return {"p"}
    return set()


def last_wins(model, weights):
    for _, w in weights:
        model.p.data.copy_(w)
    return {"p"}


def partly_shared(model, weights):
    for n, w in weights:
        model.big.data[0 if n == "a" else 2 :][:8].copy_(w)
    return {"big"}


def pad_of_both(model, weights):
    for n, w in weights:
        model.big.data[8:].fill_(1)
        model.big.data[0 if n == "a" else 4 :][:4].copy_(w[:4])
    return {"big"}


def different_pads(model, weights):
    for n, w in weights:
        model.big.data[8:].fill_(1 if n == "a" else 2)
        model.big.data[0 if n == "a" else 4 :][:4].copy_(w[:4])
    return {"big"}


def pad_clears_all(model, weights):
    for n, w in weights:
        if n == "a":
            model.big.data.fill_(0)
        model.big.data[0 if n == "a" else 4 :][:4].copy_(w[:4])
    return {"big"}


def claims_more(model, weights):
    for n, w in weights:
        (model.p if n == "a" else model.f).data.copy_(w)
    return {"p", "f"}


def beside_refused(model, weights):
    for n, w in weights:
        if n == "b":
            model.p.data.copy_(w)
        else:
            model.p.data.neg_()
    return {"p"}


def alone_elsewhere(model, weights):
    every = dict(weights)
    loaded = set()
    if "a" in every:
        (model.p if "b" in every else model.f).data.copy_(every["a"])
        loaded.add("p" if "b" in every else "f")
    if "b" in every:
        model.big.data[:8].copy_(every["b"])
        loaded.add("big")
    return loaded


def by_order(model, weights):
    for i, (_, w) in enumerate(weights):
        model.big.data[4 * i :][:4].copy_(w[:4])
    return {"big"}


def expert_elsewhere(model, weights):
    loaded = set()
    for n, w in weights:
        if n == "a":
            model.p.data.copy_(w)
            loaded.add("p")
    return loaded


def tied_name_fails_alone(model, weights):
    names = []
    for n, w in weights:
        names.append(n)
        if n == "a":
            model.p.data.copy_(w)
    if names == ["b"]:
        raise KeyError("b")
    return {"p"}


def both_from_one_resident(model, weights):
    for n, w in weights:
        if n == "a":
            model.p.data.copy_(w)
        else:
            model.f.data.copy_(w)
        model.big.data[:8].copy_(model.p.data)


COMPANY = [
    (each, "P P"),
    (materialising, "P P"),
    (weight_with_scale, "R R"),
    (weight_with_optional_scale, "R R"),
    (scale_as_number, "R R"),
    (only_together, "P P"),
    (stacked_together, "R R"),
    (across_calls, "P P"),
    (last_wins, "R R"),
    (partly_shared, "R R"),
    (pad_of_both, "P P"),
    (different_pads, "R R"),
    (pad_clears_all, "R R"),
    (claims_more, "P P"),
    (beside_refused, "R R"),
    (alone_elsewhere, "P P"),
    (by_order, "P P"),
    (expert_elsewhere, "P S"),
    (tied_name_fails_alone, "P S"),
    (both_from_one_resident, "T P"),
]
CLASSES = {
    "P": LoaderClass.BOX,
    "T": LoaderClass.TRANSFORMING,
    "S": LoaderClass.SKIPPED,
    "R": LoaderClass.REFUSED,
}


@every
@pytest.mark.parametrize(("place", "expected"), COMPANY, ids=lambda x: getattr(x, "__name__", x))
def test_tensors_in_company(storage, place, expected):
    case = TwoNames(place, ["a", "b"], storage=storage)
    learned = case.prewarm()
    assert learned.classes == {n: CLASSES[c] for n, c in zip("ab", expected.split(), strict=True)}, learned.reasons
    assert learned.reasons.keys() == {n for n, c in learned.classes.items() if c is LoaderClass.REFUSED}
    for name, cls in learned.classes.items():
        before = loaders.state(case.model)
        if cls is LoaderClass.REFUSED:
            with pytest.raises(RefusedError, match=name):
                case.refit(name)
            assert loaders.same(loaders.state(case.model), before)
        else:
            assert case.refit(name)
        if cls is LoaderClass.BOX:
            assert case.refit(name, Operation.ADD)
            assert case.refit(name, Operation.XOR)


def test_an_error_at_a_later_tensor_is_a_partial_write():
    mood = []

    def place(model, weights):
        for n, w in weights:
            (model.p if n == "a" else model.big[:8]).data.copy_(w)
            if n == "a" and mood:
                raise ValueError(mood[0])
        return {"p"}

    case = TwoNames(place, ["a", "b"], storage=hooked)
    case.prewarm().raise_if_refused()
    items = [loaders.item(n, w, loaders.changed(w, 7, 0.4), Operation.SET) for n, w in case.weights.items()]
    mood.append("disk")
    before = loaders.state(case.model)
    with pytest.raises(RefusedError, match=r"a: .*disk"):  # nothing of it is active, so nothing was written
        case.path.apply(items[1:])
    assert loaders.same(loaders.state(case.model), before)
    with pytest.raises(PartialWriteError, match=r"a: .*disk"):
        case.path.apply(items)


HIDDEN, HEADS, KV_HEADS, HEAD, EXPERTS, INNER, VOCABULARY = 24, 4, 2, 6, 4, 10, 29


class Qwen3Moe(nn.Module):
    """One layer of a Qwen3-MoE as a serving runtime holds it on one rank: fused QKV, stacked gated experts, padding."""

    def __init__(self, rank, ranks, expert_parallel):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.split = 1 if expert_parallel else ranks
        local = EXPERTS // ranks if expert_parallel else EXPERTS
        self.register_buffer("expert_map", torch.full((EXPERTS,), -1), persistent=False)
        first = rank * local if expert_parallel else 0
        self.expert_map[first : first + local] = torch.arange(local)
        rows = (HEADS + 2 * KV_HEADS) * HEAD // ranks
        self.qkv_proj = loaders.parameter(rows, HIDDEN)
        self.o_proj = loaders.parameter(HIDDEN, HEADS * HEAD // ranks)
        self.w13 = loaders.parameter(local, 2 * INNER // self.split, HIDDEN)
        self.w2 = loaders.parameter(local, HIDDEN, INNER // self.split)
        self.gate = loaders.parameter(EXPERTS, HIDDEN, dtype=torch.float32)
        self.embed = loaders.parameter(32 // ranks, HIDDEN)
        self.register_buffer("inv_freq", torch.rand(HEAD // 2, generator=torch.Generator().manual_seed(0)))

    def load_weights(self, weights):
        return {name for n, w in weights if (name := self.load_one(n.split("."), w))}

    def load_one(self, path, w):
        match path:
            case ["self_attn", "o_proj", _]:
                self.o_proj.data.copy_(self.shard(w, 1, self.ranks))
                return "o_proj"
            case ["self_attn", which, _]:
                q, kv = (n * HEAD // self.ranks for n in (HEADS, KV_HEADS))
                at, n = {"q_proj": (0, q), "k_proj": (q, kv), "v_proj": (q + kv, kv)}[which]
                self.qkv_proj.data.narrow(0, at, n).copy_(self.shard(w, 0, self.ranks))
                return "qkv_proj"
            case ["mlp", "experts", number, which, _]:
                return self.load_expert(int(number), which, w)
            case ["mlp", "gate", _]:
                self.gate.data.copy_(w)
                return "gate"
            case _:
                rows = self.embed.shape[0]
                mine = w[self.rank * rows :][:rows]
                self.embed.data[: mine.shape[0]].copy_(mine)
                self.embed.data[mine.shape[0] :].fill_(0)
                return "embed"

    def load_expert(self, number, which, w):
        local = self.expert_map[number].item()
        if local < 0:
            return None
        if which == "down_proj":
            self.w2.data[local].copy_(self.shard(w, 1, self.split))
            return "w2"
        half = self.w13.shape[1] // 2
        self.w13.data[local].narrow(0, half if which == "up_proj" else 0, half).copy_(self.shard(w, 0, self.split))
        return "w13"

    def shard(self, w, dim, ranks):
        n = w.shape[dim] // ranks
        return w.narrow(dim, n * (self.rank if ranks > 1 else 0), n)


def checkpoint(seed):
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "embed_tokens.weight": (VOCABULARY, HIDDEN),
    }
    for e in range(EXPERTS):
        shapes |= {f"mlp.experts.{e}.{n}_proj.weight": (INNER, HIDDEN) for n in ("gate", "up")}
        shapes[f"mlp.experts.{e}.down_proj.weight"] = (HIDDEN, INNER)
    return {n: loaders.random_bits(s, loaders.BF16, seed + i) for i, (n, s) in enumerate(shapes.items())}


@every
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_qwen3_moe(storage, rank, ranks, expert_parallel):
    old = checkpoint(1)
    model = Qwen3Moe(rank, ranks, expert_parallel)
    with torch.no_grad():
        model.load_weights(old.items())
    specs = [TensorSpec(n, tuple(w.shape), w.dtype) for n, w in old.items()]
    path = storage(model, model.load_weights, specs)
    classes = dict(path.prewarm().classes)
    elsewhere = EXPERTS // 2 if expert_parallel and ranks == 2 else 0
    assert sum(c is LoaderClass.SKIPPED for c in classes.values()) == 3 * elsewhere
    assert set(classes.values()) <= {LoaderClass.BOX, LoaderClass.SKIPPED}
    for seed, operation in enumerate(Operation, 100):
        new = {n: loaders.changed(w, 2 * seed, 0.1) for n, w in old.items()}
        items = [loaders.item(n, old[n], w, operation) for n, w in new.items()]
        assert path.apply(items) == len(items) - 3 * elsewhere
        fresh = Qwen3Moe(rank, ranks, expert_parallel)
        with torch.no_grad():
            fresh.load_weights(new.items())
        assert loaders.same(loaders.state(model), loaders.state(fresh))
        old = new


def streaming(model, weights):
    for n, w in weights:
        (model.p if n == "a" else model.big[:8]).data.copy_(-w)
    return {"p", "big"}


@pytest.mark.parametrize("storage", [hooked, boxes])
def test_scratch_is_that_of_the_largest_tensor_and_left_clean(storage):
    case = TwoNames(streaming, ["a", "b"], storage=storage)
    case.prewarm()
    scratch = case.path._model._scratch
    assert (scratch.bytes.nbytes, scratch.mask.nbytes) == (96, 48)
    assert case.refit("a")
    assert not scratch.bytes.any()
    assert not scratch.mask.any()
