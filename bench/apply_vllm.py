"""Applying a delta inside a real vLLM engine: learned placement against the dense hooked loader in one call.

Two Qwen3-MoE models with random weights, each in a vLLM engine on the CPU in a process of its own: one of few big
tensors, one of thousands of small ones.  Every share of changed elements is applied as one bucket of ``add`` items, in
turn by the boxes, by the hooked loader over all canonical tensors in one call, and, for scale, by nothing but vLLM's
own dense load of ready tensors.  Medians of interleaved rounds, after one round that is not counted.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table import Row, gathered, parser, report

from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.data_plane.placement.loader_path import LoaderPath
from dcr.data_plane.placement.placement import Placement
from dcr.rollout import cpu_vllm

NAME = "apply_vllm"
SHARES = (0.001, 0.01, 0.03)
AIMS = {0.001: 30.0, 0.01: 9.0, 0.03: 6.0}
NOT_MEASURED = (
    "a GPU",
    "several ranks",
    "decoding payloads, the gate, the pause that a client sees",
    "transforming tensors: these models have none",
)
MODELS: dict[str, dict[str, int]] = {
    "few big tensors": {
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_experts": 32,
        "moe_intermediate_size": 512,
        "vocab_size": 32000,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "many small tensors": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "num_experts": 128,
        "moe_intermediate_size": 128,
        "vocab_size": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


def canonical(config: dict[str, int]) -> list[TensorSpec]:
    """Every tensor of the checkpoint, in the order of a load."""
    hidden, inner, vocabulary = config["hidden_size"], config["moe_intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{which}_heads"] * config["head_dim"] for which in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        own = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (config["head_dim"],),
            "self_attn.k_norm": (config["head_dim"],),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate": (config["num_experts"], hidden),
        }
        for expert in range(config["num_experts"]):
            own |= {f"mlp.experts.{expert}.{which}_proj": (inner, hidden) for which in ("gate", "up")}
            own[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return [TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items()]


def engine(config: dict[str, int], folder: str) -> Any:
    """A vLLM engine with random weights, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    cpu_vllm.set_environment()
    from transformers import Qwen3MoeConfig  # noqa: PLC0415  slow to import, and read their environment then
    from vllm import LLM  # noqa: PLC0415  the same

    made = Qwen3MoeConfig(
        **config,
        intermediate_size=256,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    made.architectures = ["Qwen3MoeForCausalLM"]
    made.save_pretrained(folder)
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        **cpu_vllm.ENGINE_ARGUMENTS,
    )


def delta(specs: list[TensorSpec], share: float) -> list[Item]:
    """One ``add`` item a tensor: this share of its elements, at least one, at random places."""
    rng = np.random.default_rng(0)
    items = []
    for spec in specs:
        places = np.unique(rng.integers(0, spec.numel, max(1, round(spec.numel * share))))
        values = rng.integers(1, 1 << 15, places.size, np.int16)
        items.append(Item(spec, Operation.ADD, torch.from_numpy(places), torch.from_numpy(values)))
    return items


def milliseconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def both(work: Callable[[], object]) -> tuple[float, float]:
    """How long it takes, and how much processor time of all threads; the latter says more on a busy machine."""
    cpu = time.process_time()
    wall = milliseconds(work)
    return wall, 1e3 * (time.process_time() - cpu)


def measure(which: str, rounds: int) -> dict[str, Any]:
    """Everything that is measured in one engine; times in milliseconds."""
    config = MODELS[which]
    specs = canonical(config)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        llm = engine(config, folder)
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        placement, path = Placement(model, model.load_weights, specs), LoaderPath(model, model.load_weights, specs)
        compiling = milliseconds(lambda: placement.prewarm().raise_if_refused())
        found: dict[str, Any] = {"compiling": compiling, "learning": milliseconds(placement.prewarm), "shares": {}}
        path.prewarm()
        before = placement.readback()
        found["readback"] = statistics.median(milliseconds(placement.readback) for _ in range(rounds))
        found["fingerprint"] = statistics.median(milliseconds(placement.fingerprint) for _ in range(rounds))
        found["tensors"], found["bytes"] = len(specs), sum(2 * spec.numel for spec in specs)
        ready = [(spec.name, torch.zeros(spec.shape, dtype=spec.dtype)) for spec in specs]
        for share in SHARES:
            items = delta(specs, share)
            back = [Item(i.spec, Operation.ADD, i.indices, -i.values) for i in items]
            times: dict[str, list[tuple[float, float]]] = {"boxes": [], "hooked": []}
            for _ in range(rounds + 1):  # forth by one way and back by the other: both did the same if nothing is left
                times["boxes"].append(both(partial(placement.apply, items)))
                times["hooked"].append(both(partial(path.apply, back)))
            if placement.readback() != before:
                raise RuntimeError(f"{which}, {share}: boxes and the hooked loader disagree")
            found["shares"][share] = {
                f"{way}{what}": statistics.median(one[which_clock] for one in all_[1:])
                for way, all_ in times.items()
                for which_clock, what in enumerate(("", " cpu"))
            }
            found["shares"][share]["entries"] = sum(item.entries for item in items)
        found["plain load"] = statistics.median(
            milliseconds(lambda: model.load_weights(iter(ready))) for _ in range(rounds)
        )
    return found


def rows_of(which: str, found: dict[str, Any]) -> Iterator[Row]:
    """The rows of one model."""
    size = f"{which} ({found['tensors']}, {found['bytes'] / 1e9:.2f} GB)"
    for share, times in found["shares"].items():
        claim = f"{size}, {100 * float(share):g} % changed"
        yield Row(
            f"{claim}: dense hooked path / placement", times["hooked"] / times["boxes"], "x", aim=AIMS[float(share)]
        )
        yield Row(f"{claim}: the same in processor time", times["hooked cpu"] / times["boxes cpu"], "x")
        yield Row(f"{claim}: plain dense load / placement", found["plain load"] / times["boxes"], "x")
        yield Row(f"{claim}: placement", times["boxes"], "ms")
        yield Row(f"{claim}: placement, an entry", 1e6 * times["boxes"] / times["entries"], "ns")
        yield Row(f"{claim}: dense hooked path", times["hooked"], "ms")
    yield Row(f"{size}: plain dense load of ready tensors", found["plain load"], "ms")
    yield Row(f"{size}: learning", found["learning"], "ms")
    yield Row(f"{size}: first learning of the process, kernels loaded", found["compiling"], "ms")
    yield Row(f"{size}: readback", found["readback"], "ms")
    yield Row(f"{size}: fingerprint", found["fingerprint"], "ms")


def main() -> None:
    """Measure each model in a process of its own: vLLM on a CPU starts only where no kernel was compiled before."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    arguments.add_argument("--only", choices=list(MODELS), help="measure one model and print its raw figures")
    asked = arguments.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.only, asked.rounds)))
        return

    def found(which: str) -> dict[str, Any]:
        command = [sys.executable, str(Path(__file__)), "--only", which, "--rounds", str(asked.rounds)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - ourselves
        measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return measured

    rows = gathered(row for which in MODELS for row in rows_of(which, found(which)))
    report(NAME, rows, NOT_MEASURED, as_json=asked.json)


if __name__ == "__main__":
    main()
