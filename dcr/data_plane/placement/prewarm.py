"""What learning a native loader gives: the class of every canonical tensor, its writes, the calls that make them."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dcr.data_plane.kernels.box_table import PlacedBox
from dcr.data_plane.placement.write_watch import Write
from dcr.data_plane.region import Region
from dcr.protocol.errors import RefusedError

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str] | None]
"""A native loader: takes (canonical name, tensor) pairs, returns the names of the runtime tensors it loaded."""


class LoaderClass(enum.StrEnum):
    """What a loader does with a canonical tensor, and so how it is refitted (paper section 5)."""

    BOX = "box"
    """Copies views of it as they are, or widened, and nothing else touches the bytes: ``set``, ``xor`` and ``add``,
    at the cost of the changed elements."""
    TRANSFORMING = "transforming"
    """Every written element is computed from one canonical element: ``set`` only, through the loader."""
    SKIPPED = "skipped"
    """This rank holds nothing of it."""
    REFUSED = "refused"
    """Cannot be refitted exactly."""


@dataclass(frozen=True)
class Learned:
    """The writes that one canonical tensor causes.

    Attributes:
        writes: in the order of the loader.
        skip: positions of fills that later copies of the same tensor cover in part; a refit leaves them out.
        boxes: what repeats the copies without the loader; empty for a transforming tensor.
    """

    writes: tuple[Write, ...] = ()
    skip: frozenset[int] = frozenset()
    boxes: tuple[PlacedBox, ...] = ()


@dataclass(frozen=True)
class LoadCall:
    """One load call over some canonical tensors, as it must be whenever it is made.

    Attributes:
        names: the tensors, in the order in which the loader is given them.
        steps: every write in order, with the tensor that it is learned as.
        reported: what the loader returned, as a set; None if it returned None.
        streams: every write was made from the tensor that the loader had been given last, so that it needs no other.
    """

    names: tuple[str, ...]
    steps: tuple[tuple[str, Write], ...]
    reported: frozenset[str] | None
    streams: bool


@dataclass(frozen=True)
class Prewarm:
    """What prewarm learned.

    Attributes:
        classes: class of every canonical tensor.
        reasons: why, for every refused tensor.
        learned: the writes of every box or transforming tensor.
        consulted: resident memory that the loader reads and no load writes, such as expert maps.
        calls: load calls that together make every write in ``learned``: one, unless the loader takes tensors only
            one by one.
        transforming: load calls that together make every write of a transforming tensor, and few others.
    """

    classes: dict[str, LoaderClass]
    reasons: dict[str, str]
    learned: dict[str, Learned]
    consulted: frozenset[Region]
    calls: tuple[LoadCall, ...]
    transforming: tuple[LoadCall, ...]

    def raise_if_refused(self) -> None:
        """RefusedError that names refused tensors and says why."""
        if self.reasons:
            shown = "; ".join(f"{n}: {why}" for n, why in list(self.reasons.items())[:8])
            raise RefusedError(f"{len(self.reasons)} canonical tensors cannot be refitted in place: {shown}")
