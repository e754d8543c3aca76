"""vLLM's own way to change some elements of a checkpoint tensor, beside ours, on models with loaders of their own."""

import pytest
import torch
import vllm_support as support
from safetensors.torch import save_file
from vllm_models import write_checkpoint

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import Operation
from dcr.rollout.checkpoint import read_checkpoint
from demo.vllm_twin import ENGINE_ARGUMENTS

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

MAMBA = [f"model.layers.{layer}.mixer." for layer in (0, 3)]
FOUND = {
    "qwen3-moe": ("qwen3-moe", {}, [], []),
    "nemotron-h": ("nemotron-h", {}, [f"{m}A" for m in MAMBA], []),
    "nemotron-h 1 group TP2": (
        "nemotron-h-1-group",
        {"tensor_parallel_size": 2},
        [
            f"{m}{name}"
            for m in MAMBA
            for name in ("A", "conv1d.bias", "conv1d.weight", "conv_weights", "in_proj.weight")
        ],
        [f"{m}{name}" for m in MAMBA for name in ("conv1d.bias", "conv1d.weight", "in_proj.weight")],
    ),
}
"""What vLLM 0.32 leaves other than a dense load does, on any rank; and where it leaves NaN."""


def patch(worker, old, new):
    """Run in a worker: change what differs, by vLLM's sparse patches; returns where NaN is then."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (  # noqa: PLC0415
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    before = dict(read_checkpoint(old))
    model = worker.model_runner.get_model()
    for name, tensor in read_checkpoint(new):
        changed = (bit_view(tensor) != bit_view(before[name])).flatten().nonzero().flatten().to(torch.int32)
        values = tensor.flatten()[changed.long()]
        patches = [CheckpointWeightPatch(name, tuple(tensor.shape), values.dtype, values, changed)]
        with torch.no_grad():
            load_checkpoint_weight_patches(model, patches)  # no error, whatever comes of it
    return sorted(n for n, p in model.named_parameters() if p.is_floating_point() and bool(p.isnan().any()))


@pytest.mark.parametrize("case", FOUND)
def test_where_sparse_patches_of_vllm_are_wrong_and_ours_are_not(tmp_path, monkeypatch, case):
    model, arguments, wrong, nan = FOUND[case]
    for name, value in support.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the test sends functions to the workers
    from vllm import LLM  # noqa: PLC0415

    old, other = (write_checkpoint(tmp_path / f"s{seed}", seed, model) for seed in (0, 1))
    generator = torch.Generator().manual_seed(3)
    after, merged = dict(read_checkpoint(other)), {}
    for name, tensor in read_checkpoint(old):
        chosen = torch.rand(tensor.shape, generator=generator) < 0.02
        chosen.view(-1)[0] = True
        merged[name] = torch.where(chosen, after[name], tensor)
    new = tmp_path / "merged"
    new.mkdir()
    save_file(merged, new / "model.safetensors")
    llm = LLM(model=str(old), **{**ENGINE_ARGUMENTS, **arguments})
    try:

        def digests():
            return llm.collective_rpc("dcr_resident_digests")

        found_nan = {name for rank in llm.collective_rpc(patch, args=(str(old), str(new))) for name in rank}
        patched = digests()
        llm.collective_rpc(support.load_dense, args=(str(new),))
        dense = digests()
        llm.collective_rpc(support.load_dense, args=(str(old),))
        assert digests() != dense
        llm.collective_rpc(support.refit, args=(str(old), str(new), Operation.SET))
        assert digests() == dense
        differ = {n for mine, theirs in zip(dense, patched, strict=True) for n in mine if mine[n] != theirs[n]}
        print(f"{case}: vLLM's sparse patches differ in {sorted(differ)}, NaN in {sorted(found_nan)}")
        assert sorted(differ) == sorted(wrong)
        assert sorted(found_nan) == sorted(nan)
    finally:
        llm.llm_engine.engine_core.shutdown()
