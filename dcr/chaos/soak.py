"""Refits for as long as you like, under kills that a seed decides; and whether anything leaks."""

import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dcr.chaos.cases import COORDINATORS, ENGINES, OWNERS, RECEIVERS, STALLS, Case
from dcr.chaos.point import Point
from dcr.chaos.process import ChildError
from dcr.chaos.run import Run
from dcr.chaos.scenario import Deployment, Scenario, Trainer
from dcr.chaos.strike import Strike
from dcr.chaos.trainer_child import resources
from dcr.runtime.settings import Settings

QUIET_REFITS = 100
"""Relative refits in a row at the end, in the same processes: long enough for a leak to show."""
SAMPLE_EVERY = 10
"""Refits between two looks at what processes hold."""
WARM_REFITS = 20
"""After so many refits of its life, a process holds what it needs."""
CHECKPOINTS_MAX = 200
"""Checkpoints that are kept: every one is compared before, and a night makes thousands."""
PROGRESS_S = 60.0
"""Between two lines that say how far it is."""
_CALM = 2
"""One refit in so many has a fault."""
HARNESS = "the harness"
_MEMORY_BYTES_MAX = 24 << 20
_REMEMBERED_BYTES_MAX = 8 << 10
"""What the harness remembers of a refit, at most: its version, and its faults."""
_MORE_MAX = 2
"""Threads or files more than before are noise up to here."""
_SHARED_FILES_MAX = 64
_SWEPT_LATE = 2
"""Commits until what is kept no more is swept, at the latest."""


class Sample(msgspec.Struct, frozen=True):
    """What one process held after a refit."""

    refit: int
    held: dict[str, int]


class Held(msgspec.Struct):
    """What one process held in its life: when it was first looked at, once it was warm, and last."""

    since: int
    """The refit of the first look."""
    warm: Sample | None = None
    last: Sample | None = None

    def add(self, sample: Sample) -> None:
        """Another look."""
        if sample.refit >= self.since + WARM_REFITS:
            self.warm, self.last = self.warm or sample, sample


class Row(msgspec.Struct, frozen=True):
    """The refits at the end: all in a row relative, in processes that lived through all of them, and what that came to.

    The bits are those of a fresh model that loaded the last candidate densely, once.
    """

    refits: int
    first_version: int
    version: int
    engines: int
    tensors: int
    """Parameters and buffers of an engine."""
    bytes: int
    """Of all engines, that were compared."""
    equal: bool

    def __str__(self) -> str:
        what = "the bits of" if self.equal else "OTHER BITS than"
        return (
            f"{self.refits} relative refits in a row, versions {self.first_version} to {self.version}, in processes "
            f"that lived through all of them: {self.engines} engines, {self.tensors} parameters and buffers each, hold "
            f"{what} one dense load of the last candidate ({self.bytes:,} bytes compared)"
        )


