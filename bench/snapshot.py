"""How long refits hold a training loop up: ``push``, which holds the weights, or ``begin_push``, which copies them.

Two deployments, a trainer in this process and a torch engine in one of its own, train and refit in turn.  After each
step the first calls ``push``; the second takes the ``result`` of the push before, and calls ``begin_push``.  Held up is
the time inside these calls.  A step is work that takes about as long as a push (``--busy``), and an update of the
weights.  The work is matrix products on one core or on both, or sleep: what a step on a GPU leaves to the host.  Where
all cores are busy, a push in the background takes from the training what it saves, so that the whole loop is told too.
The copy by itself is measured against detection, on one core.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from table import Row, gathered, parser, report
from torch import nn

import dcr
from dcr.data_plane.bits import bit_view
from dcr.protocol.identity import Kind
from dcr.rollout.torch.engine import TorchEngine
from dcr.trainer.torch.source import TorchSource

NAME = "snapshot"
RATES = (0.01, 0.05)
HELD_UP_RATE = 0.03
WORK = {"asleep": 0, "on one core": 1, "on both cores": 2}
"""Threads of a training step's work."""
COLUMNS = 1024
WAIT_S = 300.0
NOT_MEASURED = (
    "trainers on GPUs, whose weights come over the bus, and are compared by the host once they are copied",
    "several ranks, whose begin_push waits for the last of them",
    "real networks and engines, which make a push longer and the gain larger",
    "training that writes as much memory as the copy reads",
)


class Policy(nn.Module):
    """Square BF16 matrices, trained and served as they are."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        for number in range(max(1, elements // COLUMNS**2)):
            weight = torch.randn(COLUMNS, COLUMNS).mul_(0.02).to(torch.bfloat16)
            self.register_parameter(f"w{number}", nn.Parameter(weight, requires_grad=False))

    def load_weights(self, weights: Any) -> set[str]:
        """The native loader."""
        return {name for name, tensor in weights if self.get_parameter(name).copy_(tensor) is not None}

    def step(self, rate: float) -> None:
        """Change about this share of the elements by the smallest difference there is."""
        for tensor in self.parameters():
            bit_view(tensor).add_((torch.rand(tensor.shape) < rate).to(torch.int16))


def serve(folder: Path, elements: int, address: dict[str, Any], pipe: Connection) -> None:
    """The engine's process, until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    policy = Policy(elements)
    policy.load_weights(load_file(folder / "model.safetensors").items())
    node = dcr.RolloutNode(TorchEngine(policy, name="a", checkpoint=folder), **address)
    node.wait_serving(0, timeout_s=WAIT_S)
    pipe.send("serves")
    while (version := pipe.recv()) is not None:
        node.wait_serving(version, timeout_s=WAIT_S)
        pipe.send(sum(int(bit_view(tensor).sum(dtype=torch.int64)) for tensor in policy.parameters()))
    node.close()


class Deployment:
    """A trainer that refits by push or by begin_push, and its engine."""

    def __init__(self, folder: Path, elements: int, *, copies: bool) -> None:
        folder.mkdir()
        self._copies = copies
        self._policy = Policy(elements)
        save_file(self._policy.state_dict(), folder / "model.safetensors")
        settings: dict[str, object] = {"event_log": "off"}
        address = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
        self._refit = dcr.TrainerRefit(self._policy, **address, settings=settings)  # type: ignore[arg-type]
        self._pipe, theirs = multiprocessing.Pipe()
        work = (folder, elements, {**address, "settings": settings}, theirs)
        self._engine = multiprocessing.get_context("spawn").Process(target=serve, args=work)
        self._engine.start()
        self._hear()
        self._pending: dcr.PendingPush | None = None
        self.pushed = 0

    def train(self, seconds: float, threads: int) -> None:
        """Work that takes this many seconds where nothing else runs, and an update of the weights."""
        if threads:
            for _ in range(round(seconds / product_s(threads))):
                product()
        else:
            time.sleep(seconds)
        self._policy.step(HELD_UP_RATE)

    def refit(self) -> float:
        """Bring the engine to the weights, or begin to; seconds that the loop was held up."""
        began = time.perf_counter()
        if self._copies:
            self.finish()
            self._pending = self._refit.begin_push()
        else:
            self._refit.push()
        self.pushed += 1
        return time.perf_counter() - began

    def finish(self) -> float:
        """Hear how the push before ended; seconds."""
        began = time.perf_counter()
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return time.perf_counter() - began

    def check(self) -> None:
        """The engine holds what is pushed now; RuntimeError if it holds anything else."""
        self.refit()
        self.finish()
        self._pipe.send(self.pushed)
        if self._hear() != sum(int(bit_view(t).sum(dtype=torch.int64)) for t in self._policy.parameters()):
            raise RuntimeError("the engine does not hold what was pushed")

    def close(self) -> None:
        """End both."""
        self._pipe.send(None)
        self._engine.join(WAIT_S)
        self._refit.close()

    def _hear(self) -> Any:
        if not self._pipe.poll(WAIT_S):
            raise RuntimeError(f"the engine said nothing for {WAIT_S:g} s")
        return self._pipe.recv()


