"""What the death of a leader costs a push: from SIGKILL in an open attempt to the commit, in leases.

A trainer in this process whose coordinator is elsewhere, a torch engine, and two `dcr coordinator` processes.  Every
second push has its leader killed when the owner begins to emit; the others are left alone.  Then the next coordinator
is started, and the roles change.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from table import Row, gathered, parser, report
from torch import nn

import dcr
from dcr.control_plane.address import open_control_plane
from dcr.protocol.step import Step
from dcr.rollout.torch.engine import TorchEngine

ELEMENTS = 1 << 16
WAIT_S = 120.0
NOT_MEASURED = (
    "etcd, whose leases end by its own clock, and other machines than this one: SQLite and loopback",
    "many engines: a leader that took over waits for all that K names to find it, at most rejoin_timeout_s",
    "payloads of any size: what an attempt had sent before the kill is sent again",
    "a leader that is stopped and not killed, whose peers notice by the registry or after peer_timeout_s",
)


class Policy(nn.Module):
    """A matrix that is trained, and served as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ELEMENTS // 1024, 1024, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: object) -> set[str]:
        """The native loader."""
        for _, weight in weights:  # type: ignore[attr-defined]
            self.w.copy_(weight)
        return {"w"}


class Deployment:
    """A trainer, an engine that serves, and coordinators of which one leads."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        self._folder = folder
        (folder / "v0").mkdir(parents=True)
        self._address = {"control": f"sqlite://{folder}/record.db", "delivery": f"file://{folder}/payloads"}
        self._lease_s = lease_s
        self._coordinators: dict[str, subprocess.Popen[bytes]] = {}
        self._kill = False
        self._killed_at = 0.0
        self._version = 0
        self._policy, served = Policy(), Policy()
        save_file(self._policy.state_dict(), folder / "v0" / "model.safetensors")
        for _ in range(2):
            self._start_coordinator()
        settings: dict[str, object] = {"coordinator": "elsewhere", "event_log": "off"}
        trainer = {**self._address, "settings": settings, "observe": self._observe}
        self._refit = dcr.TrainerRefit(self._policy, **trainer)  # type: ignore[arg-type]
        engine = TorchEngine(served, name="a", checkpoint=folder / "v0")
        self._node = dcr.RolloutNode(engine, **self._address, settings={"event_log": "off"})  # type: ignore[arg-type]
        self._node.wait_serving(0, timeout_s=WAIT_S)
        self._control = open_control_plane(self._address["control"])

    def push(self, *, kill: bool) -> float:
        """Seconds until the push has returned and its version is served: of the whole, or since the kill."""
        positions = torch.randint(ELEMENTS, (ELEMENTS // 100,))
        self._policy.w.view(-1)[positions] += 1
        self._version += 1
        self._kill = kill
        started = time.perf_counter()
        self._refit.push()
        self._node.wait_serving(self._version, timeout_s=WAIT_S)
        ended = time.perf_counter()
        if kill:
            self._start_coordinator()
        return ended - (self._killed_at if kill else started)

    def close(self) -> None:
        """End all of it."""
        self._node.close()
        self._refit.close()
        self._control.close()
        for process in self._coordinators.values():
            process.kill()
            process.wait()

    def _observe(self, step: Step) -> None:
        if self._kill and step.action == "Emit":
            self._kill = False
            lease = self._control.leader("default")
            assert lease is not None
            process = self._coordinators.pop(lease.holder.split("-")[0])
            self._killed_at = time.perf_counter()
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _start_coordinator(self) -> None:
        """One more, which stands by when this returns."""
        name = f"c{time.time_ns():x}"
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "dcr.cli.main", "coordinator", "--name", name, "--event-log", "off"]
        command += [f"--control={self._address['control']}", f"--delivery={self._address['delivery']}"]
        command += [f"--settings=leader_lease_s={self._lease_s}", "--settings=record_poll_s=0.2"]
        with log.open("wb") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._coordinators[name] = subprocess.Popen(command, stdout=out, stderr=out, env=environment)  # noqa: S603
        deadline = time.monotonic() + WAIT_S
        while b"stands by" not in (said := log.read_bytes()) and b"waits for a trainer" not in said:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not come up:\n{said.decode(errors='replace')}")
            time.sleep(0.05)


def rows(folder: Path, leases: list[float], rounds: int) -> Iterator[Row]:
    """The rows, the cheapest first."""
    for lease_s in leases:
        deployment = Deployment(folder / f"lease-{lease_s:g}", lease_s)
        try:
            deployment.push(kill=False)  # the first compiles kernels
            pairs = [(deployment.push(kill=True), deployment.push(kill=False)) for _ in range(rounds)]
        finally:
            deployment.close()
        killed, alone = zip(*pairs, strict=True)
        sizes = f"lease of {lease_s:g} s, one engine, {rounds} kills"
        median = statistics.median
        yield Row(
            f"SIGKILL of the leader to the commit of its push, median, {sizes}", median(killed) / lease_s, "leases"
        )
        yield Row(f"the same, longest, {sizes}", max(killed) / lease_s, "leases")
        yield Row(f"an undisturbed push of the same run, median, {sizes}", median(alone) / lease_s, "leases")


def main() -> None:
    """Measure, and report."""
    made = parser(str(__doc__))
    made.add_argument("--leases", type=float, nargs="+", default=[2.0, 8.0], metavar="S", help="leader_lease_s (2 8)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="kills of each (5)")
    options = made.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = gathered(rows(Path(folder), options.leases, options.rounds))
    report("failover", found, NOT_MEASURED, as_json=options.json)


if __name__ == "__main__":
    main()
