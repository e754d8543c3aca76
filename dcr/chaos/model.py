"""The small models of scenarios that bring none of their own, and how a user's are found."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dcr.protocol.errors import RefusedError
from dcr.rollout.checkpoint import read_checkpoint

_BF16 = torch.bfloat16
_SPECIALS = (0x7FC1, 0x7F81, -0x8000, 0x7F80, -0x80, 0x0001)
"""BF16 bits: quiet and signalling NaN with payloads, -0.0, infinities, a denormal."""


RAISED = (Exception, SystemExit)
"""What code of a user's may raise: a module that ends the process would end the harness, as if all were well."""
VLLM = "vllm"
"""As an engine's model: an engine of vLLM, on the trainer's checkpoint."""
CHECKPOINT = "checkpoint:"
"""As a trainer's model, before the folder of a Hugging Face checkpoint: its tensors, under their own names."""
POLICY = "dcr.chaos.model:policy"
"""The trainer's model where a scenario gives none."""
SERVED = "dcr.chaos.model:served"
"""The engine's, likewise: it serves what ``POLICY`` trains."""
_LISTED_MAX = 12
"""Factories that an error lists; a module may have hundreds."""


def make(factory: str) -> nn.Module:
    """A module from ``package.module:factory``, or of a checkpoint's tensors from ``checkpoint:/folder``.

    Raises:
        RefusedError: there is no such factory, or it makes no module, or no such checkpoint; names it.
    """
    if factory.startswith(CHECKPOINT):
        return Tensors(Path(factory.removeprefix(CHECKPOINT)))
    make_it = _found(factory)
    try:
        made = make_it()
    except RAISED as e:
        raise RefusedError(f"model {factory!r}: called without arguments it raises {_told(e)}") from e
    if not isinstance(made, nn.Module):
        raise RefusedError(f"model {factory!r} makes a {type(made).__name__}, not a torch module")
    return made


def _found(factory: str) -> Any:
    """What ``package.module:factory`` names."""
    of, _, name = factory.partition(":")
    try:
        module = import_module(of)
    except RAISED as e:  # importing runs the user's module
        unknown = isinstance(e, ModuleNotFoundError) and f"{of}.".startswith(f"{e.name}.")
        todo = "put the folder of its module on PYTHONPATH" if unknown else f"that is what importing {of} raises"
        raise RefusedError(f"model {factory!r}: {_told(e)}; {todo}") from e
    try:
        return getattr(module, name)
    except RAISED as e:  # a module may have a __getattr__
        place = getattr(module, "__file__", None) or "its folder"
        raise RefusedError(f"model {factory!r}: {_told(e)}; in {place} there is {_others(module, name)}") from e


def _others(module: ModuleType, name: str) -> str:
    """For an error: what the module defines, itself or in modules below it, that may be a factory."""
    own = f"{module.__name__}."
    known = [
        n
        for n, value in vars(module).items()
        if callable(value) and not n.startswith("_") and f"{getattr(value, '__module__', '')}.".startswith(own)
    ]
    if not known:
        return "no class or function that could be meant"
    near = get_close_matches(name, known, 1)
    meant = f"; did you mean {module.__name__}:{near[0]}?" if near else ""
    more = ", ..." if len(known) > _LISTED_MAX else ""
    return f"{', '.join(known[:_LISTED_MAX])}{more}{meant}"


def check(trainer: str, engine: str) -> None:
    """See that the engine's model can load the trainer's checkpoint, before any process is started.

    Raises:
        RefusedError: a model cannot be made, or the engine's native loader does not take the trainer's state dict.
    """
    if engine == VLLM:
        _check_vllm(Path(trainer.removeprefix(CHECKPOINT)))
        return
    weights = {name: t.detach().clone() for name, t in make(trainer).state_dict().items()}
    loader: Any = make(engine)
    if engine == SERVED and (skipped := weights.keys() - make(POLICY).state_dict().keys()):
        # Its loader would skip them, and as no engine holds them, no push would ever commit.
        raise RefusedError(
            f"model {engine!r}: it has no place for {min(skipped)!r} of {trainer!r}{_of_harness(trainer, engine)}"
        )
    if not callable(getattr(loader, "load_weights", None)):
        raise RefusedError(f"model {engine!r}: it has no load_weights(weights), the native loader of an engine's model")
    try:
        loader.load_weights(iter(weights.items()))
    except RAISED as e:
        raise RefusedError(
            f"model {engine!r}: its load_weights, given the tensors of {trainer!r}, raises {_told(e)}"
            f"{_of_harness(trainer, engine)}"
        ) from e


def _of_harness(trainer: str, engine: str) -> str:
    """For an error: if the harness's own model met one of the user's, that this is what comes of a key left out."""
    if (trainer == POLICY) == (engine == SERVED):
        return ""
    own, other, left = ("trainer", "engine", engine) if engine == SERVED else ("engine", "trainer", trainer)
    return (
        f"; {left!r} is the harness's own model, taken where `{other}` is left out: with a `{own}` of your own give "
        f"`{other}` too"
    )


def _check_vllm(checkpoint: Path) -> None:
    if not (checkpoint / "config.json").is_file():
        raise RefusedError(f"model.engine vllm: {checkpoint} has no config.json: name a Hugging Face checkpoint")
    if find_spec("vllm") is None:
        raise RefusedError("model.engine vllm: vLLM is not installed here: pip install vllm")


class Tensors(nn.Module):
    """A checkpoint's tensors under their own names: a module whose state dict is the checkpoint.

    Args:
        folder: of the checkpoint, in Hugging Face's layout.

    Raises:
        RefusedError: it is none.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        for name, tensor in read_checkpoint(folder):
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(tensor, requires_grad=False))

    def train_step(self, seed: int, rate: float) -> None:
        """About this share of the elements gets another value, and each is one that text can be made with."""
        change(self, seed, rate)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def train_step(model: nn.Module, seed: int, rate: float) -> None:
    """A step that is the same for the same seed: the model's own ``train_step(seed, rate)``, or a change of its state.

    About this share of the elements of every floating tensor gets another value, and a few of the first BF16 tensor
    get NaNs, infinities, -0.0 and a denormal.

    Raises:
        RefusedError: the model's own step raises.
    """
    own = getattr(model, "train_step", None)
    if own is not None:
        try:
            own(seed, rate)
        except RAISED as e:
            raise RefusedError(f"model {type(model).__name__}: its train_step({seed}, {rate}) raises {_told(e)}") from e
        return
    change(model, seed, rate, special=True)


def change(model: nn.Module, seed: int, rate: float, *, special: bool = False) -> None:
    """Give about this share of the elements of every floating tensor another value; the same for the same seed.

    Args:
        model: whose.
        seed: of which, and of the values.
        rate: the share.
        special: have NaNs, infinities, -0.0 and a denormal among the first BF16 tensor's.
    """
    g = torch.Generator().manual_seed(seed)
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
