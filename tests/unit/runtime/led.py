"""An engine and its node, led by hand: a real record, a real channel, real payloads in a folder."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from dcr.control_plane.address import open_control_plane
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import manifest_key
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.identity import Base, Kind, encode_manifest, manifest_root
from dcr.protocol.messages import (
    AttemptFailed,
    Emit,
    Prepare,
    Published,
    Serving,
    decode_report,
    encode_message,
)
from dcr.protocol.record import CommitRecord, Member, OpenTransition, OwnerRef, encode_record
from dcr.rollout.node import RolloutNode
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.channel import Hub, Peer, Received
from dcr.runtime.emission import Emission
from dcr.runtime.registry import register_leader
from dcr.runtime.secret import load_or_create_secret, record_secret
from dcr.runtime.secret_path import secret_path
from dcr.runtime.settings import Settings
from dcr.trainer.torch.source import TorchSource
from tests.faults.models import Policy, Served, dense, stored_bits

WAIT_S = 60.0
INCARNATION = 7
T = TypeVar("T")


class Led:
    """One engine that serves version 0, its node, and a leader that is this test."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file = folder / "run" / "record.db"
        control, delivery = f"sqlite://{self.file}", f"file://{folder}/payloads"
        self.control = open_control_plane(control)
        secret = record_secret(load_or_create_secret(secret_path(control)), "default")
        self.delivery = SealedDelivery(open_delivery(delivery), secret)
        self.policy = Policy()
        self.source = TorchSource(self.policy)
        digest = self.source.baseline_digest
        assert digest is not None
        self.old = {n: t.detach().clone() for n, t in self.policy.state_dict().items()}
        save_file(self.old, folder / "model.safetensors")
        self.model = Served()
        self.model.load_weights(self.old.items())
        self.heard: queue.Queue[object] = queue.Queue()
        self.hub = Hub(secret, self._on_event)
        register_leader(self.control, "default", self.hub.address)
        self.engine = TorchEngine(self.model, name="a", checkpoint=folder, gate_wait_s=WAIT_S)
        settings = {"record_poll_s": 0.05, **settings}
        self.node = RolloutNode(self.engine, control=control, delivery=delivery, settings=settings)
        self._watch_lease()
        self.me = Member("a", self.node.incarnations["a"])
        self.owner = OwnerRef(self.source.owner, INCARNATION)
        self.revision: int | None = None
        self.record = CommitRecord.create("default", "leader", digest.hex())
        self.write(self.record.admit((self.me,)))
        self.node.wait_serving(0, WAIT_S)

    def _on_event(self, event: object) -> None:
        if isinstance(event, Received):
            self.heard.put(decode_report(event.message))

    def _watch_lease(self) -> None:
        """From here on, ``ages`` has how old the record was, in seconds, whenever the gate was told to close."""
        gate = self.node._agents["a"]._gate
        self.read_at, self.ages = gate._read_at, list[float]()
        renew, close = gate.renew, self.engine.close_gate

        def renewed(asked_at: float) -> None:
            renew(asked_at)
            self.read_at = asked_at

        def closes(drain_timeout_s: float) -> None:
            self.ages.append(time.monotonic() - self.read_at)
            close(drain_timeout_s)

        gate.renew, self.engine.close_gate = renewed, closes  # type: ignore[method-assign]

    def close(self) -> None:
        self.node.close()
        self.hub.close()
        self.control.close()
        self.delivery.close()

    def write(self, record: CommitRecord) -> None:
        self.record = record
        n = 1 if self.revision is None else self.revision + 1
        stored = self.control.compare_and_set(
            "default", self.revision, encode_record(record), operation_id=f"op{n}", actor="leader", reason="test"
        )
        self.revision = stored.revision

    def send(self, order: object) -> None:
        peer = Peer("node", "a", self.node.incarnations["a"])
        deadline = time.monotonic() + WAIT_S
        while not self.hub.send(peer, encode_message(order)):  # type: ignore[arg-type]
            assert time.monotonic() < deadline, "the node did not connect"
            time.sleep(0.01)

    def hear(self, kind: type[T]) -> T:
        """The next report of this kind; others before it are passed over."""
        deadline = time.monotonic() + WAIT_S
        while True:
            report = self.heard.get(timeout=max(0.0, deadline - time.monotonic()))
            if isinstance(report, kind):
                return report
            assert not isinstance(report, AttemptFailed), report

    def hears_serving(self, epoch: int) -> list[object]:
        """Everything up to the report that version 0 is served, made at this epoch of K."""
        found: list[object] = []
        while Serving("a", self.node.incarnations["a"], epoch, 0) not in found:
            found.append(self.heard.get(timeout=WAIT_S))
        return found

    def prepare(self, *, stage: bool, incarnation: int | None = None) -> Prepare:
        """Open an attempt in K and order it."""
        k = self.record
        attempts = 1 if k.open is None else k.open.attempts + 1
        kind = Kind.RELATIVE if attempts == 1 else Kind.ABSOLUTE
        self.write(
            k.open_attempt(OpenTransition(1, "w", attempts, kind, (self.owner,), 0, ("add",), pushes=(1,)), (self.me,))
        )
        base = Base(kind, 0, k.baseline_id, "w")
        order = Prepare(
            "default", self.record.epoch, 1, base, (self.owner,), incarnation or self.node.incarnations["a"], stage
        )
        self.send(order)
        return order

    def emit(self, order: Prepare) -> str:
        """Deliver the candidate's payloads, then its seal; the root over it."""
        emit = Emit("default", order.epoch, order.target, order.base, "add", ("scale",), INCARNATION)
        with torch.no_grad():
            manifest = Emission(emit, self.source, INCARNATION, self.delivery, Settings(bucket_bytes=700)).run()
        assert len(manifest.payloads) >= 3
        key = manifest_key("default", order.target, order.epoch, self.owner.owner, INCARNATION)
        self.delivery.put(key, encode_manifest(manifest))
        self.content_digest = manifest.content_digest
        return manifest_root({self.owner.owner: manifest.digest()})

    def commit(self, root: str) -> None:
        self.write(self.record.commit(self.content_digest, root, "op"))
        self.send(Published("default", self.record.epoch))
        assert self.node.wait_serving(1, WAIT_S) == 1
        assert stored_bits(self.model) == dense(self.policy.state_dict())

    def serves_old(self) -> None:
        with self.engine.request() as version:
            assert version == 0
            assert stored_bits(self.model) == dense(self.old)


def led(folder: Path, **settings: Any) -> Iterator[Led]:
    one = Led(folder, settings)
    yield one
    one.close()


def wait(until: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)
