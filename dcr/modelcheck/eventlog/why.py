"""Why the specification has no step for a line: TLC is asked again, at that line, what of it holds."""

import re
from collections.abc import Sequence
from pathlib import Path

from dcr.modelcheck import tlc
from dcr.modelcheck.checker import CheckerError
from dcr.modelcheck.eventlog.deployment import Deployment
from dcr.modelcheck.eventlog.guards import Guards
from dcr.modelcheck.eventlog.module import config
from dcr.modelcheck.eventlog.steps import SpecStep
from dcr.modelcheck.story import changes
from dcr.modelcheck.values import parse_value

_MODULE = "RefitLogWhy"
_PROPERTIES = (
    *("ServingExact", "CommitStored", "CommitHeld", "BaselineExact", "RelativeOnce", "FencedWrites", "OneCommit"),
    "RecordStep",
)
_PRIMED = "'"
_COMPARED = "AsWritten(x) == K' = x.record"
_TOLD = "AsWritten(x) == PrintT(<< \"made\", K', x.record >>) /\\ K' = x.record"


def why_not(
    folder: Path, d: Deployment, steps: Sequence[SpecStep], at: int, *, heap: str, timeout_s: float
) -> tuple[str, ...]:
    """What keeps a step from being taken, line by line, for people.

    Args:
        folder: the model as ``write_model`` left it.
        d: who took part.
        steps: all of the run.
        at: the index of the one that was not taken.
        heap: Java heap.
        timeout_s: seconds at most.
    """
    step = steps[at]
    guards = Guards(folder / "RefitLog.tla")
    found = guards.of(f"Log{step.name}")
    asked = ", ".join(f"Ask{n}(Lines[line])" for n in range(1, len(found) + 1))
    asks = [f"Ask{n}(x) ==\n{' ' * 2}{g.fragment}" for n, g in enumerate(found, 1)]
    after = ", ".join(f"{p}{'' if p == 'RecordStep' else _PRIMED}" for p in _PROPERTIES)
    lines = (
        f"---- MODULE {_MODULE} ----",
        "EXTENDS RefitLog",
        *guards.operators,
        *asks,
        "WhyNext ==",
        f"  IF line = {at + 1}",
        f'  THEN \\/ PrintT(<< "guards", {asked or "TRUE"} >>) /\\ FALSE',
        f'       \\/ Log{step.name}(Lines[line]) /\\ PrintT(<< "properties", {after} >>) /\\ FALSE',
        "  ELSE LogNext",
        "WhySpec == LogInit /\\ [][WhyNext]_<< vars, line >>",
        "====",
        "",
    )
    (folder / f"{_MODULE}.tla").write_text("\n".join(lines))
    written = folder / "RefitLog.tla"  # the private copy: it says what K it makes, before that is compared
    written.write_text(written.read_text().replace(_COMPARED, _TOLD))
    path = folder / f"{_MODULE}.cfg"
    path.write_text(config(d, "WhySpec"))
    try:
        result = tlc.run(folder / f"{_MODULE}.tla", path, heap=heap, timeout_s=timeout_s)
    except CheckerError as e:
        return (f"TLC could not say which guard it is: {e}",)
    what = "" if not step.hidden else f", which the line takes for granted: {_values(step)}"
    header = f"the specification has no step {step.name} here{what}"
    broken = [p for p, holds in zip(_PROPERTIES, _said(result.printed, "properties"), strict=False) if not holds]
    if broken:
        return (f"after {step.name} these properties would not hold: {', '.join(broken)}",)
    for guard, holds in zip(found, _said(result.printed, "guards"), strict=False):
        if not holds:
            return (header, f"does not hold in {guard.where}: {guard.text}")
    differs = _differs(result.printed)
    return (header, "every guard holds, but the step makes something else than the line says", *differs)


def _differs(printed: str) -> list[str]:
    """What K would be, where the line says something else."""
    told = re.findall(r'^<< *"made",\s*(\[.*?\]) *>>$', printed, re.MULTILINE | re.DOTALL)
    if not told:
        return []
    pair = parse_value(f"<<{told[-1]}>>")
    assert isinstance(pair, tuple)
    made, said = pair
    return [f"{change}   (the step's -> the line's)" for change in changes("K", made, said)]


def _values(step: SpecStep) -> str:
    return ", ".join(f"{k} = {v}" for k, v in step.values.items() if not isinstance(v, dict))


def _said(printed: str, what: str) -> list[bool]:
    found = re.search(rf'<<\s*"{what}"((?:\s*,\s*(?:TRUE|FALSE))*)\s*>>', printed)
    return [] if found is None else [word == "TRUE" for word in re.findall(r"TRUE|FALSE", found[1])]
