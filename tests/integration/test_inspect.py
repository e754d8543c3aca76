"""`dcr inspect` on configurations alone, beside what real ranks with real weights have found."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from dcr.cli import inspect as command
from tests.integration.megatron_ranks import checkpoints

TIED = "qwen3-tied tp1 pp2 of 2"
EXPERTS = "qwen3-moe tp2 pp2 ep2 etp1 of 4"


def inspect(*arguments, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "dcr.cli.main", "inspect", *map(str, arguments), "--json"],
        check=False, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


def test_a_configuration_alone_says_what_real_ranks_find(megatron):
    folder, seen = megatron
    report, done = inspect(folder / "checkpoints" / "qwen3-moe", "--tp", "2", "--pp", "2", "--ep", "2")
    state = load_file(folder / "checkpoints" / "qwen3-moe" / "model.safetensors")
    assert report["size_bytes"] == sum(t.numel() * t.element_size() for t in state.values())
    assert sum(c["tensors"] for c in report["classes"]) == len(state)
    assert report["direct_share"] == 1.0
    assert "direct: 100.0000% of the bytes" in done.stdout
    owned, real = report["owned_bytes"], seen[EXPERTS][0]["bytes"]
    assert len(owned) == 4
    assert sum(owned) == sum(real) == report["size_bytes"]
    assert max(abs(a - b) for a, b in zip(owned, real, strict=True)) < 0.02 * sum(real)


@pytest.mark.long
def test_tied_names_count_once_where_the_checkpoint_has_one(tmp_path):
    checkpoints(tmp_path, ["qwen3-tied"])
    report, _ = inspect(tmp_path / "checkpoints" / "qwen3-tied")
    names = {c["name"] for c in report["classes"]}
    assert "embedding.word_embeddings.weight" in names
    assert "output_layer.weight" not in names
    assert report["layout"]["ranks"] == 1
    assert report["imbalance"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "no configuration in no-such-model"),
        (["qwen3-30b-a3b", "--tp", "2", "--ranks", "3"], "ranks must be a multiple of tp * pp = 2"),
        (["qwen3-30b-a3b", "--tp", "0"], "every size must be at least 1"),
    ],
)
def test_what_cannot_be_inspected_is_named(arguments, said):
    report, done = inspect(*arguments, status=3)
    assert report["ok"] is False
    assert said in report["error"]
    assert said in done.stderr


@pytest.mark.long
def test_an_unknown_model_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "hidden_size": 8}))
    report, _ = inspect(tmp_path, status=3)
    assert "Megatron Bridge makes no model of this configuration" in report["error"]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "size_bytes", "layers"), [("qwen3-30b-a3b", 61_064_245_248, 48), ("nemotron-3-nano-30b-a3b", 63.2e9, 52)]
)
def test_the_shipped_shapes_are_projected_directly(model, size_bytes, layers):
    assert json.loads((command.SHAPES / f"{model}.json").read_text())["num_hidden_layers"] == layers
    done = subprocess.run(
        [sys.executable, "-m", "dcr.cli.main", "inspect", model, "--tp", "2", "--ep", "8", "--ranks", "8", "--json"],
        check=False, capture_output=True, text=True, timeout=1100,
    )  # fmt: skip
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["size_bytes"] == pytest.approx(size_bytes, rel=2e-3)
    assert report["direct_share"] >= 0.999
    assert sum(report["owned_bytes"]) == report["size_bytes"]
    assert report["imbalance"] < 1.1
