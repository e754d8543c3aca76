"""How much of each layer changed, as owners tell it to the leader and the leader to every push."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

LAYERS_MAX = 256
"""Most layers that are named one by one; whatever else there is stands in one entry more, ``LAYERS_REST``."""
LAYERS_REST = ""
"""Stands for all layers that are not named; no layer has this name, for no canonical tensor has."""


class LayerChanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One layer of the checkpoint; for people, no rule depends on it."""

    layer: str
    """The dotted beginning that its tensors' names have in common, such as ``model.layers.12``; or ``LAYERS_REST``."""
    changed: int
    """Elements whose stored bits differ from the base version's."""
    elements: int
    """Elements of the layer, changed or not."""


Layers = Annotated[tuple[LayerChanges, ...], msgspec.Meta(max_length=LAYERS_MAX + 1)]
"""Each layer at most once, ``LAYERS_REST`` among them; empty where nothing was compared: dense attempts, restores."""


def add_layers(shares: Iterable[tuple[LayerChanges, ...]]) -> tuple[LayerChanges, ...]:
    """The layers of all owners together.

    Owners of one checkpoint name the same layers.  Should they not, what is beyond the bound goes to the rest.

    Args:
        shares: what each owner counted in its own elements.

    Returns:
        Layers in the order in which they come first, at most LAYERS_MAX, and then the rest if there is one.
    """
    totals: dict[str, tuple[int, int]] = {}
    rest: tuple[int, int] | None = None
    for one in (one for share in shares for one in share):
        named = one.layer != LAYERS_REST and (one.layer in totals or len(totals) < LAYERS_MAX)
        changed, elements = totals.get(one.layer, (0, 0)) if named else rest or (0, 0)
        total = (changed + one.changed, elements + one.elements)
        if named:
            totals[one.layer] = total
        else:
            rest = total
    if rest is not None:
        totals[LAYERS_REST] = rest
    return tuple(LayerChanges(layer, *total) for layer, total in totals.items())
