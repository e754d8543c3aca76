"""Whether the event logs of a run are a behaviour of the specification; TLC decides."""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dcr.modelcheck.eventlog.deployment import Deployment
from dcr.modelcheck.eventlog.order import in_order
from dcr.modelcheck.eventlog.parts import PART_STEPS, take
from dcr.modelcheck.eventlog.read import Line, RejectedError, read_logs
from dcr.modelcheck.eventlog.run import Run
from dcr.modelcheck.eventlog.steps import SpecStep, steps_of
from dcr.modelcheck.eventlog.why import why_not
from dcr.protocol.errors import RefusedError

STORY_LINES = 12


class Validation(msgspec.Struct, frozen=True):
    """What was found."""

    ok: bool
    record_id: str
    lines: int
    steps: int
    """Of the specification; of those that were taken, if not all were."""
    transitions: int
    """Commits in the logs."""
    seconds: float
    notes: tuple[str, ...]
    """What was not checked, or seen in the files."""
    rejected: str = ""
    """File, line and event of the first line that is no step; empty if all are."""
    why: tuple[str, ...] = ()
    story: tuple[str, ...] = ()
    """What happened before it, last things last."""


def validate(
    folder: Path,
    spec: Path,
    *,
    heap: str = "3g",
    timeout_s: float = 600,
    part_steps: int = PART_STEPS,
    tell: Callable[[int, int], None] | None = None,
) -> Validation:
    """Validate the logs of one run.

    Args:
        folder: where the run's processes wrote their events.
        spec: folder of the specification.
        heap: Java heap.
        timeout_s: seconds for each run of TLC: one for each part of a long log, and one more if a line is rejected.
        part_steps: steps of a part, at least.
        tell: is told after each part of several how many steps were taken, and of how many.

    Raises:
        RefusedError: nothing there can be validated.
        CheckerMissingError: no Java, or no TLC.
        CheckerError: TLC came to no verdict.
    """
    start = time.monotonic()
    modules = _modules(spec)
    try:
        logs = read_logs(folder)
        run = Run.of(logs)
    except RejectedError as e:
        return Validation(False, "", 0, 0, 0, time.monotonic() - start, (), _named(e.line), (e.why,))
    deployment = Deployment(run)
    lines = in_order(run)
    steps, wrong = _steps(deployment, lines)
    with tempfile.TemporaryDirectory(prefix="dcr-log-") as private:
        work = Path(private)
        for module in modules:
            shutil.copy(module, work)
        taken = take(work, deployment, steps, heap=heap, timeout_s=timeout_s, part_steps=part_steps, tell=tell)
        why: tuple[str, ...] = ()
        rejected = ""
        at = taken.count
        if at < len(steps):
            rejected = _named(steps[at].line)
            why = why_not(work, deployment, taken.part, at - taken.first, heap=heap, timeout_s=timeout_s)
        elif wrong is not None:
            rejected, why = _named(wrong.line), (wrong.why,)
    return Validation(
        ok=not rejected,
        record_id=logs.record_id,
        lines=logs.lines,
        steps=at,
        transitions=sum(w.line.event.action == "Commit" for w in run.history.writes),
        seconds=time.monotonic() - start,
        notes=tuple(run.notes),
        rejected=rejected,
        why=why,
        story=_story(steps[:at]) if rejected else (),
    )


def _steps(deployment: Deployment, lines: list[Line]) -> tuple[list[SpecStep], RejectedError | None]:
    steps: list[SpecStep] = []
    try:
        steps += []
        for step in steps_of(deployment, lines):
            steps.append(step)
    except RejectedError as e:
        return steps, e
    return steps, None


def _named(line: Line) -> str:
    step = line.event.step
    epoch = "" if step is None else f" of epoch {step.epoch}"
    detail = f" ({step.detail})" if step is not None and step.detail else ""
    return f"{line.place}: {line.event.action}{epoch} by {line.who}{detail}"


def _story(steps: list[SpecStep]) -> tuple[str, ...]:
    told: dict[int, str] = {}
    for step in reversed(steps):
        if not step.hidden:
            told.setdefault(id(step.line), _named(step.line))
        if len(told) == STORY_LINES:
            break
    return tuple(reversed(told.values()))


def _modules(spec: Path) -> list[Path]:
    """The modules of the specification; RefusedError if it is not there."""
    found = sorted(spec.glob("*.tla"))
    if spec / "RefitLog.tla" not in found:
        raise RefusedError(
            f"{spec}: no specification is there (RefitLog.tla); give the folder spec/tla of dcr as --spec"
        )
    return found
