"""What a leader leaves beside the payloads of an epoch that it commits, so that later engines can read them (D15).

K holds the last commit alone.  Each of these objects names the epoch of the commit before, so that whoever has read K
finds the payloads of the versions before it, one after the other, for as long as they are kept.  It goes with them.
"""

from typing import Self

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Prepare
from dcr.protocol.record import RECORD_BYTES_MAX, CommitRecord, Committed, OwnerRef

FORMAT = 1
BYTES_MAX = 2 * RECORD_BYTES_MAX
"""It holds less than K: what K says of one commit, and what its payloads were made against."""


class CommittedAttempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One epoch that was committed.  Left before the commit: it is one only if K, or a later one, names its epoch."""

    format: int
    record_id: str
    epoch: int
    target: int
    """The version that it was committed as; that of the base for a rollback."""
    content_digest: str
    """Of that version."""
    base: Base
    """What its payloads were made against."""
    base_digest: str
    """Content digest of the version before; a dense attempt's base has none."""
    owners: tuple[OwnerRef, ...]
    manifest_root: str
    before: int
    """The epoch that was committed before; 0 if none was."""

    def __post_init__(self) -> None:
        if self.before >= self.epoch:
            raise ValueError(f"epoch {self.before} was committed before epoch {self.epoch}")

    @classmethod
    def of(cls, before: CommitRecord, after: CommitRecord) -> Self:
        """From K before the commit and after it."""
        tr, c = before.open, after.committed
        assert tr is not None
        assert c is not None
        base_id = "" if tr.kind is Kind.DENSE else before.baseline_id
        return cls(
            FORMAT,
            after.record_id,
            c.epoch,
            c.version,
            after.baseline_id,
            Base(tr.kind, before.version, base_id, tr.candidate),
            before.baseline_id,
            c.owners,
            c.manifest_root,
            0 if before.committed is None else before.committed.epoch,
        )

    @property
    def back(self) -> bool:
        """Whether it was a rollback, which keeps version and content (DESIGN D17)."""
        return self.target == self.base.version

    def order(self, incarnation: int) -> Prepare:
        """The order that its members were given, for this incarnation of an engine."""
        return Prepare(self.record_id, self.epoch, self.target, self.base, self.owners, incarnation)

    def opened(self) -> CommitRecord:
        """K as the attempt found it, as far as a receiver looks at it."""
        return CommitRecord(self.record_id, self.base.version, self.epoch, "", 0, self.base_digest)

    def committed(self) -> CommitRecord:
        """K as the commit left it, as far as a receiver looks at it."""
        c = Committed(self.target, self.epoch, self.base.candidate, (), self.manifest_root, "")
        return CommitRecord(self.record_id, self.target, self.epoch, "", 0, self.content_digest, committed=c)

    def encode(self) -> bytes:
        """The object's bytes."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read an object; RefusedError if it is none of this version of dcr."""
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError as e:
            raise RefusedError(f"not what a leader leaves of a commit: {e}") from e
        if found.format != FORMAT:
            raise RefusedError(f"a commit of format {found.format}; this version of dcr reads {FORMAT}")
        return found  # type: ignore[return-value]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(CommittedAttempt)
