"""The harness's own reading of stored bits, and untouched twins; nothing of it is code that it judges."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dcr.chaos.model import RAISED, VLLM, make
from dcr.protocol.errors import RefusedError

CHECKPOINT = "model.safetensors"
TWINS_MAX = 8
"""So many twins' bits are remembered: those of what is served now, and a little before."""


def stored_bits(model: nn.Module) -> dict[str, str]:
    """SHA-256 over dtype, shape and stored bytes of every parameter and buffer, by name."""
    found = {}
    for name, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        digest = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def combined(bits: dict[str, str]) -> str:
    """One digest of all of it, as requests write it down."""
    return hashlib.sha256("".join(f"{n} {d}\n" for n, d in sorted(bits.items())).encode()).hexdigest()[:32]


def stored_bytes(model: nn.Module) -> int:
    """How many bytes ``stored_bits`` reads."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return sum(t.numel() * t.element_size() for _, t in named)


def load(model: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint densely, through the model's native loader.

    Raises:
        RefusedError: the loader raises.
    """
    loader: Any = model
    weights = load_file(checkpoint / CHECKPOINT)
    try:
        loader.load_weights(weights.items())
    except RAISED as e:
        of = f"model {type(model).__name__}: its load_weights, given {checkpoint},"
        raise RefusedError(f"{of} raises {type(e).__name__}: {e}") from e


class Twins:
    """Fresh engine models, each of which loaded one version's checkpoint densely and was never refitted.

    Args:
        factory: of the engine's model.
    """

    def __init__(self, factory: str) -> None:
        self._factory = factory
        self._bits: dict[Path, dict[str, str]] = {}
        self.bytes = 0

    def bits(self, checkpoint: Path) -> dict[str, str]:
        """What storage must hold after a refit to this checkpoint."""
        if checkpoint not in self._bits:
            while len(self._bits) >= TWINS_MAX:
                del self._bits[next(iter(self._bits))]
            self._bits[checkpoint], self.bytes = self._of_a_twin(checkpoint)
        return self._bits[checkpoint]

    def _of_a_twin(self, checkpoint: Path) -> tuple[dict[str, str], int]:
        if self._factory == VLLM:
            from dcr.chaos.vllm_engine import twin_bits  # noqa: PLC0415 - only where a scenario wants vLLM

            return twin_bits(checkpoint)
        twin = make(self._factory)
        load(twin, checkpoint)
        return stored_bits(twin), stored_bytes(twin)
