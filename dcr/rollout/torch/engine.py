"""A plain torch model as an engine: its storage, its gate, and the checkpoint that it was loaded from."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.placement import Placement
from dcr.protocol.errors import RefusedError
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.gate import Gate
from dcr.rollout.readback import LoadWeights, Readback
from dcr.rollout.tied import tied_names
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.rank_host import RankHost

_NAMED_MAX = 4
"""How many tensors a warning names."""


class TorchEngine:
    """Any torch module with a native loader, as an engine of one rank in this process.

    Requests run inside ``request()``; there is no cache that outlives one, unless ``reset_caches`` is given.

    Args:
        model: the module whose storage is refitted in place.
        load_weights: its native loader: takes (canonical name, tensor) pairs and copies them into the module; by
            default ``model.load_weights``.
        name: names the engine in errors.
        checkpoint: folder of the safetensors checkpoint that the loader was fed; None if it was fed nothing that is
            kept, and then the engine is restored before it serves.  Storage is compared with it once: a module that
            was never loaded, or was loaded from elsewhere, is restored too.
        reset_caches: drops what was computed with older weights.
        gate_wait_s: how long a request waits at the closed gate, seconds.
        observe: called with every protocol step of the rank.
        verify: "written" to read back everything that was written, "dense" to do every application again through the
            native loader, and compare; see :class:`dcr.data_plane.placement.placement.Placement`.

    Raises:
        RefusedError: the module has no loader.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        name: str,
        checkpoint: Path | str | None = None,
        reset_caches: Callable[[], None] | None = None,
        gate_wait_s: float = 60.0,
        observe: Observer = log_step,
        verify: str = "",
    ) -> None:
        loader = load_weights or getattr(model, "load_weights", None)
        if loader is None:
            raise RefusedError(
                f"engine {name}: {type(model).__name__} has no load_weights; give its native loader as load_weights"
            )
        self.name = name
        self.model = model
        self._checkpoint = checkpoint
        self._reset = reset_caches
        self._gate = Gate(name, gate_wait_s)

        def storage(specs: Sequence[TensorSpec]) -> Placement:
            return Placement(model, loader, specs, verify=verify)

        def not_loaded() -> str:
            readback = Readback(model)
            readback.run(loader, self.checkpoint_tensors() or ())
            return "; ".join(str(finding) for finding in readback.findings[:_NAMED_MAX])

        self._rank = RankHost(
            storage,
            state_incarnation=time.time_ns(),
            observe=observe,
            not_loaded=not_loaded,
            tied=lambda skipped, held: tied_names(model, skipped, held),
        )

    @property
    def version(self) -> int | None:
        """The version being served; None while the gate is closed."""
        return self._gate.version

    @property
    def runtime(self) -> object:
        """The module: see ``RolloutEngine.runtime``."""
        return self.model

    def request(self) -> AbstractContextManager[int]:
        """Hold the gate for one request: ``with engine.request() as version: model(...)``."""
        return self._gate.request()

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Canonical name and tensor of what the loader was fed; None if that is not known."""
        return None if self._checkpoint is None else read_checkpoint(str(self._checkpoint))

    @property
    def ranks(self) -> tuple[str, ...]:
        """Its one rank."""
        return ("0",)

    def call_ranks(self, request: bytes) -> list[bytes]:
        """Hand a request to the host of the rank."""
        with torch.no_grad():
            return [self._rank.call(request)]

    def close_gate(self, drain_timeout_s: float) -> None:
        """Let no request in, and return when none is inside; GateTimeoutError if they do not leave in time."""
        self._gate.close(drain_timeout_s)

    def reset_caches(self) -> None:
        """Drop what was computed with older weights."""
        self._gate.check_drained("resetting caches")
        if self._reset is not None:
            self._reset()

    def open_gate(self, version: int) -> None:
        """Let requests in, served by this version."""
        self._gate.open(version)
