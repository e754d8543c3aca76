"""The owners that a coordinator waits for: who sits where, with what baseline, and which push waits."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from dcr.protocol.messages import OwnerJoin
from dcr.protocol.record import OwnerRef
from dcr.protocol.session import digest_sum

_NAME_DIGITS = 16


@dataclass
class Seat:
    """One owner, as its last report left it."""

    incarnation: int = 0
    connected: bool = False
    baseline_digest: str = ""
    ready: int = 0
    """The push that waits for its outcome; 0 if none does."""
    refused: str = ""
    """Why the weights of that push may not become a version; empty if they may."""
    done: int = 0
    """The last push that got its outcome."""
    dense: bool = False
    """The push that waits asks for every element to be sent (DESIGN D14)."""

    def take(self, report: OwnerJoin) -> bool:
        """Seat this incarnation; True if it is another than sat here before."""
        restarted = self.incarnation not in (0, report.incarnation)
        self.incarnation = report.incarnation
        self.connected = True
        self.baseline_digest = report.baseline_digest
        if restarted:
            self.ready = self.done = 0
        return restarted


class Seats:
    """One seat for each owner's name."""

    def __init__(self, owners: Iterable[str]) -> None:
        self._seats = {name: Seat() for name in sorted(owners)}

    def __iter__(self) -> Iterator[tuple[str, Seat]]:
        return iter(self._seats.items())

    def __getitem__(self, owner: str) -> Seat:
        return self._seats[owner]

    def __contains__(self, owner: object) -> bool:
        return owner in self._seats

    @property
    def names(self) -> set[str]:
        """Every owner's name."""
        return set(self._seats)

    @property
    def missing(self) -> list[str]:
        """Owners without a connection."""
        return [name for name, seat in self if not seat.connected]

    @property
    def late(self) -> list[str]:
        """Owners that have not offered a candidate, while others have."""
        late = [name for name, seat in self if not seat.ready]
        return late if len(late) < len(self._seats) else []

    @property
    def ready(self) -> bool:
        """True when every owner has offered a candidate."""
        return all(seat.ready for _, seat in self)

    @property
    def refused(self) -> str:
        """Why what is offered may not become a version, by every owner that says so; empty if none does."""
        return "; ".join(seat.refused for _, seat in self if seat.ready and seat.refused)

    @property
    def dense(self) -> bool:
        """True if a push that waits asks for every element to be sent."""
        return any(seat.ready and seat.dense for _, seat in self)

    @property
    def pushes(self) -> tuple[int, ...]:
        """Which push of each owner waits, in the order of ``refs``; 0 where none does."""
        return tuple(seat.ready for _, seat in self)

    def waiting(self, owners: Iterable[OwnerRef], pushes: Iterable[int]) -> set[str]:
        """Owners that still wait with these pushes."""
        named = zip(owners, pushes, strict=True)
        return {
            o.owner
            for o, push in named
            if push and o.owner in self and (self[o.owner].incarnation, self[o.owner].ready) == (o.incarnation, push)
        }

    def took_back(self, owners: Iterable[OwnerRef], pushes: Iterable[int]) -> bool:
        """True if one that still waits with these pushes says by now that its weights may not become a version."""
        return any(self[name].refused for name in self.waiting(owners, pushes))

    def took_part(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """(incarnation, push) that these owners wait with."""
        return {name: (self[name].incarnation, self[name].ready) for name in names}

    @property
    def candidate(self) -> str:
        """Names the weights that the owners offer: the same pushes have the same name, whoever leads (DESIGN D10)."""
        offered = [(name, seat.incarnation, seat.ready) for name, seat in self]
        return hashlib.sha256(msgspec.msgpack.encode(offered)).hexdigest()[:_NAME_DIGITS]

    @property
    def refs(self) -> tuple[OwnerRef, ...]:
        """Every owner as its present incarnation."""
        return tuple(OwnerRef(name, seat.incarnation) for name, seat in self)

    @property
    def baseline_total(self) -> str:
        """Content digest of the whole baseline; empty if an owner has none."""
        return digest_sum([seat.baseline_digest for _, seat in self])
