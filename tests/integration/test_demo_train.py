"""The demo's training side on two real processes: what it keeps, read back from its tensors and its checkpoint."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcr.chaos.servers import free_ports
from demo import main, policy, text

ROOT = Path(__file__).resolve().parent.parent.parent
RANKS = 2
STEPS = 3

# What each rank runs: steps on one repeated batch, and everything the test wants to look at written to files.
RANK_SCRIPT = f"""
import json, sys
from pathlib import Path
import torch
from demo import text
from demo.fsdp2 import Fsdp2Trainer

out = Path(sys.argv[1])
trainer = Fsdp2Trainer(seed=3)
trainer.optimizer.set_rate(1e-3)
batch = text.batch(text.corpus(), step=0, size=4, length=32, seed=3)
losses = [trainer.step_on(batch) for _ in range({STEPS})]
rank = torch.distributed.get_rank()
names = [name for name, _ in trainer.model.named_parameters()]
torch.save({{
    "losses": losses,
    "weights": dict(zip(names, [weight.clone() for weight in trainer.optimizer.weights])),
    "masters": dict(zip(names, trainer.optimizer.masters)),
    "full": {{name: tensor.full_tensor() for name, tensor in trainer.model.state_dict().items()}},
}}, out / f"rank{{rank}}.pt")
trainer.save(out / "checkpoint")
trainer.close()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    (port,) = free_ports(1)
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT, str(out)],
            cwd=ROOT,
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)
    return out, [torch.load(out / f"rank{rank}.pt") for rank in range(RANKS)]


def round_to_bfloat16(master):
    """FP32 bits to BF16 bits, round to nearest even, by integer arithmetic on the stored bits."""
    bits = master.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(rounded >= 1 << 15, rounded - (1 << 16), rounded).to(torch.int16)


def test_the_loss_is_finite_and_falls_on_a_repeated_batch(trained):
    _, ranks = trained
    losses = ranks[0]["losses"]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.1
    # An untrained policy knows nothing of 256 bytes.
    assert abs(losses[0] - math.log(256)) < 1.0
    assert ranks[1]["losses"] == losses


def test_weights_are_the_rounded_masters(trained):
    _, ranks = trained
    for rank in ranks:
        for name, weight in rank["weights"].items():
            assert weight.dtype == torch.bfloat16
            assert rank["masters"][name].dtype == torch.float32
            assert torch.equal(weight.view(torch.int16), round_to_bfloat16(rank["masters"][name])), name
    # Masters hold more than the weights do, or there would be no point in them.
    masters = torch.cat([master.flatten() for master in ranks[0]["masters"].values()])
    assert not torch.equal(masters.bfloat16().float(), masters)


def test_ranks_hold_disjoint_halves_of_one_policy(trained):
    _, ranks = trained
    for name, full in ranks[0]["full"].items():
        assert torch.equal(full.view(torch.int16), ranks[1]["full"][name].view(torch.int16)), name
        halves = torch.cat([rank["weights"][name] for rank in ranks])
        assert torch.equal(full.view(torch.int16), halves.view(torch.int16)), name


def test_every_tensor_was_trained(trained):
    _, ranks = trained
    untrained = policy.build(seed=3).state_dict()
    assert untrained.keys() == ranks[0]["masters"].keys()
    # The masters tell: near 1.0 three steps are less than half a BF16 spacing.
    masters = {name: torch.cat([rank["masters"][name] for rank in ranks]) for name in untrained}
    assert [name for name, tensor in untrained.items() if torch.equal(tensor.float(), masters[name])] == []


def test_the_checkpoint_is_the_policy_in_hugging_face_layout(trained):
    out, ranks = trained
    saved = load_file(out / "checkpoint" / "model.safetensors")
    full = ranks[0]["full"]
    # The checkpoint has one tensor an expert and projection; in memory the experts are stacked, gate over up.
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        gate_up, down = full.pop(f"{experts}.gate_up_proj"), full.pop(f"{experts}.down_proj")
        for expert in range(8):
            gate, up = gate_up[expert].chunk(2)
            full |= {
                f"{experts}.{expert}.gate_proj.weight": gate,
                f"{experts}.{expert}.up_proj.weight": up,
                f"{experts}.{expert}.down_proj.weight": down[expert],
            }
    assert saved.keys() == full.keys()
    for name, tensor in full.items():
        assert torch.equal(saved[name].view(torch.int16), tensor.contiguous().view(torch.int16)), name
    config = json.loads((out / "checkpoint" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["fsdp3", "Megatron"])
def test_an_unknown_trainer_is_refused_with_the_choices(monkeypatch, capsys, name):
    monkeypatch.setenv("TRAINER", name)
    monkeypatch.setattr(sys, "argv", ["demo"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main.main()
    assert f"no trainer '{name}'; choose one of fsdp2, megatron" in capsys.readouterr().err


def test_no_trainer_is_the_first():
    assert [main.trainer_name(name) for name in ("", "fsdp2", "megatron")] == ["fsdp2", "fsdp2", "megatron"]


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kill", [[], ["--kill"]])
def test_the_demo_with_a_megatron_trainer(tmp_path, kill):
    command = [sys.executable, "-m", "demo.main", "--trainer", "megatron", "--json", "--run", str(tmp_path / "run")]
    done = subprocess.run([*command, *kill], cwd=ROOT, check=False, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *_, last, report = done.stdout.splitlines()
    assert last.startswith("bit-exact 3/3 refits, 3 receivers, payload ")
    pushes = json.loads(report)["reports"]
    assert [push["kind"] for push in pushes] == ["relative", "absolute" if kill else "relative", "relative"]


def test_batches_are_windows_of_the_text_and_depend_on_their_arguments_alone():
    tokens = text.corpus()
    assert tokens.min() >= 0
    assert tokens.max() < text.VOCABULARY
    corpus = bytes(tokens.tolist())
    batch = text.batch(tokens, step=5, size=8, length=64, seed=1)
    assert batch.shape == (8, 64)
    assert all(bytes(window.tolist()) in corpus for window in batch)
    assert torch.equal(batch, text.batch(tokens, step=5, size=8, length=64, seed=1))
    assert not torch.equal(batch, text.batch(tokens, step=6, size=8, length=64, seed=1))
    assert not torch.equal(batch, text.batch(tokens, step=5, size=8, length=64, seed=2))


def test_text_survives_tokens():
    assert text.decode(text.encode("naïve: 0x3F01")) == "naïve: 0x3F01"
