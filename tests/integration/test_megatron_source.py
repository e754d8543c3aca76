"""Owners inside real Megatron-Core models on gloo ranks: what they emit, put together, is the checkpoint bit for bit.

The truth does not come from the owners, nor from the Bridge's export alone: each step is a checkpoint of random bits
made here, which the Bridge loads into the ranks; the ranks write what they saw into files, and are judged here.
"""

import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest
from dcr.protocol.identity import Kind
from dcr.trainer.megatron.conversion import BridgeConversion
from dcr.trainer.megatron.inspection import Layout
from dcr.trainer.megatron.source import MegatronSource
from tests.integration.emitted import bits_of, digest, same, union
from tests.integration.megatron_ranks import Case, build, load, run

JOB = "tests.integration.test_megatron_source:refits"
CHUNK = 1000
STEPS = 3
NORMAL = ("qwen3-tied tp1 pp2 of 2", "nemotron-h tp2 of 2", "qwen3-moe tp2 pp2 ep2 etp1 of 4")
LAYOUTS = ("of 1", "tp2 of 2", "pp2 of 2", "tp2 pp2 of 4", "of 2")
LONG = (
    *(f"{model} {layout}" for model in ("qwen3-tied", "qwen3-untied", "nemotron-h") for layout in LAYOUTS),
    *(f"qwen3-moe {layout}" for layout in (*LAYOUTS, "ep2 of 2", "tp2 ep2 of 2", "tp2 etp2 ep2 of 4", "ep2 pp2 of 4")),
    *(f"nemotron-h-moe {layout}" for layout in ("of 1", "tp2 of 2", "ep2 of 2", "tp2 pp2 ep2 of 4")),
)


def step_of(folder, checkpoint, number):
    """A checkpoint with new random bits in a third of the elements; rank 0 writes it, all ranks get its folder."""
    made = folder / f"step-{number}"
    if dist.get_rank() == 0:
        shutil.copytree(checkpoint, made)
        random = torch.Generator().manual_seed(number)
        state = load_file(checkpoint / "model.safetensors")
        for tensor in state.values():
            bits = bit_view(tensor)
            info = torch.iinfo(bits.dtype)
            noise = torch.randint(info.min, info.max, bits.shape, dtype=bits.dtype, generator=random)
            noise.view(-1)[:1] = info.min  # -0.0
            bits.copy_(torch.where(torch.rand(bits.shape, generator=random) < 0.3, noise, bits))
        save_file(state, made / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    return made


def refit(source):
    """One refit of weights that have changed; what this rank saw of it."""
    seen = {"baseline": source.baseline_digest, "owned": source.owned_elements}
    source.prepare()
    # The first attempt, a retry that overwrites, one without a baseline, and a restore.
    for kind in Kind:
        seen[kind] = [(c.spec.name, c.indices, c.old, c.new) for c in source.changes(kind)]
        if kind is not Kind.RESTORE:
            assert seen.setdefault("candidate", source.candidate_digest) == source.candidate_digest
    seen["exported"] = source.gather_state()
    source.fold(seen["candidate"])
    seen["folded"] = source.baseline_digest
    source.prepare()
    seen["left"] = len(list(source.changes(Kind.RELATIVE)))
    return seen


def coordinates():
    """Where Megatron itself has put this rank: tensor, pipeline, expert and expert-tensor parallel."""
    from megatron.core import parallel_state  # noqa: PLC0415 - in ranks alone

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


def refits(case, rank, folder):
    """Runs on every rank."""
    checkpoint = folder.parent / "checkpoints" / case.model
    bridge, model = build(case, checkpoint)
    source = MegatronSource(BridgeConversion(bridge, model), chunk_elements=CHUNK)
    seen = []
    for number in range(1, STEPS + 1):
        checkpoint = step_of(folder, checkpoint, number)
        load(bridge, model, checkpoint)
        seen.append(refit(source))
    return {
        "coordinates": coordinates(),
        "specs": source.specs,
        "residual": source.residual,
        "bytes": source.ownership.bytes_by_rank,
        "memory": source.memory_bytes,
        "refits": seen,
    }


def judge_layout(case, everyone):
    """What ``dcr inspect`` takes for the holders of a shard are the ranks that Megatron gives it to."""
    layout = Layout(case.tp, case.pp, case.ep, case.etp, case.ranks)
    for rank, (tp, pp, ep, etp) in enumerate(everyone):
        assert rank in layout.holders(stage=pp, shard=tp, expert_rank=None)
        assert rank in layout.holders(stage=pp, shard=etp, expert_rank=ep)
    dense = [layout.holders(stage=pp, shard=tp, expert_rank=None) for pp in range(case.pp) for tp in range(case.tp)]
    assert sorted(rank for ranks in dense for rank in ranks) == list(range(case.ranks))


def judge(folder, case, ranks):
    assert all(r["specs"] == ranks[0]["specs"] and r["bytes"] == ranks[0]["bytes"] for r in ranks)
    assert all(r["residual"] == () for r in ranks)
    judge_layout(Case.of(case), [r["coordinates"] for r in ranks])
    specs = ranks[0]["specs"]
    old = load_file(folder / "checkpoints" / Case.of(case).model / "model.safetensors")
    assert [(s.name, s.shape, s.dtype) for s in specs] == [(n, tuple(t.shape), t.dtype) for n, t in sorted(old.items())]
    numel = sum(t.numel() for t in old.values())
    assert [r["memory"] for r in ranks] == list(ranks[0]["bytes"])
    assert sum(ranks[0]["bytes"]) == 2 * numel  # all owners together keep one copy of the checkpoint
    for number in range(STEPS):
        seen = [r["refits"][number] for r in ranks]
        new = load_file(folder / case / f"step-{number + 1}" / "model.safetensors")
        assert same(bits_of(seen[0]["exported"]), bits_of(new))
        changed = sum(int((bits_of(old)[n] != b).sum()) for n, b in bits_of(new).items())
        assert changed > numel / 5
        assert sum(s["owned"] for s in seen) == numel
        for kind in (Kind.RELATIVE, Kind.ABSOLUTE):
            result, named = union([s[kind] for s in seen], bits_of(old), check_old=True, chunk=CHUNK)
            assert same(result, bits_of(new))
            assert named == changed
        blank = {n: torch.zeros_like(b) for n, b in bits_of(old).items()}
        for kind, expected in ((Kind.DENSE, new), (Kind.RESTORE, old)):
            result, named = union([s[kind] for s in seen], blank, check_old=False, chunk=CHUNK)
            assert same(result, bits_of(expected))
            assert named == numel
        for share, expected in (("baseline", old), ("candidate", new), ("folded", new)):
            assert sum((s[share] for s in seen), ContentDigest()) == digest(specs, expected)
        assert all(s["left"] == 0 for s in seen)
        old = new


@pytest.mark.parametrize("case", NORMAL)
def test_ranks_together_emit_the_checkpoint(megatron, case):
    folder, seen = megatron
    judge(folder, case, seen[case])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ranks_of_every_layout_together_emit_the_checkpoint(tmp_path):
    for case, ranks in run(tmp_path, [(JOB, case) for case in LONG], timeout_s=3500).items():
        judge(tmp_path, case, ranks)
