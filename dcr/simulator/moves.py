"""Everything that can happen, by name."""

from typing import TYPE_CHECKING

from dcr.simulator.faults import FAULTS
from dcr.simulator.progress import PROGRESS

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment
    from dcr.simulator.schedule import Move

ACTS = {name: act for name, (act, _) in (PROGRESS | FAULTS).items()}


def apply(world: "Deployment", move: "Move") -> bool:
    """Let a move happen; False if it cannot."""
    name, who, n = move
    world.steps += 1
    return ACTS[name](world, who, n)


def describe(move: "Move") -> str:
    """What a move is, for people."""
    name, who, n = move
    return (PROGRESS | FAULTS)[name][1].format(who=who, n=n)
