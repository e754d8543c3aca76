"""A trainer of one rank in this process, and engines in processes of their own."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dcr import RefitReport, TrainerRefit
from tests.faults.engine_process import EngineProcess, Kill, combined
from tests.faults.models import Policy, dense

SETTINGS = {
    "bucket_bytes": 700,
    "attempt_pause_timeout_s": 0.1,
    "prepare_timeout_s": 60.0,
    "ack_timeout_s": 60.0,
    "restore_timeout_s": 60.0,
    "members_timeout_s": 30.0,
    "delivery_timeout_s": 30.0,
    "record_poll_s": 0.1,
}


class Deployment:
    def __init__(self, folder: Path, settings: dict[str, Any] | None = None, delivery: str | None = None) -> None:
        self.folder = folder
        self.policy = Policy()
        self.addresses = {
            "control": f"sqlite://{folder}/record.db",
            "delivery": delivery or f"file://{folder}/payloads",
            "settings": {**SETTINGS, **(settings or {})},
        }
        self.checkpoint = folder / "v0"
        self.checkpoint.mkdir()
        save_file(self.state(), self.checkpoint / "model.safetensors")
        self.refit = TrainerRefit(self.policy, **self.addresses)
        self.version = 0
        self.bits = {0: dense(self.state())}
        self.engines: list[EngineProcess] = []
        self._steps = 0

    def state(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in self.policy.state_dict().items()}

    def engine(self, name: str, kill: Kill | None = None, *, loaded: bool = True) -> EngineProcess:
        e = EngineProcess(name, self.folder, self.checkpoint if loaded else None, self.addresses, kill)
        self.engines.append(e)
        return e

    def step(self, rate: float = 0.05) -> None:
        self._steps += 1
        self.policy.step(self._steps, rate)

    def push(self, **kwargs: Any) -> RefitReport:
        report = self.refit.push(**kwargs)
        self.version += 1
        assert report.version == self.version
        self.bits[self.version] = dense(self.state())
        return report

    def check(self, engine: EngineProcess) -> None:
        """The engine serves the committed version, and holds its bits."""
        assert engine.wait_serving(self.version) == self.version
        assert engine.call("bits") == self.bits[self.version]

    def check_requests(self) -> int:
        """Every request that any engine answered saw the bits of the version on its label, whole."""
        expected = {v: combined(b) for v, b in self.bits.items()}
        answered = 0
        for e in self.engines:
            for version, digest in e.requests():
                assert digest == expected[version], f"{e.name} answered from storage that is not version {version}"
                answered += 1
        return answered

    def close(self) -> None:
        for e in self.engines:
            e.kill()
        self.refit.close()
