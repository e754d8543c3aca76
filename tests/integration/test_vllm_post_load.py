"""vLLM's post-load processing, its own function and its own conversions: what moves is composed, the rest is refused.

Layers are small modules with quantisation methods that do what vLLM's do on GPUs.  Refusals come with the node agent's
first call, before it opens a gate, and leave every bit as it was.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.rollout.checkpoint import read_checkpoint
from dcr.runtime.rank_messages import Attach, Attached, ReadBack, WireSpec, decode_answer, encode

pytestmark = [pytest.mark.vllm]

E, INNER, HIDDEN = 4, 32, 64
BF16 = torch.bfloat16
SHAPES = {
    **{f"{what}.{e}": (INNER, HIDDEN) for e in range(E) for what in ("gate", "up")},
    **{f"down.{e}": (HIDDEN, INNER) for e in range(E)},
    "norm": (HIDDEN,),
}


@pytest.fixture(scope="module")
def vllm_parts():
    """What these tests take from vLLM, imported once."""
    from vllm.model_executor.layers.fused_moe.oracle import unquantized  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: PLC0415
    from vllm.model_executor.model_loader import base_loader  # noqa: PLC0415
    from vllm.model_executor.utils import replace_parameter  # noqa: PLC0415

    from dcr.rollout.vllm import extension, post_load  # noqa: PLC0415  watches from here on

    return SimpleNamespace(
        unquantized=unquantized,
        method=QuantizeMethodBase,
        loader=base_loader,
        replace=replace_parameter,
        extension=extension.DcrWorkerExtension,
        post_load=post_load,
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(E, 2 * INNER, HIDDEN, dtype=BF16), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(E, HIDDEN, INNER, dtype=BF16), requires_grad=False)
        self.moe_config = SimpleNamespace(is_act_and_mul=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = Experts()
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=BF16), requires_grad=False)

    def load_weights(self, weights):
        done = set()
        for name, w in weights:
            what, _, e = name.partition(".")
            if what == "norm":
                self.norm.data.copy_(w)
            elif what == "down":
                self.experts.w2_weight.data[int(e)].copy_(w)
            else:
                self.experts.w13_weight.data[int(e)].narrow(0, INNER * (what == "up"), INNER).copy_(w)
            done.add({"norm": "norm", "down": "experts.w2_weight"}.get(what, "experts.w13_weight"))
        return done


def weights(seed):
    g = torch.Generator().manual_seed(seed)
    state = {n: torch.randn(shape, generator=g).to(BF16) for n, shape in SHAPES.items()}
    state["up.1"].view(torch.int16)[0, :6] = torch.tensor([0x7FC1, 0x7F81, -0x8000, 0x7F80, -0x80, 1])
    return state


def method_of(parts, act, backend=None):
    class Method(parts.method):
        def create_weights(self, layer, *args, **kwargs):
            raise NotImplementedError

        def apply(self, layer, *args, **kwargs):
            raise NotImplementedError

        def process_weights_after_loading(self, layer):
            act(parts, layer)

    method = Method()
    if backend is not None:
        method.unquantized_backend = backend
    return method


def started(parts, act, state, backend=None):
    """A model as vLLM's loader leaves it: loaded, then processed by vLLM's function."""
    model = Model()
    model.experts.quant_method = method_of(parts, act, backend)
    with torch.no_grad():
        model.load_weights(state.items())
        config = SimpleNamespace(dtype=BF16, quantization=None, word_embeddings_untied_by_checkpoint=False)
        parts.loader.process_weights_after_loading(model, config, torch.device("cpu"))
    return model


class Worker:
    """A worker as the extension finds it."""

    def __init__(self, parts, model, checkpoint):
        model_config = SimpleNamespace(model=str(checkpoint), quantization=None)
        parallel = SimpleNamespace(rank=0, world_size=1, enable_expert_parallel=False)
        config = SimpleNamespace(
            parallel_config=parallel, load_config=None, model_config=model_config, additional_config=None
        )
        rank = type("Rank", (parts.extension,), {})()
        rank.model_runner = SimpleNamespace(get_model=lambda: model, vllm_config=config, model_config=model_config)
        self.rank = rank
        self.specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in read_checkpoint(checkpoint)]

    def call(self, request):
        return decode_answer(self.rank.dcr_call(1, encode(request))[1])

    def attach(self):
        return self.call(Attach("a", "r", tuple(map(WireSpec.of, self.specs)), ""))


@pytest.fixture
def worker_of(vllm_parts, tmp_path):
    def make(act, backend=None):
        state = weights(0)
        save_file(state, tmp_path / "model.safetensors")
        model = started(vllm_parts, act, state, backend)
        return model, Worker(vllm_parts, model, tmp_path)

    return make


def bits(model):
    return {n: bit_view(t).flatten().tolist() for n, t in model.named_parameters() if t.dtype != torch.bool}


# ---------------------------------------------------------------- what vLLM does


def cutlass(parts, layer):
    """As ``UnquantizedFusedMoEMethod._setup_kernel``: vLLM's conversion into new parameters."""
    backend = layer.quant_method.unquantized_backend
    w13, w2 = parts.unquantized.convert_to_unquantized_kernel_format(
        backend, layer.moe_config, layer.w13_weight, layer.w2_weight, layer
    )
    parts.replace(layer, "w13_weight", w13)
    parts.replace(layer, "w2_weight", w2)


