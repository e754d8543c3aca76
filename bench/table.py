"""What a bench script prints: rows against the paper, peers and our aims, as a table or as one JSON line."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One measured claim.

    Attributes:
        claim: what is measured, with the sizes it was measured at.
        measured: the figure.
        unit: of all figures.
        paper: the paper's figure, if it has one.
        peer: the best peer's, if there is one.
        aim: ours; None if the figure is only reported.
        at_least: whether more is better.
    """

    claim: str
    measured: float
    unit: str
    paper: float | None = None
    peer: float | None = None
    aim: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        if self.aim is None:
            return None
        return self.measured >= self.aim if self.at_least else self.measured <= self.aim

    def json(self) -> dict[str, object]:
        """The fields that other programs read."""
        fields = asdict(self)
        del fields["at_least"]
        return {**fields, "met": self.met}


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every script takes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print one JSON object on the last line instead of a table")
    return made


def gathered(rows: Iterable[Row]) -> list[Row]:
    """All rows, each told on standard error as it is found: a bench takes minutes."""
    started, found = time.perf_counter(), []
    for row in rows:
        found.append(row)
        print(f"[{time.perf_counter() - started:6.1f} s] {row.claim}: {row.measured:.3g} {row.unit}", file=sys.stderr)
    return found


def report(
    bench: str, rows: Sequence[Row], not_measured: Sequence[str], *, as_json: bool, notes: Sequence[str] = ()
) -> None:
    """Print the rows, what they say nothing about, and, if one misses its aim, the notes that say why."""
    if all(row.met is not False for row in rows):
        notes = ()
    if as_json:
        found = {"bench": bench, "rows": [row.json() for row in rows], "not_measured": list(not_measured)}
        print(json.dumps({**found, "notes": list(notes)}))
        return
    heads = ("claim", "measured", "unit", "paper", "peer", "aim", "met")
    lines = [heads, *(tuple(_shown(row.json()[head]) for head in heads) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    print(bench)
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for text in not_measured:
        print(f"not measured: {text}")
    for text in notes:
        print(f"note: {text}")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
