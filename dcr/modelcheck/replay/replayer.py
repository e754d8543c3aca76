"""Replays a trace of the specification on the roles, state by state."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from dcr.modelcheck.replay.abstraction import Abstraction, specified
from dcr.modelcheck.replay.player import Event, Player
from dcr.modelcheck.replay.trials import ForbiddenError, Trials
from dcr.modelcheck.replay.world import World
from dcr.modelcheck.story import changes
from dcr.modelcheck.trace import Trace
from dcr.modelcheck.values import State
from dcr.protocol.errors import DcrError, RefusedError


class DivergenceError(DcrError):
    """The code did not do what the specification did.

    Args:
        reason: what, at which step, and how the two differ.
        step: index of the state at which it shows, in the trace or on the way.
        way: the states that led there, where what is replayed is no trace.
    """

    def __init__(self, reason: str, step: int = 0, way: Trace | None = None) -> None:
        super().__init__(reason)
        self.step = step
        self.way = way


@dataclass
class Replayed:
    """What replays came to."""

    traces: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    """Steps that were taken, by name."""
    refused: Counter[str] = field(default_factory=Counter)
    """Forbidden events that were refused with an error, by name."""
    without_effect: Counter[str] = field(default_factory=Counter)
    """Forbidden events that changed nothing, by name."""
    refusals: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Where the errors were raised: (file name, line)."""

    def __iadd__(self, other: "Replayed") -> Self:
        self.traces += other.traces
        self.steps += other.steps
        self.refused += other.refused
        self.without_effect += other.without_effect
        self.refusals += other.refusals
        return self


def replay(trace: Trace, *, forbidden: bool = True) -> Replayed:
    """Replay one trace of ``RefitTraces.tla``: each step must be possible, and lead to the specification's state.

    Args:
        trace: the trace.
        forbidden: before each step also try whatever the specification forbids there.

    Raises:
        DivergenceError: a role refused a step, came to another state, or did what is forbidden.
        RefusedError: it is a trace of another module, or has a step of no known name.
    """
    missing = {"step", "could", "setting"} - set(trace.steps[0].state)
    if missing:
        raise RefusedError(f"no trace of RefitTraces.tla: it has no variable {', '.join(sorted(missing))}")
    world = World(trace.steps[0].state)
    player, view = Player(world), Abstraction(world)
    trials, done = Trials(player, view), Replayed(traces=1)
    compare(view, trace.steps[0].state, "state 1, Init")
    for i, (before, step) in enumerate(itertools.pairwise(trace.steps), start=1):
        event = Event.of(step.state["step"])
        try:
            if forbidden:
                trials.run(before.state, step.state["could"])
            player.play(event, step.state)
        except ForbiddenError as e:
            raise DivergenceError(f"at state {i}: {e}", i - 1) from e
        except RefusedError as e:
            raise DivergenceError(f"state {i + 1}, {event}: the code refused it: {e}", i) from e
        compare(view, step.state, f"state {i + 1}, {event}", i)
        done.steps[event.name] += 1
    done.refused, done.without_effect, done.refusals = trials.refused, trials.without_effect, trials.refusals
    return done


def compare(view: Abstraction, state: State, where: str, step: int = 0) -> None:
    """Compare the world that is seen with the specification's state.

    Raises:
        DivergenceError: they differ.
    """
    spec, code = specified(state), view.state()
    if spec == code:
        return
    found = [line for name in sorted(spec) for line in changes(name, spec[name], code[name])]
    old = "" if step else " (was it taken from this version of the specification?  `dcr spec traces` takes it anew)"
    raise DivergenceError("\n    ".join([f"{where}: specification -> code{old}", *found]), step)
