"""A run's steps, taken by TLC: if they are many in parts, each of which begins in the state in which the last ended.

TLC parses a part as one module and keeps what it parsed; all of a night's log would not fit into any heap.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcr.modelcheck import tlc
from dcr.modelcheck.checker import CheckerError
from dcr.modelcheck.eventlog.deployment import Deployment
from dcr.modelcheck.eventlog.module import CONFIG, write_model
from dcr.modelcheck.eventlog.steps import SpecStep

MODULE = "RefitLog.tla"
PART_STEPS = 4_000
"""Steps of a part, at least: a heap of 1 GB is enough for many more."""
_STEPS_A_CELL = 20
"""And so many for each cell: a state says what every one holds, so it costs the more to write one down."""
_LEFT = re.compile(r'<<\s*"left",')


@dataclass(frozen=True)
class Taken:
    """How far TLC came.

    Attributes:
        count: steps that were taken.
        part: the steps of the part in which it ended, whose model is still there.
        first: the number of the first of them.
    """

    count: int
    part: Sequence[SpecStep]
    first: int


def take(
    work: Path,
    d: Deployment,
    steps: Sequence[SpecStep],
    *,
    heap: str,
    timeout_s: float,
    part_steps: int,
    tell: Callable[[int, int], None] | None,
) -> Taken:
    """Have TLC take the steps one after the other, until one is none of the specification.

    Args:
        work: a private copy of the specification's folder.
        d: who took part.
        steps: what they did.
        heap: Java heap.
        timeout_s: seconds for each part.
        part_steps: steps of a part, at least.
        tell: is told after each part of several how many steps were taken, and of how many.

    Raises:
        CheckerMissingError: no Java, or no TLC.
        CheckerError: TLC came to no verdict; says after how many steps.
    """
    length = max(part_steps, _STEPS_A_CELL * len(d.owner_of))
    first, before = 0, ""
    while True:
        part = steps[first : first + length]
        continued = first + len(part) < len(steps)
        write_model(work, d, part, before=before, continued=continued)
        try:
            count, printed = _run(work, heap, timeout_s)
        except CheckerError as e:
            if not first:
                raise
            # Those that were taken are a behaviour; of the others nothing is known.
            raise type(e)(f"TLC took {first:,} of {len(steps):,} steps, and then: {e}") from e
        if count < len(part) or not continued:
            return Taken(first + count, part, first)
        before = _left(printed)
        first += len(part)
        if tell is not None:
            tell(first, len(steps))


def _run(work: Path, heap: str, timeout_s: float) -> tuple[int, str]:
    """How many steps of a part TLC took, and what it printed."""
    result = tlc.run(work / MODULE, work / CONFIG, heap=heap, timeout_s=timeout_s, brief=True)
    if result.outcome is not tlc.Outcome.OK or result.distinct_states is None:
        raise CheckerError(f"TLC could not take the lines of the log: {result.verdict}: {result.message[-2000:]}")
    return result.distinct_states - 1, result.printed  # a state for each step, and the initial one


def _left(printed: str) -> str:
    """The state in which a part ended, in TLA+."""
    said = _LEFT.split(printed)
    if len(said) == 1:
        raise CheckerError(f"TLC did not say in which state it ended: {printed[-500:]}")
    return said[1].rpartition(">>")[0]
