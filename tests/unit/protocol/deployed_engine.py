"""One engine of a deployment: a node and a rank around concrete storage, and what must be true of that storage."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from cells import RECORD_ID, Payload, content_digest, operate

from dcr.protocol import node as nodes
from dcr.protocol import receiver as ranks
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.messages import (
    CONTROL_VERSION,
    Acknowledged,
    AttemptFailed,
    Join,
    Prepare,
    Prepared,
    Serving,
)
from dcr.protocol.step import Step

if TYPE_CHECKING:
    from deployment import Deployment

    from dcr.protocol.record import CommitRecord


class DeployedEngine:
    """Carries out the effects of ``Node`` and ``Receiver``, one small step at a time."""

    def __init__(self, d: "Deployment", name: str) -> None:
        self.d = d
        self.name = name
        self.incarnation = 0
        self.start(loaded=True)

    def start(self, *, loaded: bool) -> None:
        """A new incarnation: storage as the loader left it from the checkpoint of version 0, or garbage."""
        cells = self.d.history[0]
        self.incarnation += 1
        self.loaded = loaded
        self.storage = dict(cells) if loaded else {i: self.d.random.randrange(1 << 16) for i in cells}
        self.receiver = ranks.Receiver(self.name, RECORD_ID, content_digest(cells) if loaded else "")
        self.node = nodes.Node(self.name, self.incarnation, RECORD_ID)
        self.serving: int | None = None  # the version that requests inside are told; None: the gate is closed
        self.gate_orders: deque[nodes.CloseGate | nodes.OpenGate] = deque()
        self.rank_orders: deque[nodes.ToRank] = deque()
        self.reads: list[CommitRecord | None] = []  # None: K is still to be read
        self.write: tuple[Payload, int] | None = None  # and how many of its entries are in place
        self.fed: Payload | None = None
        self.synchronising: list[int] = []
        self.fetching: int | None = None
        self.fetched: set[object] = set()
        self.prepared = -1  # highest epoch answered with Prepared
        self.acknowledged: dict[int, int] = {}  # epoch -> target
        self.relative: set[object] = set()
        self.refused = ""

    def join(self) -> Join:
        return Join(
            self.name,
            self.incarnation,
            CONTROL_VERSION,
            0,
            ("add", "xor"),
            self.receiver.state,
            set_only=(),
            refused={},
        )

    # ------------------------------------------------------------ effects

    def run(self, effects: list) -> None:
        for e in effects:
            match e:
                case Step():
                    self.d.saw(e)
                case nodes.CloseGate() | nodes.OpenGate():
                    self.gate_orders.append(e)
                case nodes.ReadRecord():
                    self.reads.append(None)
                case nodes.ToRank():
                    self.rank_orders.append(e)
                case nodes.StartFetch():
                    self.fetching = e.order.epoch
                    self.fetched = set()
                case nodes.StopFetch():
                    if self.fetching is not None and self.fetching <= e.epoch:
                        self.fetching = None
                case nodes.ReportPrepared():
                    self.prepared = max(self.prepared, e.epoch)
                    self._send(Prepared(self.name, self.incarnation, e.epoch, e.state))
                case nodes.ReportAcknowledged():
                    self._send(Acknowledged(self.name, self.incarnation, e.epoch, e.root, {}))
                case nodes.ReportFailed():
                    self._send(AttemptFailed(self.name, self.incarnation, e.epoch, e.reason, self.receiver.state))
                case nodes.ReportServing():
                    self._send(Serving(self.name, self.incarnation, e.epoch, e.version))
                case nodes.AskToJoin():
                    self._send(self.join())
                case nodes.GiveUp():
                    self.refused = e.reason
                case ranks.BeginWrite():
                    self._begin_write(e)
                case ranks.Synchronise():
                    self.synchronising.append(e.epoch)
                case ranks.RankPrepared():
                    self.run(self.node.rank_prepared(e))
                case ranks.RankAcknowledged():
                    self.run(self.node.rank_acknowledged(e))
                case ranks.RankFailed():
                    self.run(self.node.rank_failed(e))
                case ranks.RankState():
                    pass
                case _:
                    raise AssertionError(e)

    def _send(self, report: object) -> None:
        self.d.links[self.name].send_up(report)

    def _begin_write(self, e: ranks.BeginWrite) -> None:
        p = self.fed
        assert p is not None
        assert p.identity == e.identity
        assert self.write is None
        if p.base.kind is Kind.RELATIVE:
            assert p.identity not in self.relative, "RelativeOnce: a relative payload began twice"
            self.relative.add(p.identity)
        self.write = (p, 0)

    # ------------------------------------------------------------ orders and K

    def order(self, order: object) -> None:
        """The leader's order arrives at the node."""
        self._may_refuse(lambda: self.node.order(order))

    def rank_step(self) -> bool:
        """Hand the oldest order to the rank, once no write is under way."""
        if not self.rank_orders or self.write is not None:
            return False
        order = self.rank_orders.popleft().order
        if isinstance(order, Prepare):
            self._may_refuse(lambda: self.receiver.prepare(order))
        else:
            self._may_refuse(lambda: self.receiver.open_apply(order.record_id, order.epoch))
        return True

    def poll(self) -> bool:
        """A node reads K now and then."""
        if len(self.reads) >= 3:
            return False
        self.reads.append(None)
        return True

    def read_step(self, at: int) -> bool:
        """Read K, or hand the K that was read to the rank and then to the node."""
        if at >= len(self.reads) or self.d.store.record is None:
            return False
        record = self.reads[at]
        if record is None:
            self.reads[at] = self.d.store.record
            return True
        if self.write is not None:
            return False
        del self.reads[at]
        effects = self.receiver.learn(record)
        self.run(effects)
        state = effects[-1]
        assert isinstance(state, ranks.RankState)
        self.run(self.node.learned(record, state))
        return True

    def gate_step(self, *, stuck: bool = False) -> bool:
        """Close or open the gate for real."""
        if not self.gate_orders:
            return False
        order = self.gate_orders.popleft()
        if isinstance(order, nodes.OpenGate):
            self.serving = order.version
            self.d.check_serving(self)
            self.run(self.node.gate_opened(order.epoch, order.version))
        elif stuck:
            self.run(self.node.gate_stuck("requests would not leave"))
        else:
            self.serving = None
            self.run(self.node.gate_closed(order.epoch))
        return True

    def _may_refuse(self, call: Callable[[], list]) -> None:
        before = (self.receiver.state, dict(self.storage), self.receiver.fence)
        try:
            effects = call()
        except RefusedError:
            assert before == (self.receiver.state, self.storage, self.receiver.fence), (
                "a refused input changed something"
            )
            return
        self.run(effects)

    # ------------------------------------------------------------ payloads

    def feed(self, item: Payload | Manifest) -> bool:
        """A payload or a manifest arrives at the rank."""
        if self.write is not None:
            return False
        self.fetched.add(item.digest if isinstance(item, Payload) else item.digest())
        if isinstance(item, Manifest):
            self._may_refuse(lambda: self.receiver.manifest(item))
        else:
            self.fed = item
            self._may_refuse(lambda: self.receiver.payload(item.identity, item.base, item.digest, len(item.entries)))
        return True

    def write_step(self, *, fail: bool = False) -> bool:
        """Write one entry, or end the write; a write that fails leaves garbage where it stood."""
        if self.write is None:
            return False
        p, done = self.write
        assert self.serving is None, "a write while the gate is open"
        assert p.identity.epoch >= self.prepared, "FencedWrites: a write of an older epoch after prepare was answered"
        if fail:
            self.write = None
            if done < len(p.entries):
                self.storage[p.entries[done][1]] ^= 0x5555
            self.run(self.receiver.write_failed(p.identity, "the loader raised"))
        elif done == len(p.entries):
            self.write = None
            self.run(self.receiver.write_ended(p.identity))
        else:
            operation, i, value = p.entries[done]
            if operation != "set":
                base = self.d.history[p.base.version]
                assert self.storage[i] == base[i], "RelativeOnce: a relative entry found other bits than its base's"
            self.storage[i] = operate(operation, self.storage[i], value)
            self.write = (p, done + 1)
        return True

    def synchronise_step(self, *, fail: bool = False) -> bool:
        """Everything has reached storage."""
        if not self.synchronising:
            return False
        epoch = self.synchronising.pop(0)
        effects = self.receiver.synchronise_failed(epoch, "") if fail else self.receiver.synchronised(epoch)
        for e in effects:
            if isinstance(e, ranks.RankAcknowledged):
                self.acknowledged[e.epoch] = self.d.targets[e.epoch]
        self.run(effects)
        return True
