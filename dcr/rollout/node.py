"""The rollout side's front door: the engines of one host, kept at the committed version."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

from dcr.control_plane.address import open_control_plane
from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.header import DEFAULT_LIMITS
from dcr.data_plane.item import TensorSpec
from dcr.delivery.address import open_delivery
from dcr.delivery.sealed import SealedDelivery
from dcr.delivery.traffic import Traffic
from dcr.protocol.errors import RefusedError
from dcr.rollout.claim import Claim
from dcr.runtime.contents import ReadbackReport
from dcr.runtime.event_log import event_folder
from dcr.runtime.node_agent import NodeAgent
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.progress import EngineStatus
from dcr.runtime.progress_log import ProgressLog, Steps, Stuck
from dcr.runtime.ranks import Engine
from dcr.runtime.reception import Reception
from dcr.runtime.registry import RelayDirectory
from dcr.runtime.seconds import seconds
from dcr.runtime.secret import record_secret
from dcr.runtime.secret_path import run_secret
from dcr.runtime.settings import Settings
from dcr.runtime.shared_memory import SharedMemory

_log = logging.getLogger("dcr.node")


class RolloutEngine(Engine, Protocol):
    """An adapter of ``dcr.rollout``: ``VllmEngine`` or ``TorchEngine``."""

    name: str

    @property
    def runtime(self) -> object:
        """What serves behind the adapter: of all adapters of it, one at a time has a node."""
        ...

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Canonical name and tensor of what the loader was fed; None if that is not known."""
        ...


