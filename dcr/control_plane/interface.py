"""What every control plane offers: the commit record K, its history, leases and the registry (DESIGN D1, D3, D16)."""

from dataclasses import dataclass
from typing import Protocol

from dcr.control_plane.lease import Lease
from dcr.protocol.errors import DcrError, RefusedError


@dataclass(frozen=True)
class Stored:
    """The record as the control plane holds it.

    Attributes:
        revision: 1 for the first write of a record, one more with every write; never reused.
        body: what the protocol encoded; opaque here.
        operation_id: the unique id of the write that made this revision.
    """

    revision: int
    body: bytes
    operation_id: str


@dataclass(frozen=True)
class HistoryEntry:
    """Who wrote one revision of the record, and why.

    Attributes:
        revision: the revision that the write made.
        operation_id: the unique id of the write.
        actor: who wrote.
        reason: why.
        time_s: the writer's wall clock, seconds since the epoch; for people, never for decisions.
        version: the committed version that the writer said the body holds; None where it said none.
        digest: the content digest of that version; empty where it said none.
    """

    revision: int
    operation_id: str
    actor: str
    reason: str
    time_s: float
    version: int | None = None
    digest: str = ""


@dataclass(frozen=True)
class ControlPlaneSettings:
    """Bounds of a control plane; every implementation keeps them.

    Attributes:
        record_bytes_max: largest record body, bytes.
        history_max: history entries kept per record; older ones are forgotten.
        registry_value_bytes_max: largest registry value, bytes.
        registry_entries_max: registry entries per record and kind.
        busy_timeout_s: longest wait for other users of the control plane, seconds.
    """

    record_bytes_max: int = 64 * 1024
    history_max: int = 1024
    registry_value_bytes_max: int = 4096
    registry_entries_max: int = 4096
    busy_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        bounds = (self.record_bytes_max, self.history_max, self.registry_value_bytes_max, self.registry_entries_max)
        if min(bounds) < 1 or self.busy_timeout_s <= 0:
            raise RefusedError(f"every bound of a control plane must be positive: {self}")


class ConflictError(DcrError):
    """The record is not at the expected revision; nothing was written.

    Attributes:
        current: the record as it was when the write was refused; None if there is none.
    """

    def __init__(self, message: str, current: Stored | None) -> None:
        super().__init__(message)
        self.current = current


class UnknownOutcomeError(DcrError):
    """A write may or may not have taken effect; resolve it by reading back (DESIGN D3).

    Attributes:
        operation_id: the write in doubt, for ``operation_revision``.
    """

    def __init__(self, message: str, operation_id: str) -> None:
        super().__init__(message)
        self.operation_id = operation_id


class ControlPlaneUnavailableError(DcrError):
    """The control plane could not be used; no write of the record took effect."""


