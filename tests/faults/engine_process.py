"""A rollout engine in a process of its own, which may kill itself at a chosen protocol step."""

import hashlib
import multiprocessing as mp
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dcr.data_plane.item import TensorSpec
from dcr.protocol.step import Step
from dcr.rollout.node import RolloutNode
from dcr.rollout.torch.engine import TorchEngine
from tests.faults.models import Policy, Served, stored_bits

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "dcr.rollout.node", "dcr.rollout.torch.engine", "tests.faults.models"])


@dataclass(frozen=True)
class Kill:
    """SIGKILL to itself just before the count-th step with this action (in an epoch of at least epoch_min)."""

    action: str
    count: int = 1
    epoch_min: int = 0


class Trigger:
    def __init__(self, kill: Kill | None) -> None:
        self._kill = kill
        self._seen = 0

    def __call__(self, step: Step) -> None:
        k = self._kill
        if k is None or step.action != k.action or step.epoch < k.epoch_min:
            return
        self._seen += 1
        if self._seen == k.count:
            os.kill(os.getpid(), signal.SIGKILL)


class EngineProcess:
    """Controls one engine process; every wait is bounded."""

    def __init__(
        self, name: str, folder: Path, checkpoint: Path | None, addresses: dict[str, Any], kill: Kill | None = None
    ):
        self.name = name
        self.log = folder / f"{name}-{time.time_ns()}.requests"
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(name, checkpoint, addresses, kill, theirs, self.log, _credentials()), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def call(self, command: str, *args: Any, timeout_s: float = 100) -> Any:
        self._pipe.send((command, *args))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"engine {self.name}: {command} was not answered in {timeout_s} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait_serving(self, version: int, timeout_s: float = 100) -> int:
        return self.call("wait_serving", version, timeout_s, timeout_s=timeout_s + 5)

    def wait_killed(self, timeout_s: float = 100) -> None:
        self._process.join(timeout_s)
        assert self._process.exitcode == -signal.SIGKILL, f"engine {self.name} ended with {self._process.exitcode}"

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(30)

    def requests(self) -> list[tuple[int, str]]:
        """(version, digest of all storage as the request saw it); a torn last line of a killed process is left out."""
        if not self.log.exists():
            return []
        lines = self.log.read_text().split("\n")[:-1]
        return [(int(v), d) for v, d in (line.split() for line in lines)]


def combined(bits: dict[str, str]) -> str:
    return hashlib.sha256("".join(f"{n}{d}" for n, d in sorted(bits.items())).encode()).hexdigest()


def _credentials() -> dict[str, str]:
    """Of the object store; the process that engines are forked from may be older than they are."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _serve(name, checkpoint, addresses, kill, pipe, log, environment) -> None:  # noqa: PLR0917 - a process's arguments
    os.environ.update(environment)
    torch.set_num_threads(1)
    trigger = Trigger(kill)
    model = Served()
    specs = None
    if checkpoint is None:
        specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in sorted(Policy().state_dict().items())]
    else:
        model.load_weights(load_file(checkpoint / "model.safetensors").items())
    engine = TorchEngine(model, name=name, checkpoint=checkpoint, observe=trigger, gate_wait_s=3600)
    node = RolloutNode(engine, **addresses, specs=specs, observe=trigger)

    def request_loop() -> None:
        with log.open("a") as out:
            while True:
                with engine.request() as version:
                    digest = combined(stored_bits(model))
                out.write(f"{version} {digest}\n")
                out.flush()
                time.sleep(0.002)

    threading.Thread(target=request_loop, daemon=True).start()
    while True:
        command, *args = pipe.recv()
        try:
            if command == "wait_serving":
                pipe.send(node.wait_serving(*args))
            elif command == "bits":
                pipe.send(stored_bits(model))
            elif command == "version":
                pipe.send(node.version)
            elif command == "corrupt":  # what a torn write or a stray store would leave
                model.embed.data.view(torch.int16)[0, 0] ^= 1
                pipe.send(None)
        except Exception as e:  # noqa: BLE001
            pipe.send(RuntimeError(str(e)))
