"""Sharded trainers on real gloo ranks: what the ranks emit, put together, is the trainer's own checkpoint bit for bit.

The ranks write what they saw into files; the judging is done here, from the gathered checkpoints alone.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcr.chaos.servers import free_ports
from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.trainer.share import CandidateChangedError
from dcr.trainer.torch.source import TorchSource
from tests.integration.emitted import bits_of, digest, same, union

CHUNK = 1000


class Mlp(nn.Module):
    """Uneven sizes, a norm that stays replicated, an integer buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 5, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(5)


def moe(*, tied):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - slow, and for some ranks only

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=24, max_position_embeddings=64, tie_word_embeddings=tied, num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def fsdp_moe(*, tied):
    model = moe(tied=tied)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel():
    model = Mlp()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert {p for t in model.parameters() if isinstance(t, DTensor) for p in t.placements} >= {Shard(0), Shard(1)}
    return model


def fsdp_over_columns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.Linear(4, 5, dtype=torch.bfloat16))
    fully_shard(
        model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else Shard(0)
    )
    return model


def replicated():
    return distribute_module(Mlp(), init_device_mesh("cpu", (2,)))


def hybrid():
    model = Mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    return model


def fsdp_over_tensor_parallel():
    model = Mlp()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model.up, mesh=mesh["data"])
    fully_shard(model.down, mesh=mesh["data"])
    return model


def more_ranks_than_rows():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


TWO = {
    "fsdp moe": lambda: fsdp_moe(tied=False),
    "fsdp tied moe": lambda: fsdp_moe(tied=True),
    "tensor parallel": tensor_parallel,
    "fsdp over columns": fsdp_over_columns,
    "replicated": replicated,
}
FOUR = {
    "hybrid": hybrid,
    "fsdp over tensor parallel": fsdp_over_tensor_parallel,
    "more ranks than rows": more_ranks_than_rows,
}


def scramble(model, seed):
    """New random bits in a third of the elements, the same on all replicas: scattered by the DTensor, not gathered."""
    random = torch.Generator().manual_seed(seed)
    unique = {id(t): t for t in model.state_dict(keep_vars=True).values()}
    for tensor in unique.values():
        width = bit_view(torch.empty(0, dtype=tensor.dtype)).dtype
        info = torch.iinfo(width)
        noise = torch.randint(info.min, info.max, tensor.shape, dtype=width, generator=random)
        noise.view(-1)[:1] = info.min  # -0.0
        chosen = torch.rand(tensor.shape, generator=random) < 0.3
        local = tensor.detach()
        if isinstance(tensor, DTensor):
            noise, chosen = (shard_like(tensor, full) for full in (noise, chosen))
            local = local.to_local()
        bits = bit_view(local)
        bits.copy_(torch.where(chosen, noise, bits))


def shard_like(tensor, full):
    """This rank's shard of a full tensor; FSDP splits what tensor parallelism, a later mesh dimension, has split."""
    if all(p.__class__ is Shard or p.is_replicate() for p in tensor.placements):
        return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
    for dim in reversed(range(tensor.device_mesh.ndim)):
        placement, (rank, size) = (
            tensor.placements[dim],
            (tensor.device_mesh.get_local_rank(dim), tensor.device_mesh.size(dim)),
        )
        if not placement.is_replicate():
            chunks = full.chunk(size, placement.dim)
            full = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