_LEFT, _RIGHT = torch.randn(512, 512), torch.randn(512, 512)


def product() -> None:
    """What training is here."""
    _LEFT @ _RIGHT


@cache
def product_s(threads: int) -> float:
    """Seconds of one product by this many threads, where nothing else runs."""
    torch.set_num_threads(threads)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        product()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def held_up(asked: argparse.Namespace) -> Iterator[Row]:
    """Rows of the two ways, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        ways = [Deployment(Path(folder, name), asked.elements, copies=name == "copy") for name in ("hold", "copy")]
        for work, threads in WORK.items():
            torch.set_num_threads(threads or 1)
            spent, whole, seconds = [], [], 0.0
            for turn in range(asked.warmups + asked.rounds):
                one = [turn_of(way, asked.refits, seconds, threads) for way in ways]
                if turn < asked.warmups:
                    seconds = asked.busy * one[0][0] / asked.refits
                else:
                    spent.append([held for held, _ in one])
                    whole.append([all_of_it for _, all_of_it in one])
            claim = f"{asked.elements >> 20} Mi BF16 weights, {100 * HELD_UP_RATE:g} % changed, training {work}"
            ratio = statistics.median(hold / copy for hold, copy in spent)
            yield Row(f"{claim}: held up by push / by begin_push and result", ratio, "x")
            ratio = statistics.median(hold / copy for hold, copy in whole)
            yield Row(f"{claim}: the whole loop with push / with begin_push", ratio, "x")
        for way in ways:
            way.check()
            way.close()


def turn_of(way: Deployment, refits: int, seconds: float, threads: int) -> tuple[float, float]:
    """Some steps and refits; seconds that they were held up, and seconds of all.

    Nothing is in the background when it begins or ends: the other way would pay for it.
    """
    began, held = time.perf_counter(), 0.0
    for _ in range(refits):
        way.train(seconds, threads)
        held += way.refit()
    way.train(seconds, threads)
    held += way.finish()
    return held, time.perf_counter() - began


def copied(elements: int, rate: float, rounds: int) -> Iterator[Row]:
    """Rows of the copy against detection, on one core."""
    torch.set_num_threads(1)
    policy = Policy(elements)
    source = TorchSource(policy)
    made, again, detected = list[float](), list[float](), list[float]()
    for turn in range(rounds + 2):
        policy.step(rate)
        source.hold()
        times = [time.perf_counter()]
        for _ in range(2):
            source.snapshot()
            times.append(time.perf_counter())
        for _ in source.changes(Kind.RELATIVE):
            pass
        times.append(time.perf_counter())
        digest = source.candidate_digest
        assert digest is not None
        source.fold(digest)
        if turn >= 2:
            for found, began, ended in zip((made, again, detected), times[:-1], times[1:], strict=True):
                found.append(ended - began)
    claim = f"{elements >> 20} Mi BF16 weights, {100 * rate:g} % changed, one core"
    first, copy, detect = (statistics.median(found) for found in (made, again, detected))
    yield Row(f"{claim}: the copy / detection", copy / detect, "x")
    yield Row(f"{claim}: the first copy, into new memory / the next ones", first / copy, "x")


def rows_of(asked: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    yield from held_up(asked)
    for rate in RATES:
        yield from copied(asked.elements, rate, asked.rounds)


def main() -> None:
    """Measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--elements", type=int, default=1 << 25, help="weights of the model (default: 2**25)")
    arguments.add_argument("--refits", type=int, default=4, help="refits of a turn (default: 4)")
    arguments.add_argument("--rounds", type=int, default=5, help="turns that count, of each way (default: 5)")
    arguments.add_argument("--warmups", type=int, default=2, help="turns before (default: 2)")
    arguments.add_argument("--busy", type=float, default=1.0, help="training between refits, in pushes (default: 1)")
    asked = arguments.parse_args()
    with torch.no_grad():
        rows = gathered(rows_of(asked))
    report(NAME, rows, NOT_MEASURED, as_json=asked.json)


if __name__ == "__main__":
    main()