def test_swapped_halves_are_composed_and_refits_equal_an_engine_that_loaded_and_swapped(vllm_parts, worker_of):
    backend = vllm_parts.unquantized.UnquantizedMoeBackend.FLASHINFER_CUTLASS
    model, worker = worker_of(cutlass, backend)
    (change,) = vllm_parts.post_load.changes_of(model)
    assert (change.name, change.kind) == ("experts.w13_weight", "rewritten")
    assert bits(model) != bits(started(vllm_parts, lambda *_: None, weights(0)))
    answer = worker.attach()
    assert answer.refused == ""
    (attached,) = answer.results
    assert isinstance(attached, Attached)
    assert attached.refused == {}
    assert worker.call(ReadBack()).results[0].wrong == {}
    storage = worker.rank._dcr_storage(worker.specs)
    storage.prewarm().raise_if_refused()
    for seed in (1, 2):
        before, new = weights(seed - 1), weights(seed)
        items = [
            Item(s, Operation.ADD, torch.arange(s.numel), (bit_view(new[s.name]) - bit_view(before[s.name])).flatten())
            for s in worker.specs
        ]
        storage.apply(items)
        storage.synchronise()
        assert bits(model) == bits(started(vllm_parts, cutlass, new, backend))


def test_layers_of_one_shape_are_learned_once(vllm_parts, monkeypatch):
    from dcr.rollout.vllm import conversions  # noqa: PLC0415  imports vLLM

    backend = vllm_parts.unquantized.UnquantizedMoeBackend.FLASHINFER_CUTLASS
    models = [started(vllm_parts, cutlass, weights(seed), backend) for seed in (0, 1)]
    both = nn.ModuleList(models)
    changes = [
        dataclasses.replace(change, name=f"{i}.{change.name}")
        for i, model in enumerate(models)
        for change in vllm_parts.post_load.changes_of(model)
    ]
    learned = []
    learn = conversions.learn_conversions
    monkeypatch.setattr(conversions, "learn_conversions", lambda *args: learned.append(args) or learn(*args))
    found, reasons = conversions.find_conversions(both, changes)
    assert len(learned) == 1
    assert reasons == {}
    assert [one.name for one in found] == ["0.experts.w13_weight", "1.experts.w13_weight"]


def swap_behind(parts, layer):
    """The same swap by a backend that is known for another conversion, or for none."""
    parts.replace(layer, "w13_weight", layer.w13_weight.data.roll(INNER, 1))


def blocks(_, layer):
    """TensorRT-LLM: a block layout in place, same address and shape."""
    w = layer.w2_weight.data
    w.copy_(w.view(E, 8, 8, 2, 16).permute(0, 3, 1, 2, 4).reshape(w.shape).clone())


def padded(parts, layer):
    parts.replace(layer, "w2_weight", functional.pad(layer.w2_weight.data, (0, 8)))


def transposed(parts, layer):
    parts.replace(layer, "w2_weight", layer.w2_weight.data.transpose(1, 2).contiguous())


def fp8(parts, layer):
    parts.replace(layer, "w13_weight", layer.w13_weight.data.to(torch.float8_e4m3fn))


def marlin(parts, layer):
    parts.replace(layer, "w2_weight", layer.w2_weight.data.transpose(1, 2).contiguous().view(torch.int32))


def derived(_, layer):
    """MLA's W_UV and W_UK_T, FlashInfer's FP32 sinks."""
    layer.W_UV = layer.w2_weight.data.float().mean(0)


