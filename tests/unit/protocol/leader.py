"""A coordinator or a conductor alone, and what its peers would say to it."""

import hashlib
from typing import TYPE_CHECKING

import msgspec

from dcr.protocol.conductor import Conductor
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Fatal, ReadRecord, SendMember, SendOwner, StartTimer, WriteRecord
from dcr.protocol.identity import manifest_root
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
)
from dcr.protocol.step import Step

if TYPE_CHECKING:
    from dcr.protocol.record import CommitRecord

D0, D1, D2 = (f"{n:032x}" for n in (10, 11, 12))
V0 = StorageState(0, D0, ())


def token(version: int, push: int, incarnation: int = 1, owner: str = "o") -> str:
    """The candidate's name where one owner offers it: the same push, the same name, whoever leads (DESIGN D10)."""
    offered = hashlib.sha256(msgspec.msgpack.encode([[owner, incarnation, push]])).hexdigest()
    return f"v{version}-{offered[:16]}"


TORN = StorageState(0, D0, (token(1, 1),))


class Leader:
    """A coordinator with a control plane that answers at once; what it sends is kept until taken."""

    def __init__(self, owners: tuple[str, ...] = ("o",), name: str = "c1", **settings: object) -> None:
        self.c = self.role(owners, name, settings)
        self.revision: int | None = None
        self.record: CommitRecord | None = None
        self.sent: list = []
        self.reasons: list[str] = []
        self.timer = 0
        self.timers: list[StartTimer] = []
        self.steps: list[Step] = []
        self.fatal = ""
        self.hold_writes = False
        self.held: list[WriteRecord] = []

    def role(self, owners: tuple[str, ...], name: str, settings: dict) -> Conductor:
        return Coordinator("policy", name, owners, wire_version=0, **{"attempts_max": 3, **settings})

    def do(self, effects: list) -> None:
        for e in effects:
            match e:
                case ReadRecord():
                    self.do(self.c.record_read(self.revision, self.record, ""))
                case WriteRecord():
                    self.reasons.append(e.reason)
                    self.held.append(e)
                    if not self.hold_writes:
                        self.write()
                case SendMember() | SendOwner():
                    self.sent.append(e.order)
                case StartTimer():
                    self.timer = e.number
                    self.timers.append(e)
                case Fatal():
                    self.fatal = e.reason
                case Step():
                    self.steps.append(e)

    def write(self) -> None:
        w = self.held.pop()
        assert w.expected_revision == self.revision
        self.record, self.revision = w.record, (self.revision or 0) + 1
        self.do(self.c.written(w.operation_id, self.revision))

    def owner(self, report: object) -> None:
        self.do(self.c.owner_report(report))

    def member(self, report: object) -> None:
        self.do(self.c.member_report(report))

    def take(self) -> list:
        taken, self.sent = self.sent, []
        return taken

    @property
    def epoch(self) -> int:
        assert self.record is not None
        return self.record.epoch

    def expires(self) -> None:
        self.do(self.c.expired(self.timer))

    # what peers say

    def owner_joins(self, incarnation: int = 1, baseline: str = D0) -> None:
        self.owner(OwnerJoin("o", incarnation, 1, baseline))

    def joins(self, engine: str, state: StorageState = V0, incarnation: int = 1, **changes: object) -> None:
        join = Join(engine, incarnation, 1, 0, ("xor", "add"), state, (), {})
        self.member(msgspec.structs.replace(join, **changes))

    def push(self, number: int = 1) -> None:
        self.owner(CandidateReady("o", 1, number))

    def prepared(self, engine: str, state: StorageState = V0) -> None:
        self.member(Prepared(engine, 1, self.epoch, state))

    def staged(self, engine: str) -> None:
        self.member(Staged(engine, 1, self.epoch))

    def seals(self, content: str = D1, incarnation: int = 1) -> None:
        self.owner(Sealed("o", incarnation, self.epoch, "digest", content, 1, 8, 1, 3, {}))

    def acknowledged(self, engine: str, root: str = manifest_root({"o": "digest"})) -> None:
        self.member(Acknowledged(engine, 1, self.epoch, root, {}))

    def fails(self, engine: str, state: StorageState = TORN) -> None:
        self.member(AttemptFailed(engine, 1, self.epoch, "the loader raised", state))

    def folded(self, content: str = D1) -> None:
        self.owner(Folded("o", 1, self.epoch, content, "", {}))


class Bare(Leader):
    """A conductor: nothing happens but what a test does."""

    def role(self, owners: tuple[str, ...], name: str, settings: dict) -> Conductor:
        return Conductor("policy", name, owners, wire_version=0, **settings)


def leading(*engines: str, **settings: object) -> Leader:
    at = Leader(**settings)
    at.owner_joins()
    for e in engines:
        at.joins(e)
    at.take()
    return at


def attempting(*engines: str, **settings: object) -> Leader:
    at = leading(*engines, **settings)
    at.push()
    return at


def committed(*engines: str) -> Leader:
    at = attempting(*engines)
    for e in engines:
        at.prepared(e)
    at.seals()
    for e in engines:
        at.acknowledged(e)
    return at


def stopped(content: str) -> Leader:
    """A transition that stopped after its only attempt; with this content found, or none."""
    at = attempting("a", attempts_max=1)
    at.prepared("a")
    if content:
        at.seals(content)
    at.fails("a")
    assert at.reasons[-1] == "Stop"
    at.take()
    return at


def succeeding(old: Leader, **settings: object) -> Leader:
    """A new leader of the record that another one led; nobody has come to it yet."""
    at = Leader(name="c2", **settings)
    at.record, at.revision = old.record, old.revision
    return at
