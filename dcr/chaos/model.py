"""The small models of scenarios that bring none of their own, and how a user's are found."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from dcr.protocol.errors import RefusedError

_BF16 = torch.bfloat16
_SPECIALS = (0x7FC1, 0x7F81, -0x8000, 0x7F80, -0x80, 0x0001)
"""BF16 bits: quiet and signalling NaN with payloads, -0.0, infinities, a denormal."""


def make(factory: str) -> nn.Module:
    """A module from ``package.module:factory``.

    Raises:
        RefusedError: there is no such factory, or it makes no module; names it.
    """
    module, _, name = factory.partition(":")
    try:
        make_it = getattr(import_module(module), name)
    except Exception as e:  # importing runs the user's module
        raise RefusedError(f"model {factory!r}: {_told(e)}; put the folder of its module on PYTHONPATH") from e
    try:
        made = make_it()
    except Exception as e:
        raise RefusedError(f"model {factory!r}: called without arguments it raises {_told(e)}") from e
    if not isinstance(made, nn.Module):
        raise RefusedError(f"model {factory!r} makes a {type(made).__name__}, not a torch module")
    return made


def check(trainer: str, engine: str) -> None:
    """See that the engine's model can load the trainer's checkpoint, before any process is started.

    Raises:
        RefusedError: a model cannot be made, or the engine's native loader does not take the trainer's state dict.
    """
    weights = {name: t.detach().clone() for name, t in make(trainer).state_dict().items()}
    loader: Any = make(engine)
    if not callable(getattr(loader, "load_weights", None)):
        raise RefusedError(f"model {engine!r}: it has no load_weights(weights), the native loader of an engine's model")
    try:
        loader.load_weights(iter(weights.items()))
    except Exception as e:
        raise RefusedError(
            f"model {engine!r}: its load_weights, given the tensors of {trainer!r}, raises {_told(e)}"
        ) from e


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def train_step(model: nn.Module, seed: int, rate: float) -> None:
    """A step that is the same for the same seed: the model's own ``train_step(seed, rate)``, or a change of its state.

    About this share of the elements of every floating tensor gets another value, and a few of the first BF16 tensor
    get NaNs, infinities, -0.0 and a denormal.
    """
    own = getattr(model, "train_step", None)
    if own is not None:
        own(seed, rate)
        return
    g = torch.Generator().manual_seed(seed)
    special = True
    with torch.no_grad():
        for t in model.state_dict().values():
            if not t.is_floating_point() or not t.numel():
                continue
            noise = torch.randn(t.shape, generator=g).to(t.dtype) * 0.01
            t.add_(noise * (torch.rand(t.shape, generator=g) < rate).to(t.dtype))
            if special and t.dtype is _BF16 and t.numel() >= len(_SPECIALS):
                special = False
                at = torch.randperm(t.numel(), generator=g)[: len(_SPECIALS)]
                t.view(torch.int16).flatten()[at] = torch.tensor(_SPECIALS, dtype=torch.int16)


def policy() -> nn.Module:
    """The trainer's side: 5,500 elements, BF16 and FP32."""
    return _Policy()


def served() -> nn.Module:
    """The engine's side: another layout, and one tensor that the loader transforms."""
    return _Served()


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def p(*shape: int, dtype: torch.dtype = _BF16) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=g).to(dtype), requires_grad=False)

        self.embed = p(64, 24)
        self.q = p(24, 24)
        self.k = p(12, 24)
        self.gate = p(40, 24)
        self.up = p(40, 24)
        self.scale = p(24, dtype=torch.float32)


class _Served(nn.Module):
    """q and k fused, gate and up fused and transposed, the scale cast."""

    def __init__(self) -> None:
        super().__init__()

        def z(*shape: int, dtype: torch.dtype = _BF16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.embed = z(64, 24)
        self.qk = z(36, 24)
        self.gate_up = z(24, 80)
        self.decay = z(24, dtype=torch.float32)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The native loader."""
        places = {
            "embed": ("embed", self.embed),
            "q": ("qk", self.qk[:24]),
            "k": ("qk", self.qk[24:]),
            "gate": ("gate_up", self.gate_up[:, :40].t()),
            "up": ("gate_up", self.gate_up[:, 40:].t()),
        }
        loaded = set()
        with torch.no_grad():
            for name, w in weights:
                if name == "scale":
                    self.decay.copy_(-torch.exp(w))
                    loaded.add("decay")
                elif name in places:
                    at, place = places[name]
                    place.copy_(w)
                    loaded.add(at)
        return loaded
