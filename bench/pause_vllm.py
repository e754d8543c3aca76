"""The pause that a client of a vLLM engine sees at a refit: the longest gap between two tokens while a push runs.

One engine (``AsyncLLM``), one trainer with the demo's policy, one client that always wants its next token: when an
answer ends or is cut short it asks again, with the tokens so far.  Every way in which a gate can close is measured once
a round, in both gate modes, beside two controls: no refit at all, and vLLM's own way to new weights, a dense load of
the checkpoint while generation is paused with ``keep``.  Medians over the rounds.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from dcr.rollout import cpu_vllm

cpu_vllm.set_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the dense load is sent to the worker as a function

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of the demonstration, whose policy is served

import torch  # noqa: E402
from table import Row, parser, report  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402

import dcr  # noqa: E402
from dcr.rollout.checkpoint import read_checkpoint  # noqa: E402
from dcr.rollout.vllm.async_engine import AsyncVllmEngine, OnClose  # noqa: E402
from demo import policy  # noqa: E402

NAME = "pause_vllm"
NOT_MEASURED = (
    "a GPU, where kernels and copies are faster and a step is shorter",
    "a model of a real size, where the dense load grows with the model and a refit with what changed",
    "a network",
    "many clients at once",
)
GATE_MODES = ("sync", "async")
ON_CLOSE: tuple[OnClose, ...] = ("keep", "wait", "abort")
PROMPT = [5, 9, 77, 130, 33]
CONTEXT = 512
ANSWER_TOKENS = 96
CHANGED = 0.02
LIMIT_S = 120.0
DENSE = "dense load while paused"

Result = tuple[float, float]
"""Longest gap between two tokens, in milliseconds, and the refit's own time, in seconds."""


class Client:
    """Wants tokens without end, and notes when each came."""

    def __init__(self, generate: Callable[..., Any], loop: asyncio.AbstractEventLoop) -> None:
        self.times: list[float] = []
        self._generate = generate
        self._stop = False
        self._done = asyncio.run_coroutine_threadsafe(self._run(), loop)

    async def _run(self) -> None:
        tokens: list[int] = []
        number = 0
        while not self._stop:
            tokens = tokens if len(PROMPT) + len(tokens) + ANSWER_TOKENS < CONTEXT else []
            sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
            begun, number = list(tokens), number + 1
            prompt = {"prompt_token_ids": [*PROMPT, *begun]}
            async for answer in self._generate(prompt, sampling, f"{id(self)}-{number}"):
                made = list(getattr(answer, "output", answer).outputs[0].token_ids)
                self.times += [time.perf_counter()] * (len(begun) + len(made) - len(tokens))
                tokens = begun + made

    def wait_tokens(self, more: int) -> None:
        """Wait until so many more tokens have come."""
        wanted, deadline = len(self.times) + more, time.monotonic() + LIMIT_S
        while len(self.times) < wanted:
            if self._done.done() or time.monotonic() > deadline:
                raise RuntimeError(f"the client stands still after {len(self.times)} tokens: {self._done}")
            time.sleep(0.001)

    def finish(self, began: float, ended: float) -> float:
        """Stop; the longest gap, in milliseconds, that touches this span of time."""
        self.wait_tokens(8)
        self._stop = True
        self._done.result(LIMIT_S)
        gaps = zip(self.times, self.times[1:], strict=False)
        return 1e3 * max(b - a for a, b in gaps if b >= began and a <= ended)


