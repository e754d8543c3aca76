"""The control plane: one record, compare-and-set, and writes whose answer may be late or lost."""

from collections.abc import Callable
from dataclasses import dataclass, field

from dcr.protocol.coordinator_effects import WriteRecord
from dcr.protocol.record import CommitRecord, decode_record, encode_record
from dcr.simulator.invariants import BrokenError, first_record, record_step


@dataclass(eq=False, slots=True)
class Write:
    """A compare-and-set on its way."""

    by: str
    order: WriteRecord
    awaited: bool = True
    """The coordinator that asked lives, and still waits for this answer."""


@dataclass
class Store:
    """K, its revision, and the operation that made it.

    Args:
        members_min: fewest members that an attempt may be opened with.
        on_write: called with K before and after, and the reason, when a compare-and-set takes effect.
    """

    members_min: int
    on_write: Callable[[CommitRecord | None, CommitRecord, str], None]
    record: CommitRecord | None = None
    revision: int | None = None
    operation_id: str = ""
    writes: list[Write] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    """Who made each revision."""

    def read(self) -> tuple[int | None, CommitRecord | None, str]:
        """(revision, K, operation) as a linearizable read finds them."""
        return (self.revision, self.record, self.operation_id)

    def take_effect(self, w: Write) -> bool:
        """Compare and set; True if K was as expected."""
        self.writes.remove(w)
        if self.revision != w.order.expected_revision:
            return False
        old, new = self.record, decode_record(encode_record(w.order.record))
        if new != w.order.record:
            raise BrokenError("RecordBytes", "K, read from its bytes, is another record")
        if old is None:
            first_record(new)
        else:
            record_step(old, new, w.order.reason, self.members_min)
        self.record, self.operation_id = new, w.order.operation_id
        self.revision = 1 if self.revision is None else self.revision + 1
        self.writers.append(w.by)
        self.on_write(old, new, w.order.reason)
        return True
