"""One engine: a node, its gate and its ranks, and what must be true of what it serves."""

from collections import deque
from typing import TYPE_CHECKING, Any

from dcr.protocol import node as roles
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Manifest
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
from dcr.simulator.cells import MODULUS, RECORD_ID, Cells, mixed
from dcr.simulator.invariants import holds
from dcr.simulator.rank import SimulatedRank

if TYPE_CHECKING:
    from dcr.protocol.record import CommitRecord
    from dcr.simulator.deployment import Deployment
    from dcr.simulator.network import Link
    from dcr.simulator.schedule import Move

_READS_MAX = 3
"""So many readings of K are under way at a node."""


class SimulatedEngine:
    """Carries out the effects of ``Node``; its ranks carry out theirs.

    Args:
        world: the deployment.
        name: of the engine.
        width: how many ranks it has.
    """

    def __init__(self, world: "Deployment", name: str, width: int) -> None:
        self.world = world
        self.name = name
        self.id = name
        self.incarnation = 0
        self.width = width
        self.link: Link | None = None
        self.late: deque[Any] = deque()
        self.stalled = self.cut = False
        self.start(world.history[0])

    def start(self, content: Cells | None) -> None:
        """A new incarnation: storage as the loader left it, or garbage."""
        self.incarnation += 1
        self.loaded = content is not None
        salt = self.incarnation + self.world.setup.salt
        self.ranks = [
            SimulatedRank(
                self,
                str(n),
                {i: mixed(salt + n, i) % MODULUS for i in self.world.history[0]} if content is None else dict(content),
                loaded=content is not None,
            )
            for n in range(self.width)
        ]
        self.node = roles.Node(self.name, self.incarnation, RECORD_ID, tuple(r.name for r in self.ranks))
        self.serving: int | None = None  # what requests inside are told; None: the gate is closed
        self.gate_orders: deque[roles.CloseGate | roles.OpenGate] = deque()
        self.reads: list[CommitRecord | None] = []  # None: K is still to be read
        self.fetching: int | None = None
        self.refused = ""
        self.late.clear()

    def state(self) -> StorageState:
        """What the engine's storage holds, as it says itself."""
        return roles.engine_state(r.receiver.state for r in self.ranks)

    def joins(self) -> list[object]:
        """What a node sends on every connection."""
        return [self._join()]

    def _join(self) -> Join:
        return Join(self.name, self.incarnation, CONTROL_VERSION, 0, ("add", "xor"), self.state(), (), {})

    # ------------------------------------------------------------ effects

    def run(self, effects: list[roles.Effect]) -> None:
        """Carry out what the node asks for."""
        for e in effects:
            match e:
                case roles.CloseGate() | roles.OpenGate():
                    self.gate_orders.append(e)
                case roles.LetIn():
                    self.serving, self.refused = e.version, ""
                    self._check_let_in(e.version)
                case roles.ReadRecord():
                    self.reads.append(None)
                case roles.ToRank():
                    self.ranks[int(e.rank)].orders.append(e.order)
                case roles.StartFetch():
                    self.fetching = e.order.epoch
                    for r in self.ranks:
                        r.fetched = set()
                case roles.StopFetch():
                    if self.fetching is not None and self.fetching <= e.epoch:
                        self.fetching = None
                case roles.GiveUp():
                    self.refused = e.reason
                case _:
                    self._report(e)

    def _report(self, e: roles.Effect) -> None:
        name, incarnation = self.name, self.incarnation
        match e:
            case roles.ReportPrepared():
                done = all(r.prepared >= e.epoch for r in self.ranks)
                holds(done, "FencedWrites", lambda: f"{name} says that it is prepared before every rank is")
                self._send(Prepared(name, incarnation, e.epoch, e.state))
            case roles.ReportStaged():
                self._send(Staged(name, incarnation, e.epoch))
            case roles.ReportAcknowledged():
                done = all(e.epoch in r.acknowledged for r in self.ranks)
                holds(done, "CommitStored", lambda: f"{name} acknowledges epoch {e.epoch} before every rank has")
                self._send(Acknowledged(name, incarnation, e.epoch, e.root, {}))
            case roles.ReportFailed():
                self._send(AttemptFailed(name, incarnation, e.epoch, e.reason, self.state()))
            case roles.ReportServing():
                self._send(Serving(name, incarnation, e.epoch, e.version))
            case roles.AskToJoin():
                self._send(self._join())
            case _:
                self.world.saw(e)

    def _send(self, report: object) -> None:
        if self.link is not None:
            self.link.send_up(report)

    # ------------------------------------------------------------ orders, K and the gate

    def take(self, order: Any) -> None:
        """The leader's order arrives at the node; K is read after it, so what was read before is read again."""
        self.reads = [None] * len(self.reads)
        try:
            effects = self.node.order(order)
        except RefusedError:
            return
        self.run(effects)

    def poll(self) -> bool:
        """A node reads K now and then."""
        if len(self.reads) >= _READS_MAX:
            return False
        self.reads.append(None)
        return True

    def read_step(self, at: int) -> bool:
        """Read K, or hand the K that was read to the node, to every rank, and then to the node again."""
        if at >= len(self.reads):
            return False
        record = self.reads[at]
        if record is None:
            self.reads[at] = self.world.store.record
            return self.reads[at] is not None
        if any(r.write is not None for r in self.ranks):
            return False
        del self.reads[at]
        try:
            effects = self.node.read(record)
        except RefusedError:
            effects = []
        self.run(effects)
        self.run(self.node.learned(record, {r.name: r.learn(record) for r in self.ranks}))
        return True

    def gate_step(self, *, stuck: bool = False) -> bool:
        """Close or open the gate for real, or find that it will not."""
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

    def lose_record(self) -> bool:
        """K was not reached for so long that what is served may be stale."""
        effects = self.node.record_lost()
        self.run(effects)
        return bool(effects)

    # ------------------------------------------------------------ what can happen

    def lacking(self, r: SimulatedRank) -> list[int]:
        """Which items of the epoch that is fetched have not come to this rank."""
        if self.fetching is None:
            return []
        items, writes = self.world.delivery.of(self.fetching), r.write is not None
        found = [n for n, (key, _) in enumerate(items) if key not in r.fetched]
        return [n for n in found if isinstance(items[n][1], Manifest)] if writes else found

    def moves(self) -> "list[Move]":
        """What can happen here by itself."""
        if self.stalled:
            return []
        out: list[Move] = []
        me = self.id
        fetching = self.fetching is not None and not self.cut
        if not self.cut:
            if self.link is not None and self.link.down:
                out.append(("take", me, 0))
            if self.reads and (self.reads[0] is None or all(r.write is None for r in self.ranks)):
                out.append(("read", me, 0))
        if self.gate_orders:
            out.append(("gate", me, 0))
        for n, r in enumerate(self.ranks):
            if fetching:
                out += [("deliver", me, n + self.width * item) for item in self.lacking(r)]
            if r.write is not None:
                out.append(("write", me, n))
            elif r.orders or r.staged:
                out.append(("work", me, n))
            if r.synchronising:
                out.append(("synchronise", me, n))
        return out

    # ------------------------------------------------------------ what must hold

    def _check_let_in(self, version: int) -> None:
        """ServingExact: storage holds a committed version's bits, and K let this incarnation serve it."""
        world, me = self.world, self.name
        holds(version in world.history, "ServingExact", lambda: f"{me} serves {version}, which was never committed")
        bits = all(r.storage == world.history[version] and r.write is None for r in self.ranks)
        holds(bits, "ServingExact", lambda: f"{me} serves version {version} with other bits")
        licensed = (me, self.incarnation, version) in world.licensed
        holds(licensed, "ServingExact", lambda: f"K never let {me} ({self.incarnation}) serve version {version}")
