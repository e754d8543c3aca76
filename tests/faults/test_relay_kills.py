"""A trainer and engine processes over a relay, whose nodes are killed and stopped: commit by retry, every bit right."""

import os
import signal
import time
from pathlib import Path

import pytest

from dcr.credentials.authority import create_authority, issue
from tests.faults.deployment import Deployment
from tests.faults.engine_process import EngineProcess, Kill

QUICK = "heartbeat_s=0.5&peer_timeout_s=10&connect_timeout_s=10&fan_out=1"


class Relayed(Deployment):
    """Each engine is a node of its own, with credentials of its own."""

    def __init__(self, folder: Path) -> None:
        create_authority(folder / "authority")
        issue(folder / "authority", folder / "trainer", "trainer")
        bounds = {"ack_timeout_s": 60.0, "prepare_timeout_s": 60.0, "members_timeout_s": 60.0}
        super().__init__(folder, bounds, delivery=f"relay://{folder}/trainer?{QUICK}")

    def engine(self, name: str, kill: Kill | None = None, *, loaded: bool = True) -> EngineProcess:
        credentials = self.folder / f"node-{name}"
        if not credentials.exists():
            issue(self.folder / "authority", credentials, f"node-{name}")
        addresses = {**self.addresses, "delivery": f"relay://{credentials}?{QUICK}"}
        e = EngineProcess(name, self.folder, self.checkpoint if loaded else None, addresses, kill)
        self.engines.append(e)
        return e


@pytest.fixture
def relayed(tmp_path: Path):
    deployment = Relayed(tmp_path)
    yield deployment
    deployment.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nodes_are_killed_and_stopped_and_come_back(relayed: Relayed) -> None:
    d = relayed
    a, b = d.engine("a"), d.engine("b")
    c = d.engine("c", Kill("EndWrite", count=2, epoch_min=2))
    for e in (a, b, c):
        d.check(e)
    d.step()
    report = d.push()
    assert (report.kind, report.attempts, sorted(report.members)) == ("relative", 1, ["a", "b", "c"])
    assert report.payloads > 3
    # Every object crossed the boundary once: what was sent is what the report counts, and a seal for each object.
    sent = report.traffic
    assert sent.requests == report.payloads + 1
    assert report.payload_bytes < sent.bytes_up < report.payload_bytes + 40 * sent.requests + 4096
    for e in (a, b, c):
        d.check(e)

    d.step()
    report = d.push()  # c kills itself in the middle of its writes, and its part of every tree is gone with it
    c.wait_killed()
    assert (report.kind, sorted(report.members)) == ("absolute", ["a", "b"])
    for e in (a, b):
        d.check(e)

    c = d.engine("c")  # with a port of its own again; it is restored over the relay
    d.check(c)
    d.step()
    assert sorted(d.push().members) == ["a", "b", "c"]
    for e in (a, b, c):
        d.check(e)

    os.kill(b.pid, signal.SIGSTOP)
    d.step()
    started = time.monotonic()
    report = d.push()
    assert time.monotonic() - started < 120
    assert sorted(report.members) == ["a", "c"]
    assert any("node-b" in f or " b " in f"{f} " for f in report.failures), report.failures
    os.kill(b.pid, signal.SIGCONT)
    for e in (a, c):
        d.check(e)
    d.check(b)  # it finds that it was left out, is restored, and serves
    assert d.check_requests() > 0