def packed_beside(_, layer):
    """A packed copy beside the weight, in words that are no floating-point tensor."""
    layer.packed = layer.w2_weight.data.view(torch.int32).clone()


def private(_, layer):
    packed = layer.w2_weight.data.transpose(1, 2).contiguous()
    layer.apply_packed = lambda x: x @ packed


def emptied(parts, layer):
    parts.replace(layer, "w2_weight", torch.empty(0, dtype=BF16))


OTHER = "an update would write the loader's layout over it"
REFUSED = {
    swap_behind: f"experts.w13_weight: rewritten after loading, elsewhere: {OTHER}",
    blocks: f"experts.w2_weight: rewritten after loading, at the same address: {OTHER}",
    padded: "experts.w2_weight: made torch.bfloat16 (4, 64, 40) after loading, it was torch.bfloat16 (4, 64, 32)",
    transposed: "experts.w2_weight: made torch.bfloat16 (4, 32, 64) after loading",
    fp8: "experts.w13_weight: made torch.float8_e4m3fn (4, 64, 64) after loading",
    marlin: "experts.w2_weight: made torch.int32 (4, 32, 32) after loading",
    derived: "experts.W_UV: made after loading, torch.float32 (64, 32): what it holds is derived",
    packed_beside: "experts.packed: made after loading, torch.int32 (4, 64, 16): what it holds is derived",
    private: "experts.weight: apply_packed computes with a private copy (Tensor)",
    emptied: "experts.w2_weight: removed after loading",
}


@pytest.mark.parametrize("act", REFUSED)
def test_what_was_done_after_loading_is_refused_by_name_and_nothing_is_written(worker_of, act):
    model, worker = worker_of(act)
    before = bits(model)
    answer = worker.attach()
    assert answer.refused.startswith("RepackedError: ")
    assert REFUSED[act] in answer.refused
    assert "choose a backend that does not repack" in answer.refused
    assert answer.results == ()
    assert bits(model) == before
    assert "attached" in worker.call(ReadBack()).refused  # no order is taken either


def test_a_backend_whose_conversion_is_not_what_happened_is_refused(vllm_parts, worker_of):
    """It says CUTLASS, and something has swapped the halves back: only reading the checkpoint back tells."""
    backend = vllm_parts.unquantized.UnquantizedMoeBackend.FLASHINFER_CUTLASS

    def act(parts, layer):
        cutlass(parts, layer)
        layer.w13_weight.data[1].copy_(layer.w13_weight.data[1].roll(INNER, 0).clone())

    model, worker = worker_of(act, backend)
    before = bits(model)
    refused = worker.attach().refused
    assert "gate.1: not where vLLM's conversion after loading puts it" in refused
    assert "gate.0" not in refused
    assert bits(model) == before


def test_an_identity_that_does_not_explain_a_change_is_said(vllm_parts, worker_of):
    _, worker = worker_of(blocks, vllm_parts.unquantized.UnquantizedMoeBackend.TRITON)
    assert "its backend's conversion leaves it as it is, so that something else changed it" in worker.attach().refused


def nothing(_, __):
    pass


def rewrapped(parts, layer):
    """Other objects and other memory with the same bits: what offloading does before it is over."""
    parts.replace(layer, "w13_weight", layer.w13_weight.data.clone())
    layer.w2_weight.data = layer.w2_weight.data.clone()


@pytest.mark.parametrize("act", [nothing, rewrapped])
def test_what_keeps_the_loaders_layout_is_accepted(vllm_parts, worker_of, act):
    model, worker = worker_of(act)
    assert vllm_parts.post_load.changes_of(model) == ()
    assert worker.attach().refused == ""


def test_another_version_of_vllm_is_refused_by_name(vllm_parts, worker_of, monkeypatch):
    monkeypatch.setattr(vllm_parts.post_load, "SUPPORTED_VERSION", "9.9")
    monkeypatch.setattr(vllm_parts.post_load, "_seen", {})
    monkeypatch.setattr(vllm_parts.post_load, "_state", {"unwatched": ""})
    vllm_parts.post_load.watch()
    monkeypatch.setattr(vllm_parts.post_load, "changes_of", lambda _: None)
    _, worker = worker_of(nothing)
    refused = worker.attach().refused
    assert "what vLLM does to weights after loading cannot be watched: this is vLLM" in refused
    assert "knows where 9.9 processes weights" in refused
