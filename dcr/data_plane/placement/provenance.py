"""Which canonical element each element of a tensor came from, followed through a loader's temporaries.

Views of a canonical tensor share its storage, so that their offset and strides say it.  A temporary gets a *shadow*: a
mask of the same geometry, made by doing to the mask what was done to the values.  Values are never looked at.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# One output element from the input elements at the same (broadcast) place, and from nothing else.
# fmt: off
ELEMENTWISE = frozenset({
    "clone", "_to_copy", "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal",
    "sigmoid", "tanh", "relu", "silu", "gelu", "softplus", "square", "sign", "floor", "ceil", "round", "trunc",
    "clamp", "clamp_min", "clamp_max", "nan_to_num", "mul", "add", "sub", "rsub", "div", "pow", "where", "minimum",
    "maximum", "lt", "le", "gt", "ge", "eq", "ne", "isnan", "isinf", "isfinite", "logical_not", "logical_and",
    "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__",
    "__lshift__", "__rshift__",
})
# fmt: on

# Elements are only moved, repeated, or joined by constants; positions do not depend on values.
MOVES = frozenset({"cat", "stack", "flip", "roll", "repeat", "index_select", "index", "gather", "constant_pad_nd"})

_Layout = tuple[tuple[int, ...], tuple[int, ...], int]


class UntraceableError(Exception):
    """A step that cannot be followed element by element."""

    def __init__(self, origins: frozenset[str], reason: str) -> None:
        super().__init__(reason)
        self.origins = origins
        self.reason = reason


@dataclass(frozen=True)
class Source:
    """Where the elements of one tensor came from.

    Attributes:
        mask: bool, the tensor's shape: which elements come from an active canonical element.
        lineage: equal for two tensors only if equal places hold elements of the same canonical element.
        origins: the canonical tensors that the elements come from.
        steps: the operations on the way, with their scalar arguments.
        direct: the tensor is a view of the canonical tensor's own storage.
    """

    mask: torch.Tensor
    lineage: tuple[Any, ...]
    origins: frozenset[str]
    steps: tuple[str, ...]
    direct: bool

    def expand(self, shape: Sequence[int]) -> "Source":
        """The source of the tensor broadcast to a shape."""
        if tuple(self.mask.shape) == tuple(shape):
            return self
        return replace(self, mask=self.mask.expand(shape), lineage=("expand", self.lineage, tuple(shape)))


@dataclass(frozen=True)
class _Shadow:
    storage: torch.UntypedStorage  # kept alive: an address must not be used again while it is known here
    itemsize: int
    mask: torch.Tensor  # bool, one for every element of the storage
    layout: _Layout | None  # the layout that `lineage` speaks of; None: of no one layout
    lineage: tuple[Any, ...]
    origins: frozenset[str]
    steps: tuple[str, ...]
    direct: bool


def storage_id(t: torch.Tensor) -> int:
    """The identity of a tensor's storage, also without memory; of use only while the storage is kept alive."""
    return int(t.untyped_storage()._cdata)  # noqa: SLF001 - a meta storage has no address


def _layout(t: torch.Tensor) -> _Layout:
    return tuple(t.shape), t.stride(), int(t.storage_offset())


