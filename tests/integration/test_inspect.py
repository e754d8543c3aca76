"""`dcr inspect` on configurations alone, beside what real ranks with real weights have found."""

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from dcr.cli import inspect as command
from dcr.protocol.errors import RefusedError
from dcr.trainer.megatron import inspection
from dcr.trainer.megatron.conversion import Task
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


def options(model, **layout):
    sizes = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "ranks": None, **layout}
    return argparse.Namespace(model=str(model), json=True, **sizes)


def written(folder, data):
    path = folder / "config.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"model_type": "\xff\xfe"}', "can't decode byte 0xff"),
        (b"[" * 200_000, "maximum recursion depth"),
        (b"", "Expecting value"),
        (b" " * (command.CONFIG_BYTES_MAX + 1), "more than 16777216 bytes"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "qwen3", "num_hidden_layers": 10**9}, "layers times experts are 1000000000"),
        ({"model_type": "x", "num_hidden_layers": 900, "num_experts": 900}, "layers times experts are 810000"),
    ],
    ids=["not UTF-8", "deep", "empty", "long", "no type", "layers", "experts"],
)
def test_a_file_that_is_no_configuration_is_named_at_once(tmp_path, data, said):
    with pytest.raises(RefusedError, match=re.escape(said)):
        command.run(options(written(tmp_path, data)))


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(RefusedError, match="there is no such file"):
        command.run(options(tmp_path))


def test_more_ranks_than_there_can_be_are_refused():
    with pytest.raises(RefusedError, match="8192 ranks at most"):
        command.run(options("qwen3-30b-a3b", ranks=2_000_000))


@pytest.mark.long
def test_a_model_that_megatron_cannot_build_is_named(tmp_path):
    """It fails in the model's own construction, after the Bridge has taken the configuration."""
    config = json.loads((command.SHAPES / "qwen3-30b-a3b.json").read_text()) | {
        "vocab_size": -5,
        "num_hidden_layers": 1,
    }
    report, _ = inspect(written(tmp_path, config), status=3)
    assert "Megatron Bridge makes no model of this configuration: RuntimeError" in report["error"]


class Whole:
    """A model of two layers with four experts, as far as its layout goes."""

    def tasks(self):
        split = [Task("decoder.layers.0.mlp.linear_fc1.weight", "Own", torch.empty(64, 8), split=True)]
        return split + [
            Task(
                f"decoder.layers.1.mlp.experts.local_experts.{n}.linear_fc1.weight",
                "Own",
                torch.empty(64, 8),
                True,
                True,
            )
            for n in range(4)
        ]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"tp": 7, "ranks": 7}, "linear_fc1.weight of shape (64, 8) cannot be split by tp 7"),
        ({"etp": 3, "ranks": 3}, "cannot be split by etp 3"),
        ({"ep": 8, "ranks": 8}, "the model has 4 experts, which ep 8 does not divide"),
        ({"pp": 3, "ranks": 3}, "the model has 2 layers, fewer than pipeline stages"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(layout, said):
    with pytest.raises(RefusedError, match=re.escape(said)):
        inspection.inspect(Whole(), inspection.Layout(**layout))
