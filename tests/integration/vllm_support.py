"""A tiny real checkpoint, engines and twins in processes of their own, and what the tests run inside a worker."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm_models import write_checkpoint  # noqa: F401  part of what tests take from here

from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest, digest_elements
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


def specs_of(checkpoint) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in read_checkpoint(checkpoint)]


def attach(engine, checkpoint):
    """What a node agent says first to an engine's one rank; the rank's answer."""
    specs = tuple(WireSpec.of(spec) for spec in specs_of(checkpoint))
    (answer,) = engine.call_ranks(encode(Attach(engine.name, "record", specs, "")))
    return decode_answer(answer)


def refit(worker, old, new, operation, verify=""):
    """Run in a worker: apply the changed elements between two checkpoints; returns how many there are."""
    operation = Operation(operation)  # arrives as a plain string
    worker.model_runner.vllm_config.additional_config["dcr_verify"] = verify
    before = dict(read_checkpoint(old))
    storage = worker._dcr_storage(specs_of(old))
    storage.prewarm().raise_if_refused()
    assert_holds(worker, storage, old)
    items = []
    for name, tensor in read_checkpoint(new):
        was, now = bit_view(before[name]).flatten(), bit_view(tensor).flatten()
        changed = (was != now).nonzero().flatten()
        values = {Operation.SET: now, Operation.XOR: now ^ was, Operation.ADD: now - was}[operation][changed]
        items.append(Item(TensorSpec(name, tuple(tensor.shape), tensor.dtype), operation, changed, values))
    storage.apply(items)
    storage.synchronise()
    assert_holds(worker, storage, new)
    return sum(item.entries for item in items)


def assert_holds(worker, storage, checkpoint):
    """A rank that is alone holds this checkpoint, read back through its boxes; what is transformed has no way back."""
    found = storage.readback()
    assert found.wrong == {}
    if worker.parallel_config.world_size > 1:
        return  # it holds a part
    held = {name: sum((h.digest for h in extents), ContentDigest()) for name, extents in found.held.items()}
    for spec, (name, tensor) in zip(specs_of(checkpoint), read_checkpoint(checkpoint), strict=True):
        if name not in found.unread:
            assert held.pop(name) == digest_elements(spec, None, bit_view(tensor).flatten()), name
    assert held == {}


def load_dense(worker, checkpoint):
    """Run in a worker: load a whole checkpoint in place, as a dense refit does."""
    model = worker.model_runner.get_model()
    with torch.no_grad():
        model.load_weights(read_checkpoint(checkpoint))


class Twin:
    """``python -m demo.vllm_twin`` and its answers; started when it is asked first."""

    def __init__(self):
        self._process = None

    def ask(self, checkpoint, prompts: Sequence[Sequence[int]], *, alone=False, **arguments) -> dict:
        request = {"checkpoint": str(checkpoint), "prompts": prompts, "max_tokens": TOKENS, "alone": alone}
        request["arguments"] = arguments
        if self._process is None:
            command, environment = [sys.executable, "-m", "demo.vllm_twin"], {**os.environ, **ENVIRONMENT}
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BaseException:  # a test that ran out of time, for one: the answer would be taken for the next question's
            self._process.kill()
            self.close()
            raise
        assert line, "the twin died; its last words are in the captured standard error"
        return json.loads(line)

    def close(self):
        if self._process is not None:
            self._process.communicate(timeout=200)  # the end of its input ends it
            self._process = None


@contextmanager
def twin() -> Iterator[Twin]:
    made = Twin()
    try:
        yield made
    finally:
        made.close()


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
    found = [(finding["module"], finding["tensor"]) for finding in engine.layout_reports()[0]["findings"]]
    engine.shutdown()
    tokens = vllm_twin.greedy(llm, PROMPTS, TOKENS)["tokens"]
    print(json.dumps({"tokens": tokens, "refused": refused, "before": before, "after": after, "found": found}))


if __name__ == "__main__":
    _stock_main(sys.argv[1])
