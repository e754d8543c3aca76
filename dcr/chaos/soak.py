"""Refits for as long as you like, under kills that a seed decides; and whether anything leaks."""

import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from dcr.chaos.cases import COORDINATORS, ENGINES, OWNERS, RECEIVERS, STALLS, Case
from dcr.chaos.point import Point
from dcr.chaos.run import Run
from dcr.chaos.scenario import Deployment, Scenario, Trainer
from dcr.chaos.strike import Strike
from dcr.runtime.settings import Settings

QUIET_REFITS = 100
"""Refits without a fault at the end, in the same processes: long enough for a leak to show."""
SAMPLE_EVERY = 10
"""Refits between two looks at what processes hold."""
WARM_REFITS = 20
"""After so many refits of its life, a process holds what it needs."""
_CALM = 2
"""One refit in so many has a fault."""
_MEMORY_BYTES_MAX = 24 << 20
_MORE_MAX = 2
"""Threads or files more than before are noise up to here."""
_SHARED_FILES_MAX = 64


class Sample(msgspec.Struct, frozen=True):
    """What one process held after a refit."""

    refit: int
    held: dict[str, int]


class Soak:
    """One soak.

    Args:
        folder: for everything that it leaves.
        seconds: how long refits go on under faults.
        seed: of steps and faults.
        gate: ``sync`` or ``async``.
        tell: takes a line of progress.
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
        self._seconds = seconds
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._samples: dict[str, list[Sample]] = defaultdict(list)
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
            self._refit(case)
        for _ in range(QUIET_REFITS):
            self._refit(None)

    def _refit(self, case: Case | None) -> None:
        self.refits += 1
        strikes = []
        for fault in () if case is None else case.faults:
            moved = msgspec.structs.replace(fault, at=f"{fault.at} in refit {self.refits}")
            strikes.append(Strike(len(self.run.strikes), moved))
            self.run.strikes.append(strikes[-1])
        self.run.refit(self.refits, strikes)
        if self.refits % SAMPLE_EVERY == 0:
            for name, held in self.run.resources().items():
                self._samples[name].append(Sample(self.refits, held))
            self._objects()

    def _objects(self) -> None:
        """Epochs in the store are at most those that are retained, and those of the attempts since the last sweep."""
        epochs = list((self.run.fleet.folder / "payloads" / "default").glob("[0-9]*"))
        bound = 2 * Settings.of(self.scenario.deployment.all_settings).retain_epochs + 4
        if len(epochs) > bound:
            self.run.checks.problems.append(f"refit {self.refits}: {len(epochs)} epochs are in the store, not {bound}")

    def _leaks(self) -> None:
        """Of each process that lived for long enough: no more at the end than once it was warm."""
        for name, samples in self._samples.items():
            warm = [s for s in samples if s.refit >= samples[0].refit + WARM_REFITS]
            for early, late in [(warm[0], warm[-1])] if len(warm) > 1 else []:
                self.run.checks.problems += [f"{name} {what}" for what in leaked(early, late)]


def leaked(early: Sample, late: Sample) -> list[str]:
    """What a process holds more of than what refits explain, in words."""
    found = []
    for what, bound in (("memory_bytes", _MEMORY_BYTES_MAX), ("threads", _MORE_MAX), ("files", _MORE_MAX)):
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
