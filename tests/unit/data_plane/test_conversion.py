"""Conversions after loading: refits through composed boxes against a dense load that is converted afterwards."""

import loaders
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import Operation, TensorSpec
from dcr.data_plane.placement.conversion import Form, learn_conversions
from dcr.data_plane.placement.placement import Placement
from dcr.data_plane.placement.prewarm import LoaderClass
from dcr.protocol.errors import RefusedError

E, INNER, HIDDEN = 4, 32, 64  # vLLM's prepacking wants multiples of 32
BF16 = torch.bfloat16


class Experts(nn.Module):
    """Gate and up fused in ``w13``, down in ``w2``, a norm beside them: loaded expert by expert as vLLM's are."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(E, 2 * INNER, HIDDEN, dtype=dtype), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(E, HIDDEN, INNER, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=BF16), requires_grad=False)
        self.log = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def load_weights(self, weights):
        done = set()
        for name, w in weights:
            what, _, e = name.partition(".")
            if what in {"norm", "log"}:
                getattr(self, what).data.copy_(w if what == "norm" else -torch.exp(w.float()))
            elif what == "down":
                self.w2.data[int(e)].copy_(w)
            else:
                self.w13.data[int(e)].narrow(0, INNER * (what == "up"), INNER).copy_(w)
            done.add({"down": "w2", "norm": "norm", "log": "log"}.get(what, "w13"))
        return done


SHAPES = {
    **{f"{what}.{e}": (INNER, HIDDEN) for e in range(E) for what in ("gate", "up")},
    **{f"down.{e}": (HIDDEN, INNER) for e in range(E)},
    "norm": (HIDDEN,),
}


def weights(seed):
    return {n: loaders.random_bits(shape, BF16, seed + i) for i, (n, shape) in enumerate(SHAPES.items())}


# ---------------------------------------------------------------- what runtimes do


def swap(t):
    """The halves of w13 as FlashInfer's CUTLASS kernels want them, in a new parameter."""
    return {**t, "w13": t["w13"].roll(INNER, 1)}


def transpose(t):
    return {"w13": t["w13"].transpose(1, 2).contiguous(), "w2": t["w2"].transpose(1, 2)}


def blocks(t):
    """A block layout at the same address and of the same shape."""
    for one in t.values():
        rows, columns = one.shape[1:]
        tiled = one.view(E, rows // 8, 8, columns // 16, 16).permute(0, 3, 1, 2, 4)
        one.copy_(tiled.reshape(one.shape))
    return t


def pad(t):
    """Rows of each half rounded up, with a constant that is not zero in one of them."""
    gate, up = t["w13"].split(INNER, 1)
    return {
        "w13": torch.cat([nn.functional.pad(gate, (0, 0, 0, 8)), nn.functional.pad(up, (0, 0, 0, 8), value=1.0)], 1),
        "w2": nn.functional.pad(t["w2"], (0, 8)),
    }


def vllm_cutlass(t):
    unquantized = pytest.importorskip("vllm.model_executor.layers.fused_moe.oracle.unquantized")

    class Config:
        is_act_and_mul = True

    backend = unquantized.UnquantizedMoeBackend.FLASHINFER_CUTLASS
    w13, w2 = unquantized.convert_to_unquantized_kernel_format(backend, Config(), t["w13"], t["w2"])
    return {"w13": w13, "w2": w2}


def vllm_cpu_prepack(t):
    """vLLM's stock layout on a CPU: prepacked experts of the same shape."""
    cpu_moe = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    return {n: cpu_moe.cpu_prepack_moe_weight(w, "vec") for n, w in t.items()}


MOVES = [swap, transpose, blocks, pad, vllm_cutlass, vllm_cpu_prepack]


def served(convert, state):
    """A model that loaded and converted these weights, as the runtime does it."""
    model = Experts()
    with torch.no_grad():
        model.load_weights(state.items())
        for name, tensor in convert({"w13": model.w13.data, "w2": model.w2.data}).items():
            old = getattr(model, name)
            if (tensor.data_ptr(), tensor.shape) != (old.data_ptr(), old.shape):
                setattr(model, name, nn.Parameter(tensor, requires_grad=False))
    return model


def learned(convert):
    return list(learn_conversions(convert, {n: Form.of(getattr(Experts(), n)) for n in ("w13", "w2")}).values())


def placed(model, conversions, state):
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in state.items()]
    placement = Placement(model, model.load_weights, specs, conversions=conversions)
    return placement, placement.prewarm(), specs


def bits(model):
    return {n: loaders.raw(t).clone() for n, t in model.named_parameters()}


