"""What a coordinator asks its shell to do."""

from dataclasses import dataclass

from dcr.protocol.messages import Order
from dcr.protocol.record import CommitRecord
from dcr.protocol.step import Step


@dataclass(frozen=True)
class ReadRecord:
    """Read K and answer ``record_read``."""


@dataclass(frozen=True)
class WriteRecord:
    """Compare-and-set K from this revision (None: create it); answer ``written``, ``conflict`` or ``unknown``."""

    record: CommitRecord
    expected_revision: int | None
    operation_id: str
    reason: str


@dataclass(frozen=True)
class SendMember:
    """Send an order to an engine's node; losing it is allowed."""

    engine: str
    order: Order


@dataclass(frozen=True)
class SendOwner:
    """Send an order to an owner; losing it is allowed."""

    owner: str
    order: Order


@dataclass(frozen=True)
class StartTimer:
    """Call ``expired(number)`` after the time-out of that name, unless a later timer was started meanwhile."""

    name: str
    number: int
    times: int = 1
    """So many times as long."""


@dataclass(frozen=True)
class Fatal:
    """This coordinator leads no more, or never can; it does nothing after this."""

    reason: str


Effect = Step | ReadRecord | WriteRecord | SendMember | SendOwner | StartTimer | Fatal
