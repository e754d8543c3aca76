"""What a rank and a node live in: K as its leaders may change it, and the orders that were ever given.

Written from spec/tla/RefitCoordinator.tla: ``OpenAttempt``, ``RollBack``, ``OpenRestore``, ``Commit``, ``Stop``,
``Abandon``, ``TakeOver``.  Records are built field by field, not by the methods of ``CommitRecord``.  A leader here
opens attempts whatever the engine holds, as one does whose reports are old (``StaleReports``).
"""

from dataclasses import dataclass

import msgspec

from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload
from dcr.protocol.messages import Prepare
from dcr.protocol.record import CommitRecord, Committed, Direction, Member, OpenTransition, OwnerRef

ME, OTHER = "e", "f"
CELLS = {"a": "o0", "b": "o0", "c": "o1"}
"""Cells of storage, each with the owner that sends it."""
OWNERS = (OwnerRef("o0", 1), OwnerRef("o1", 1))
NARROW = {"a", "c"}
"""Cells that every candidate changes; those with an even number change no other."""
GARBAGE = -1
FIRST = dict.fromkeys(CELLS, 0)

Content = dict[str, int]


def number(value: int) -> str:
    return f"{value:032x}"


def share(owner: str, content: Content) -> int:
    """An owner's share of a content's digest: another content has another one."""
    return sum((v + 2) << (20 * i) for i, (cell, v) in enumerate(content.items()) if CELLS[cell] == owner)


def digest(content: Content) -> str:
    return number(sum(share(o.owner, content) for o in OWNERS))


def candidate_content(candidate: int, baseline: Content) -> Content:
    """``CandidateReady``: what this candidate's weights are."""
    return {p: candidate if p in NARROW or candidate % 2 else v for p, v in baseline.items()}


@dataclass(frozen=True)
class Payload:
    """One cell of one attempt, as it travels."""

    identity: PayloadIdentity
    cell: str
    old: int | None
    """What a relative one was made against; None for ``set``."""
    new: int

    @property
    def digest(self) -> str:
        return f"{self.cell}{self.old}{self.new}"


@dataclass(frozen=True)
class Order:
    """An attempt or restore session, and everything that its owners send."""

    prepare: Prepare
    payloads: tuple[Payload, ...]
    manifests: tuple[Manifest, ...]

    @property
    def epoch(self) -> int:
        return self.prepare.epoch

    @property
    def kind(self) -> Kind:
        return self.prepare.base.kind


def order_of(prepare: Prepare, weights: Content, tracker: Content) -> Order:
    """``Payloads`` and ``Seal`` of RefitOwner.tla."""
    base = prepare.base
    back = prepare.target == base.version
    sent = CELLS if base.kind in (Kind.DENSE, Kind.RESTORE) else [p for p in CELLS if weights[p] != tracker[p]]
    goal = tracker if back else weights
    payloads, manifests = [], []
    for o in prepare.owners:
        listed = []
        for p in (p for p in sent if CELLS[p] == o.owner):
            i = PayloadIdentity("policy", prepare.target, prepare.epoch, o.owner, o.incarnation, len(listed))
            one = Payload(i, p, tracker[p] if base.kind is Kind.RELATIVE else None, goal[p])
            payloads.append(one)
            listed.append(SealedPayload(i.sequence, one.digest, 1, 8))
        content = number(share(o.owner, goal))
        manifests.append(
            Manifest(
                "policy", prepare.target, prepare.epoch, o.owner, o.incarnation, base, tuple(listed), content, 1, 3
            )
        )
    return Order(prepare, tuple(payloads), tuple(manifests))


class World:
    """K, every K that ever was, and the orders to this engine by epoch."""

    def __init__(self, *, stage: bool) -> None:
        self.stage = stage
        self.incarnation = 1
        self.owners = OWNERS
        self.contents: list[Content] = [FIRST]
        """Of every committed version."""
        self.candidate = 0
        k = CommitRecord("policy", 0, 0, "c", 1, digest(FIRST), (Member(ME, 1),))
        self.ks = [k]
        self.orders: dict[int, Order] = {}

    @property
    def k(self) -> CommitRecord:
        return self.ks[-1]

    @property
    def baseline(self) -> Content:
        return self.contents[-1]

    @property
    def weights(self) -> Content:
        return candidate_content(self.candidate, self.baseline)

    @property
    def under_way(self) -> bool:
        return self.k.open is not None and not self.k.open.stopped

    @property
    def member(self) -> bool:
        return any(m.engine == ME for m in self.k.members)

    def _write(self, **fields: object) -> None:
        self.ks.append(msgspec.structs.replace(self.k, **fields))

    def open_attempt(self, kind: Kind, *, member: bool, back: bool = False) -> None:
        tr = self.k.open
        if tr is None:
            self.candidate += 1
        back = back or (tr is not None and tr.direction is Direction.BACK)
        attempts = 1 if tr is None else tr.attempts + 1
        kind = Kind.ABSOLUTE if back else Kind.RELATIVE if attempts == 1 and kind is Kind.ABSOLUTE else kind
        kind = Kind.ABSOLUTE if attempts > 1 and kind is Kind.RELATIVE else kind
        epoch, version = self.k.epoch + 1, self.k.version
        members = (Member(ME, self.incarnation),) if member else (Member(OTHER, 1),)
        direction = Direction.BACK if back else Direction.FORWARD
        self._write(
            epoch=epoch,
            members=members,
            open=OpenTransition(
                version + 1,
                f"w{self.candidate}",
                attempts,
                kind,
                self.owners,
                0,
                ("add",),
                direction=direction,
                pushes=(1,) * len(self.owners),
            ),
        )
        if member:
            held = "" if kind is Kind.DENSE else self.k.baseline_id
            base = Base(kind, version, held, f"w{self.candidate}")
            target = version if back else version + 1
            prepare = Prepare("policy", epoch, target, base, self.owners, self.incarnation, self.stage)
            self.orders[epoch] = order_of(prepare, self.weights, self.baseline)

    def open_restore(self, *, member: bool) -> None:
        version = self.k.version
        self._write(epoch=self.k.epoch + 1)
        if member:
            base = Base(Kind.RESTORE, version, self.k.baseline_id, "")
            prepare = Prepare("policy", self.k.epoch, version, base, self.owners, self.incarnation)
            self.orders[self.k.epoch] = order_of(prepare, self.weights, self.baseline)

    def commit(self, root: str) -> None:
        tr = self.k.open
        assert tr is not None
        assert not tr.stopped
        back = tr.direction is Direction.BACK
        if not back:
            self.contents.append(self.weights)
        version = len(self.contents) - 1
        self._write(
            version=version,
            baseline_id=digest(self.baseline),
            open=None,
            committed=Committed(
                version,
                self.k.epoch,
                tr.candidate,
                self.k.members,
                root,
                "op",
                tr.owners,
                tr.direction,
                tr.pushes,
            ),
        )

    def admit(self) -> None:
        self._write(members=tuple(sorted({*self.k.members, Member(ME, self.incarnation)})))

    def end(self, how: str) -> None:
        """Stop, abandon, or a new leader: each has an epoch of its own."""
        tr = self.k.open
        if how == "take over":
            self._write(epoch=self.k.epoch + 1, leader=f"{self.k.leader}c", fencing_token=self.k.fencing_token + 1)
        elif how == "stop" and self.under_way:
            self._write(epoch=self.k.epoch + 1, open=msgspec.structs.replace(tr, stopped=True))
        elif tr is not None:
            self._write(epoch=self.k.epoch + 1, open=None)
