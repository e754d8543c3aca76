"""One engine of a deployment: a node and its ranks, and what must be true of what they serve."""

from collections import deque
from typing import TYPE_CHECKING

from cells import RECORD_ID, Payload, content_digest
from deployed_rank import DeployedRank

from dcr.protocol import node as roles
from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import (
    CONTROL_VERSION,
    Acknowledged,
    AttemptFailed,
    Join,
    Prepared,
    Serving,
    Staged,
    StorageState,
)
from dcr.protocol.step import Step

if TYPE_CHECKING:
    from deployment import Deployment

    from dcr.protocol.identity import Manifest
    from dcr.protocol.receiver import Receiver
    from dcr.protocol.record import CommitRecord


class DeployedEngine:
    """Carries out the effects of ``Node``, and lets its ranks carry out theirs, one small step at a time."""

    def __init__(self, d: "Deployment", name: str) -> None:
        self.d = d
        self.name = name
        self.incarnation = 0
        self.width = d.random.choice((1, 1, 2))  # ranks; each of them holds every cell
        self.start(loaded=True)

    def start(self, *, loaded: bool) -> None:
        """A new incarnation: storage as the loader left it from the checkpoint of version 0, or garbage."""
        cells = self.d.history[0]
        self.incarnation += 1
        self.loaded = loaded
        self.ranks = {
            str(n): DeployedRank(
                self,
                str(n),
                dict(cells) if loaded else {i: self.d.random.randrange(1 << 16) for i in cells},
                content_digest(cells) if loaded else "",
            )
            for n in range(self.width)
        }
        self.node = roles.Node(self.name, self.incarnation, RECORD_ID, tuple(self.ranks))
        self.serving: int | None = None  # the version that requests inside are told; None: the gate is closed
        self.gate_orders: deque[roles.CloseGate | roles.OpenGate] = deque()
        self.reads: list[CommitRecord | None] = []  # None: K is still to be read
        self.fetching: int | None = None
        self.refused = ""

    # ------------------------------------------------------------ what is there

    @property
    def storage(self) -> dict[int, int | None]:
        """What every rank holds; None where they differ."""
        first, *others = [r.storage for r in self.ranks.values()]
        return {i: v if all(o[i] == v for o in others) else None for i, v in first.items()}

    @property
    def receiver(self) -> "Receiver":
        """The first rank's, for whoever tells of this engine."""
        return self.ranks["0"].receiver

    @property
    def write(self) -> Payload | None:
        """What some rank is writing."""
        return next((r.write[0] for r in self.ranks.values() if r.write is not None), None)

    @property
    def acknowledged(self) -> dict[int, int]:
        """Epochs that every rank acknowledged, and their targets."""
        first, *others = [r.acknowledged for r in self.ranks.values()]
        return {epoch: target for epoch, target in first.items() if all(epoch in o for o in others)}

    @property
    def fetched(self) -> set[str]:
        """Digests of what has come to every rank."""
        return set.intersection(*(r.fetched for r in self.ranks.values()))

    def state(self) -> StorageState:
        return roles.engine_state(r.receiver.state for r in self.ranks.values())

    def join(self) -> Join:
        return Join(
            self.name, self.incarnation, CONTROL_VERSION, 0, ("add", "xor"), self.state(), set_only=(), refused={}
        )

    # ------------------------------------------------------------ effects

    def run(self, effects: list) -> None:
        for e in effects:
            match e:
                case Step():
                    self.d.saw(e)
                case roles.CloseGate() | roles.OpenGate():
                    self.gate_orders.append(e)
                case roles.LetIn():
                    self.serving, self.refused = e.version, ""
                    self.d.check_serving(self)
                case roles.ReadRecord():
                    self.reads.append(None)
                case roles.ToRank():
                    self.ranks[e.rank].orders.append(e.order)
                case roles.StartFetch():
                    self.fetching = e.order.epoch
                    for r in self.ranks.values():
                        r.fetched = set()
                case roles.StopFetch():
                    if self.fetching is not None and self.fetching <= e.epoch:
                        self.fetching = None
                case roles.ReportPrepared():
                    assert all(r.prepared >= e.epoch for r in self.ranks.values())
                    self._send(Prepared(self.name, self.incarnation, e.epoch, e.state))
                case roles.ReportStaged():
                    self._send(Staged(self.name, self.incarnation, e.epoch))
                case roles.ReportAcknowledged():
                    assert e.epoch in self.acknowledged
                    self._send(Acknowledged(self.name, self.incarnation, e.epoch, e.root, {}))
                case roles.ReportFailed():
                    self._send(AttemptFailed(self.name, self.incarnation, e.epoch, e.reason, self.state()))
                case roles.ReportServing():
                    self._send(Serving(self.name, self.incarnation, e.epoch, e.version))
                case roles.AskToJoin():
                    self._send(self.join())
                case roles.GiveUp():
                    self.refused = e.reason
                case _:
                    raise AssertionError(e)

    def _send(self, report: object) -> None:
        self.d.links[self.name].send_up(report)

    # ------------------------------------------------------------ orders, K and the gate

    def order(self, order: object) -> None:
        """The leader's order arrives at the node; K is read after it, so what was read before is read again."""
        self.reads = [None] * len(self.reads)
        try:
            effects = self.node.order(order)
        except RefusedError:
            return
        self.run(effects)

    def poll(self) -> bool:
        """A node reads K now and then."""
        if len(self.reads) >= 3:
            return False
        self.reads.append(None)
        return True

    def read_step(self, at: int) -> bool:
        """Read K, or hand the K that was read to the node, to every rank, and then to the node again."""
        if at >= len(self.reads) or self.d.store.record is None:
            return False
        record = self.reads[at]
        if record is None:
            self.reads[at] = self.d.store.record
            return True
        if self.write is not None:
            return False
        del self.reads[at]
        try:
            effects = self.node.read(record)
        except RefusedError:
            effects = []
        self.run(effects)
        self.run(self.node.learned(record, {name: r.learn(record) for name, r in self.ranks.items()}))
        return True

    def gate_step(self, *, stuck: bool = False) -> bool:
        """Close or open the gate for real."""
        if not self.gate_orders:
            return False
        order = self.gate_orders.popleft()
        if isinstance(order, roles.OpenGate):
            if stuck:
                self.run(self.node.gate_stuck("the caches would not reset"))
                return True
            try:
                effects = self.node.gate_ready(order.epoch)
            except RefusedError:
                return True
            self.run(effects)
        elif stuck:
            self.run(self.node.gate_stuck("requests would not leave"))
        else:
            self.serving = None
            self.run(self.node.gate_closed(order.epoch))
        return True

    def record_lost(self) -> bool:
        """K was not reached for so long that what is served may be stale."""
        effects = self.node.record_lost()
        self.run(effects)
        return bool(effects)

    # ------------------------------------------------------------ ranks

    def feed(self, item: "Payload | Manifest") -> bool:
        """A payload or a manifest arrives at one of the ranks; mostly at one that does not have it."""
        free = [r for r in self.ranks.values() if r.write is None]
        if not free:
            return False
        digest = item.digest if isinstance(item, Payload) else item.digest()
        lacking = [r for r in free if digest not in r.fetched]
        return self.d.random.choice(lacking if lacking and self.d.random.random() < 0.9 else free).feed(item)

    def _any(self, step: str, **how: bool) -> bool:
        first = self.d.random.randrange(self.width)
        ranks = [*self.ranks.values()]
        return any(getattr(r, step)(**how) for r in ranks[first:] + ranks[:first])

    def rank_step(self) -> bool:
        """A rank takes its oldest order, or else a payload of the stage that it applies."""
        return self._any("step")

    def write_step(self, *, fail: bool = False) -> bool:
        """A rank writes one entry, or ends its write."""
        return self._any("write_step", fail=fail)

    def synchronise_step(self, *, fail: bool = False) -> bool:
        """Everything has reached a rank's storage."""
        return self._any("synchronise_step", fail=fail)
