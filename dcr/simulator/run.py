"""One run: a seed's schedule or a given one, every invariant after every move, and convergence at the end."""

import random
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcr.protocol.errors import RefusedError
from dcr.simulator.deployment import Deployment
from dcr.simulator.generator import Generator, draw_setup
from dcr.simulator.invariants import BrokenError
from dcr.simulator.liveness import converge, start_up
from dcr.simulator.moves import apply, describe
from dcr.simulator.scenarios import SCENARIOS
from dcr.simulator.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

_FROM_A_SCENARIO = 0.15
"""So many seeds begin with the first moves of a scenario."""
_FIRST_MOVES_MAX = 150
_NAMES = sorted(SCENARIOS)

STEPS = 60
"""Moves of a short schedule, before faults stop."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An invariant that broke, and the schedule that broke it."""

    invariant: str
    what: str
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one schedule."""

    steps: int
    """Everything that happened, the convergence included."""
    actions: frozenset[str]
    """That were taken, by the specification's names, and special cases of them."""
    failure: Failure | None
    outcome: str
    """How it ended: K's version, epoch, and what every engine serves; the same for the same schedule."""


def run_seed(seed: int, steps: int = STEPS) -> Run:
    """Make a schedule from a seed, move by move, and run it.

    Args:
        seed: decides everything.
        steps: moves before faults stop.
    """
    r = random.Random(seed)  # noqa: S311 -- choices, no secrets
    scenario = SCENARIOS[r.choice(_NAMES)] if r.random() < _FROM_A_SCENARIO else None
    setup = draw_setup(r) if scenario is None else scenario.setup
    world = Deployment(setup)
    generator = Generator(world, r)

    def schedule() -> None:
        start_up(world)
        if scenario is not None:
            scenario.begin(world, generator.moves, r.randrange(_FIRST_MOVES_MAX))
        for _ in range(steps):
            generator.step()
        converge(world)

    broken = attempt(schedule)
    if broken is None:
        return _ended(world, None)
    moves = Schedule(setup, tuple(generator.moves), seed, broken.invariant)
    return _ended(world, Failure(broken.invariant, broken.what, moves))


class Observer:
    """Whoever wants to tell what happens."""

    def begins(self, world: Deployment, what: str) -> None:
        """Something is done."""

    def nothing(self) -> None:
        """It was not possible."""

    def ends(self, world: Deployment) -> None:
        """Nothing more is done."""


def run_schedule(schedule: Schedule, observer: Observer | None = None) -> Run:
    """Run a schedule that is given.

    Args:
        schedule: what happens.
        observer: told of everything that is done.
    """
    world = Deployment(schedule.setup)
    if observer is not None:
        world.notes = []

    def begins(what: str) -> None:
        if observer is not None:
            observer.begins(world, what)

    def go() -> None:
        start_up(world, begins)
        for move in schedule.moves:
            if observer is None:
                apply(world, move)
                continue
            observer.begins(world, describe(move))
            if not apply(world, move):
                observer.nothing()
        converge(world, begins)

    broken = attempt(go)
    if observer is not None:
        observer.ends(world)
    failure = None if broken is None else Failure(broken.invariant, broken.what, schedule)
    return _ended(world, failure)


def attempt(what: "Callable[[], None]") -> BrokenError | None:
    """Run something; the invariant that broke, where an error of a role is one too."""
    try:
        what()
    except BrokenError as e:
        return e
    except (AssertionError, RefusedError, LookupError, TypeError, ValueError, AttributeError) as e:
        # A role that raises what its shell does not expect ends its process: an assertion, a guard, a plain error.
        where = traceback.extract_tb(e.__traceback__)[-1]
        file = where.filename.rpartition("/")[2]
        return BrokenError(f"{type(e).__name__} in {file}:{where.name}", f"{e or where.line}")
    return None


def _ended(world: Deployment, failure: Failure | None) -> Run:
    k = world.store.record
    at = "no record" if k is None else f"version {k.version}, epoch {k.epoch}, digest {k.baseline_id}"
    serving = ", ".join(f"{e.name}.{e.incarnation} {e.serving}" for e in world.engines)
    return Run(world.steps, frozenset(world.actions), failure, f"{at}; {serving}")
