"""A deployment of the pure roles in one place: what the specification's environment does is done here, nothing else.

The roles decide; the world keeps what they said (messages stay for ever, as in the specification), the commit record,
and the bits: baselines, weights, resident storage.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcr.modelcheck.replay.content import GARBAGE, Content, digest
from dcr.modelcheck.values import State
from dcr.protocol import coordinator_effects as ce
from dcr.protocol import node as node_role
from dcr.protocol import owner as owner_role
from dcr.protocol import receiver as receiver_role
from dcr.protocol.conductor import Conductor
from dcr.protocol.identity import Kind, Manifest, PayloadIdentity, SealedPayload
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Emit, OpenApply, Prepare, Sealed, StorageState
from dcr.protocol.node import Node
from dcr.protocol.owner import Owner
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, Receiver
from dcr.protocol.record import CommitRecord, Direction, Member
from dcr.protocol.step import Step

RECORD = "policy"
WIRE_VERSION = 1

Rank = tuple[str, str]
"""(engine, rank)."""


@dataclass(frozen=True)
class Setting:
    """The constants of the model that a trace comes from."""

    owner_of: dict[str, str]
    kinds: frozenset[str]
    members_min: int
    attempts_max: int
    asynchronous: bool
    stale_reports: bool
    reload: bool

    @property
    def absolute_first(self) -> bool:
        """The first attempt may be absolute: relative payloads are not used."""
        return "relative" not in self.kinds

    @classmethod
    def of(cls, initial: State) -> "Setting":
        """From a trace's first state."""
        s: Any = initial["setting"]
        return cls(
            owner_of=dict(s["owner_of"]),
            kinds=s["kinds"],
            members_min=min(map(len, s["enough"])),
            attempts_max=s["attempts"],
            asynchronous=s["async"],
            stale_reports=s["stale_reports"],
            reload=s["reload"],
        )


@dataclass(frozen=True)
class Payload:
    """One cell on its way from an owner."""

    identity: PayloadIdentity
    order: Emit
    cell: str
    operation: str
    old: int
    new: int

    @property
    def digest(self) -> str:
        """Stands for the digest of its bytes."""
        return f"{self.cell} {self.operation} {self.old} {self.new}"


@dataclass(frozen=True)
class Writing:
    """A payload that a rank is writing, and what its cell will hold."""

    payload: Payload
    result: int


@dataclass
class Order:
    """The orders that a leader sent for one epoch."""

    prepares: dict[str, Prepare] = field(default_factory=dict)
    emits: dict[str, Emit] = field(default_factory=dict)


@dataclass
class Messages:
    """Everything that was ever said; nothing is taken away, so nothing is ever too late or said once only."""

    orders: dict[int, Order] = field(default_factory=dict)
    applies: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    payloads: list[Payload] = field(default_factory=list)
    manifests: dict[tuple[int, str, int], Manifest] = field(default_factory=dict)
    prepared: set[tuple[int, str, str, int]] = field(default_factory=set)
    acks: dict[tuple[int, str, str, int], str] = field(default_factory=dict)
    """(epoch, engine, rank, incarnation) -> root."""
    sealed: list[Sealed] = field(default_factory=list)
    engines_failed: list[tuple[int, str, int]] = field(default_factory=list)
    owners_failed: list[tuple[int, str, int]] = field(default_factory=list)


@dataclass
class LateWrite:
    """A compare-and-set whose answer was lost and that may still take effect."""

    by: str
    write: ce.WriteRecord
    revision: int


