"""What a leader with a policy waits for before it opens an attempt: after a stop (DESIGN D14), after a take-over."""

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import StartTimer, WriteRecord
from dcr.protocol.record import CommitRecord, Direction
from dcr.simulator.invariants import holds

REJOIN = "rejoin"
"""The time-out of the wait for engines that K names."""


class Waits:
    """Looks at what one leader writes, beside what was said to it and what ran out.

    Args:
        role: the leader's.
        rejoins: it waits for the engines that K named when it took over, ``rejoin_timeout_s`` long.

    Attributes:
        word: the operator said, after the last stop of this leader, that the transition goes on.
        heard: engines that joined here.
        timer: the time-out that was started last.
    """

    def __init__(self, role: Coordinator, *, rejoins: bool) -> None:
        self.word = False
        self.heard: set[str] = set()
        self.timer: StartTimer | None = None
        self._role = role
        self._rejoins = rejoins
        self._named: frozenset[str] = frozenset()

    def ran_out(self, number: int) -> None:
        """A time-out ran out: those who were waited for need not come any more."""
        if self.timer is not None and (self.timer.name, self.timer.number) == (REJOIN, number):
            self._named = frozenset()

    def writes(self, w: WriteRecord) -> None:
        """It orders a compare-and-set."""
        match w.reason:
            case "TakeOver":
                self._named = frozenset(m.engine for m in w.record.members)
            case "Stop":
                self.word = False
            case "OpenAttempt":
                self._opens(w.record)

    def _opens(self, new: CommitRecord) -> None:
        old = self._role.record
        assert old is not None
        assert new.open is not None
        if new.open.direction is Direction.BACK:
            return  # that is an operator's order, or goes on with one
        absent = sorted(self._named - self.heard) if self._rejoins else []
        me = self._role.leader
        holds(not absent, "RejoinWaits", lambda: f"{me} opens an attempt and has not waited for {', '.join(absent)}")
        stopped = old.open is not None and old.open.stopped
        same = old.open is not None and (old.open.owners, old.open.pushes) == (new.open.owners, new.open.pushes)
        ordered = self.word or not stopped or not same
        holds(ordered, "StopWaits", lambda: f"{me} goes on with a stopped transition, and nobody said so")
