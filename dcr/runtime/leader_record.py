"""The commit record as its leader reads and writes it: the role is told each answer of the control plane (D1, D3)."""

import logging
import threading
from collections.abc import Callable, Sequence

from dcr.control_plane.interface import (
    ConflictError,
    ControlPlane,
    ControlPlaneUnavailableError,
    Stored,
    UnknownOutcomeError,
)
from dcr.control_plane.lease import LeadershipLostError, Lease
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect, ReadRecord, WriteRecord
from dcr.protocol.errors import RefusedError
from dcr.protocol.leader import Phase
from dcr.protocol.record import CommitRecord, decode_record, encode_record
from dcr.runtime.leadership import why_lost

_log = logging.getLogger("dcr.coordinator")
_AGAIN_S = 0.2


class LeaderError(Exception):
    """This leader cannot lead on.

    Attributes:
        lost: because its lease is not the record's any more; otherwise the record cannot be read or written as it
            should be.
    """

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class LeaderRecord:
    """Everything is called from the thread of the role, but for the constructor.

    Args:
        control: where the record is.
        role: who leads it.
        lease: every write is held to it; None where none are kept.
        again: takes effects that are to be carried out once more.
        closing: set when nothing is to be tried again.
        before_attempt: called before a write that opens an attempt; the write waits while it cannot be done.
    """

    def __init__(
        self,
        control: ControlPlane,
        role: Coordinator,
        lease: Lease | None,
        again: Callable[[Sequence[Effect]], None],
        closing: threading.Event,
        *,
        before_attempt: Callable[[], None],
    ) -> None:
        self._control = control
        self._role = role
        self._lease = lease
        self._again = again
        self._closing = closing
        self._before_attempt = before_attempt

    def read(self) -> list[Effect]:
        """Carry out ``ReadRecord``; LeaderError if the record is none of this version of dcr."""
        try:
            stored = self._control.read(self._role.record_id)
        except ControlPlaneUnavailableError as e:
            return self._later(e, [ReadRecord()])
        if stored is None:
            return self._role.record_read(None, None, "")
        return self._role.record_read(stored.revision, self._decoded(stored), stored.operation_id)

    def look(self) -> list[Effect]:
        """Another leader may have taken K over while this one had nothing to write."""
        if self._role.record is None or self._role.phase is Phase.WRITING:
            return []
        try:
            stored = self._control.read(self._role.record_id)
        except ControlPlaneUnavailableError:
            return []
        if stored is None:
            return []
        return self._role.record_read(stored.revision, self._decoded(stored), stored.operation_id)

    def write(self, w: WriteRecord) -> list[Effect]:
        """Carry out ``WriteRecord``; LeaderError if the record is led by another, or the write is refused."""
        try:
            if w.reason == "OpenAttempt":
                self._before_attempt()
            stored = self._control.compare_and_set(
                self._role.record_id,
                w.expected_revision,
                encode_record(w.record),
                operation_id=w.operation_id,
                actor=self._role.leader,
                reason=w.reason,
                lease=self._lease,
                version=w.record.version,
                digest=w.record.baseline_id,
            )
        except ConflictError as e:
            found = e.current
            return self._role.conflict(
                w.operation_id, None if found is None else found.revision, "" if found is None else found.operation_id
            )
        except UnknownOutcomeError:
            return self._role.unknown(w.operation_id)
        except LeadershipLostError as e:
            raise LeaderError(why_lost(e), lost=True) from e
        except RefusedError as e:
            raise LeaderError(f"the record could not be written ({w.reason}): {e}") from e
        except ControlPlaneUnavailableError as e:
            return self._later(e, [w])
        return self._role.written(w.operation_id, stored.revision)

    def _decoded(self, stored: Stored) -> CommitRecord:
        try:
            return decode_record(stored.body)
        except RefusedError as e:
            raise LeaderError(f"record {self._role.record_id!r}, revision {stored.revision}: {e}") from e

    def _later(self, error: ControlPlaneUnavailableError, effects: list[Effect]) -> list[Effect]:
        """The control plane is away and nothing took effect: the same again, until it is back or we are closed."""
        _log.warning("coordinator %s waits for the control plane: %s", self._role.leader, error)
        if not self._closing.wait(_AGAIN_S):
            self._again(effects)
        return []