@pytest.mark.parametrize("convert", MOVES)
@pytest.mark.parametrize("operation", [Operation.SET, Operation.ADD, Operation.XOR])
def test_two_refits_equal_a_dense_load_that_is_converted(convert, operation):
    states = [weights(100 * i) for i in range(3)]
    model = served(convert, states[0])
    addresses = {n: t.data_ptr() for n, t in model.named_parameters()}
    placement, found, specs = placed(model, learned(convert), states[0])
    found.raise_if_refused()
    assert set(found.classes.values()) == {LoaderClass.BOX}
    assert loaders.same(bits(model), bits(served(convert, states[0])))
    for old, new in ((states[0], states[1]), (states[1], states[2])):
        placement.apply([loaders.item(n, old[n], new[n], operation) for n in old])
        placement.synchronise()
        assert loaders.same(bits(model), bits(served(convert, new)))
        read = placement.readback()
        assert (read.wrong, read.unread) == ({}, ())
        for spec in specs:
            mine = sum((h.digest for h in read.held[spec.name]), ContentDigest())
            assert mine == digest_elements(spec, None, bit_view(new[spec.name]).flatten()), spec.name
    assert {n: t.data_ptr() for n, t in model.named_parameters()} == addresses


@pytest.mark.parametrize("convert", [swap, blocks, vllm_cutlass, vllm_cpu_prepack])
def test_a_conversion_that_is_not_known_is_seen_by_reading_back(convert):
    """Same shape, sometimes same address: nothing but the bits tells."""
    state = weights(0)
    model = served(convert, state)
    placement, found, specs = placed(model, (), state)
    found.raise_if_refused()
    read = placement.readback()
    wrong = [
        s.name
        for s in specs
        if sum((h.digest for h in read.held[s.name]), ContentDigest())
        != digest_elements(s, None, bit_view(state[s.name]).flatten())
    ]
    assert {"gate.0", "up.3"} <= set(wrong)
    assert "norm" not in wrong


def test_padding_is_read_back_too():
    state = weights(0)
    model = served(pad, state)
    placement, _, _ = placed(model, learned(pad), state)
    assert placement.readback().wrong == {}
    model.w13.data[2, -1, 5] = 2.0
    assert placement.readback().wrong == {"gate.0": "the padding that its conversion leaves in w13 is not there"}


# ---------------------------------------------------------------- what is refused


def scaled(t):
    return {**t, "w13": t["w13"] * 2}


def quantised(t):
    """FP8 online quantisation."""
    return {**t, "w13": t["w13"].to(torch.float8_e4m3fn)}


def repacked(t):
    """Marlin: words of another dtype, transposed."""
    return {**t, "w2": t["w2"].transpose(1, 2).contiguous().view(torch.int32)}


def dropped(t):
    return {**t, "w13": t["w13"][:, 1:]}


def repeated(t):
    return {**t, "w2": torch.cat([t["w2"], t["w2"][:, :1]], 1)}


def joined(t):
    return {"both": torch.cat([t["w13"].flatten(), t["w2"].flatten()])}


def exchanged(t):
    w13, w2 = t["w13"].clone(), t["w2"].clone()
    w13[0, 0, 0], w2[0, 0, 0] = t["w2"][0, 0, 0], t["w13"][0, 0, 0]
    return {"w13": w13, "w2": w2}


def absorbed(t):
    """As MLA's W_UV: something that is computed stands where the weight was."""
    return {**t, "w2": t["w2"] + t["w13"].flatten()[: t["w2"].numel()].view_as(t["w2"])}


def ordered_by_value(t):
    return {**t, "w2": t["w2"].view(torch.int16).sort(-1).values.view(BF16)}


def failing(_):
    raise NotImplementedError("no kernel here")


@pytest.mark.parametrize(
    ("convert", "why"),
    [
        (scaled, "conversion of w13 computes"),
        (quantised, "conversion of w13 changes its dtype from torch.bfloat16 to torch.float8_e4m3fn"),
        (repacked, "conversion of w2 changes its dtype"),
        (dropped, r"conversion of w13 drops 256 of its 16384 elements"),
        (repeated, "conversion of w2 repeats elements"),
        (joined, "gives both: tensors are joined or derived"),
        (exchanged, "joins elements of several tensors"),
        (absorbed, "conversion of w2 (computes|repeats)"),
        (ordered_by_value, "conversion of w2 (computes|depends on values|drops)"),
        (failing, "failed on ids: NotImplementedError: no kernel here"),
    ],
)
def test_what_is_no_matter_of_places_is_refused_by_name(convert, why):
    with pytest.raises(RefusedError, match=why):
        learned(convert)


