"""One run of a scenario: refits under fire, and what must hold after each of them."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError

from dcr.chaos.bits import Twins
from dcr.chaos.checks import Checks
from dcr.chaos.fleet import Fleet, use_few_threads
from dcr.chaos.history import FILE, History
from dcr.chaos.process import ChildError
from dcr.chaos.pushes import Pushes
from dcr.chaos.run_folder import FolderError, FullError, no_room
from dcr.chaos.scenario import Scenario
from dcr.chaos.strike import Strike, Totals
from dcr.chaos.supervisor import Supervisor
from dcr.control_plane.interface import ControlPlaneUnavailableError, HistoryEntry
from dcr.protocol.errors import DcrError
from dcr.protocol.record import CommitRecord

if TYPE_CHECKING:
    from dcr.chaos.trigger import Armed

START_TIMEOUT_S = 300.0
"""The first start of a copy of this tree compiles kernels."""
ANSWER_TIMEOUT_S = 60.0
_LATE_S = 30.0
"""How long a point that comes after everything serves again is waited for."""


class Run:
    """Runs a scenario.

    Args:
        scenario: what to run.
        folder: for everything that it leaves, empty or not there yet (``RunFolder``).
        tell: takes a line of progress.
        bug: what is broken on purpose (``dcr.chaos.bugs``); empty for nothing.

    Raises:
        MissingServerError: a server that the scenario needs is not installed.
        RefusedError: a model cannot be made.
        FolderError: the checkpoints cannot be written.
    """

    def __init__(self, scenario: Scenario, folder: Path, tell: Callable[[str], None], bug: str = "") -> None:
        use_few_threads()
        self.scenario = scenario
        self.totals = Totals()
        self.strikes = [Strike(n, f) for n, f in enumerate(scenario.faults)]
        self.fleet = Fleet(scenario, folder, bug)
        self.checks = Checks(folder, Twins(scenario.deployment.model.engine))
        self.checks.begin(self.fleet.first)
        self._full = ""  # what was found first, once the folder's disk is full
        self._history = History(folder / FILE, self.checks.problems, self._commit)
        self.pushes = Pushes(self.fleet, self.strikes, self.totals, tell)
        self._supervisor = Supervisor(
            self.fleet,
            self.strikes,
            self.pushes,
            checks=self.checks,
            totals=self.totals,
            tell=tell,
            follow=self._follow,
        )

    def run(self) -> None:
        """Run it; what is wrong is in ``checks.problems`` afterwards.

        Raises:
            FullError: the disk of its folder became full, and everything was ended.
        """
        self.over(self._refits)

    def over(self, refits: Callable[[], None]) -> None:
        """Start everything, do this, and whatever came of it end everything and check what is checked at the end.

        Raises:
            FullError: as ``run``.
        """
        try:
            self._told(self._start)
            if not self.checks.problems:
                self._told(refits)
            if not self._full:
                self._told(lambda: self._read_history(end=True))
        finally:
            self.fleet.close()
        if self._full:
            raise FullError(self.fleet.folder, self._full)
        self._told(self.checks.requests)

    def _told(self, act: Callable[[], None]) -> None:
        try:
            act()
        except DcrError as e:
            self.checks.problems.append(str(e))
        except (OSError, SafetensorError) as e:  # a disk that fails, or filled meanwhile
            self.checks.problems.append(f"{self.fleet.folder}: {e}")
        # Looked for at once: the processes that are there leave no room that their ends would make.
        if self.checks.problems and not self._full and no_room(self.fleet.folder):
            self._full = self.checks.problems[-1]

    def _refits(self) -> None:
        for refit in range(1, self.scenario.deployment.trainer.refits + 1):
            self.refit(refit, [s for s in self.strikes if s.fault.point.refit == refit])

    def _start(self) -> None:
        here = [s for s in self.strikes if s.fault.point.refit == 0]
        of = self._arms(here)
        self.fleet.start([a for name, armed in of.items() if name.startswith("trainer") for a in armed], of)
        self._supervisor.settle(START_TIMEOUT_S)
        self._recovered(here)

    def refit(self, number: int, strikes: list[Strike]) -> None:
        """One training step and its push under these faults, until everything serves again; and compare every bit.

        Raises:
            DcrError: it did not come to that.
        """
        self.pushes.refit = number
        self._supervisor.epoch = self._record().epoch
        restoring = [s for s in strikes if s.fault.point.restore]
        if restoring:
            self._in_restore(restoring)
            self._supervisor.epoch = self._record().epoch
        normal = [s for s in strikes if not s.fault.point.restore]
        self._arm(normal)
        self.pushes.begin()
        self._supervisor.settle(self.scenario.recover_within_s)
        self._supervisor.wait_for(lambda: all(s.fired_s is not None for s in normal), _LATE_S)
        self._supervisor.settle(self.scenario.recover_within_s)
        self._recovered(normal)
        self._compare()

    def _in_restore(self, strikes: list[Strike]) -> None:
        """A node is started anew, so that its engines are restored; faults strike meanwhile."""
        nodes = [name for s in strikes for name in self._takers(s) if name in self.fleet.nodes]
        victim = nodes[0] if nodes else list(self.fleet.nodes)[-1]
        self._arm([s for s in strikes if not self.fleet.nodes.keys() & self._takers(s)])
        self._supervisor.kill(self.fleet.nodes[victim])
        self._supervisor.restart_node(victim, strikes)
        self._supervisor.wait_for(lambda: all(s.fired_s is not None for s in strikes), self.scenario.recover_within_s)
        self._supervisor.settle(self.scenario.recover_within_s)
        self._recovered(strikes)
        self._compare()

    def resources(self) -> dict[str, dict[str, int]]:
        """What every process holds now of what could leak, by the process's name and start."""
        found = {}
        for child in self.fleet.children:
            child.send("resources")
            held = self._supervisor.answer(child, "resources", ANSWER_TIMEOUT_S)
            found[f"{child.name}-{child.config.start}"] = held
        return found

    def _recovered(self, strikes: list[Strike]) -> None:
        now = time.monotonic()
        for strike in strikes:
            if strike.fired_s is None:
                self.checks.problems.append(f"the fault never came: {strike.fault}{strike.missed}")
                continue
            strike.recovered_s = now
            if strike.fault.push_error and not strike.told:
                self.checks.problems.append(f"{strike.fault}: no push ended with {strike.fault.push_error!r}")
            if now - strike.quiet_s > self.scenario.recover_within_s:
                self.checks.problems.append(f"{strike.fault}: recovered only after {now - strike.quiet_s:.1f} s")

    def _follow(self) -> None:
        """Read the history while a refit goes on; it may be that the control plane does not answer now.

        Raises:
            FolderError: the disk is full; what that leads to might be told only after every time-out has passed.
        """
        if no_room(self.fleet.folder):
            raise FolderError(f"refit {self.pushes.refit}: no space is left on the disk of {self.fleet.folder}")
        with contextlib.suppress(ControlPlaneUnavailableError):
            self._history.read(self.fleet.history(self._history.revision))

    def _read_history(self, *, end: bool = False) -> None:
        record = self._record()  # waits until the control plane answers
        self._history.read(self.fleet.history(self._history.revision))
        if end:
            self._history.end(record)

    def _commit(self, entry: HistoryEntry) -> bool:
        return entry.version is not None and self.checks.won(entry.version, entry.digest)

    def _compare(self) -> None:
        self._read_history()
        record = self._record()
        self.checks.won(record.version, record.baseline_id)
        self.checks.bits(self._stored(), record.version)

    def compare_with(self, checkpoint: Path) -> tuple[int, int]:
        """Compare every engine with a fresh model that loads this checkpoint, which is what is committed, now.

        Returns:
            how many engines there are, and how many parameters and buffers the model has.
        """
        version = self._record().version
        committed = self.checks.versions.get(version)
        if committed != checkpoint:
            self.checks.problems.append(f"version {version} is {committed}, and the last candidate was {checkpoint}")
        expected = Twins(self.scenario.deployment.model.engine).bits(checkpoint)
        found = self._stored()
        self.checks.same(found, version, expected)
        return len(found), len(expected)

    def _stored(self) -> dict[str, dict[str, Any]]:
        """What every engine serves and holds, by its name."""
        for node in self.fleet.nodes.values():
            node.send("bits")
        found: dict[str, dict[str, Any]] = {}
        for node in self.fleet.nodes.values():
            found |= self._supervisor.answer(node, "bits", ANSWER_TIMEOUT_S)
        return found

    def _arm(self, strikes: list[Strike]) -> None:
        for name, there in self._arms(strikes).items():
            child = self.fleet.child(name)
            child.send("arm", armed=msgspec.to_builtins(there))
            self._supervisor.answer(child, "armed", ANSWER_TIMEOUT_S)

    def _arms(self, strikes: list[Strike]) -> dict[str, list["Armed"]]:
        of: dict[str, list[Armed]] = {}
        for strike in strikes:
            armed = strike.armed(self._supervisor.epoch, self.fleet.processes_of)
            for name in self._takers(strike):
                of.setdefault(name, []).append(armed)
        return of

    def _takers(self, strike: Strike) -> tuple[str, ...]:
        return self.fleet.processes_of(strike.fault.point.taken_by)

    def _record(self) -> CommitRecord:
        record = self.fleet.record()
        if record is None:
            raise ChildError("there is no record")
        return record