class Bench:
    """The engine, the trainer's model, and the record that they share."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._model = policy.build(0)
        self._checkpoint = run / "checkpoint"
        self._model.save_pretrained(self._checkpoint)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._llm = self._on(self._start())
        self._addresses: dict[str, Any] = {"control": f"sqlite://{run}/record.db", "delivery": f"file://{run}/payloads"}
        self._generator = torch.Generator().manual_seed(1)
        self._version = 0

    async def _start(self) -> AsyncLLM:
        arguments = AsyncEngineArgs(
            model=str(self._checkpoint),
            skip_tokenizer_init=True,
            max_model_len=CONTEXT,
            max_num_seqs=4,
            max_num_batched_tokens=CONTEXT,
            **cpu_vllm.ENGINE_ARGUMENTS,
        )
        return AsyncLLM.from_engine_args(arguments)

    def _on(self, job: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(LIMIT_S)

    def _step(self) -> None:
        """Change about as many stored elements as an optimizer step at a high rate would."""
        with torch.no_grad():
            for weight in self._model.parameters():
                where = torch.rand(weight.shape, generator=self._generator) < CHANGED
                weight.mul_(torch.where(where, 1.0 + 2.0**-6, 1.0).to(weight.dtype))

    def refits(self, gate_mode: str, order: Sequence[OnClose]) -> dict[str, Result]:
        """One push for each way to close, under a client each; by the name of the way."""
        found = {}
        with dcr.TrainerRefit(self._model, **self._addresses, settings={"gate_mode": gate_mode}) as refit:
            for on_close in order:
                engine = AsyncVllmEngine(self._llm, name="bench", on_close=on_close, loop=self._loop)
                node = dcr.RolloutNode(engine, **self._addresses)
                try:
                    node.wait_serving(self._version, LIMIT_S)
                    found[f"{gate_mode} gate, {on_close}"] = self._push(refit, node, engine)
                finally:
                    node.close()
        return found

    def _push(self, refit: dcr.TrainerRefit, node: dcr.RolloutNode, engine: AsyncVllmEngine) -> Result:
        client = Client(engine.generate, self._loop)
        client.wait_tokens(24)
        self._step()
        began = time.perf_counter()
        self._version = refit.push().version
        ended = time.perf_counter()
        node.wait_serving(self._version, LIMIT_S)
        return client.finish(began, time.perf_counter()), ended - began

    def dense(self) -> Result:
        """VLLM's own way: pause, load the whole checkpoint in place, resume."""
        self._on(self._llm.resume_generation())
        checkpoint = self._run / "dense"
        self._model.save_pretrained(checkpoint)  # the same weights: the record's version stands
        client = Client(self._llm.generate, self._loop)
        client.wait_tokens(24)
        began = time.perf_counter()
        self._on(self._llm.pause_generation(mode="keep"))
        self._on(self._llm.collective_rpc(_load, args=(str(checkpoint),)))
        self._on(self._llm.resume_generation())
        ended = time.perf_counter()
        return client.finish(began, ended), ended - began

    def nothing(self) -> Result:
        """No refit, for as long as one takes."""
        self._on(self._llm.resume_generation())
        client = Client(self._llm.generate, self._loop)
        client.wait_tokens(24)
        began = time.perf_counter()
        time.sleep(0.5)
        ended = time.perf_counter()
        return client.finish(began, ended), ended - began

    def close(self) -> None:
        """End the engine."""
        self._on(asyncio.to_thread(self._llm.shutdown))
        self._loop.call_soon_threadsafe(self._loop.stop)


def _load(worker: Any, checkpoint: str) -> None:
    with torch.no_grad():
        worker.model_runner.get_model().load_weights(read_checkpoint(checkpoint))


def measure(rounds: int) -> dict[str, list[Result]]:
    """Results of every way, once a round, each round in another order."""
    found: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as run:
        bench = Bench(Path(run))
        try:
            for turn in range(rounds + 1):
                order = [*ON_CLOSE[turn % 3 :], *ON_CLOSE[: turn % 3]]
                results: dict[str, Result] = {}
                for mode in GATE_MODES[:: -1 if turn % 2 else 1]:
                    results |= bench.refits(mode, order)
                results |= {DENSE: bench.dense(), "no refit": bench.nothing()}
                if turn:  # the first round warms up
                    for way, result in results.items():
                        print(f"round {turn}, {way}: longest gap {result[0]:.1f} ms", file=sys.stderr)
                        found.setdefault(way, []).append(result)
        finally:
            bench.close()
    return found


def rows(found: dict[str, list[Result]]) -> list[Row]:
    """Medians; the peer is the dense load."""
    gaps = {way: statistics.median(gap for gap, _ in results) for way, results in found.items()}
    dense = gaps[DENSE]
    table = [Row(f"longest gap between tokens, {way}", gap, "ms", peer=dense) for way, gap in gaps.items()]
    for way, results in found.items():
        if "gate" in way:
            table.append(Row(f"whole push, {way}", statistics.median(s for _, s in results), "s"))
    table.append(Row("gap of the dense load over that of an async refit, keep", dense / gaps["async gate, keep"], "x"))
    return table


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds that count, after one (default: 3)")
    asked = arguments.parse_args()
    report(NAME, rows(measure(asked.rounds)), NOT_MEASURED, as_json=asked.json)


if __name__ == "__main__":
    main()
