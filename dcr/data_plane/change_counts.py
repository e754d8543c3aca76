"""Counts of what detection found: which canonical tensors and layers changed, and at what rate."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcr.data_plane.item import TensorSpec


@dataclass(frozen=True)
class ChangeCount:
    """Of a canonical tensor, of a layer, or of a share of either.

    Attributes:
        changed: elements whose stored bits differ from the committed ones.
        elements: elements there are, changed or not.
    """

    changed: int
    elements: int

    @property
    def rate(self) -> float:
        """The share that changed, 0 to 1; 0 of nothing."""
        return self.changed / self.elements if self.elements else 0.0

    def __add__(self, other: "ChangeCount") -> "ChangeCount":
        return ChangeCount(self.changed + other.changed, self.elements + other.elements)


def layer_of(specs: Sequence[TensorSpec], layers_max: int, rest: str) -> dict[str, str]:
    """The layer of every canonical tensor; the same on every rank, since it depends on the checkpoint alone.

    A layer is the longest dotted beginning of the name that ends in a number, such as ``model.layers.12``; a tensor
    without one is a layer of its own.  Where these are too many, as with one for every expert of a large model, all
    names stop at an earlier number, the same one counted from the left; where the first numbers are still too many
    layers, the first ``layers_max`` of them in reading order are kept, and the others are the rest.

    Args:
        specs: all canonical tensors of the checkpoint.
        layers_max: most layers with a name of their own.
        rest: the name of all the others together.

    Returns:
        Layer by canonical name.
    """
    beginnings = {spec.name: _beginnings(spec.name) for spec in specs}
    for depth in range(max(map(len, beginnings.values()), default=1), 0, -1):
        layers = {name: found[min(depth, len(found)) - 1] for name, found in beginnings.items()}
        if len(set(layers.values())) <= layers_max:
            return layers
    named = set(sorted(set(layers.values()), key=reading_order)[:layers_max])
    return {name: layer if layer in named else rest for name, layer in layers.items()}


def reading_order(name: str) -> list[tuple[int, int, str]]:
    """A sorting key under which ``layers.2`` comes before ``layers.10``."""
    parts = re.split(r"([0-9]+)", name)
    return [(1, int(part), part) if position % 2 else (0, 0, part) for position, part in enumerate(parts)]


def by_layer(counts: Mapping[str, ChangeCount], layers: Mapping[str, str]) -> dict[str, ChangeCount]:
    """The counts of tensors, added up by layer."""
    found: dict[str, ChangeCount] = {}
    for name, count in counts.items():
        layer = layers[name]
        found[layer] = found.get(layer, ChangeCount(0, 0)) + count
    return found


def in_words(counts: Mapping[str, ChangeCount], layers: Mapping[str, ChangeCount], most: int = 3) -> str:
    """One line for a log.

    Args:
        counts: by canonical tensor.
        layers: the same by layer.
        most: how many layers to name, those with the highest rates.
    """
    total = sum(counts.values(), ChangeCount(0, 0))
    touched = sum(count.changed > 0 for count in counts.values())
    text = f"{total.changed} of {total.elements} elements changed ({_percent(total)})"
    text += f" in {touched} of {len(counts)} tensors"
    highest = sorted((n for n, c in layers.items() if c.changed), key=lambda n: -layers[n].rate)[:most]
    if highest:
        text += ", most in " + ", ".join(f"{name or 'further layers'} ({_percent(layers[name])})" for name in highest)
    return text


def _beginnings(name: str) -> list[str]:
    """The dotted beginnings of a name that end in a number, shortest first; the name itself if there is none."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if re.fullmatch("[0-9]+", part)] or [name]


def _percent(count: ChangeCount) -> str:
    return f"{100 * count.rate:.3g} %"