class Soak:
    """One soak.

    Args:
        folder: for everything that it leaves.
        seconds: how long refits go on under faults.
        seed: of steps and faults.
        gate: ``sync`` or ``async``.
        tell: takes a line of progress.

    Attributes:
        row: what the refits in a row at the end came to; None if it did not come to that.
    """

    def __init__(self, folder: Path, seconds: float, seed: int, gate: str, tell: Callable[[str], None]) -> None:
        self.scenario = Scenario(
            name=f"soak, seed {seed}, {gate}",
            deployment=Deployment(
                trainer=Trainer(refits=1),
                gate=gate,  # type: ignore[arg-type]
            ),
            seed=seed,
            recover_within_s=90.0,
        )
        self.run = Run(self.scenario, folder, tell)
        self.refits = 0
        self.row: Row | None = None
        self._seconds = seconds
        self._tell = tell
        self._told_s = time.monotonic()
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._held: dict[str, Held] = {}
        self._settings = Settings.of(self.scenario.deployment.all_settings)
        self._cases = [
            case
            for case in (*RECEIVERS, *ENGINES, *OWNERS, *COORDINATORS, *STALLS)
            if case.ranks == 1 and not case.settings and not case.start and _possible(case, gate)
        ]

    def soak(self) -> None:
        """Go; what is wrong is in ``run.checks.problems`` afterwards."""
        self.run.over(self._refits)
        self._leaks()

    def _refits(self) -> None:
        end = time.monotonic() + self._seconds
        self._refit(None)  # engines start with version 0, and are restored to later ones only
        while time.monotonic() < end:
            case = self._random.choice(self._cases) if self._random.randrange(_CALM) == 0 else None
            if case is not None and any(Point.parse(f.at).restore for f in case.faults):
                self._until_nothing_dense_is_kept()
            self._refit(case)
        self._in_a_row()

    def _until_nothing_dense_is_kept(self) -> None:
        """An engine catches up from the payloads of a dense push whatever it holds, and is not restored then."""
        kept = max(self._settings.retain_versions, self._settings.retain_epochs) + _SWEPT_LATE
        for _ in range(2 * kept):
            if nothing_dense(list(self.run.pushes.kinds), kept):
                return
            self._refit(None)
        raise ChildError(f"{2 * kept} refits without a fault were not {kept} in a row without a dense push")

    def _in_a_row(self) -> None:
        """Refits without a fault, until enough of them in a row were relative; then every bit once more."""
        self._tell(f"refit {self.refits}: faults are over; {QUIET_REFITS} relative refits in a row follow")
        before, first = self._starts(), self.run.checks.latest + 1
        for _ in range(2 * QUIET_REFITS):
            self._refit(None)
            if self.run.pushes.kinds[-1] != "relative":
                before, first = self._starts(), self.run.checks.latest + 1
            if self.run.checks.latest - first + 1 == QUIET_REFITS:
                break
        else:
            raise ChildError(
                f"{2 * QUIET_REFITS} refits without a fault were not {QUIET_REFITS} relative ones in a row"
            )
        if self._starts() != before:
            raise ChildError(f"a process was started again in {QUIET_REFITS} refits without a fault")
        self.row = self._compared(first)

    def _starts(self) -> dict[str, int]:
        return {child.name: child.config.start for child in self.run.fleet.children}

    def _compared(self, first: int) -> Row:
        """Load the last candidate densely, in a fresh model, and compare every engine with that."""
        checks = self.run.checks
        problems, compared = len(checks.problems), checks.bytes
        engines, tensors = self.run.compare_with(self.run.pushes.checkpoint)
        return Row(
            refits=QUIET_REFITS,
            first_version=first,
            version=checks.latest,
            engines=engines,
            tensors=tensors,
            bytes=checks.bytes - compared,
            equal=len(checks.problems) == problems,
        )

    def _refit(self, case: Case | None) -> None:
        self.refits += 1
        strikes = []
        for fault in () if case is None else case.faults:
            moved = msgspec.structs.replace(fault, at=f"{fault.at} in refit {self.refits}")
            strikes.append(Strike(len(self.run.strikes), moved))
            self.run.strikes.append(strikes[-1])
        self.run.refit(self.refits, strikes)
        if time.monotonic() > self._told_s + PROGRESS_S:
            self._progress()
        if self.refits % SAMPLE_EVERY == 0:
            for name, held in {**self.run.resources(), HARNESS: resources()}.items():
                self._held.setdefault(name, Held(self.refits)).add(Sample(self.refits, held))
            self._objects()
            self._forget()

    def _progress(self) -> None:
        totals, problems = self.run.totals, len(self.run.checks.problems)
        self._told_s = time.monotonic()
        self._tell(
            f"{self.refits} refits so far: {totals.faults} faults, {totals.kills} kills, {totals.commits} commits, "
            f"{problems or 'no'} problem{'s' * (problems != 1)}"
        )

    def _objects(self) -> None:
        """Epochs in the store are at most those that are retained, and those of the attempts since the last sweep."""
        epochs = list((self.run.fleet.folder / "payloads" / "default").glob("[0-9]*"))
        bound = 2 * self._settings.retain_epochs + 4
        if len(epochs) > bound:
            self.run.checks.problems.append(f"refit {self.refits}: {len(epochs)} epochs are in the store, not {bound}")

    def _forget(self) -> None:
        """Remove checkpoints that were compared long ago; the first is what engines start with."""
        found = (self.run.fleet.folder / "checkpoints").glob("c*")
        for folder in sorted(found, key=lambda path: int(path.name[1:]))[:-CHECKPOINTS_MAX]:
            shutil.rmtree(folder)

    def _leaks(self) -> None:
        """Of each process that lived for long enough: no more at the end than once it was warm."""
        for name, held in self._held.items():
            if held.warm is not None and held.last is not None:
                remembered = _REMEMBERED_BYTES_MAX * (held.last.refit - held.warm.refit) if name == HARNESS else 0
                self.run.checks.problems += [f"{name} {what}" for what in leaked(held.warm, held.last, remembered)]


def nothing_dense(kinds: Sequence[str], last: int) -> bool:
    """Whether there were so many commits, and the last of them were none of them dense."""
    return len(kinds) >= last and "dense" not in kinds[-last:]


def leaked(early: Sample, late: Sample, remembered_bytes: int = 0) -> list[str]:
    """What a process holds more of than what refits explain, in words; with what it may remember of them, in bytes."""
    found = []
    memory = _MEMORY_BYTES_MAX + remembered_bytes
    for what, bound in (("memory_bytes", memory), ("threads", _MORE_MAX), ("files", _MORE_MAX)):
        more = late.held[what] - early.held[what]
        if more > bound:
            found.append(f"holds {more:,} {what} more after refit {late.refit} than after refit {early.refit}")
    if late.held["shared_files"] > _SHARED_FILES_MAX:
        found.append(f"holds {late.held['shared_files']} files in shared memory after refit {late.refit}")
    return found


def _possible(case: Case, gate: str) -> bool:
    here = "file" in case.transports and "sqlite" in case.controls and gate in case.gates and 0 in case.coordinators
    # Without a baseline nothing is restored in the next refit, whose case may be one that strikes in a restore.
    not_here = {"fill", "partition", "step_early"}
    return here and not any(f.do in not_here or Point.parse(f.at).refit == 0 for f in case.faults)