class Provenance:
    """The shadows of one or more load calls."""

    def __init__(self) -> None:
        self._shadows: dict[int, _Shadow] = {}
        self._steps: Counter[frozenset[str]] = Counter()

    def begin(self) -> None:
        """Start a load call: the steps of every tensor are numbered from 1, so that equal calls give equal lineages."""
        self._steps.clear()

    def forget(self) -> None:
        """Let go of every shadow, and of the storages that they keep alive."""
        self._shadows.clear()

    def track(self, name: str, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        """Make a tensor the canonical tensor ``name``; ``mask`` is bool, one for every element of its storage."""
        s = tensor.untyped_storage()
        self._shadows[storage_id(tensor)] = _Shadow(
            s, tensor.itemsize, mask, None, (name,), frozenset({name}), (), direct=True
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in a canonical tensor or in a temporary made from one."""
        return storage_id(tensor) in self._shadows

    def source(self, t: torch.Tensor) -> Source | None:
        """Where a tensor's elements came from; None if from no canonical tensor."""
        s = self._shadows.get(storage_id(t))
        if s is None:
            return None
        if t.itemsize != s.itemsize:
            raise UntraceableError(s.origins, f"sees it as elements of {t.itemsize} bytes instead of {s.itemsize}")
        layout = _layout(t)
        lineage = s.lineage if layout == s.layout else (s.lineage, layout)
        return Source(s.mask.as_strided(*layout), lineage, s.origins, s.steps, s.direct)

    def derive(
        self, operation: str, args: Sequence[Any], sources: dict[int, Source], scalars: tuple[Any, ...], out: Any
    ) -> None:
        """Give the result of an operation its shadow.

        Args:
            operation: name of the ATen operation.
            args: its positional arguments.
            sources: what is known of its tensor arguments, by ``id``.
            scalars: its scalar arguments.
            out: its result.

        Raises:
            UntraceableError: an output element may depend on more than one canonical element, or on values' order.
        """
        origins = frozenset[str]().union(*(s.origins for s in sources.values()))
        if isinstance(out, torch.Tensor) and self.knows(out):
            return  # a view, whatever its schema says
        if not isinstance(out, torch.Tensor) or operation not in ELEMENTWISE | MOVES:
            raise UntraceableError(origins, f"reads values with {operation}, which is not elementwise")
        if operation in ELEMENTWISE:
            self.assign(out, combine(operation, list(sources.values()), tuple(out.shape), scalars))
            return
        if len(origins) > 1:
            raise UntraceableError(origins, f"joins {_names(origins)} with {operation} before writing them")
        moved = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        if sources.keys() - {id(t) for t in moved}:
            raise UntraceableError(origins, f"uses its values as positions in {operation}")
        device = next(iter(sources.values())).mask.device
        masks = [
            sources[id(t)].mask if id(t) in sources else torch.zeros(t.shape, dtype=torch.bool, device=device)
            for t in moved
        ]
        rest = args[1:2] if operation == "constant_pad_nd" else args[1:]
        mask = getattr(torch.ops.aten, operation)(masks if isinstance(args[0], (list, tuple)) else masks[0], *rest)
        steps = _steps(operation, list(sources.values()), scalars)
        self.assign(out, Source(mask, ("moved", *self._number(origins)), origins, steps, direct=False))

    def assign(self, t: torch.Tensor, source: Source | None) -> None:
        """Record that a temporary now holds elements of ``source`` (None: constants)."""
        storage = t.untyped_storage()
        old = self._shadows.get(storage_id(t))
        if old is None and source is None:
            return
        origins = (old.origins if old else frozenset()) | (source.origins if source else frozenset())
        if len(origins) > 1:
            raise UntraceableError(origins, f"joins {_names(origins)} in one temporary before writing them")
        if old is not None and old.direct:
            raise UntraceableError(origins, "changes the tensor it was given")
        if old is not None and old.itemsize != t.itemsize:
            raise UntraceableError(origins, f"sees a temporary as elements of {t.itemsize} bytes, not {old.itemsize}")
        if old is None:
            assert source is not None
            flat = torch.zeros(storage.nbytes() // t.itemsize, dtype=torch.bool, device=source.mask.device)
        else:
            flat = old.mask
        flat.as_strided(*_layout(t)).copy_(source.mask if source else torch.zeros_like(flat[:1])[0])
        steps = (old.steps if old else ()) + (source.steps if source else ())
        whole = t.numel() * t.itemsize == storage.nbytes() and source is not None
        self._shadows[storage_id(t)] = _Shadow(
            storage,
            t.itemsize,
            flat,
            _layout(t) if whole else None,
            source.lineage if whole and source else ("written", *self._number(origins)),
            origins,
            steps,
            direct=False,
        )

    def _number(self, origins: frozenset[str]) -> tuple[str, int]:
        """Of a step with elements of one tensor; does not depend on which other tensors are loaded."""
        self._steps[origins] += 1
        return _names(origins), self._steps[origins]


def combine(operation: str, sources: list[Source], shape: tuple[int, ...], scalars: tuple[Any, ...]) -> Source:
    """The source of an elementwise result of this shape; UntraceableError if two canonical elements meet in it."""
    grown = [s.expand(shape) for s in sources]
    origins = frozenset[str]().union(*(s.origins for s in grown))
    if any(s.lineage != grown[0].lineage for s in grown):
        raise UntraceableError(origins, f"combines different elements of {_names(origins)} with {operation}")
    return Source(grown[0].mask, grown[0].lineage, origins, _steps(operation, sources, scalars), direct=False)


def _steps(operation: str, sources: list[Source], scalars: tuple[Any, ...]) -> tuple[str, ...]:
    before = tuple(step for s in sources for step in s.steps)
    return (*before, operation + "".join(f" {x!r}" for x in scalars))


def _names(origins: frozenset[str]) -> str:
    return ", ".join(sorted(origins))