class RolloutNode:
    """Keeps the engines of one host at the committed version: each joins, is refitted, restored and gated by itself.

    ::

        engine = TorchEngine(model, name="node-a", checkpoint="ckpt")   # or VllmEngine(llm, name="node-a")
        node = RolloutNode(engine, control="sqlite:///tmp/run/record.db", delivery="file:///tmp/run/payloads")
        node.wait_serving(0, timeout_s=60)

    What is delivered is received once for all engines of the node, and shared with their ranks through memory.  Apart
    from that engines have nothing in common: each has its own place in the protocol, its thread and its gate, and one
    that is slow, fails or is lost leaves the others as they are (DESIGN D9).

    Args:
        engines: the engine's adapter, or those of several; their gates are closed until the record admits them.
        control: address of the control plane.
        delivery: address of the delivery store.
        record_id: the commit record to obey.
        specs: canonical tensors, for engines whose checkpoint is not known.
        settings: bounds, as ``Settings`` or as a mapping of some of its fields.
        observe: called with every protocol step of the node, from the thread of the engine that takes it.

    Raises:
        RefusedError: an engine cannot be refitted (its layout, its loader), or nothing tells its canonical tensors; or
            two engines have the same name, or another node of this process has one of them.
        ReadbackError: an engine was read back, and does not hold the checkpoint that it was started from.
    """

    def __init__(
        self,
        engines: RolloutEngine | Sequence[RolloutEngine],
        *,
        control: str,
        delivery: str,
        record_id: str = "default",
        specs: Sequence[TensorSpec] | None = None,
        settings: Settings | dict[str, object] | None = None,
        observe: Observer = log_step,
    ) -> None:
        bounds = settings if isinstance(settings, Settings) else Settings.of(settings or {})
        all_engines = tuple(engines) if isinstance(engines, Sequence) else (engines,)
        names = [e.name for e in all_engines]
        if not names or len(set(names)) != len(names):
            raise RefusedError(f"a node takes one engine or several, each with a name of its own, not {names}")
        self._agents: dict[str, NodeAgent] = {}
        self._closing = threading.Lock()
        with ExitStack() as opened, Steps(_log, f"node of {', '.join(names)}") as step:
            claims: dict[str, Claim] = {}
            for engine in all_engines:
                claims[engine.name] = Claim(engine.runtime, engine.name)
                opened.callback(claims[engine.name].release)
            step("reads and digests the checkpoints that its engines were started from")
            known = {e.name: _checkpoint_of(e, specs) for e in all_engines}
            step("opens the control plane and the delivery")
            plane = open_control_plane(control)
            events = event_folder(bounds.event_log, control)
            opened.callback(plane.close)
            secret = run_secret(control)
            directory = RelayDirectory(plane, record_id)
            store = SealedDelivery(open_delivery(delivery, directory, receives=True), record_secret(secret, record_id))
            opened.callback(store.close)
            memory = SharedMemory(record_id, time.time_ns())
            opened.callback(memory.close)
            self._reception = Reception(
                store, memory, names, bounds, payload_bytes_max=DEFAULT_LIMITS.payload_bytes_max
            )
            opened.callback(self._reception.close)
            for engine in all_engines:
                step(f"learns how the weights of engine {engine.name} lie in its storage")
                tensors, digest, checkpoint = known[engine.name]
                agent = NodeAgent(
                    engine,
                    name=engine.name,
                    record_id=record_id,
                    control=plane,
                    inbox=self._reception.inbox(engine.name),
                    secret=secret,
                    specs=tensors,
                    loaded_digest=digest,
                    settings=bounds,
                    observe=observe,
                    checkpoint=checkpoint,
                    events=events,
                )
                self._agents[engine.name] = agent
                claims[engine.name].until(partial(getattr, agent, "ended"))
                opened.callback(agent.close)
            opened.callback(ProgressLog(_log, "dcr-progress", self._under_way).close)
            self._opened = opened.pop_all()

    @property
    def version(self) -> int | None:
        """The version that every engine serves; None while a gate is closed, or they differ."""
        versions = set(self.versions.values())
        return versions.pop() if len(versions) == 1 else None

    @property
    def versions(self) -> dict[str, int | None]:
        """The version that each engine serves; None while its gate is closed."""
        return {name: agent.serving for name, agent in self._agents.items()}

    @property
    def incarnations(self) -> dict[str, int]:
        """Incarnation of each engine's storage."""
        return {name: agent.attached.incarnation for name, agent in self._agents.items()}

    @property
    def failures(self) -> dict[str, str]:
        """Why engines cannot go on; those that can are left out."""
        return {name: agent.failure for name, agent in self._agents.items() if agent.failure}

    @property
    def statuses(self) -> dict[str, EngineStatus]:
        """What each engine does now, and why it does not serve if it does not."""
        return {name: agent.status for name, agent in self._agents.items()}

    def _under_way(self) -> Mapping[str, str | Stuck]:
        found: dict[str, str | Stuck] = {}
        for name, agent in self._agents.items():
            if hangs := agent.hangs:
                found[name] = Stuck(partial(str, f"engine {name} serves nothing: it waits for {hangs}"))
            elif (status := agent.status.refit) is not None:
                found[name] = f"engine {name}, {status}"
        return found

    @property
    def received(self) -> tuple[int, int]:
        """How many objects this node has read from the delivery store, and how many bytes those were."""
        return self._reception.objects, self._reception.bytes

    @property
    def traffic(self) -> Traffic:
        """What this node has asked of the delivery store: requests, retries by their reasons, bytes."""
        return self._reception.traffic

    def wait_serving(self, version: int, timeout_s: float, engine: str | None = None) -> int:
        """Wait until this version or a later one is served, and return it.

        Args:
            version: which.
            timeout_s: how long to wait at most.
            engine: whose; all of the node if it is not given, and then the oldest version is returned.

        Raises:
            RefusedError: the node has no such engine; or ``timeout_s`` is no number of seconds.
            NodeError: an engine was refused or failed, or the time ran out.
        """
        timeout_s = seconds(timeout_s, "wait_serving(timeout_s)")
        if engine is not None and engine not in self._agents:
            raise RefusedError(f"this node has no engine {engine!r}, only {', '.join(self._agents)}")
        deadline = time.monotonic() + timeout_s
        agents = self._agents.values() if engine is None else [self._agents[engine]]
        return min(agent.wait_serving(version, deadline - time.monotonic()) for agent in agents)

    def readback(self, timeout_s: float = 600.0) -> dict[str, ReadbackReport]:
        """Read every engine's storage back now and compare it with the version that it is taken to hold, by digests.

        After anything that may have touched weights behind the node's back, such as a runtime that slept.

        Raises:
            ReadbackError: an engine does not hold its version: its gate is closed, and it is out of service.
            RefusedError: an engine is taken to hold none: an attempt is under way, or has failed; or ``timeout_s`` is
                no number of seconds.
            NodeError: an engine is out already, or the time ran out.
        """
        timeout_s = seconds(timeout_s, "readback(timeout_s)")
        return {name: agent.readback(timeout_s) for name, agent in self._agents.items()}

    def close(self) -> None:
        """Leave: end threads and connections; the gates stay as they are.  Safe to repeat, from several threads too."""
        with self._closing:
            self._opened.close()


def _checkpoint_of(
    engine: RolloutEngine, specs: Sequence[TensorSpec] | None
) -> tuple[Sequence[TensorSpec], str, Mapping[str, ContentDigest] | None]:
    """Canonical tensors of an engine, and the digest of what it was fed, in all and by tensor, if that is known."""
    tensors = engine.checkpoint_tensors()
    if tensors is not None:
        return describe(tensors)
    if specs is None:
        raise RefusedError(f"engine {engine.name}: without a checkpoint, its canonical tensors must come as specs")
    return specs, "", None


def describe(
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> tuple[tuple[TensorSpec, ...], str, dict[str, ContentDigest]]:
    """Specs, sorted by name, the content digest of a checkpoint (DESIGN D2), and that of each of its tensors."""
    specs: list[TensorSpec] = []
    digests: dict[str, ContentDigest] = {}
    for name, tensor in tensors:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        specs.append(spec)
        digests[name] = digest_elements(spec, None, bit_view(tensor.contiguous()).flatten())
    return tuple(sorted(specs, key=lambda s: s.name)), sum(digests.values(), ContentDigest()).hex(), digests
