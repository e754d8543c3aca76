"""The commit record K: what it holds, how it is written down, and the only ways in which it may change (DESIGN D1).

Every function below that returns a record is one kind of compare-and-set.  They are pure: the control plane stores
the result if, and only if, K is still what the function was given.
"""

import enum
from typing import Self

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind

RECORD_BYTES_MAX = 65536


def _check_pushes(owners: tuple["OwnerRef", ...], pushes: tuple[int, ...]) -> None:
    if len(pushes) != len(owners):
        raise ValueError(f"{len(pushes)} pushes of {len(owners)} owners")


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """An engine, as the incarnation that holds its storage."""

    engine: str
    incarnation: int


class OwnerRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """An owner, as the incarnation that holds its share of the baseline."""

    owner: str
    incarnation: int


class Direction(enum.StrEnum):
    """Which way an open transition goes (DESIGN D17)."""

    FORWARD = "forward"
    """To the candidate."""
    BACK = "back"
    """Back to the committed version: torn members get the baseline's bits.  Never turned forward again."""


class OpenTransition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transition that is neither committed nor abandoned, as its latest attempt left it."""

    target: int
    candidate: str
    """Token that names the candidate weights (DESIGN D10)."""
    attempts: int
    kind: Kind
    owners: tuple[OwnerRef, ...]
    wire_version: int
    operations: tuple[str, ...]
    """What every member offered; relative payloads use the first one."""
    content_digest: str = ""
    """The candidate's content digest once an attempt has found it; a retry that finds another one fails."""
    stopped: bool = False
    """No attempt is under way and none follows by itself (DESIGN D14)."""
    direction: Direction = Direction.FORWARD
    pushes: tuple[int, ...] = ()
    """Which push of each owner offers the candidate, in the order of ``owners``, as the last attempt was opened."""

    def __post_init__(self) -> None:
        _check_pushes(self.owners, self.pushes)


class Committed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last commit; only the next one replaces it."""

    version: int
    epoch: int
    candidate: str
    members: tuple[Member, ...]
    manifest_root: str
    operation_id: str
    owners: tuple[OwnerRef, ...] = ()
    """Whose seals were committed: an owner folds its own seal only (DESIGN D13)."""
    direction: Direction = Direction.FORWARD
    pushes: tuple[int, ...] = ()
    """Which push of each owner ended so, in the order of ``owners``: whoever still waits with it is told (D16)."""

    def __post_init__(self) -> None:
        _check_pushes(self.owners, self.pushes)


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """K.  ``members`` are the engines that the open attempt requires or, when none is open, those admitted."""

    record_id: str
    version: int
    epoch: int
    leader: str
    fencing_token: int
    baseline_id: str
    """Content digest of the committed version (DESIGN D2)."""
    members: tuple[Member, ...] = ()
    open: OpenTransition | None = None
    committed: Committed | None = None

    @classmethod
    def create(cls, record_id: str, leader: str, baseline_id: str) -> Self:
        """CreateRecord: version 0, by the first leader, if K is absent."""
        return cls(record_id=record_id, version=0, epoch=0, leader=leader, fencing_token=1, baseline_id=baseline_id)

    def take_over(self, leader: str) -> "CommitRecord":
        """TakeOver: a leader writes itself in; every older leader's compare-and-set fails from here on."""
        return msgspec.structs.replace(self, leader=leader, fencing_token=self.fencing_token + 1, epoch=self.epoch + 1)

    def open_attempt(self, transition: OpenTransition, members: tuple[Member, ...]) -> "CommitRecord":
        """OpenAttempt: a new epoch, counted in K before any payload leaves an owner (DESIGN D4)."""
        before = 0 if self.open is None else self.open.attempts
        assert transition.target == self.version + 1
        assert transition.attempts == before + 1
        assert self.open is None or self.open.candidate == transition.candidate
        assert self.open is None or self.open.direction is not Direction.BACK or transition.direction is Direction.BACK
        assert members
        return msgspec.structs.replace(self, epoch=self.epoch + 1, open=transition, members=tuple(sorted(members)))

    def commit(self, content_digest: str, manifest_root: str, operation_id: str) -> "CommitRecord":
        """Commit: the candidate becomes the committed version and the baseline of the next delta (DESIGN D11).

        The commit of a rollback keeps the version: what it brought back is the baseline (DESIGN D17).
        """
        assert self.open is not None
        assert not self.open.stopped
        assert self.members
        back = self.open.direction is Direction.BACK
        assert not back or content_digest == self.baseline_id
        version = self.version if back else self.open.target
        committed = Committed(
            version=version,
            epoch=self.epoch,
            candidate=self.open.candidate,
            members=self.members,
            manifest_root=manifest_root,
            operation_id=operation_id,
            owners=self.open.owners,
            direction=self.open.direction,
            pushes=self.open.pushes,
        )
        return msgspec.structs.replace(
            self, version=version, baseline_id=content_digest, open=None, committed=committed
        )

    def stop(self, content_digest: str) -> "CommitRecord":
        """Stop: fences the last attempt; clean members may go on serving the committed version (DESIGN D14).

        Args:
            content_digest: the candidate's, if an attempt has found it: what a resumed push is held to (D10).
        """
        assert self.open is not None
        found = self.open.content_digest or content_digest
        stopped = msgspec.structs.replace(self.open, stopped=True, content_digest=found)
        return msgspec.structs.replace(self, epoch=self.epoch + 1, open=stopped)

    def abandon(self) -> "CommitRecord":
        """Abandon: clears the transition and bumps the epoch before anyone is told (DESIGN D17)."""
        assert self.open is not None
        return msgspec.structs.replace(self, epoch=self.epoch + 1, open=None)

    def open_restore(self) -> "CommitRecord":
        """OpenRestore: a fresh epoch for a restore session; K otherwise stays as it is (DESIGN D15)."""
        assert self.open is None
        return msgspec.structs.replace(self, epoch=self.epoch + 1)

    def admit(self, members: tuple[Member, ...]) -> "CommitRecord":
        """Admit: engines that hold the committed version join, while no transition is open (DESIGN D15)."""
        assert self.open is None
        engines = {m.engine for m in members}
        kept = tuple(m for m in self.members if m.engine not in engines)
        return msgspec.structs.replace(self, members=tuple(sorted(kept + members)))


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(CommitRecord)


def encode_record(record: CommitRecord) -> bytes:
    """K's bytes; RefusedError if there are more than RECORD_BYTES_MAX of them."""
    data = _encoder.encode(record)
    if len(data) > RECORD_BYTES_MAX:
        raise RefusedError(
            f"commit record {record.record_id}: {len(data)} bytes, at most {RECORD_BYTES_MAX} are allowed; "
            f"it names {len(record.members)} members: use shorter engine names or fewer engines to a record"
        )
    return data


def decode_record(data: bytes) -> CommitRecord:
    """Read K; RefusedError if the bytes are no commit record of this version of dcr."""
    if len(data) > RECORD_BYTES_MAX:
        raise RefusedError(f"a commit record of {len(data)} bytes was refused: at most {RECORD_BYTES_MAX} are allowed")
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"these bytes are no commit record that this version of dcr can read: {e}") from e
