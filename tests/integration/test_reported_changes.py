"""What a push of two real ranks reports of every layer and tensor, against a count over the gathered checkpoints."""

import json
import os
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcr import RolloutNode, TrainerRefit
from dcr.chaos.servers import free_ports
from dcr.rollout.torch.engine import TorchEngine

SIZES = (14, 9)
STEPS = ("one layer", "nothing", "everywhere", "dense", "one layer")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(*SIZES, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(9, 9, dtype=torch.bfloat16) for _ in range(11))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def load_weights(self, weights):
        state = self.state_dict()
        names = set()
        for name, tensor in weights:
            state[name].copy_(tensor)
            names.add(name)
        return names


def change(model, what):
    """Some elements of this rank's shards, their stored bits."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        flat = (tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()).view(-1)
        if what in ("everywhere", "dense") and flat.dtype == torch.bfloat16:
            flat.view(torch.int16)[::3] ^= 0x8001
        elif what == "one layer" and name.startswith("layers.10."):
            flat[:4] += 1.0


def rank_main(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    addresses = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
    refit = TrainerRefit(model, **addresses, settings={"bucket_bytes": 500, "chunk_elements": 20})
    node = None
    if rank == 0:
        node = RolloutNode(TorchEngine(Model(), name="e"), **addresses, specs=refit.source.specs)
        node.wait_serving(0, 60)  # restored first: its bits are not the sharded model's
    seen = []
    for what in STEPS:
        old = refit.source.gather_state()
        with torch.no_grad():
            change(model, what)
        new = refit.source.gather_state()
        report = refit.push(dense=what == "dense")
        share = {name: asdict(count) for name, count in refit.changes.items()}
        seen.append((what, old, new, json.loads(report.json()), asdict(report), share))
    torch.save(seen, f"{folder}/{rank}.pt")
    dist.barrier()
    if node is not None:
        node.close()
    refit.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (port,) = free_ports(1)
    mp.start_processes(rank_main, (port, str(folder)), nprocs=2, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def count(old, new):
    stored = {torch.bfloat16: torch.int16, torch.int64: torch.int64}
    differ = {n: torch.ne(old[n].view(stored[t.dtype]), t.view(stored[t.dtype])) for n, t in new.items()}
    return {n: (int(where.sum()), where.numel()) for n, where in differ.items()}


@pytest.mark.parametrize("push", range(len(STEPS)))
def test_the_report_counts_every_layer_and_each_rank_its_tensors(ranks, push):
    what, old, new, said, report, _ = ranks[0][push]
    counts = count(old, new)
    expected = {"embed.weight": counts["embed.weight"]}
    for i in range(11):
        weight, bias = counts[f"layers.{i}.weight"], counts[f"layers.{i}.bias"]
        expected[f"layers.{i}"] = (weight[0] + bias[0], weight[1] + bias[1])
    expected["steps"] = counts["steps"]
    assert expected["steps"] == (0, 3)  # nobody changed it, and it is there
    assert (expected["layers.10"][0] > 0) == (what != "nothing")
    assert (expected["layers.2"][0] > 0) == (what in ("everywhere", "dense"))

    assert said["kind"] == report["kind"] == ("dense" if what == "dense" else "relative")
    if what == "dense":
        expected, counts = {}, {}
    else:
        assert report["changed_entries"] == sum(changed for changed, _ in counts.values())
    found = {name: (layer["changed"], layer["elements"]) for name, layer in report["layers"].items()}
    assert list(found.items()) == list(expected.items())  # in reading order
    assert said["layers"] == {name: {"changed": c, "elements": e, "rate": c / e} for name, (c, e) in expected.items()}
    assert ranks[1][push][4]["layers"] == report["layers"]  # every rank hears the same

    total = {}
    for rank in ranks:
        for name, share in rank[push][5].items():
            before = total.get(name, (0, 0))
            total[name] = (before[0] + share["changed"], before[1] + share["elements"])
    assert total == counts
