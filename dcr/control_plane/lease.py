"""Leading a record for as long as one says so: a lease with a fencing token (DESIGN D16)."""

from dataclasses import dataclass, field

from dcr.protocol.errors import DcrError, RefusedError

LEASE_S_MIN, LEASE_S_MAX = 1.0, 3600.0
"""Shortest and longest lease, seconds."""


@dataclass(frozen=True)
class Lease:
    """Leadership of one record, as the control plane granted it.

    Attributes:
        record_id: of which record.
        holder: who leads.
        token: the fencing token; greater with every lease of a record, never reused.
        lease_s: how long it holds without a renewal, seconds.
        handle: what the control plane knows it by; nobody else's business.
    """

    record_id: str
    holder: str
    token: int
    lease_s: float
    handle: int = field(default=0, repr=False, compare=False)

    def __str__(self) -> str:
        return f"lease {self.token} of record {self.record_id} held by {self.holder}"


class LeaseHeldError(DcrError):
    """Somebody else leads the record; nothing was changed.

    Attributes:
        current: the lease that stands in the way; None if it ended meanwhile.
    """

    def __init__(self, message: str, current: Lease | None = None) -> None:
        super().__init__(message)
        self.current = current


class LeadershipLostError(DcrError):
    """A lease is not the record's any more; nothing was written.

    Attributes:
        current: the lease that is the record's now; None if it just ended.
    """

    def __init__(self, message: str, current: Lease | None = None) -> None:
        super().__init__(message)
        self.current = current


class NoLeasesError(RefusedError):
    """The control plane keeps records and no leases: something else must see to it that one coordinator runs."""


def lost(lease: Lease, current: Lease | None) -> LeadershipLostError:
    """The error of a lease that is not the record's any more; ``current`` is the one that is."""
    why = "it ran out or was given up" if current is None else f"{current.holder} leads now, with token {current.token}"
    return LeadershipLostError(f"{lease}: {why}; what it writes is refused", current)


def held(record_id: str, current: Lease | None) -> LeaseHeldError:
    """The error of who wanted to lead a record that ``current`` leads."""
    by = "another one was faster" if current is None else f"{current.holder} leads it, with token {current.token}"
    return LeaseHeldError(
        f"record {record_id}: {by}; wait until that lease ends, or take it over by its token", current
    )


def check_lease_s(lease_s: float) -> None:
    """Raise RefusedError unless a lease may be so long."""
    if not LEASE_S_MIN <= lease_s <= LEASE_S_MAX:
        raise RefusedError(f"a lease must be of {LEASE_S_MIN:.0f} to {LEASE_S_MAX:.0f} seconds, not {lease_s}")


def check_lease_of(lease: Lease | None, record_id: str) -> None:
    """Raise RefusedError if a lease is another record's."""
    if lease is not None and lease.record_id != record_id:
        raise RefusedError(f"record {record_id}: {lease} is of another record")