class ControlPlane(Protocol):
    """The commit records of any number of trainers, and beside each a registry of who listens where.

    Usable from several threads at once.  Every method may raise ControlPlaneUnavailableError, and RefusedError for
    arguments beyond the bounds of ControlPlaneSettings or of ``check_text``.

    Attributes:
        leases: whether it keeps leases.  Where it does not, ``acquire``, ``renew``, ``release``, ``lease_left_s`` and a
            write that names a lease raise NoLeasesError, ``leader`` is always None, and something else must guarantee
            that one coordinator runs.  A second one tears nothing, for it writes by compare-and-set too: it overtakes
            the first.
    """

    leases: bool

    def read(self, record_id: str) -> Stored | None:
        """The record, or None while there is none.  Linearizable: sees every write acknowledged before the call."""
        ...

    def compare_and_set(
        self,
        record_id: str,
        expected_revision: int | None,
        body: bytes,
        *,
        operation_id: str,
        actor: str,
        reason: str,
        lease: Lease | None = None,
        version: int | None = None,
        digest: str = "",
    ) -> Stored:
        """Write the record if it is still at the expected revision, durably before returning.

        Repeating a write is safe: an operation that took effect is never done twice.

        Args:
            record_id: which record.
            expected_revision: the revision the caller read; None to create the record only if there is none.
            body: the new body, at most ``record_bytes_max`` bytes.
            operation_id: unique for this write; a repetition carries the same id and the same body.
            actor: who writes, for the history.
            reason: why, for the history.
            lease: write only while this lease is the record's, which is looked at in the same transaction; None to
                write whoever leads.
            version: committed version that the body holds, for the history: the body is opaque here.
            digest: content digest of that version, for the history.

        Returns:
            The record as written; for a repetition, the same again while that write is the current one.

        Raises:
            ConflictError: the record is elsewhere, or a repeated operation has been overtaken; carries the record.
            UnknownOutcomeError: the write may have taken effect.
            LeadershipLostError: the lease is not the record's any more.
            RefusedError: the operation id is the current one's, with another body.
        """
        ...

    def operation_revision(self, record_id: str, operation_id: str) -> int | None:
        """The revision that an operation made, or None if it is not in the history: the read-back of DESIGN D3.

        None proves nothing until a later compare-and-set of the caller has succeeded, and nothing about operations
        more than ``history_max`` revisions old.
        """
        ...

    def history(self, record_id: str, limit: int) -> list[HistoryEntry]:
        """The last writes, newest first, at most ``limit``."""
        ...

    def acquire(self, record_id: str, holder: str, lease_s: float, *, replaces: int | None = None) -> Lease:
        """Lead the record: every older lease of it is refused from here on (DESIGN D16).

        Args:
            record_id: which record; it need not be there.
            holder: who leads, a name new with every start.
            lease_s: how long to lead without a renewal, seconds; rounded up to whole ones.
            replaces: token of the lease to take over, whether or not it has run out; None only if nobody leads.

        Raises:
            LeaseHeldError: somebody leads, with another token than ``replaces``; carries who.
            NoLeasesError: no leases are kept here.
        """
        ...

    def renew(self, lease: Lease) -> None:
        """Lead for another ``lease_s``, counted from now.

        Raises:
            LeadershipLostError: the lease is not the record's any more.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Lead no more, so that the next one need not wait; fine if it ended already."""
        ...

    def leader(self, record_id: str) -> Lease | None:
        """The lease that is the record's now, or None."""
        ...

    def lease_left_s(self, lease: Lease) -> float:
        """Seconds until the lease ends if it is not renewed, as of now; 0 if it has ended.

        Raises:
            NoLeasesError: no leases are kept here.
        """
        ...

    def register(self, record_id: str, kind: str, name: str, value: bytes) -> None:
        """Set one registry entry; the last writer wins.  Safe to repeat after ControlPlaneUnavailableError."""
        ...

    def lookup(self, record_id: str, kind: str, name: str) -> bytes | None:
        """One registry entry, or None."""
        ...

    def registered(self, record_id: str, kind: str) -> dict[str, bytes]:
        """Every registry entry of a kind, value by name."""
        ...

    def unregister(self, record_id: str, kind: str, name: str) -> None:
        """Remove one registry entry; removing an absent one is fine."""
        ...

    def close(self) -> None:
        """Let go of files and connections; safe to repeat.  Any later call raises ControlPlaneUnavailableError."""
        ...


TEXT_CHARS_MAX = 200
"""Longest record id, operation id, actor, kind or name, in characters."""

REASON_CHARS_MAX = 4096
"""Longest reason of a write, in characters."""


def check_text(what: str, text: str, chars_max: int = TEXT_CHARS_MAX) -> None:
    """Raise RefusedError unless the text is printable, not empty and at most ``chars_max`` characters."""
    if not 0 < len(text) <= chars_max or not text.isprintable():
        raise RefusedError(f"{what} must be 1 to {chars_max} printable characters, not {text[:chars_max]!r}")


def check_write(
    settings: ControlPlaneSettings, record_id: str, body: bytes, operation: tuple[str, str, str], digest: str
) -> None:
    """Raise RefusedError unless the arguments of a compare-and-set are within bounds.

    Args:
        settings: the bounds.
        record_id: which record.
        body: the new body.
        operation: operation id, actor and reason.
        digest: content digest for the history, or empty.
    """
    operation_id, actor, reason = operation
    check_text("record id", record_id)
    check_text("operation id", operation_id)
    check_text("actor", actor)
    check_text("reason", reason, REASON_CHARS_MAX)
    if digest:
        check_text("digest", digest)
    if len(body) > settings.record_bytes_max:
        raise RefusedError(
            f"record {record_id}: a body of {len(body)} bytes exceeds record_bytes_max = {settings.record_bytes_max}; "
            f"history and payloads do not belong in the record"
        )


def check_entry(settings: ControlPlaneSettings, entry: tuple[str, str, str], value: bytes) -> None:
    """Raise RefusedError unless a registry entry (record id, kind, name) and its value are within bounds."""
    for what, text in zip(("record id", "kind", "name"), entry, strict=True):
        check_text(what, text)
    if len(value) > settings.registry_value_bytes_max:
        raise RefusedError(
            f"registry entry {'/'.join(entry)}: a value of {len(value)} bytes exceeds "
            f"registry_value_bytes_max = {settings.registry_value_bytes_max}"
        )
