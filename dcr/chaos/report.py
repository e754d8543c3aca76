"""What a run came to: for people, for machines, and added up over many."""

from collections.abc import Iterable, Sequence

import msgspec

NAMED_MAX = 8
"""How many problems of a run are printed."""
_NAME_CHARS_MAX = 80
"""Of the name of a run, in the table."""


class FaultReport(msgspec.Struct, frozen=True):
    """One fault; times in seconds."""

    what: str
    fired_s: float | None
    """Since the first process was started; None if it never came."""
    commit_s: float | None
    """From the fault to the next commit that the trainer knew of."""
    recovered_s: float | None
    """From the fault until every process was back and every engine served the committed version."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a scenario."""

    name: str
    ok: bool
    deployment: str
    folder: str
    """Where everything lies that it left."""
    skipped: str = ""
    """Why it was not run; then nothing else is true of it."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[FaultReport, ...] = ()
    commits: int = 0
    kills: int = 0
    retries: int = 0
    """Attempts and pushes that had to be made again."""
    restarts: int = 0
    requests: int = 0
    """Answers whose storage was compared with a twin's."""
    bytes_compared: int = 0
    """Resident bytes of engines that were compared with a twin's after each refit."""
    recovery_s: float = 0.0
    """The longest recovery, what a fault lasts itself not counted."""
    seconds: float = 0.0
    logs: str = "not validated"
    """What the event logs are, held to the specification."""
    validated: bool = False
    """Whether they were held to it, all of them, and are a behaviour of it."""
    began_s: float = 0.0
    """When the first process was started, on the machine's monotonic clock."""

    @property
    def verdict(self) -> str:
        """In a few words; what was not checked is no part of ``ok``, so it is said."""
        if not self.ok:
            return "WRONG"
        return "ok" if self.validated else "ok, logs not validated"


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Many runs."""

    runs: int
    failed: int
    skipped: int
    faults: int
    kills: int
    commits: int
    retries: int
    restarts: int
    requests: int
    bytes_compared: int
    logs_validated: int
    recovery_s: float
    seconds: float

    @classmethod
    def of(cls, reports: Sequence[RunReport], seconds: float) -> "Totals":
        """Add up."""
        ran = [r for r in reports if not r.skipped]

        def total(name: str) -> int:
            return sum(getattr(r, name) for r in ran)

        return cls(
            runs=len(ran),
            failed=sum(not r.ok for r in ran),
            skipped=len(reports) - len(ran),
            faults=sum(f.fired_s is not None for r in ran for f in r.faults),
            kills=total("kills"),
            commits=total("commits"),
            retries=total("retries"),
            restarts=total("restarts"),
            requests=total("requests"),
            bytes_compared=total("bytes_compared"),
            logs_validated=sum(r.validated for r in ran),
            recovery_s=max((r.recovery_s for r in ran), default=0.0),
            seconds=seconds,
        )

    def __str__(self) -> str:
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return (
            f"{runs}, {self.failed} failed, {self.skipped} skipped: {self.faults} faults, "
            f"{self.kills} kills, {self.restarts} restarts, {self.commits} commits, {self.retries} retries, "
            f"{self.requests:,} answers and {self.bytes_compared:,} resident bytes compared, "
            f"{self.logs_validated} logs validated, slowest recovery {self.recovery_s:.1f} s, "
            f"{self.seconds:.0f} s in all"
        )


class Table:
    """One line a run.  What is said of a run of the shipped matrix has room in 120 columns.

    Args:
        runs: name and deployment of each run that comes, for the widths of the first two columns.
    """

    def __init__(self, runs: Iterable[tuple[str, str]]) -> None:
        names, deployments = zip(*runs, strict=True)
        self._name = min(max(len("scenario"), *map(len, names)), _NAME_CHARS_MAX)
        self._deployment = max(len("deployment"), *map(len, deployments))

    @property
    def header(self) -> str:
        """The first line."""
        return (
            f"{'scenario':{self._name}} {'deployment':{self._deployment}} {'faults':>6} {'commits':>7} {'retries':>7} "
            f"{'recovery':>8} {'answers':>9} {'bytes':>10} {'time':>6}"
        )

    def row(self, r: RunReport) -> str:
        """The line of a run."""
        first = f"{r.name[: self._name]:{self._name}} {r.deployment:{self._deployment}}"
        if r.skipped:
            return f"{first} SKIPPED: {r.skipped}"
        struck = sum(f.fired_s is not None for f in r.faults)
        return (
            f"{first} {struck:6} {r.commits:7} {r.retries:7} {r.recovery_s:6.1f} s "
            f"{r.requests:9,} {r.bytes_compared:10,} {r.seconds:4.0f} s  {r.verdict}"
        )


def details(r: RunReport, *, page: bool = False) -> Iterable[str]:
    """What is to be said below the line.

    Args:
        r: the run.
        page: name its page also if nothing is wrong.
    """
    for problem in r.problems[:NAMED_MAX]:
        yield f"  WRONG  {problem}"
    if len(r.problems) > NAMED_MAX:
        yield f"  WRONG  and {len(r.problems) - NAMED_MAX} more problems"
    for note in r.notes:
        yield f"  note   {note}"
    if not r.skipped and not r.validated:
        yield f"  logs   {r.logs}"
    if r.problems:
        yield f"  see    {r.folder}/timeline.html and the logs beside it"
    elif page and not r.skipped:
        yield f"  see    {r.folder}/timeline.html"
