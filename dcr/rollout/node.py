"""The rollout side's front door: one engine, kept at the committed version."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from dcr.control_plane.address import open_control_plane
from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.item import TensorSpec
from dcr.delivery.address import open_delivery
from dcr.protocol.errors import RefusedError
from dcr.runtime.node_agent import Engine, NodeAgent
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.secret import load_or_create_secret
from dcr.runtime.secret_path import secret_path
from dcr.runtime.settings import Settings


class RolloutEngine(Engine, Protocol):
    """An adapter of ``dcr.rollout``: ``VllmEngine`` or ``TorchEngine``."""

    name: str

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Canonical name and tensor of what the loader was fed; None if that is not known."""
        ...


class RolloutNode:
    """Keeps one engine at the committed version: joins, refits, restores, and minds its gate, by itself.

    ::

        engine = TorchEngine(model, name="node-a", checkpoint="ckpt")   # or VllmEngine(llm, name="node-a")
        node = RolloutNode(engine, control="sqlite:///run/record.db", delivery="file:///run/payloads")
        node.wait_serving(0, timeout_s=60)

    Args:
        engine: the engine's adapter; its gate is closed until the record admits it.
        control: address of the control plane.
        delivery: address of the delivery store.
        record_id: the commit record to obey.
        specs: canonical tensors, for an engine whose checkpoint is not known.
        settings: bounds, as ``Settings`` or as a mapping of some of its fields.
        observe: called with every protocol step of the node.

    Raises:
        RefusedError: the engine cannot be refitted (its layout, its loader), or nothing tells the canonical tensors.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        control: str,
        delivery: str,
        record_id: str = "default",
        specs: Sequence[TensorSpec] | None = None,
        settings: Settings | dict[str, object] | None = None,
        observe: Observer = log_step,
    ) -> None:
        bounds = settings if isinstance(settings, Settings) else Settings.of(settings or {})
        self.name = engine.name
        tensors = engine.checkpoint_tensors()
        digest = ""
        if tensors is not None:
            specs, digest = describe(tensors)
        elif specs is None:
            raise RefusedError(f"engine {engine.name}: without a checkpoint, its canonical tensors must come as specs")
        self._control = open_control_plane(control)
        self._delivery = open_delivery(delivery)
        try:
            self._agent = NodeAgent(
                engine,
                name=engine.name,
                record_id=record_id,
                control=self._control,
                delivery=self._delivery,
                secret=load_or_create_secret(secret_path(control)),
                specs=specs,
                loaded_digest=digest,
                settings=bounds,
                observe=observe,
            )
        except BaseException:
            self._control.close()
            self._delivery.close()
            raise

    @property
    def version(self) -> int | None:
        """The version being served; None while the gate is closed."""
        return self._agent.serving

    @property
    def incarnation(self) -> int:
        """Incarnation of the engine's storage."""
        return self._agent.attached.incarnation

    def wait_serving(self, version: int, timeout_s: float) -> int:
        """Wait until this version or a later one is served, and return it; NodeError if that cannot be."""
        return self._agent.wait_serving(version, timeout_s)

    def close(self) -> None:
        """Leave: end threads and connections; the gate stays as it is."""
        self._agent.close()
        self._control.close()
        self._delivery.close()


def describe(tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorSpec, ...], str]:
    """Specs, sorted by name, and the content digest of a checkpoint (DESIGN D2)."""
    specs: list[TensorSpec] = []
    total = ContentDigest()
    for name, tensor in tensors:
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        specs.append(spec)
        total += digest_elements(spec, None, bit_view(tensor.contiguous()).flatten())
    return tuple(sorted(specs, key=lambda s: s.name)), total.hex()
