"""A tiny real checkpoint, engines and twins in processes of their own, and what the tests run inside a worker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from dcr.data_plane.bits import bit_view
from dcr.data_plane.item import Item, Operation, TensorSpec
from dcr.rollout import cpu_vllm
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.vllm.engine import VllmEngine
from dcr.runtime.rank_messages import Attach, WireSpec, decode_answer, encode
from demo import vllm_twin

ENVIRONMENT = {
    **cpu_vllm.ENVIRONMENT,
    "OMP_NUM_THREADS": "1",  # the model is tiny; threads of several engines would only spin against each other
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ROOT = Path(__file__).parents[2]
PROMPTS = [[5, 9, 77, 130, 33], [1, 2, 3]]
LONG_PROMPT = [(7 * i) % 250 + 3 for i in range(70)]  # more than two cache blocks of 32
BATCH = [*PROMPTS, LONG_PROMPT]
TOKENS = 16


def write_checkpoint(directory, seed):
    """A Qwen3-MoE with random weights: fused QKV, gated experts, norms, untied embedding and head."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def specs_of(checkpoint) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in read_checkpoint(checkpoint)]


def attach(engine, checkpoint):
    """What a node agent says first to an engine's rank; the rank's answer."""
    specs = tuple(WireSpec.of(spec) for spec in specs_of(checkpoint))
    return decode_answer(engine.rank_call(encode(Attach(engine.name, "record", specs, ""))))


def refit(worker, old, new, operation):
    """Run in a worker: apply the changed elements between two checkpoints; returns how many there are."""
    operation = Operation(operation)  # arrives as a plain string
    before = dict(read_checkpoint(old))
    storage = worker._dcr_storage(specs_of(old))
    storage.prewarm().raise_if_refused()
    items = []
    for name, tensor in read_checkpoint(new):
        was, now = bit_view(before[name]).flatten(), bit_view(tensor).flatten()
        changed = (was != now).nonzero().flatten()
        values = {Operation.SET: now, Operation.XOR: now ^ was, Operation.ADD: now - was}[operation][changed]
        items.append(Item(TensorSpec(name, tuple(tensor.shape), tensor.dtype), operation, changed, values))
    storage.apply(items)
    storage.synchronise()
    return sum(item.entries for item in items)


def load_dense(worker, checkpoint):
    """Run in a worker: load a whole checkpoint in place, as a dense refit does."""
    model = worker.model_runner.get_model()
    with torch.no_grad():
        model.load_weights(read_checkpoint(checkpoint))


class Twin:
    """``python -m demo.vllm_twin`` and its answers."""

    def __init__(self, process):
        self._process = process

    def ask(self, checkpoint, prompts: Sequence[Sequence[int]], *, alone=False, **arguments) -> dict:
        request = {"checkpoint": str(checkpoint), "prompts": prompts, "max_tokens": TOKENS, "alone": alone}
        request["arguments"] = arguments
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the twin died; its last words are in the captured standard error"
        return json.loads(line)


@contextmanager
def twin() -> Iterator[Twin]:
    command = [sys.executable, "-m", "demo.vllm_twin"]
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Twin(process)
        finally:
            process.stdin.close()
            process.wait(30)


@contextmanager
def stock(checkpoint) -> Iterator[Callable[[], dict]]:
    """A stock engine, which repacks, in a process of its own: its tokens, and what became of an attempt to refit it.

    Starts at once; call what is yielded to wait for it.
    """
    command = [sys.executable, __file__, str(checkpoint)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield lambda: json.loads(process.communicate(timeout=240)[0].splitlines()[-1])
        finally:
            process.kill()


def _stock_main(checkpoint):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM  # noqa: PLC0415  reads its environment then

    extension = "dcr.rollout.vllm.extension.DcrWorkerExtension"
    llm = LLM(model=checkpoint, **{**vllm_twin.ENGINE_ARGUMENTS, "worker_extension_cls": extension})
    engine = VllmEngine(llm, name="stock")
    before = engine.resident_digests()
    refused = attach(engine, checkpoint).refused
    after = engine.resident_digests()
    found = [(finding["module"], finding["tensor"]) for finding in engine.layout_report()["findings"]]
    engine.shutdown()
    tokens = vllm_twin.greedy(llm, PROMPTS, TOKENS)
    print(json.dumps({"tokens": tokens, "refused": refused, "before": before, "after": after, "found": found}))


if __name__ == "__main__":
    _stock_main(sys.argv[1])
