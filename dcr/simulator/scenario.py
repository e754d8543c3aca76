"""A schedule that somebody wrote: what an adversary does, in what deployment, and where things have to be for it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from dcr.simulator.deployment import Deployment
from dcr.simulator.liveness import start_up
from dcr.simulator.schedule import MOVES_MAX, Move, Schedule, Setup
from dcr.simulator.script import EnoughError, ScenarioError, Script


@dataclass(frozen=True, slots=True)
class Scenario:
    """A schedule by name."""

    sentence: str
    setup: Setup
    script: Callable[[Script], None]
    shows: tuple[str, ...]
    """Actions that are taken by it, or it shows nothing."""

    def schedule(self) -> Schedule:
        """What happens, as data."""
        world, moves = Deployment(self.setup), list[Move]()
        start_up(world)
        self.script(Script(world, moves, MOVES_MAX))
        return Schedule(self.setup, tuple(moves))

    def begin(self, world: Deployment, moves: list[Move], moves_max: int) -> None:
        """Its first moves, for a schedule that goes on in its own way.

        Args:
            world: of its setup, where version 0 is served.
            moves: what happens is written down here.
            moves_max: so many moves at most.
        """
        with contextlib.suppress(EnoughError, ScenarioError):
            self.script(Script(world, moves, moves_max))


# ---------------------------------------------------------------- where things are


def writes(reason: str) -> Callable[[Deployment], bool]:
    """A compare-and-set with this reason is on its way."""
    return lambda w: any(x.awaited and x.order.reason == reason for x in w.store.writes)


def took(action: str) -> Callable[[Deployment], bool]:
    """The last step that was taken is this one, or it was taken lately."""
    return lambda w: any(step.action == action for step in w.trail)


def stage(engine: str, stage: str) -> Callable[[Deployment], bool]:
    """The first rank of this engine is so far."""

    def reached(w: Deployment) -> bool:
        e = w.engine(engine)
        return e is not None and e.ranks[0].receiver.stage == stage

    return reached


def writing(engine: str, entries: int = 1) -> Callable[[Deployment], bool]:
    """The first rank of this engine is in the middle of a payload."""

    def reached(w: Deployment) -> bool:
        e = w.engine(engine)
        write = None if e is None else e.ranks[0].write
        return write is not None and write[1] == entries

    return reached


def forget(s: Script) -> None:
    """What was taken so far does not count for ``took``."""
    s.world.trail.clear()
