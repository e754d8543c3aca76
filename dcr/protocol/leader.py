"""Leading a record: the compare-and-sets of one leader, one at a time, and what their answers mean (DESIGN D1, D3)."""

import enum
from abc import ABC, abstractmethod

from dcr.protocol.coordinator_effects import Effect, Fatal, ReadRecord, WriteRecord
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import CommitRecord, Member, OwnerRef
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
    """K as its only writer knows it.  What follows from a write is said by who derives from it.

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

    # ------------------------------------------------------------ for who derives from it

    @abstractmethod
    def _found(self, record: CommitRecord | None, revision: int | None) -> list[Effect]:
        """K was read at the start; None if there is none."""

    @abstractmethod
    def _after(self, reason: str) -> list[Effect]:
        """The compare-and-set with this reason took effect; ``record`` is what it wrote."""

    @abstractmethod
    def _restoring(self, reason: str) -> tuple[tuple[Member, ...], tuple[OwnerRef, ...]]:
        """Whom the write with this reason concerns, where K does not name them: engines and owners of a restore."""

    @property
    def _k(self) -> CommitRecord:
        assert self.record is not None
        return self.record

    @property
    def _epoch(self) -> int:
        return 0 if self.record is None else self.record.epoch

    # ------------------------------------------------------------ the control plane's answers

    def record_read(self, revision: int | None, record: CommitRecord | None, operation_id: str) -> list[Effect]:
        """K was read: at the start, to resolve a write of unknown outcome (DESIGN D3), or to see who leads (D16).

        Args:
            revision: K's revision; None if K is absent.
            record: K; None if absent.
            operation_id: the operation that made this revision.
        """
        if self.phase is Phase.FATAL:
            return []  # whatever became of its last write, it leads no more
        w = self._write
        if w is None:
            if self.phase is Phase.STARTING:
                return self._found(record, revision)
            # Reads may overtake one another: one that is older than our last write tells nothing.
            late = revision is None or self.revision is None or revision < self.revision
            return [] if record is None or late or record.leader == self.leader else self._overtaken(record.leader)
        if operation_id == w.operation_id and revision is not None:
            return [
                Step(self.leader, "ReadBack", w.record.epoch, operation_id=operation_id),
                *self.written(w.operation_id, revision),
            ]
        if w.expected_revision is not None and (revision is None or revision < w.expected_revision):
            return [ReadRecord()]  # older than our last write: it tells nothing of this one
        if revision != w.expected_revision:
            return self._overtaken("" if record is None else record.leader)
        # The old revision proves nothing: our write may still be on its way.  The same compare-and-set again settles
        # it, for only one of the two can take effect.
        self._rewrites += 1
        if self._rewrites > REWRITES_MAX:
            return self._fatal("the control plane leaves the outcome of a write open again and again")
        return [Step(self.leader, "WriteAgain", w.record.epoch, operation_id=w.operation_id), w]

    def written(self, operation_id: str, revision: int) -> list[Effect]:
        """Our compare-and-set took effect."""
        w = self._write
        if w is None or w.operation_id != operation_id:
            return []
        self._write, self._rewrites = None, 0
        self.record, self.revision = w.record, revision
        members, owners = self._restoring(w.reason)
        step = Step(
            self.leader,
            w.reason,
            w.record.epoch,
            record=w.record,
            revision=revision,
            operation_id=operation_id,
            members=members,
            owners=owners,
        )
        return [step, *self._after(w.reason)]

    def conflict(self, operation_id: str, revision: int | None, stored_operation_id: str) -> list[Effect]:
        """K is not at the revision that our compare-and-set expected."""
        w = self._write
        if w is None or w.operation_id != operation_id:
            return []
        if stored_operation_id == operation_id and revision is not None:
            return self.written(operation_id, revision)  # it was our own write, whose answer was lost
        return self._overtaken("")

    def unknown(self, operation_id: str) -> list[Effect]:
        """Our compare-and-set may or may not have taken effect: read K back (DESIGN D3)."""
        if self._write is None or self._write.operation_id != operation_id:
            return []
        return [ReadRecord()]

    # ------------------------------------------------------------ inside

    def _cas(self, record: CommitRecord, reason: str, operation_id: str = "") -> list[Effect]:
        assert self._write is None
        self.phase = Phase.WRITING
        self._write = WriteRecord(record, self.revision, operation_id or self._next_operation(), reason)
        return [self._write]

    def _next_operation(self) -> str:
        self._operations_made += 1
        return f"{self.leader}-{self._operations_made}"

    def _must(self, action: str, holds: object, why: str) -> None:
        """The guard of an action: RefusedError, which names the action and why, unless it holds."""
        if not holds:
            raise RefusedError(
                f"{self.leader}: {action} of record {self.record_id!r} was refused at epoch {self._epoch}: {why}"
            )

    def _overtaken(self, other: str) -> list[Effect]:
        named = f" ({other})" if other else ""
        return self._fatal(
            f"another coordinator{named} leads record {self.record_id!r}; if that is another trainer's, stop one of "
            "the two, or give each its own record_id"
        )

    def _fatal(self, reason: str) -> list[Effect]:
        self.phase, self._write = Phase.FATAL, None
        return [Step(self.leader, "Fatal", self._epoch, reason), Fatal(reason)]
