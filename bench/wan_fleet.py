"""What runs in the WAN bench's network: a store, fleets of owners and engines, and the transfer that they race."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
from wan_arithmetic import Interval, lower_bound_s, stream_bytes
from wan_child import Child, Handler, together
from wan_control import ControlBridge
from wan_network import STORE, Network
from wan_process import OBJECT_BYTES, node, owner, store, transfer

from dcr.credentials.authority import create_authority, issue

BUCKET = "dcr-wan"
SETTINGS = {"bucket_bytes": 2 << 20, "deliver_threads": 8, "buckets_ahead": 16}
"""As checkpoints here are a thousandth of the paper's: buckets that give an owner some payloads to overlap."""
IDLE_S = 600
"""The relay's connections outlast what else is measured between two refits."""
CONSTRUCTION = frozenset({"detect", "encode", "seal"})
_START_S, _REFIT_S, _TRANSFER_S = 600.0, 300.0, 900.0
_END_S = 10.0
_HUB_PORT = 29500

Event = tuple[str, float, float, str]
"""Stage, begin, end, thread."""


@dataclass(frozen=True)
class Refit:
    """One refit as it was measured; times in seconds, sizes in bytes.

    Attributes:
        began: on the monotonic clock.
        latency_s: from the first owner's push to the last one's return.
        payload_bytes: of unique payloads (the paper's V_payload).
        objects: that the nodes' reports say they have taken, payloads and manifests, all nodes together.
        frame_bytes: that came in over the rollout nodes' WAN interfaces, heads of frames included.
        crossed_bytes: the same without heads: bytes of TCP streams (V_cross).
        told_bytes: what the owners' reports say that they asked their store to take.
        processor_s: seconds by kind of process: owner, node, store, switch.
        events: stages by process.
    """

    began: float
    latency_s: float
    payload_bytes: int
    payloads: int
    changed: int
    elements: int
    objects: int
    frame_bytes: int
    crossed_bytes: int
    told_bytes: int
    processor_s: dict[str, float]
    stages: dict[str, float]
    events: dict[str, list[Event]] = field(repr=False)

    @property
    def construction_s(self) -> float:
        """Construction's lower bound: comparison, projection, encoding, zstd, digests, on the busiest owner."""
        return lower_bound_s(self._of_owners(CONSTRUCTION))

    @property
    def transport_s(self) -> float:
        """Transport's lower bound: from a payload's submission to its receipt, on the busiest owner."""
        return lower_bound_s(self._of_owners({"send"}))

    def _of_owners(self, stages: Iterable[str]) -> list[list[Interval]]:
        wanted = set(stages)
        return [
            [(begins, ends) for name, begins, ends, _ in events if name in wanted]
            for process, events in self.events.items()
            if process.startswith("t")
        ]


class Children:
    """Processes on nodes of a network."""

    def __init__(self, network: Network, run: Path) -> None:
        self._network = network
        self._run = run
        self._children: list[Child] = []

    def start(self, node: str, role: Callable[..., dict[str, Handler]], *arguments: Any) -> Child:
        """A process of ``wan_process.py`` on a node."""
        made = Child(f"{node}-{role.__name__}", self._run, self._network.file(node), role, *arguments)
        self._children.append(made)
        return made

    def close(self) -> None:
        """End all of them, together."""
        for child in self._children:
            child.hang_up()
        deadline = time.monotonic() + _END_S
        for child in self._children:
            child.end(max(0.0, deadline - time.monotonic()))


def processor_s(pid: int) -> float:
    """Processor seconds of a process and its children so far."""
    process = psutil.Process(pid)
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    return total


def peak_bytes(pid: int) -> int:
    """VmHWM of a process."""
    for line in Path("/proc", str(pid), "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmHWM")


