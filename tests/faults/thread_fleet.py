"""A trainer and engines in threads of this process, with hooks on protocol steps; for faults that need no kill."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dcr import RefitReport, RolloutNode, TrainerRefit
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.sealed import SEAL_BYTES, SealedDelivery
from dcr.protocol.record import CommitRecord, decode_record
from dcr.protocol.step import Step
from dcr.rollout.gate import GateTimeoutError
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.secret import record_secret
from tests.faults.engine_process import combined
from tests.faults.models import Policy, Served, stored_bits

SETTINGS: dict[str, Any] = {
    "bucket_bytes": 700,
    "attempt_pause_timeout_s": 0.05,
    "prepare_timeout_s": 60.0,
    "ack_timeout_s": 60.0,
    "fold_timeout_s": 60.0,
    "restore_timeout_s": 60.0,
    "members_timeout_s": 30.0,
    "owners_timeout_s": 60.0,
    "push_timeout_s": 200.0,
    "delivery_timeout_s": 30.0,
    "record_poll_s": 0.1,
}
"""A machine that stalls for seconds uses none of these times up; a test of one that runs out sets its own."""
WAIT_S = 60.0
SERVED_S = 60.0
"""Until an engine serves what is committed, on a machine that is busy with other things too."""


class ThreadEngine:
    """One engine: its storage, its node agent, and a thread of requests that each read all of the storage."""

    def __init__(self, fleet: "Fleet", name: str, model: nn.Module, checkpoint: Path | None) -> None:
        self.name = name
        self.model = model
        self.seen: list[tuple[int, str]] = []
        self._fleet = fleet
        self.engine = TorchEngine(model, name=name, checkpoint=checkpoint, observe=fleet.observe, gate_wait_s=0.05)
        self.node = self.start_node()
        self._stop = threading.Event()
        self._requests = threading.Thread(target=self._request_loop, daemon=True)
        self._requests.start()

    def start_node(self) -> RolloutNode:
        self.node = RolloutNode(self.engine, **self._fleet.addresses, observe=self._fleet.observe)
        return self.node

    def bits(self) -> dict[str, str]:
        return stored_bits(self.model)

    def close(self) -> None:
        self._stop.set()
        self._requests.join(WAIT_S)
        self.node.close()

    def _request_loop(self) -> None:
        while not self._stop.is_set():
            try:
                with self.engine.request() as version:
                    self.seen.append((version, combined(stored_bits(self.model))))
            except GateTimeoutError:
                continue  # the gate stayed closed: ask again
            time.sleep(0.001)


class Fleet:
    """Everything of one record under one folder; ``close`` checks every answer that any engine gave."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any] | None = None,
        payloads: Path | None = None,
        delivery: str | None = None,
        control: str | None = None,
    ) -> None:
        self.folder = folder
        self.payloads = payloads or folder / "payloads"
        self.addresses: dict[str, Any] = {
            "control": control or f"sqlite://{folder}/record.db",
            "delivery": delivery or f"file://{self.payloads}",
            "settings": {**SETTINGS, **(settings or {})},
        }
        self._hooks: list[tuple[str, Callable[[Step], None]]] = []
        self._hooks_lock = threading.Lock()
        self.steps: list[Step] = []
        self.policy = Policy()
        self.version = 0
        self.states = {0: self.state()}
        self.checkpoint = folder / "v0"
        self.checkpoint.mkdir()
        save_file(self.states[0], self.checkpoint / "model.safetensors")
        self.refit = self.start_trainer()
        self.engines: list[ThreadEngine] = []
        self._steps = 0

    # ---------------------------------------------------------------- the two sides

    def start_trainer(self) -> TrainerRefit:
        return TrainerRefit(self.policy, **self.addresses, observe=self.observe)

    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in self.policy.state_dict().items()}

    def engine(self, name: str, make: Callable[[], nn.Module] = Served, version: int = 0) -> ThreadEngine:
        """An engine that was started from a version's checkpoint."""
        return self._engine(name, make, self.folder / f"v{version}", self.states[version])

    def stranger(self, name: str) -> ThreadEngine:
        """An engine that was started from what is no version of the record: no payload of one helps it."""
        other = {n: t.detach().clone() for n, t in Policy(seed=99).state_dict().items()}
        return self._engine(name, Served, self.folder / "stranger", other)

    def _engine(
        self, name: str, make: Callable[[], nn.Module], checkpoint: Path, state: dict[str, torch.Tensor]
    ) -> ThreadEngine:
        if not checkpoint.exists():
            checkpoint.mkdir()
            save_file(state, checkpoint / "model.safetensors")
        model = make()
        model.load_weights(state.items())
        e = ThreadEngine(self, name, model, checkpoint)
        self.engines.append(e)
        return e

    def step(self, rate: float = 0.05) -> None:
        self._steps += 1
        self.policy.step(self._steps, rate)

    def push(self, **kwargs: Any) -> RefitReport:
        report = self.refit.push(**kwargs)
        self.version += 1
        assert report.version == self.version
        self.states[self.version] = self.state()
        return report

    def restart_trainer(self, policy: Policy | None = None) -> None:
        self.refit.close()
        self.policy = policy or self.policy
        self.refit = self.start_trainer()

    # ---------------------------------------------------------------- the proof

    def expected(self, engine: ThreadEngine, version: int) -> dict[str, str]:
        """The bits of a fresh model of this engine's class that loaded the version densely, and nothing else."""
        twin = type(engine.model)()
        twin.load_weights(self.states[version].items())
        return stored_bits(twin)

    def check(self, engine: ThreadEngine) -> None:
        """The engine serves the committed version, and holds its bits."""
        assert engine.node.wait_serving(self.version, SERVED_S) == self.version
        assert engine.bits() == self.expected(engine, self.version)

    def close(self) -> None:
        for e in self.engines:
            e.close()
        self.refit.close()
        for e in self.engines:
            expected = {v: combined(self.expected(e, v)) for v in self.states}
            for version, digest in e.seen:
                assert digest == expected[version], f"{e.name} answered from storage that is not version {version}"

    # ---------------------------------------------------------------- faults

    def once(self, action: str, act: Callable[[Step], None]) -> None:
        """Call this at the next step with this action, on the thread that takes the step, before it is carried out."""
        with self._hooks_lock:
            self._hooks.append((action, act))

    def observe(self, step: Step) -> None:
        with self._hooks_lock:
            self.steps.append(step)
            due = [h for h in self._hooks if h[0] == step.action][:1]
            self._hooks = [h for h in self._hooks if h not in due]
        for _, act in due:
            act(step)

    def objects(self, epoch: int) -> list[Path]:
        """Payload files of an epoch in order, once its one owner has sealed it."""
        deadline = time.monotonic() + WAIT_S
        while not self.manifest(epoch).exists():
            assert time.monotonic() < deadline, f"epoch {epoch} was not sealed"
            time.sleep(0.005)
        return sorted(self.manifest(epoch).parent.glob("*.payload"))

    def manifest(self, epoch: int) -> Path:
        found = list(self.payloads.glob(f"default/{epoch:020d}/*/rank-0/*/manifest"))
        return found[0] if found else Path("not there yet")

    def record(self) -> CommitRecord:
        stored = self.refit._control.read("default")
        assert stored is not None
        return decode_record(stored.body)

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < deadline, "it did not come about in time"
            time.sleep(0.005)


def unsealed(path: Path) -> bytes:
    """A stored object without its seal."""
    return path.read_bytes()[:-SEAL_BYTES]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """What a bad disk does to a stored object."""
    path.chmod(0o600)
    path.write_bytes(change(path.read_bytes()))


def forge(path: Path, change: Callable[[bytes], bytes]) -> None:
    """What a process of the run does to a stored object: its seal is right, whatever it holds."""
    parents = [path, *path.parents]
    place = next(i for i, p in enumerate(parents) if (p.parent / "record.db.secret").exists())
    secret = record_secret((parents[place].parent / "record.db.secret").read_bytes(), "default")
    key = str(path.relative_to(parents[place]))
    kept = FolderDelivery(parents[place])
    data = SealedDelivery(kept, secret).get(key, path.stat().st_size)
    assert data is not None
    path.unlink()
    SealedDelivery(kept, secret).put(key, change(data))


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