class World:
    """The deployment, as a trace's first state has it.

    Args:
        initial: the first state of a trace of ``RefitTraces.tla``.
    """

    def __init__(self, initial: State) -> None:
        s: Any = initial
        self.setting = Setting.of(initial)
        self.cells = sorted(s["tracker"])
        self.engines = sorted(s["node"])
        self.ranks = sorted(next(iter(s["rank"].values())))
        self.owners = sorted(s["own"])
        self.leader = s["K"]["leader"]
        self.baseline: Content = dict.fromkeys(self.cells, 0)
        self.weights: Content = dict.fromkeys(self.cells, 0)
        first = digest(self.baseline, self.cells)
        self._contents = {first: dict(self.baseline)}
        self.sealed_bits: dict[tuple[int, str, int], Content] = {}
        self.record = CommitRecord(
            RECORD, 0, 0, self.leader, 1, first, members=tuple(Member(e, 1) for e in self.engines)
        )
        self.revision = 1
        self.reason = "CreateRecord"
        self.operation = "create"
        self.late: list[LateWrite] = []
        self.said = Messages()
        self.candidate = 0
        self.push_over = True
        self.pushes = 0
        self.tokens: dict[str, int] = {"": 0}
        self.coordinators = {c: self._coordinator(c) for c in sorted(s["coord"])}
        self.owner: dict[str, Owner] = {}
        for o in self.owners:
            self.owner[o] = Owner(o, 1, RECORD, self.share(o, self.baseline), base=0)
        self.emission: dict[str, Emit] = {}
        self.fold: dict[str, owner_role.FoldBaseline] = {}
        self.node: dict[str, Node] = {}
        self.receiver: dict[Rank, Receiver] = {}
        self.storage: dict[Rank, Content] = {}
        self.writing: dict[Rank, Writing] = {}
        self.handed: dict[Rank, PrepareRank] = {}
        self.synchronising: dict[Rank, int] = {}
        self.gate_epoch: dict[str, int] = {}
        self.prepared_state: dict[tuple[int, str, int], StorageState] = {}
        for e in self.engines:
            self.start_engine(e, 1, self.baseline)
            states = self.learn(e)
            self.node[e].learned(self.record, states)
            self.node[e].gate_ready(0)

    # ------------------------------------------------------------ parties

    def _coordinator(self, name: str) -> Conductor:
        c = Conductor(
            RECORD,
            name,
            self.owners,
            wire_version=WIRE_VERSION,
            members_min=self.setting.members_min,
            restores_max=1 << 30,  # how patient a leader is with an engine is its policy's business
            gate_mode="async" if self.setting.asynchronous else "sync",
        )
        if name == self.leader:
            c.record, c.revision, c.phase = self.record, self.revision, Phase.IDLE
        return c

    def start_engine(self, engine: str, incarnation: int, checkpoint: Content | None) -> None:
        """An engine's process starts: gate closed, storage as a checkpoint has it or as nothing at all."""
        self.node[engine] = Node(engine, incarnation, RECORD, tuple(self.ranks))
        content = checkpoint or dict.fromkeys(self.cells, GARBAGE)
        held = digest(content, self.cells) if checkpoint else ""
        for r in self.ranks:
            self.storage[engine, r] = dict(content)
            self.receiver[engine, r] = Receiver(engine, RECORD, held)
            self.writing.pop((engine, r), None)
            self.handed.pop((engine, r), None)
            self.synchronising.pop((engine, r), None)

    def start_owner(self, owner: str, incarnation: int) -> None:
        """An owner's process starts without a baseline."""
        self.owner[owner] = Owner(owner, incarnation, RECORD, "")
        if not self.push_over:  # it pushes again, and the others still wait: another candidate
            self.candidate += 1
        self.emission.pop(owner, None)
        self.fold.pop(owner, None)

    def content(self, content_digest: str) -> Content:
        """The content that a digest in K stands for.

        Raises:
            AssertionError: it is none that owners ever sealed.
        """
        if content_digest not in self._contents:
            for epoch in {epoch for epoch, _, _ in self.sealed_bits}:
                shares = [[b for (x, y, _), b in self.sealed_bits.items() if (x, y) == (epoch, o)] for o in self.owners]
                for seals in itertools.product(*shares):
                    whole = {c: value for bits in seals for c, value in bits.items()}
                    self._contents[digest(whole, self.cells)] = whole
        assert content_digest in self._contents, f"K names a content that nobody sealed: {content_digest}"
        return self._contents[content_digest]

    def mine(self, owner: str) -> list[str]:
        """The cells of an owner."""
        return [c for c in self.cells if self.setting.owner_of[c] == owner]

    def push(self) -> None:
        """Every rank of the trainer calls push: the weights are a candidate."""
        self.candidate += 1
        self.pushes += 1
        self.push_over = False

    def prepare_order(self, engine: str, epoch: int) -> Prepare | None:
        """The order to prepare this epoch that was sent to an engine, whatever incarnation it meant."""
        order = self.said.orders.get(epoch)
        return None if order is None else order.prepares.get(engine)

    def staging(self, engine: str, epoch: int) -> bool:
        """Whether an engine was ordered to stage this epoch before it may write."""
        order = self.prepare_order(engine, epoch)
        return order is not None and order.stage

    def payload(self, epoch: int, owner: str, incarnation: int, cell: str) -> Payload:
        """The payload of this name."""
        (found,) = [
            p
            for p in self.said.payloads
            if (p.identity.epoch, p.identity.owner, p.identity.owner_incarnation, p.cell)
            == (epoch, owner, incarnation, cell)
        ]
        return found

    def share(self, owner: str, content: Content) -> str:
        """An owner's share of a content's digest."""
        return digest(content, self.mine(owner))

    # ------------------------------------------------------------ the control plane

    def compare_and_set(self, by: str, w: ce.WriteRecord) -> list[ce.Effect]:
        """A write arrives and its answer too."""
        conductor = self.coordinators[by]
        if w.expected_revision != self.revision:
            return conductor.conflict(w.operation_id, self.revision, self.operation)
        self._store(w)
        return conductor.written(w.operation_id, self.revision)

    def lose(self, by: str, w: ce.WriteRecord) -> list[ce.Effect]:
        """A write whose answer is lost: it may still take effect."""
        assert w.expected_revision is not None
        self.late.append(LateWrite(by, w, w.expected_revision + 1))
        return self.coordinators[by].unknown(w.operation_id)

    def arrive(self, late: LateWrite) -> None:
        """A write of unknown outcome arrives: it takes effect, or finds another revision."""
        if late.write.expected_revision == self.revision:
            self._store(late.write)
        if self.coordinators[late.by].phase is not Phase.WRITING:
            self.late.remove(late)

    def _store(self, w: ce.WriteRecord) -> None:
        self.record, self.reason, self.operation = w.record, w.reason, w.operation_id
        self.revision += 1

    # ------------------------------------------------------------ effects of coordinators

    def carry_out(self, by: str, effects: Iterable[Any], *, lost: bool = False) -> None:
        """Carry out a coordinator's effects; with `lost` the answer to its write does not arrive."""
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            match effect:
                case Step():
                    self._after_step(by, effect.action)
                case ce.WriteRecord():
                    if effect.record.open is not None:
                        self.tokens.setdefault(effect.record.open.candidate, self.candidate)
                    queue += self.lose(by, effect) if lost else self.compare_and_set(by, effect)
                case ce.SendMember(engine, order):
                    self._send_member(engine, order)
                case ce.SendOwner(owner, order):
                    self._send_owner(owner, order)
                case _:
                    pass  # reads and timers: the trace says when

    def _after_step(self, by: str, action: str) -> None:
        """A commit is published; or a push ends so, if it was about the candidate that still waits."""
        committed = self.record.committed
        session = self.coordinators[by].session
        if action == "OrderOpenApply" and session is not None:
            self.said.applies.add(session.epoch)
        if action == "Publish" and committed is not None:
            self.said.told.add(committed.epoch)
        back = action == "Commit" and committed is not None and committed.direction is Direction.BACK
        if (action in ("Abandon", "FinishTransition") or back) and (
            self.tokens[self.coordinators[by].candidate] == self.candidate
        ):
            self.push_over = True

    def _send_member(self, engine: str, order: Any) -> None:
        if isinstance(order, Prepare):
            self.said.orders.setdefault(order.epoch, Order()).prepares.setdefault(engine, order)

    def _send_owner(self, owner: str, order: Any) -> None:
        if isinstance(order, Emit):
            self.said.orders.setdefault(order.epoch, Order()).emits.setdefault(owner, order)

    # ------------------------------------------------------------ effects of owners

    def owner_does(self, owner: str, effects: Sequence[owner_role.Effect]) -> None:
        """Carry out an owner's effects, but for what the trace says when to do."""
        incarnation = self.owner[owner].incarnation
        for effect in effects:
            match effect:
                case owner_role.StartEmission(order):
                    self.emission[owner] = order
                    self.said.payloads += self._payloads(owner, order)
                case owner_role.DeliverManifest(manifest):
                    target = self._target(self.emission[owner])
                    self.sealed_bits[manifest.epoch, owner, incarnation] = {c: target[c] for c in self.mine(owner)}
                    self.said.manifests[manifest.epoch, owner, manifest.owner_incarnation] = manifest
                    self.owner_does(owner, self.owner[owner].sealed(manifest))
                case owner_role.ReportSealed(manifest):
                    self.said.sealed.append(_sealed(manifest))
                case owner_role.ReportEmitFailed(epoch):
                    self.said.failed.add(epoch)
                    self.said.owners_failed.append((epoch, owner, incarnation))
                case owner_role.FoldBaseline():
                    self.fold[owner] = effect
                case _:
                    pass

    def _payloads(self, owner: str, order: Emit) -> list[Payload]:
        """Detection, in cells: what differs from the baseline; every cell for dense attempts and restores."""
        kind = order.base.kind
        cells = self.mine(owner)
        if kind in (Kind.RELATIVE, Kind.ABSOLUTE):
            cells = [c for c in cells if self.weights[c] != self.baseline[c]]
        target = self._target(order)
        identity = (RECORD, order.target, order.epoch, owner, self.owner[owner].incarnation)
        return [
            Payload(
                PayloadIdentity(*identity, i),
                order,
                cell,
                "add" if kind is Kind.RELATIVE else "set",
                self.baseline[cell] if kind is Kind.RELATIVE else 0,
                target[cell],
            )
            for i, cell in enumerate(cells)
        ]

    def _target(self, order: Emit) -> Content:
        """What an order leads to: the candidate, or for restores and rollbacks the baseline."""
        return self.baseline if order.target == order.base.version else self.weights

    def manifest(self, owner: str, order: Emit) -> Manifest:
        """The manifest of what an owner emitted for an order."""
        incarnation = self.owner[owner].incarnation
        mine = [
            p
            for p in self.said.payloads
            if (p.identity.epoch, p.identity.owner, p.identity.owner_incarnation) == (order.epoch, owner, incarnation)
        ]
        target = self._target(order)
        share = self.share(owner, target)
        return Manifest(
            record_id=RECORD,
            target=order.target,
            epoch=order.epoch,
            owner=owner,
            owner_incarnation=incarnation,
            base=order.base,
            payloads=tuple(SealedPayload(p.identity.sequence, p.digest, 1, 1) for p in mine),
            content_digest=share,
            changed_entries=len(mine),
            owned_elements=len(self.mine(owner)),
        )

    # ------------------------------------------------------------ effects of engines

    def learn(self, engine: str) -> dict[str, receiver_role.RankState]:
        """Every rank of an engine learns the record as it is now."""
        states: dict[str, receiver_role.RankState] = {}
        for r in self.ranks:
            for effect in self.receiver[engine, r].learn(self.record):
                if isinstance(effect, receiver_role.RankState):
                    states[r] = effect
        return states

    def node_does(self, engine: str, effects: Sequence[node_role.Effect]) -> None:
        """Carry out a node's effects, but for what the trace says when to do."""
        for effect in effects:
            match effect:
                case node_role.CloseGate(epoch):
                    self.gate_epoch[engine] = epoch
                case node_role.ToRank(rank, order):
                    self._to_rank((engine, rank), order)
                case node_role.ReportPrepared(epoch, state):
                    self.prepared_state[epoch, engine, self.node[engine].incarnation] = state
                case node_role.ReportFailed(epoch):
                    self.said.failed.add(epoch)
                    self.said.engines_failed.append((epoch, engine, self.node[engine].incarnation))
                case _:
                    pass

    def _to_rank(self, rank: Rank, order: PrepareRank | OpenApply) -> None:
        if isinstance(order, PrepareRank):
            self.handed[rank] = order  # each rank takes it when the trace says so
        else:
            self.rank_does(rank, self.receiver[rank].open_apply(order.record_id, order.epoch))

    def rank_does(self, rank: Rank, effects: Sequence[receiver_role.Effect]) -> None:
        """Carry out a rank's effects, but for what the trace says when to do."""
        engine, r = rank
        node = self.node[engine]
        for effect in effects:
            match effect:
                case receiver_role.BeginWrite(identity):
                    self._begin_write(rank, identity)
                case receiver_role.Synchronise(epoch):
                    self.synchronising[rank] = epoch
                case RankPrepared():
                    if not self.staging(engine, effect.epoch):
                        self.said.prepared.add((effect.epoch, engine, r, node.incarnation))
                    self.node_does(engine, node.rank_prepared(r, effect))
                case RankStaged():
                    self.said.prepared.add((effect.epoch, engine, r, node.incarnation))
                    self.node_does(engine, node.rank_staged(r, effect))
                case RankAcknowledged():
                    self.said.acks[effect.epoch, engine, r, node.incarnation] = effect.root
                    self.node_does(engine, node.rank_acknowledged(r, effect))
                case RankFailed():
                    self.said.failed.add(effect.epoch)
                    self.node_does(engine, node.rank_failed(r, effect))
                case _:
                    pass

    def _begin_write(self, rank: Rank, identity: PayloadIdentity) -> None:
        (p,) = [p for p in self.said.payloads if p.identity == identity]
        held = self.storage[rank][p.cell]
        result = p.new if p.operation == "set" or held == p.old else GARBAGE
        self.storage[rank][p.cell] = GARBAGE
        self.writing[rank] = Writing(p, result)


def _sealed(m: Manifest) -> Sealed:
    return Sealed(
        owner=m.owner,
        incarnation=m.owner_incarnation,
        epoch=m.epoch,
        manifest_digest=m.digest(),
        content_digest=m.content_digest,
        payloads=len(m.payloads),
        payload_bytes=len(m.payloads),
        changed_entries=m.changed_entries,
        owned_elements=m.owned_elements,
        seconds={},
    )