def train_step(model):
    """A real optimizer step, for what scrambling may miss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(24).view(2, 12) % 61
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def refit(source, step, meanwhile=None):
    """One refit, of a copy if anything is done meanwhile; what this rank saw of it."""
    seen = {"old": source.gather_state(), "baseline": source.baseline_digest, "owned": source.owned_elements}
    step()
    seen["new"] = source.gather_state()
    if meanwhile is not None:
        source.snapshot()
        meanwhile()
    for kind in (Kind.RELATIVE, Kind.DENSE, Kind.RESTORE):
        seen[kind] = [(c.spec.name, c.indices, c.old, c.new) for c in source.changes(kind)]
        if kind is Kind.RELATIVE:
            seen["candidate"] = source.candidate_digest
            seen["found"] = {n: (c.changed, c.elements) for n, c in source.changes_found.items()}
    source.fold(seen["candidate"])
    seen["folded"] = source.baseline_digest
    seen["left"] = len(list(source.changes(Kind.RELATIVE)))
    return seen


def run_case(build):
    model = build()
    source = TorchSource(model, chunk_elements=CHUNK)
    refits = [refit(source, lambda: scramble(model, 1))]
    if hasattr(model, "config"):
        model = build()
        source = TorchSource(model, chunk_elements=CHUNK)
        refits.append(refit(source, lambda: train_step(model)))
        refits.append(refit(source, lambda: train_step(model), lambda: train_step(model)))
    else:
        refits.append(refit(source, lambda: scramble(model, 2), lambda: scramble(model, 5)))
    source.hold()
    return {
        "owner": source.owner,
        "specs": source.specs,
        "bytes": source.ownership.bytes_by_rank,
        "refits": refits,
        "caught": step_before_fold(source, model),
    }


def step_before_fold(source, model):
    scramble(model, 3)
    list(source.changes(Kind.RELATIVE))
    expected = source.candidate_digest
    scramble(model, 4)
    try:
        source.fold(expected)
    except CandidateChangedError:
        return source.baseline_digest is None
    return False


def refusals(rank):
    """What must be refused on every rank, none left waiting; the messages by case."""
    found = {}

    def refused(name, build):
        try:
            build()
        except RefusedError as error:
            found[name] = str(error)

    def one_rank_only(state):
        return {n: t.flip(0) if n == "up.weight" and rank == 1 else t for n, t in state.items()}

    def one_rank_fails(state):
        assert rank == 0 or len(state) > 1 or "up.bias" not in state, "out of luck"
        return state

    def swaps_weights(state):
        return {
            n: torch.cat(t.chunk(2)[::-1]) if n == "up.weight" and t.is_floating_point() and t.shape[0] == 13 else t
            for n, t in state.items()
        }

    refused("one rank's save path", lambda: TorchSource(tensor_parallel(), save_path=one_rank_only))
    refused("failing save path", lambda: TorchSource(tensor_parallel(), save_path=one_rank_fails))
    refused("swapped halves", lambda: TorchSource(tensor_parallel(), save_path=swaps_weights))
    refused("replicas that differ", lambda: TorchSource(Mlp(seed=rank)))
    refused("other tensors", lambda: TorchSource(nn.Linear(2 + rank, 2)))
    alone = dist.new_group([0])
    if rank == 0:
        found["owned alone"] = TorchSource(Mlp(), process_group=alone).owned_elements
    return found


def rank_main(rank, ranks, port, cases, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    seen = {name: run_case(build) for name, build in {**TWO, **FOUR}.items() if name in cases}
    if ranks == 2:
        seen["refusals"] = refusals(rank)
    torch.save(seen, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(ranks, cases, folder):
    mp.set_forkserver_preload([__name__, "transformers.models.qwen3_moe.modeling_qwen3_moe"])  # imported once for all
    (port,) = free_ports(1)
    mp.start_processes(rank_main, (ranks, port, tuple(cases), str(folder)), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_ranks(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run_ranks(4, FOUR, tmp_path_factory.mktemp("four"))


def added_up(shares):
    """Counts of all ranks by canonical tensor, each of at least one element."""
    total = {}
    for name, (changed, elements) in (count for share in shares for count in share.items()):
        assert elements > 0
        before = total.get(name, (0, 0))
        total[name] = (before[0] + changed, before[1] + elements)
    return total


def judge(ranks):
    assert [r["owner"] for r in ranks] == [f"rank-{i}" for i in range(len(ranks))]
    assert all(r["specs"] == ranks[0]["specs"] and r["bytes"] == ranks[0]["bytes"] for r in ranks)
    specs = ranks[0]["specs"]
    for number in range(len(ranks[0]["refits"])):
        seen = [r["refits"][number] for r in ranks]
        assert all(s["old"] is None and s["new"] is None for s in seen[1:])
        old, new = seen[0]["old"], seen[0]["new"]
        assert [(s.name, s.shape, s.dtype) for s in specs] == [
            (n, tuple(t.shape), t.dtype) for n, t in sorted(old.items())
        ]
        numel = sum(t.numel() for t in old.values())
        changed = sum(int((bits_of(old)[n] != b).sum()) for n, b in bits_of(new).items())
        assert changed > numel / 50
        assert sum(s["owned"] for s in seen) == numel

        result, named = union([s[Kind.RELATIVE] for s in seen], bits_of(old), check_old=True, chunk=CHUNK)
        assert same(result, bits_of(new))
        assert named == changed
        assert added_up([s["found"] for s in seen]) == {
            n: (int(torch.ne(bits_of(old)[n], b).sum()), b.numel()) for n, b in bits_of(new).items() if b.numel()
        }
        blank = {n: torch.zeros_like(b) for n, b in bits_of(old).items()}
        for kind, expected in ((Kind.DENSE, new), (Kind.RESTORE, old)):
            result, named = union([s[kind] for s in seen], blank, check_old=False, chunk=CHUNK)
            assert same(result, bits_of(expected))
            assert named == numel
        for share, expected in (("baseline", old), ("candidate", new), ("folded", new)):
            assert sum((s[share] for s in seen), ContentDigest()) == digest(specs, expected)
        assert all(s["left"] == 0 for s in seen)
    assert all(r["caught"] for r in ranks if r["refits"][0]["owned"])


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_together_emit_the_checkpoint(two_ranks, case):
    judge([rank[case] for rank in two_ranks])


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_together_emit_the_checkpoint(four_ranks, case):
    judge([rank[case] for rank in four_ranks])


def test_the_checkpoint_is_the_one_that_save_pretrained_writes(two_ranks, tmp_path):
    from safetensors.torch import load_file  # noqa: PLC0415 - slow

    for case, tied in (("fsdp moe", False), ("fsdp tied moe", True)):
        moe(tied=tied).save_pretrained(tmp_path / case)
        written = load_file(tmp_path / case / "model.safetensors")
        assert same(bits_of(written), bits_of(two_ranks[0][case]["refits"][0]["old"]))
        assert ("lm_head.weight" in written) is not tied
        assert "model.layers.0.mlp.experts.2.gate_proj.weight" in written


def test_replicas_are_shared_out(two_ranks, four_ranks):
    shares = two_ranks[0]["replicated"]["bytes"]
    total = sum(t.numel() * t.element_size() for t in Mlp().state_dict().values())
    assert sum(shares) == total
    assert min(shares) > 0.35 * total  # the biggest tensor is a half
    assert min(four_ranks[0]["hybrid"]["bytes"]) > 0


def test_all_ranks_refuse_alike(two_ranks):
    first, second = (rank["refusals"] for rank in two_ranks)
    assert first.pop("owned alone") == sum(t.numel() for t in Mlp().state_dict().values())
    assert first == second
    assert "canonical up.weight is not on rank 1 what it is on rank 0" in first["one rank's save path"]
    assert first["failing save path"].startswith("rank 1: save path failed on 1 tensors (up.bias")
    assert "canonical up.weight: random bits" in first["swapped halves"]
    assert "up.weight: ranks 0 and 1 hold replicas" in first["replicas that differ"]
    assert "state weight is not on rank 1" in first["other tensors"]
