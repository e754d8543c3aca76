"""The layout checks on small models with hand-written loaders: every repacking is found, and nothing is written."""

import pytest
import torch
from torch import nn

from dcr.protocol.errors import RefusedError
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.vllm.layout import RepackedError, examine_layout


class Model(nn.Module):
    """Loads two halves into one fused weight, a decay as -exp(log) and a norm; counts on nothing else."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Module()
        self.fused.weight = nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16), requires_grad=False)
        self.decay = nn.Parameter(torch.empty(5), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(4, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("cos_sin_cache", torch.ones(3))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "gate":
                self.fused.weight.data[:3].copy_(tensor)
            elif name == "up":
                self.fused.weight.data.narrow(0, 3, 3).copy_(tensor)
            elif name == "log":
                self.decay.data.copy_(tensor)
                self.decay.data.copy_(-torch.exp(self.decay.data))
            else:
                self.norm.data.copy_(tensor)


def loaded(seed=0):
    generator = torch.Generator().manual_seed(seed)
    fed = {
        "gate": torch.randn(3, 4, generator=generator).bfloat16(),
        "up": torch.randn(3, 4, generator=generator).bfloat16(),
        "log": torch.randn(5, generator=generator).bfloat16(),
        "norm": torch.tensor([1.0, -0.0, float("nan"), float("inf")]).bfloat16(),
    }
    model = Model()
    model.load_weights(fed.items())
    return model, fed


def examine(model, fed):
    return examine_layout(model, model.load_weights, fed.items())


def stored(model):
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def test_loader_layout_is_accepted():
    model, fed = loaded()
    report = examine(model, fed)
    report.raise_if_repacked()
    assert report.findings == ()
    assert (report.tensors_read, report.writes_compared) == (4, 4)


def empty(model):
    model.fused.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def swap_halves(model):
    model.fused.weight.data.copy_(model.fused.weight.data.roll(3, 0))


def transpose(model):
    model.fused.weight = nn.Parameter(model.fused.weight.data.t().contiguous(), requires_grad=False)


def repack_elsewhere(model):
    model.fused.weight.data = model.fused.weight.data.flip(1).contiguous()


def pad(model):
    model.fused.weight.data = torch.cat([model.fused.weight.data, torch.zeros(2, 4).bfloat16()])[
        [0, 1, 2, 6, 3, 4, 5, 7]
    ]


def close_over(model):
    packed = model.fused.weight.data.t().contiguous()
    model.fused.apply_packed = lambda x: x @ packed


def cpu_linear(model):
    handle = object()
    model.fused.cpu_linear = lambda x: (handle, x)


def derive(model):
    model.fused.absorbed = model.fused.weight.data.float() @ torch.ones(4, 2)


def one_bit(model):
    model.norm.data.view(torch.int16)[2] ^= 1  # another NaN


@pytest.mark.parametrize(
    ("repack", "named"),
    [
        (empty, "fused.weight: removed after loading, shape (0,)"),
        (swap_halves, "fused.weight: does not hold what the loader writes there for gate, shape (3, 4)"),
        (transpose, "gate: its loader refused"),
        (repack_elsewhere, "fused.weight: does not hold what the loader writes there for gate, shape (3, 4)"),
        (pad, "fused.weight: does not hold what the loader writes there for up, shape (3, 4)"),
        (close_over, "fused.weight: apply_packed computes with a private copy (Tensor)"),
        (cpu_linear, "fused.weight: cpu_linear computes with a private copy (object)"),
        (derive, "fused.absorbed: not written by the loader"),
        (one_bit, "norm: does not hold what the loader writes there for norm, shape (4,)"),
    ],
)
def test_repacking_is_refused_by_name_and_nothing_is_written(repack, named):
    model, fed = loaded()
    repack(model)
    before = stored(model)
    with pytest.raises(RepackedError, match="worker_extension_cls") as refused:
        examine(model, fed).raise_if_repacked()
    assert named in str(refused.value)
    assert isinstance(refused.value, RefusedError)
    assert stored(model) == before


def test_another_checkpoint_than_the_one_loaded_is_noticed_and_not_loaded():
    model, _ = loaded()
    before = stored(model)
    report = examine(model, loaded(seed=1)[1])
    assert {finding.tensor for finding in report.findings} == {"weight", "decay"}
    assert stored(model) == before


def test_a_long_list_of_findings_is_cut():
    model, fed = loaded()
    for i in range(20):
        model.register_buffer(f"derived_{i}", torch.ones(1))
    with pytest.raises(RepackedError, match="and 4 more"):
        examine(model, fed).raise_if_repacked()


@pytest.mark.parametrize(("content", "named"), [({}, "holds no safetensors"), ({"a": "x"}, "lacks x")])
def test_an_unreadable_checkpoint_is_refused_by_name(tmp_path, content, named):
    if content:
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    with pytest.raises(RefusedError, match=named):
        list(read_checkpoint(tmp_path))
    with pytest.raises(RefusedError, match="not a local directory"):
        list(read_checkpoint("organisation/model"))
