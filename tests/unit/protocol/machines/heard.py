"""What a leader has heard from owners and engines, the newest word of each; and a store that compares and sets."""

from dataclasses import dataclass, field

from dcr.protocol.identity import Kind
from dcr.protocol.messages import (
    Acknowledged,
    AttemptFailed,
    CandidateReady,
    Folded,
    Join,
    OwnerJoin,
    Prepared,
    Sealed,
    Staged,
    StorageState,
    Withdraw,
)
from dcr.protocol.record import CommitRecord, Direction, Member, OwnerRef

OWNERS = ("o0", "o1")


def share(owner: str, version: int) -> str:
    """An owner's share of a version's content digest."""
    return f"{16 * version + OWNERS.index(owner) + 1:032x}"


def total(version: int) -> str:
    return f"{sum(int(share(o, version), 16) for o in OWNERS):032x}"


class Store:
    """The control plane: K, its revision, and the operation that made it."""

    def __init__(self) -> None:
        self.record: CommitRecord | None = None
        self.revision: int | None = None
        self.operation_id = ""

    def put(self, record: CommitRecord, operation_id: str) -> None:
        self.record, self.operation_id = record, operation_id
        self.revision = (self.revision or 0) + 1


@dataclass
class HeardOwner:
    incarnation: int = 0
    connected: bool = False
    digest: str = ""
    waits: int = 0


@dataclass
class HeardEngine:
    incarnation: int
    state: StorageState
    connected: bool = True


@dataclass
class Heard:
    """Reports of dead incarnations do not count (D9); those of another epoch count for that epoch alone."""

    owners: dict[str, HeardOwner] = field(default_factory=lambda: {o: HeardOwner() for o in OWNERS})
    engines: dict[str, HeardEngine] = field(default_factory=dict)
    sealed: dict[tuple[str, int, int], Sealed] = field(default_factory=dict)
    prepared: set[tuple[str, int]] = field(default_factory=set)
    staged: set[tuple[str, int]] = field(default_factory=set)
    acknowledged: set[tuple[str, int]] = field(default_factory=set)
    acked: dict[tuple[Member, int], str] = field(default_factory=dict)
    over: set[tuple[Member, int]] = field(default_factory=set)
    """Who acknowledged or failed what."""
    folded: set[tuple[str, int, int]] = field(default_factory=set)
    waited: bool = False
    """A time-out ran out."""

    # ------------------------------------------------------------ reports

    def of_owner(self, r, k: CommitRecord | None) -> None:
        o = self.owners[r.owner]
        if isinstance(r, OwnerJoin):
            if o.incarnation != r.incarnation:
                o.waits = 0
            o.incarnation, o.connected, o.digest = r.incarnation, True, r.baseline_digest
        if r.incarnation != o.incarnation:
            return
        match r:
            case CandidateReady():
                o.waits = r.push
            case Withdraw():
                o.waits = 0 if o.waits == r.push else o.waits
            case Sealed():
                self.sealed.setdefault((r.owner, r.incarnation, r.epoch), r)
            case Folded():
                c = None if k is None else k.committed
                if c is not None and r.epoch == c.epoch and OwnerRef(r.owner, r.incarnation) in c.owners:
                    o.digest = r.baseline_digest
                    self.folded.add((r.owner, r.incarnation, r.epoch))

    def owner_lost(self, owner: str, incarnation: int) -> None:
        if self.owners[owner].incarnation == incarnation:
            self.owners[owner].connected = False

    def of_member(self, r, k: CommitRecord | None) -> None:
        if isinstance(r, Join):
            self.engines[r.engine] = HeardEngine(r.incarnation, r.state)
            if k is not None and self.holds(Member(r.engine, r.incarnation), k):
                self.engines[r.engine].state = StorageState(k.version, k.baseline_id, ())
            return
        e, m = self.engines.get(r.engine), Member(r.engine, r.incarnation)
        if e is None or e.incarnation != r.incarnation:
            return
        match r:
            case Prepared():
                e.state = r.state
                self.prepared.add((r.engine, r.epoch))
            case Staged():
                self.staged.add((r.engine, r.epoch))
            case Acknowledged():
                self.acknowledged.add((r.engine, r.epoch))
                self.acked[m, r.epoch] = r.manifest_root
                self.over.add((m, r.epoch))
                if k is not None and k.open is None and k.epoch == r.epoch:
                    e.state = StorageState(k.version, k.baseline_id, ())
            case AttemptFailed():
                e.state = r.state
                self.over.add((m, r.epoch))

    def engine_lost(self, engine: str, incarnation: int) -> None:
        e = self.engines.get(engine)
        if e is not None and e.incarnation == incarnation:
            e.connected = False

    def committed(self, k: CommitRecord) -> None:
        """Who acknowledged it holds it."""
        self.waited = False
        for m in k.committed.members:
            e = self.engines.get(m.engine)
            if e is not None and e.incarnation == m.incarnation:
                e.state = StorageState(k.version, k.baseline_id, ())

    # ------------------------------------------------------------ what follows

    def holds(self, m: Member, k: CommitRecord) -> bool:
        """``Holds``, by its last word."""
        s = self.engines[m.engine].state
        loaded = s.version is None and s.content_digest == k.baseline_id
        return s.clean and (s.version == k.version or loaded)

    def admits(self, m: Member, k: CommitRecord, kind: Kind, candidate: str) -> bool:
        """``Admits``: it is there, as this incarnation, and can take payloads of this kind."""
        e = self.engines.get(m.engine)
        if e is None or not e.connected or e.incarnation != m.incarnation:
            return False
        repairs = e.state.version == k.version and set(e.state.torn_by) <= {candidate}
        return kind is Kind.DENSE or self.holds(m, k) or (kind is Kind.ABSOLUTE and repairs)

    def incarnation(self, engine: str) -> int:
        return self.engines[engine].incarnation

    def engine_is_connected(self, engine: str) -> bool:
        return engine in self.engines and self.engines[engine].connected

    def owner_incarnation(self, owner: str) -> int:
        return self.owners[owner].incarnation

    def is_connected(self, owner: str) -> bool:
        return self.owners[owner].connected

    def all_connected(self) -> bool:
        return all(o.connected for o in self.owners.values())

    def waits(self, owner: str) -> int:
        return self.owners[owner].waits

    def refs(self) -> tuple[OwnerRef, ...]:
        return tuple(OwnerRef(name, o.incarnation) for name, o in self.owners.items())

    def digests(self) -> list[str]:
        return [o.digest for o in self.owners.values()]

    def baseline(self) -> str:
        """Content digest of the whole baseline, by what the owners said; empty if one has none."""
        found = self.digests()
        return f"{sum(int(d, 16) for d in found):032x}" if all(found) else ""

    def owing(self, k: CommitRecord | None) -> list[str]:
        """``OwesFold``."""
        c = None if k is None else k.committed
        if c is None or c.direction is Direction.BACK:
            return []
        here = set(self.refs())
        return [o.owner for o in c.owners if o in here and (o.owner, o.incarnation, c.epoch) not in self.folded]