def test_a_tensor_that_reaches_converted_storage_otherwise_than_as_it_is_is_refused():
    model = Experts(torch.float32)
    state = {"w13": loaders.random_bits((E, 2 * INNER, HIDDEN), BF16, 1), "log": torch.ones(HIDDEN, dtype=BF16)}

    def load(items):
        for name, w in items:
            if name == "log":
                model.load_weights([(name, w)])
            else:
                model.w13.data.copy_(w.float() * 2)

    load(state.items())
    forms = {"w13": Form.of(model.w13)}
    conversions = list(learn_conversions(lambda t: {"w13": t["w13"].roll(INNER, 1)}, forms).values())
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in state.items()]
    placement = Placement(model, load, specs, conversions=conversions)
    before = bits(model)
    found = placement.prewarm()
    assert found.reasons.keys() == {"w13"}, found.reasons
    assert found.classes == {"w13": LoaderClass.REFUSED, "log": LoaderClass.TRANSFORMING}
    assert found.reasons["w13"].startswith("it goes to w13, which is converted after loading, and its values are")
    new = loaders.changed(state["w13"], 2, 0.5)
    with pytest.raises(RefusedError, match="w13: cannot be refitted in place: it goes to w13, which is converted"):
        placement.apply([loaders.item("w13", state["w13"], new, Operation.SET)])
    assert loaders.same(bits(model), before)
    log = torch.full((HIDDEN,), 2.0, dtype=BF16)  # beside it the loader still does its part
    placement.apply([loaders.item("log", state["log"], log, Operation.SET)])
    assert torch.equal(model.log, -torch.exp(log.float()))


def test_widened_elements_are_composed_as_well():
    model = Experts(torch.float32)
    state = weights(7)
    model.load_weights(state.items())
    model.w13 = nn.Parameter(model.w13.data.roll(INNER, 1), requires_grad=False)
    conversions = list(
        learn_conversions(lambda t: {"w13": t["w13"].roll(INNER, 1)}, {"w13": Form.of(model.w13)}).values()
    )
    placement, found, _ = placed(model, conversions, state)
    found.raise_if_refused()
    new = weights(8)
    placement.apply([loaders.item(n, state[n], new[n], Operation.XOR) for n in state])
    twin = Experts(torch.float32)
    twin.load_weights(new.items())
    twin.w13 = nn.Parameter(twin.w13.data.roll(INNER, 1), requires_grad=False)
    assert loaders.same(bits(model), bits(twin))
    assert placement.readback().wrong == {}


def test_a_conversion_of_another_shape_or_a_dense_check_is_refused():
    state = weights(0)
    with pytest.raises(RefusedError, match=r"w13 is .*\(4, 64, 64\), but its conversion after loading gives"):
        placed(served(swap, state), learned(pad), state)
    with pytest.raises(RefusedError, match="the loader does not write converted storage"):
        Placement(Experts(), lambda _: None, [], verify="dense", conversions=learned(swap))


@given(st.data())
def test_whatever_moves_elements_is_learned_exactly(data):
    """Chains of moves, drawn anew for every example, against the conversion itself on random bits."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from([torch.uint8, BF16, torch.float32, torch.int64]))
    moves = data.draw(st.lists(st.sampled_from(["permute", "flip", "pad", "roll", "flat"]), max_size=4))
    orders = data.draw(st.randoms(use_true_random=False))
    steps = []
    dims = len(shape)
    for move in moves:
        order = list(range(dims))
        orders.shuffle(order)
        steps.append((move, order))
        dims = 1 if move == "flat" else dims

    def convert(t):
        x = t["x"]
        for move, order in steps:
            match move:
                case "permute":
                    x = x.permute(order)
                case "flip":
                    x = x.flip(order[0])
                case "pad":
                    x = nn.functional.pad(x, (0, 2), value=1)
                case "roll":
                    x = x.roll(1, order[0])
                case "flat":
                    x = x.reshape(-1)
        return {"x": x}

    (one,) = learn_conversions(convert, {"x": Form(shape, dtype)}).values()
    bits = loaders.random_bits(shape, dtype, 5)
    expected = bit_view(convert({"x": bits})["x"].contiguous()).flatten()
    got = torch.zeros_like(expected)
    source, target = one.index_map.expand()
    got[target] = bit_view(bits).flatten()[source]
    got[one.padding[0]] = one.padding[1]
    assert torch.equal(got, expected)