class Store:
    """SeaweedFS on a node of its own."""

    def __init__(self, network: Network, run: Path) -> None:
        self._children = Children(network, run)
        folder = run / "objects"
        folder.mkdir()
        try:
            process = self._children.start(STORE, store, str(folder), network.wan_address(STORE), BUCKET)
            started = process.ask(_START_S, do="start")
        except BaseException:
            self.close()
            raise
        self.endpoint: str = started["endpoint"]
        self.pid = process.pid

    def address(self, prefix: str) -> str:
        """The delivery address of a place in its bucket."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def close(self) -> None:
        """End it."""
        self._children.close()


class Transfer:
    """The reference: training nodes upload their shares of the checkpoint, rollout nodes then download all of it."""

    def __init__(self, network: Network, store: Store, run: Path, checkpoint_bytes: int) -> None:
        self._children = Children(network, run)
        self._network = network
        self._round = 0
        objects = checkpoint_bytes // OBJECT_BYTES
        self._shares = [
            [f"{name}/{number:04}" for number in range(place, objects, len(network.trainers))]
            for place, name in enumerate(network.trainers)
        ]
        try:
            everyone = (*network.trainers, *network.nodes)
            started = [self._children.start(name, transfer) for name in everyone]
            address = store.address("reference")
            together([(p, {"do": "start", "delivery": address}) for p in started], _START_S)
        except BaseException:
            self.close()
            raise
        self._senders, self._takers = started[: len(network.trainers)], started[len(network.trainers) :]

    def run(self) -> tuple[float, float]:
        """Seconds of all uploads, and of all downloads after them."""
        self._round += 1
        prefix = f"round-{self._round}/"
        shares = [[prefix + key for key in share] for share in self._shares]
        requests = [(p, {"do": "upload", "keys": keys}) for p, keys in zip(self._senders, shares, strict=True)]
        uploads = together(requests, _TRANSFER_S)
        keys = [key for several in zip_longest(*shares) for key in several if key is not None]  # three share unequally
        downloads = together([(p, {"do": "download", "keys": keys}) for p in self._takers], _TRANSFER_S)
        self._senders[0].ask(_REFIT_S, do="drop", prefix=prefix)
        return _lasted(uploads), _lasted(downloads)

    def close(self) -> None:
        """End its processes."""
        self._children.close()


def _lasted(answers: Sequence[dict[str, Any]]) -> float:
    return max(float(a["ended"]) for a in answers) - min(float(a["began"]) for a in answers)


class Fleet:
    """A trainer with an owner on every training node, and an engine on every rollout node, over one transport.

    Args:
        network: where they run.
        transport: ``relay`` or ``store``.
        store: of the objects; its processor time is counted.
        run: folder for logs, record and certificates.
        checkpoint: folder of the checkpoint.
        layers: of it.
        number: of the fleet in this network.
    """

    def __init__(
        self, network: Network, transport: str, store: Store, run: Path, *, checkpoint: Path, layers: int, number: int
    ) -> None:
        self.transport = transport
        self._network = network
        self._store = store
        self._run = run / transport
        self._run.mkdir()
        self._children = Children(network, self._run)
        self._seed = 0
        self._objects = 0
        control = f"sqlite://{self._run}/record.db"
        leader, *others = network.trainers
        self._bridge = ControlBridge(
            network, control, leader, {**dict.fromkeys(others, 0.0), **dict.fromkeys(network.nodes, network.delay_s)}
        )
        self._addresses = self._delivery_addresses()
        common = {"control": control, "checkpoint": str(checkpoint), "layers": layers}
        settings = {**SETTINGS, "members_min": len(network.nodes)}
        try:
            self.nodes = [self._children.start(name, node) for name in network.nodes]
            self.owners = [self._children.start(name, owner) for name in network.trainers]
            meeting = f"{network.lan_address(leader)}:{_HUB_PORT + number}"
            requests: list[tuple[Child, dict[str, Any]]] = [
                (
                    process,
                    {**common, "do": "start", "name": name, "delivery": self._addresses[name], "settings": settings},
                )
                for name, process in zip(network.nodes, self.nodes, strict=True)
            ]
            ranks = {"ranks": len(network.trainers), "meeting": meeting, "settings": settings}
            requests += [
                (child, {**common, **ranks, "do": "start", "rank": rank, "delivery": self._addresses[name]})
                for rank, (name, child) in enumerate(zip(network.trainers, self.owners, strict=True))
            ]
            together(requests, _START_S)
            together([(p, {"do": "wait", "version": 0, "timeout_s": _START_S}) for p in self.nodes], _START_S)
        except BaseException:
            self.close()
            raise

    def construction_s(self, rate: float, rounds: int) -> list[float]:
        """Processor seconds that each owner's construction of its share takes, one owner at a time."""
        self._step(rate)
        return [
            float(owner.ask(_REFIT_S, do="construct")["processor_s"]) for _ in range(rounds) for owner in self.owners
        ]

    def refit(self, rate: float) -> Refit:
        """Change a share of the weights, and bring every engine to them."""
        self._step(rate)
        network = self._network
        before, used = [network.received(name) for name in network.nodes], self._processor()
        pushes = together([(p, {"do": "push"}) for p in self.owners], _REFIT_S)
        version = pushes[0]["version"]
        together([(p, {"do": "wait", "version": version, "timeout_s": _REFIT_S}) for p in self.nodes], _REFIT_S)
        after, now_used = [network.received(name) for name in network.nodes], self._processor()
        if any((push["attempts"], push["kind"]) != (1, "relative") for push in pushes):
            raise RuntimeError(f"a refit over the {self.transport} took another attempt: see the logs in {self._run}")
        taken = together([(p, {"do": "take"}) for p in self.nodes], _REFIT_S)
        objects = sum(answer["objects"] for answer in taken)
        began = min(push["began"] for push in pushes)
        size = sum(a.bytes - b.bytes for a, b in zip(after, before, strict=True))
        frames = sum(a.frames - b.frames for a, b in zip(after, before, strict=True))
        names = (*network.trainers, *network.nodes)
        found = Refit(
            began=began,
            latency_s=max(push["ended"] for push in pushes) - began,
            payload_bytes=pushes[0]["payload_bytes"],
            payloads=pushes[0]["payloads"],
            changed=pushes[0]["changed"],
            elements=pushes[0]["elements"],
            objects=objects - self._objects,
            frame_bytes=size,
            crossed_bytes=stream_bytes(size, frames),
            told_bytes=sum(push["bytes_up"] for push in pushes),
            processor_s={kind: now_used[kind] - used[kind] for kind in used},
            stages=pushes[0]["stages"],
            events={
                name: [tuple(e) for e in answer["events"]]
                for name, answer in zip(names, [*pushes, *taken], strict=True)
            },
        )
        self._objects = objects
        return found

    def settle(self) -> None:
        """Peak memory counts from here on."""
        together([(p, {"do": "settle"}) for p in (*self.owners, *self.nodes)], _REFIT_S)

    def peaks(self) -> tuple[int, int]:
        """Peak memory of the largest owner and the largest node, bytes."""
        owners, nodes = ([peak_bytes(p.pid) for p in some] for some in (self.owners, self.nodes))
        return max(owners), max(nodes)

    def verify(self) -> None:
        """Every engine reads its storage back: an error if it does not hold the committed version, bit for bit."""
        together([(p, {"do": "readback"}) for p in self.nodes], _REFIT_S)

    def close(self) -> None:
        """End its processes."""
        self._children.close()
        self._bridge.close()

    def _step(self, rate: float) -> None:
        self._seed += 1
        requests = [
            (p, {"do": "step", "rate": rate, "seed": 1000 * self._seed + rank}) for rank, p in enumerate(self.owners)
        ]
        together(requests, _REFIT_S)

    def _processor(self) -> dict[str, float]:
        return {
            "owner": sum(processor_s(p.pid) for p in self.owners),
            "node": sum(processor_s(p.pid) for p in self.nodes),
            "store": processor_s(self._store.pid),
            "switch": processor_s(self._network.switch_pid),
        }

    def _delivery_addresses(self) -> dict[str, str]:
        network = self._network
        everyone = (*network.trainers, *network.nodes)
        if self.transport == "store":
            return dict.fromkeys(everyone, self._store.address("payloads"))
        authority = self._run / "authority"
        create_authority(authority)
        addresses = {}
        for name in everyone:
            issue(authority, self._run / "certificates" / name, name)
            listen = f"&listen={network.wan_address(name)}:7000" if name in network.nodes else ""
            addresses[name] = f"relay://{self._run}/certificates/{name}?idle_timeout_s={IDLE_S}{listen}"
        return addresses
