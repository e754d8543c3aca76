"""Learned placement: what it reads back, what it checks, what it refuses, and what it costs to learn."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import loaders
import pytest
import storages
import torch
from test_loader_company import Qwen3Moe, checkpoint
from torch import nn

from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.kernels.numba_cpu import NumbaKernels
from dcr.data_plane.placement.box_fit import REPLICAS_MAX
from dcr.data_plane.placement.learning import learn
from dcr.data_plane.placement.placement import Placement
from dcr.data_plane.placement.prewarm import LoaderClass
from dcr.data_plane.resident import PartialWriteError, Residents
from dcr.protocol.errors import RefusedError

ALL_BFLOAT16 = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)


def specs_of(weights):
    return [TensorSpec(n, tuple(w.shape), w.dtype) for n, w in weights.items()]


def placed(place, weights, **arguments):
    """A model that was loaded, and its placement; ``place`` takes (model, name, tensor)."""
    model = loaders.Model()

    def load(pairs):
        for name, w in pairs:
            place(model, name, w)

    with torch.no_grad():
        load(weights.items())
    return model, Placement(model, load, specs_of(weights), **arguments)


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("storage", storages.EVERY)
def test_a_widening_copy_carries_every_bit_pattern(storage, operation):
    """Every bfloat16 there is, signalling NaN among them, into every other one, against a dense load."""
    spec = TensorSpec("w", (256, 256), torch.bfloat16)

    def model_of(w):
        model = nn.Module()
        model.f = loaders.parameter(256, 256, dtype=torch.float32)
        model.t = loaders.parameter(256, 300, dtype=torch.float32)
        load_into(model, [("w", w)])
        return model

    def load_into(model, pairs):
        with torch.no_grad():
            for _, w in pairs:
                model.f.copy_(w)
                model.t[:, 7:263].copy_(w.t())

    a = ALL_BFLOAT16.view(torch.bfloat16).view(256, 256)
    b = ALL_BFLOAT16[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))].view(torch.bfloat16)
    b = b.view(256, 256)
    model = model_of(a)
    path = storage(model, lambda pairs: load_into(model, pairs), [spec])
    assert path.prewarm().classes == {"w": LoaderClass.BOX}
    assert path.apply([loaders.item("w", a, b, operation)]) == 1
    assert loaders.same(loaders.state(model), loaders.state(model_of(b)))


@pytest.mark.parametrize("copies", [2, REPLICAS_MAX, REPLICAS_MAX + 1])
def test_an_element_with_many_places_is_written_at_each(copies):
    spec = TensorSpec("w", (5,), torch.bfloat16)

    def model_of(w):
        model = nn.Module()
        model.rows = loaders.parameter(copies, 5)
        model.rows.data.copy_(w.expand(copies, 5))
        return model

    a, b = (loaders.random_bits((5,), torch.bfloat16, seed) for seed in (1, 2))
    model = model_of(a)
    path = Placement(model, lambda ws: [model.rows.data.copy_(w) for _, w in ws] and None, [spec])
    wanted = LoaderClass.BOX if copies <= REPLICAS_MAX else LoaderClass.TRANSFORMING
    assert path.prewarm().classes == {"w": wanted}
    path.apply([loaders.item("w", a, b, Operation.SET)])
    assert loaders.same(loaders.state(model), loaders.state(model_of(b)))


def test_a_model_that_was_never_loaded_gets_its_constants_with_the_first_items():
    def place(model, name, w):
        model.big.data[:8].copy_(w)
        model.big.data[8:].fill_(3)

    w = loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)
    loaded, _ = placed(place, {"w": w})
    model = loaders.Model()
    path = Placement(model, lambda pairs: [place(model, n, t) for n, t in pairs] and None, [loaders.SPEC])
    path.prewarm().raise_if_refused()
    assert not path.readback().wrong.keys() - {"w"}
    assert "constant" in path.readback().wrong["w"]
    zero = torch.zeros(loaders.SHAPE, dtype=loaders.BF16)
    path.apply([loaders.item("w", zero, w, Operation.SET)])
    assert loaders.same(loaders.state(model), loaders.state(loaded))
    assert path.readback().wrong == {}


def test_a_call_over_transforming_tensors_is_given_no_other():
    """The hooked load of what transforms costs those tensors, not the model."""
    given = []

    def place(model, name, w):
        given.append(name)
        {"a": model.p, "b": model.f, "c": model.big[:8]}[name].data.copy_(w if name == "a" else -w)

    weights = {n: loaders.random_bits(loaders.SHAPE, loaders.BF16, i) for i, n in enumerate("abc")}
    model, path = placed(place, weights)
    assert path.prewarm().classes == {"a": "box", "b": "transforming", "c": "transforming"}
    after = {n: loaders.changed(w, 9, 0.5) for n, w in weights.items()}
    given.clear()
    assert path.apply([loaders.item(n, weights[n], after[n], Operation.SET) for n in "acb"]) == 3
    assert given == ["b", "c"]
    assert loaders.same(loaders.state(model), loaders.state(placed(place, after)[0]))
    given.clear()
    path.apply([loaders.item("a", after["a"], weights["a"], Operation.ADD)])
    assert given == []


# ---------------------------------------------------------------- entries that belong elsewhere


def test_a_rank_that_is_alone_refuses_entries_without_a_place():
    def place(model, name, w):
        model.r.data.copy_(w[:, 3:])

    a = {"w": loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)}
    b = {"w": loaders.changed(a["w"], 2, 0.9)}
    item = loaders.item("w", a["w"], b["w"], Operation.XOR)
    elsewhere = int((item.indices % 6 < 3).sum())
    model, path = placed(place, a)
    path.prewarm().raise_if_refused()
    before = loaders.state(model)
    with pytest.raises(RefusedError, match=rf"w: {elsewhere} of its entries lie where .* sharded=True"):
        path.apply([item])
    assert loaders.same(loaders.state(model), before)
    here = item.indices % 6 >= 3
    path.apply([Item(item.spec, Operation.XOR, item.indices[here], item.values[here])])
    assert loaders.same(loaders.state(model), loaders.state(placed(place, b)[0]))
    shard, path = placed(place, a, sharded=True)
    path.prewarm().raise_if_refused()
    path.apply([item])
    assert loaders.same(loaders.state(shard), loaders.state(model))


# ---------------------------------------------------------------- readback


@pytest.mark.parametrize("kernels", [storages.boxes, storages.reference])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_readback_is_the_digest_of_what_the_checkpoint_holds_there(kernels, rank, ranks):
    weights = checkpoint(1)
    model = Qwen3Moe(rank, ranks, expert_parallel=False)
    with torch.no_grad():
        model.load_weights(weights.items())
    path = kernels(model, model.load_weights, specs_of(weights))
    path.prewarm().raise_if_refused()
    found = path.readback()
    assert found.wrong == {}
    assert found.unread == ()
    assert found.held.keys() == weights.keys()
    other = checkpoint(50)
    for spec in specs_of(weights):
        bits, wrong = (loaders.raw(w[spec.name]).flatten() for w in (weights, other))
        for held in found.held[spec.name]:
            assert held.digest == held.extent.digest(spec, bits)
            assert held.digest != held.extent.digest(spec, wrong)
            assert held.elements == held.extent.indices().numel()
        if ranks == 1:
            assert sum((h.digest for h in found.held[spec.name]), ContentDigest()) == digest_elements(spec, None, bits)


def swap_halves(model):
    model.w13.data.copy_(model.w13.data.roll(INNER_HALF, 1))


def one_bit(model):
    model.qkv_proj.data.view(torch.int16)[3, 5] ^= 1


def low_half(model):
    model.gate.data.view(torch.int32)[1, 1] ^= 1


def padding(model):
    model.embed.data[-1] = 1


INNER_HALF = 10


@pytest.mark.parametrize("tamper", [swap_halves, one_bit, low_half, padding])
def test_readback_shows_storage_that_is_not_the_loaders(tamper):
    weights = checkpoint(1)
    model = Qwen3Moe(0, 1, expert_parallel=False)
    with torch.no_grad():
        model.load_weights(weights.items())
    path = Placement(model, model.load_weights, specs_of(weights))
    path.prewarm().raise_if_refused()
    before = path.readback()
    tamper(model)
    after = path.readback()
    differs = {n for n, held in after.held.items() if held != before.held[n]}
    wanted = {
        swap_halves: {n for n in weights if "gate_proj" in n or "up_proj" in n},
        one_bit: {"self_attn.q_proj.weight"},
        low_half: set(),
        padding: set(),
    }[tamper]
    assert differs == wanted
    wrong = {low_half: {"mlp.gate.weight": "low halves"}, padding: {"embed_tokens.weight": "constant"}}.get(tamper, {})
    assert after.wrong.keys() == wrong.keys()
    assert all(said in after.wrong[name] for name, said in wrong.items())


def test_transforming_tensors_are_named_as_unread():
    _, path = placed(lambda m, _, w: m.p.data.copy_(-w), {"w": loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)})
    with pytest.raises(RefusedError, match="prewarm before readback"):
        path.readback()
    path.prewarm()
    assert path.readback().unread == ("w",)


# ---------------------------------------------------------------- the independent check, and the ground under it


def test_dense_verification_finds_a_box_that_is_wrong():
    def place(model, name, w):
        model.p.data.copy_(w)

    a = loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)
    b = loaders.changed(a, 2, 0.5)
    model, path = placed(place, {"w": a}, verify="dense")
    path.prewarm()
    path.apply([loaders.item("w", a, b, Operation.ADD)])
    path._table.dims[0, 2, 0] = 2  # the boxes now say that elements lie twice as far apart
    path._table.numel[:] = 20
    few = Item(loaders.SPEC, Operation.ADD, torch.tensor([1, 7]), torch.tensor([1, 1], dtype=torch.int16))
    with pytest.raises(PartialWriteError, match=r"p: boxes and the native loader left different bits in \d bytes"):
        path.apply([few])
    wanted = loaders.raw(b).view(-1)
    wanted[[1, 7]] += 1
    assert torch.equal(loaders.raw(model.p).view(-1), wanted), "storage holds what the loader wrote"


def test_a_count_of_hits_that_disagrees_is_a_partial_write():
    _, path = placed(lambda m, _, w: m.p.data.copy_(w), {"w": loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)})
    path.prewarm()
    path._table.dims[0, 0, 0] = 20  # the box has lost half of its elements
    path._table.high[0] = 19
    item = Item(loaders.SPEC, Operation.ADD, torch.tensor([1, 40]), torch.tensor([1, 1], dtype=torch.int16))
    with pytest.raises(PartialWriteError, match="w: its 2 entries found 1 places"):
        path.apply([item])


class Inside:
    """How many threads are in a place at once, at most; each stays there long enough to be met."""

    def __init__(self):
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def __enter__(self):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.005)

    def __exit__(self, *_):
        with self._lock:
            self._now -= 1


@pytest.mark.parametrize("transforming", [False, True])
def test_threads_that_apply_at_once_take_turns(transforming):
    """Neither two kernels nor two hooked loads are at work at once, and all differences are applied, each once."""
    inside, threads, rounds = Inside(), 4, 6
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(40, 100, dtype=torch.bfloat16), requires_grad=False)
    spec = TensorSpec("w", (40, 100), torch.bfloat16)

    class Kernels(NumbaKernels):
        def place(self, table, records):
            with inside:
                return super().place(table, records)

    def load(pairs):
        with torch.no_grad():
            for _, w in pairs:
                if learned and transforming:
                    with inside:
                        pass
                model.w.copy_(-w if transforming else w)

    learned = False
    path = Placement(model, load, [spec], kernels=Kernels(1))
    path.prewarm().raise_if_refused()
    learned = True
    everywhere = torch.arange(spec.numel)

    def worker(number):
        for _ in range(rounds):
            if transforming:  # each has elements of its own; the loader, its hooks and its scratch are one
                mine = everywhere[number::threads]
                values = torch.full((mine.numel(),), float(number + 1)).bfloat16().view(torch.int16)
                path.apply([Item(spec, Operation.SET, mine, values)])
            else:
                path.apply([Item(spec, Operation.ADD, everywhere, torch.ones(spec.numel).short())])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(worker, range(threads)))
    assert inside.most == 1
    if transforming:
        assert torch.equal(model.w.flatten(), -(everywhere % threads + 1).bfloat16())
    else:
        assert bool((model.w.view(torch.int16) == threads * rounds).all())


def test_an_unknown_verification_is_refused():
    with pytest.raises(RefusedError, match="'dense'"):
        placed(lambda *_: None, {}, verify="sometimes")


def test_the_fingerprint_sees_what_a_loader_may_ask():
    weights = {"w": loaders.random_bits(loaders.SHAPE, loaders.BF16, 1)}
    model, path = placed(lambda m, _, w: m.p.data.copy_(w), weights)
    model.p.output_dim = 0
    model.p.weight_loader = loaders.widen
    path.prewarm()
    before = path.fingerprint()
    for attribute, value in [("output_dim", 1), ("weight_loader", loaders.narrow), ("packed", True)]:
        old = getattr(model.p, attribute, None)
        setattr(model.p, attribute, value)
        assert path.fingerprint() != before, attribute
        with pytest.raises(RefusedError, match=r"p (and 1 more )?moved, was rebound or changed since prewarm"):
            path.apply([loaders.item("w", weights["w"], loaders.changed(weights["w"], 2, 0.5), Operation.SET)])
        delattr(model.p, attribute)
        if old is not None:
            setattr(model.p, attribute, old)
    assert path.fingerprint() == before
    other = placed(lambda m, _, w: m.p.data.copy_(w), weights, settings={"vllm": "0.32.0"})[1]
    one, two = (Placement(model, lambda _: None, [], settings={"vllm": v}).fingerprint() for v in ("1", "2"))
    assert one != two
    assert other.fingerprint() != before


# ---------------------------------------------------------------- what learning costs


class Columns(nn.Module):
    """Thousands of tensors that interleave in one parameter: every address range overlaps every other one."""

    def __init__(self, count, rows):
        super().__init__()
        self.fused = loaders.parameter(rows, count)
        self.calls = 0

    def load_weights(self, weights):
        self.calls += 1
        for name, w in weights:
            self.fused.data[:, int(name)].copy_(w)
        return {"fused"}


def test_thousands_of_tensors_are_learned_in_one_call_and_in_nearly_linear_time():
    def seconds(count):
        model = Columns(count, 64)
        specs = [TensorSpec(str(i), (64,), torch.bfloat16) for i in range(count)]
        started = time.process_time()
        learned = learn(model, model.load_weights, specs)
        taken = time.process_time() - started
        assert set(learned.classes.values()) == {LoaderClass.BOX}
        assert model.calls == 1
        return taken

    seconds(50)
    small, large = min(seconds(500) for _ in range(3)), seconds(4000)
    assert large < 8 * small * 3, "eight times as many tensors; quadratic growth would be 64 times as long"


def test_of_thousands_of_tensors_the_two_that_clash_are_named():
    model = Columns(2000, 8)
    specs = [TensorSpec(str(i), (8,), torch.bfloat16) for i in range(2000)]

    def load(weights):
        for name, w in weights:
            where = model.fused.data[1:, 77] if name == "1500" else model.fused.data[:, int(name)]
            where.copy_(w[8 - len(where) :])

    learned = learn(model, load, specs)
    assert learned.reasons.keys() == {"77", "1500"}
    assert "written from 77 and from 1500" in learned.reasons["77"]
    assert Residents(model).checksums() == Residents(Columns(2000, 8)).checksums()
