"""The control plane of a deployment: one record, compare-and-set, answers that may get lost, and what K must obey."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dcr.protocol.coordinator_effects import WriteRecord
from dcr.protocol.record import CommitRecord, Direction, decode_record, encode_record


@dataclass
class Write:
    """A compare-and-set on its way."""

    order: WriteRecord
    awaited: bool = True
    """The coordinator that asked still waits for the answer."""


@dataclass
class Store:
    """K, its revision, and the operation that made it.

    ``on_commit`` is called with the record before and the record after, when a commit takes effect.
    """

    members_min: int
    on_commit: Callable[[CommitRecord, CommitRecord], None]
    record: CommitRecord | None = None
    revision: int | None = None
    operation_id: str = ""
    writes: list[Write] = field(default_factory=list)
    leaders: list[str] = field(default_factory=list)

    def take_effect(self, w: Write) -> bool:
        """Compare and set; True if K was as expected."""
        self.writes.remove(w)
        if self.revision != w.order.expected_revision:
            return False
        new = decode_record(encode_record(w.order.record))
        assert new == w.order.record
        self._check(self.record, new)
        self.record, self.operation_id = new, w.order.operation_id
        self.revision = 1 if self.revision is None else self.revision + 1
        return True

    def _check(self, old: CommitRecord | None, new: CommitRecord) -> None:
        if old is None:
            assert (new.version, new.epoch, new.open, new.committed) == (0, 0, None, None), "CreateRecord"
            return
        assert new.record_id == old.record_id, "MonotoneRecord: another record"
        assert new.version in (old.version, old.version + 1), "MonotoneRecord: version"
        assert new.epoch in (old.epoch, old.epoch + 1), "MonotoneRecord: epoch"
        assert new.fencing_token >= old.fencing_token, "MonotoneRecord: fencing token"
        assert new.leader == old.leader or new.fencing_token == old.fencing_token + 1, (
            "only a take-over changes leaders"
        )
        if new.open is not None and not new.open.stopped:
            assert len(new.members) >= self.members_min, "an attempt was opened with fewer than members_min"
        if new.open is not None and old.open is not None:
            assert new.open.candidate == old.open.candidate, "a transition changes its candidate"
            turned = (old.open.direction, new.open.direction) == (Direction.BACK, Direction.FORWARD)
            assert not turned, "a rollback is turned forward"
        if new.committed == old.committed:
            assert new.version == old.version, "only a commit makes a version"
            assert new.baseline_id == old.baseline_id, "MonotoneRecord: content of a committed version"
            if new.epoch == old.epoch:
                assert new.open == old.open, "a transition changes without a new epoch"
            return
        assert old.open is not None, "a commit without an open transition"
        assert not old.open.stopped, "a commit of a stopped transition"
        assert new.open is None
        assert new.epoch == old.epoch, "a commit of another epoch than the open one"
        c, before = new.committed, old.committed
        assert c is not None, "OneCommit: a commit is forgotten"
        assert (c.version, c.epoch, c.candidate) == (new.version, old.epoch, old.open.candidate)
        assert (c.owners, c.direction) == (old.open.owners, old.open.direction)
        if c.direction is Direction.BACK:
            assert (new.version, new.baseline_id) == (old.version, old.baseline_id), "a rollback changes the version"
        else:
            assert new.version == old.version + 1, "a commit that makes no version"
        assert before is None or c.epoch > before.epoch, "OneCommit: an epoch was committed twice"
        assert c.members == old.members == new.members, "a commit by others than the attempt required"
        assert len(c.members) >= self.members_min, "a commit with fewer than members_min"
        self.on_commit(old, new)
