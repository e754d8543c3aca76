"""Many seeds, one after the other: what broke, made small, and what was covered."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dcr.simulator.coverage import Coverage
from dcr.simulator.run import Failure, run_seed
from dcr.simulator.shrink import Shrinker

FAILURES_MAX = 20
"""After so many seeds that failed no more are run."""
_TELL_S = 10.0


@dataclass
class Campaign:
    """What came of many seeds."""

    coverage: Coverage = field(default_factory=Coverage)
    steps: int = 0
    seconds: float = 0.0
    failed: list[int] = field(default_factory=list)
    """Seeds that failed."""
    failures: dict[str, tuple[int, Failure]] = field(default_factory=dict)
    """The first failure of each invariant, shrunk, with its seed."""


def run_seeds(
    seeds: Iterable[int], steps: int, *, shrink_s: float, tell: Callable[[Campaign], None] | None = None
) -> Campaign:
    """Run seeds; of each invariant that breaks the first failure is made small.

    Args:
        seeds: which.
        steps: moves of each before faults stop.
        shrink_s: how long one failure may be made smaller, seconds.
        tell: told how far it is, every ten seconds or so.
    """
    done, started = Campaign(), time.monotonic()
    next_tell = started + _TELL_S
    for seed in seeds:
        run = run_seed(seed, steps)
        done.steps += run.steps
        done.coverage.add(run.actions)
        if run.failure is not None:
            done.failed.append(seed)
            if run.failure.invariant not in done.failures:
                done.failures[run.failure.invariant] = (seed, Shrinker(run.failure, shrink_s).shrink())
            if len(done.failed) >= FAILURES_MAX:
                break
        done.seconds = time.monotonic() - started
        if tell is not None and time.monotonic() >= next_tell:
            next_tell += _TELL_S
            tell(done)
    return done
