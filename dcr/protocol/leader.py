"""Leading a record: the compare-and-sets of one leader, one at a time, and what their answers mean (DESIGN D1, D3)."""

import enum
from abc import ABC, abstractmethod

from dcr.protocol.coordinator_effects import Effect, Fatal, ReadRecord, StartTimer, WriteRecord
from dcr.protocol.record import CommitRecord
from dcr.protocol.step import Step

REWRITES_MAX = 8
"""How often a write of unknown outcome is tried again before the leader gives up."""


class Phase(enum.StrEnum):
    """What the leader is waiting for."""

    STARTING = "starting"
    IDLE = "idle"
    WRITING = "writing"
    ATTEMPT = "attempt"
    FOLDING = "folding"
    RESTORING = "restoring"
    FATAL = "fatal"


class Leader(ABC):
    """K as its only writer knows it.  What follows from a write is the coordinator's to say.

    Args:
        record_id: the record to lead.
        leader: this leader's name, new with every start.
    """

    def __init__(self, record_id: str, leader: str) -> None:
        self.record_id = record_id
        self.leader = leader
        self.phase = Phase.STARTING
        self.record: CommitRecord | None = None
        self.revision: int | None = None
        self._write: WriteRecord | None = None
        self._rewrites = 0
        self._operations_made = 0
        self._timer = 0
        self._waiting = ("", 0)

    # ------------------------------------------------------------ for the coordinator

    @abstractmethod
    def _found(self, record: CommitRecord | None, revision: int | None) -> list[Effect]:
        """K was read at the start; None if there is none."""

    @abstractmethod
    def _after(self, reason: str) -> list[Effect]:
        """The compare-and-set with this reason took effect; ``record`` is what it wrote."""

    @property
    def _k(self) -> CommitRecord:
        assert self.record is not None
        return self.record

    @property
    def _epoch(self) -> int:
        return 0 if self.record is None else self.record.epoch

    # ------------------------------------------------------------ the control plane's answers

    def record_read(self, revision: int | None, record: CommitRecord | None, operation_id: str) -> list[Effect]:
        """K was read: at the start, or to resolve a write of unknown outcome (DESIGN D3).

        Args:
            revision: K's revision; None if K is absent.
            record: K; None if absent.
            operation_id: the operation that made this revision.
        """
        w = self._write
        if w is None:
            return self._found(record, revision) if self.phase is Phase.STARTING else []
        if operation_id == w.operation_id and revision is not None:
            return self.written(w.operation_id, revision)
        if revision != w.expected_revision:
            return self._overtaken(revision)
        # The old revision proves nothing: our write may still be on its way.  The same compare-and-set again settles
        # it, for only one of the two can take effect.
        self._rewrites += 1
        if self._rewrites > REWRITES_MAX:
            return self._fatal("the control plane leaves the outcome of a write open again and again")
        return [w]

    def written(self, operation_id: str, revision: int) -> list[Effect]:
        """Our compare-and-set took effect."""
        w = self._write
        if w is None or w.operation_id != operation_id:
            return []
        self._write, self._rewrites = None, 0
        self.record, self.revision = w.record, revision
        return [Step(self.leader, w.reason, w.record.epoch), *self._after(w.reason)]

    def conflict(self, operation_id: str, revision: int | None, stored_operation_id: str) -> list[Effect]:
        """K is not at the revision that our compare-and-set expected."""
        w = self._write
        if w is None or w.operation_id != operation_id:
            return []
        if stored_operation_id == operation_id and revision is not None:
            return self.written(operation_id, revision)  # it was our own write, whose answer was lost
        return self._overtaken(revision)

    def unknown(self, operation_id: str) -> list[Effect]:
        """Our compare-and-set may or may not have taken effect: read K back (DESIGN D3)."""
        if self._write is None or self._write.operation_id != operation_id:
            return []
        return [Step(self.leader, "ReadBack", self._epoch, operation_id), ReadRecord()]

    # ------------------------------------------------------------ inside

    def _cas(self, record: CommitRecord, reason: str, operation_id: str = "") -> list[Effect]:
        assert self._write is None
        self.phase = Phase.WRITING
        self._write = WriteRecord(record, self.revision, operation_id or self._next_operation(), reason)
        return [self._write]

    def _next_operation(self) -> str:
        self._operations_made += 1
        return f"{self.leader}-{self._operations_made}"

    def _overtaken(self, revision: int | None) -> list[Effect]:
        return self._fatal(
            f"another trainer leads record {self.record_id!r} (its revision is now {revision}); "
            "stop one of the two, or give each its own record_id"
        )

    def _fatal(self, reason: str) -> list[Effect]:
        self.phase = Phase.FATAL
        return [Step(self.leader, "Fatal", self._epoch, reason), Fatal(reason)]

    def _wait(self, name: str, why: str) -> list[Effect]:
        """Wait idly for somebody to come; whoever comes does not prolong the wait for the others.

        Args:
            name: of the time-out.
            why: what is waited for; empty for a wait so common that nobody wants to hear of it.
        """
        if self._waiting == (name, self._timer):
            return []
        effects = self._start_timer(name)
        self._waiting = (name, self._timer)
        return [Step(self.leader, "Wait", self._epoch, why), *effects] if why else effects

    def _start_timer(self, name: str) -> list[Effect]:
        self._timer += 1
        return [StartTimer(name, self._timer)]
