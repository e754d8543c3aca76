"""A run as TLA+: the module ``RefitLogData``, and the configuration of the model."""

from collections.abc import Sequence
from pathlib import Path

from dcr.modelcheck.eventlog.deployment import Deployment
from dcr.modelcheck.eventlog.steps import SpecStep, Value, record_of

CONFIG = "RefitLog.cfg"
_MANY = 1_000_000_000
_BOUNDS = (
    *("MaxVersion", "MaxCandidates", "MaxAttempts", "MaxEngineRestarts", "MaxOwnerRestarts", "MaxTakeOvers"),
    *("MaxFailedWrites", "MaxTimeOuts", "MaxEvictions", "MaxSteps", "MaxStops", "MaxAbandons", "MaxRollbacks"),
)
_CONTENTS = ("content", "baseline")
"""Fields whose value is a content: written down once, and named by its number."""


class _Writer:
    def __init__(self, cells: Sequence[str]) -> None:
        self._cells = cells
        self.contents: dict[tuple[object, ...], int] = {}

    def text(self, value: Value, field: str = "") -> str:
        """A value in TLA+."""
        match value:
            case bool():
                return "TRUE" if value else "FALSE"
            case int():
                return str(value)
            case str():
                return f'"{value}"'
            case dict() if field in _CONTENTS:
                number = self.contents.setdefault(tuple(value[c] for c in self._cells), len(self.contents) + 1)
                return f"ContentAt[{number}]"
            case dict() if not value:
                return "[ nobody \\in {} |-> 0 ]"
            case dict():
                return "[ " + ", ".join(f"{name} |-> {self.text(v, name)}" for name, v in value.items()) + " ]"


def _flag(value: bool) -> str:
    return "TRUE" if value else "FALSE"


def _set(names: Sequence[str]) -> str:
    return "{" + ", ".join(f'"{name}"' for name in names) + "}"


def write_model(
    folder: Path, d: Deployment, steps: Sequence[SpecStep], *, before: str = "", continued: bool = False
) -> None:
    """Write the data of a run, or of a part of it, and its configuration, beside the modules of the specification.

    Args:
        folder: a private copy of the specification's folder.
        d: who took part.
        steps: what they did.
        before: the state in which the part before this one ended, in TLA+; empty for the first.
        continued: whether another part follows, which needs to know in which state this one ends.
    """
    cells = list(d.owner_of)
    writer = _Writer(cells)
    lines = ",\n".join(f"  {writer.text({'name': s.name, **s.values})}" for s in steps)
    h = d.run.history
    first = writer.text(record_of(d, h.first, h.first_revision, "CreateRecord", d.first_named))
    rows = ",\n".join("  << " + ", ".join(map(str, content)) + " >>" for content in writer.contents)
    owners = ", ".join(f'"{o}"' for o in d.owner_of.values())
    names = ", ".join(f'"{c}"' for c in cells)
    (folder / "RefitLogData.tla").write_text(
        "\n".join(
            (
                "---- MODULE RefitLogData ----",
                "EXTENDS Integers, Sequences, TLC",
                f"CellNames == << {names} >>",
                f"CellOwners == << {owners} >>",
                "CellNumber == [ p \\in { CellNames[i] : i \\in 1 .. Len(CellNames) } |->",
                "  CHOOSE i \\in 1 .. Len(CellNames) : CellNames[i] = p ]",
                "CellOwner == [ p \\in DOMAIN CellNumber |-> CellOwners[CellNumber[p]] ]",
                f"Contents == <<\n{rows} >>",
                "ContentAt == [ i \\in 1 .. Len(Contents) |->",
                "  [ p \\in DOMAIN CellNumber |-> Contents[i][CellNumber[p]] ] ]",
                f"FirstRecord == {first}",
                f"Continues == {_flag(bool(before))}",
                f"Before == {before or '<< >>'}",
                f"Continued == {_flag(continued)}",
                f"Lines == <<\n{lines} >>",
                "====",
                "",
            )
        )
    )
    (folder / CONFIG).write_text(config(d))


def config(d: Deployment, specification: str = "LogSpec") -> str:
    """The configuration that TLC reads."""
    return "\n".join(
        (
            f"SPECIFICATION {specification}",
            "CONSTANTS",
            f'  FirstLeader = "{d.leaders[d.run.history.first.leader]}"',
            f"  Engines = {_set(list(d.engines.values()))}",
            f"  Ranks = {_set(d.ranks)}",
            f"  Owners = {_set(list(d.owners.values()))}",
            f"  Cells = {_set(list(d.owner_of))}",
            "  OwnerOf <- CellOwner",
            f"  Coordinators = {_set(list(d.leaders.values()))}",
            "  Narrow = {}",
            "  Enough <- AnyEngines",
            '  Kinds = {"relative", "absolute", "dense"}',
            f"  Async = {'TRUE' if d.asynchronous else 'FALSE'}",
            "  StaleReports = TRUE",
            "  Reload = TRUE",
            *(f"  {bound} = {_MANY}" for bound in _BOUNDS),
            "  MaxUnknowns = 0",
            "VIEW Reached",
            "",
        )
    )
