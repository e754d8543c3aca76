"""One rank of a deployed engine: a receiver around concrete storage, and what must be true of its writes."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from cells import RECORD_ID, Payload, operate

from dcr.protocol import receiver as roles
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.step import Step

if TYPE_CHECKING:
    from deployed_engine import DeployedEngine

    from dcr.protocol.messages import OpenApply
    from dcr.protocol.record import CommitRecord


class DeployedRank:
    """Carries out the effects of ``Receiver``; what it answers goes to the engine's node."""

    def __init__(self, engine: "DeployedEngine", name: str, storage: dict[int, int], loaded_digest: str) -> None:
        self.engine = engine
        self.name = name
        self.storage = storage
        self.receiver = roles.Receiver(engine.name, RECORD_ID, loaded_digest)
        self.orders: deque[roles.PrepareRank | OpenApply] = deque()
        self.held: dict[object, Payload] = {}  # in host memory, of an attempt that stages
        self.staged: deque[Payload] = deque()  # of these, what is to be written now
        self.write: tuple[Payload, int] | None = None  # and how many of its entries are in place
        self.fed: Payload | None = None
        self.synchronising: list[int] = []
        self.fetched: set[str] = set()
        self.prepared = -1  # highest epoch that it was prepared for
        self.acknowledged: dict[int, int] = {}  # epoch -> target
        self.relative: set[object] = set()

    def run(self, effects: list) -> None:
        node = self.engine.node
        for e in effects:
            match e:
                case Step():
                    self.engine.d.saw(e)
                case roles.Hold():
                    assert self.fed is not None
                    assert self.fed.identity == e.identity
                    self.held[e.identity] = self.fed
                case roles.ApplyStaged():
                    assert all(i.epoch == e.epoch for i in self.held)
                    self.staged.extend(self.held.values())
                case roles.DropStage():
                    self.held = {i: p for i, p in self.held.items() if i.epoch > e.epoch}
                    self.staged.clear()
                case roles.BeginWrite():
                    self.held.pop(e.identity, None)
                    self._begin_write(e)
                case roles.Synchronise():
                    self.synchronising.append(e.epoch)
                case roles.RankPrepared():
                    self.prepared = max(self.prepared, e.epoch)
                    self.engine.run(node.rank_prepared(self.name, e))
                case roles.RankStaged():
                    self.engine.run(node.rank_staged(self.name, e))
                case roles.RankAcknowledged():
                    self.acknowledged[e.epoch] = self.engine.d.targets[e.epoch]
                    self.engine.run(node.rank_acknowledged(self.name, e))
                case roles.RankFailed():
                    self.engine.run(node.rank_failed(self.name, e))
                case _:
                    raise AssertionError(e)

    def _begin_write(self, e: roles.BeginWrite) -> None:
        p = self.fed
        assert p is not None
        assert p.identity == e.identity
        assert self.write is None
        if p.base.kind is Kind.RELATIVE:
            assert p.identity not in self.relative, "RelativeOnce: a relative payload began twice"
            self.relative.add(p.identity)
        self.write = (p, 0)

    def learn(self, record: "CommitRecord") -> roles.RankState:
        *effects, state = self.receiver.learn(record)
        self.run(effects)
        assert isinstance(state, roles.RankState)
        return state

    # ------------------------------------------------------------ what comes

    def step(self) -> bool:
        """Take the oldest order, or else a payload of the stage that is applied; never during a write."""
        if self.write is not None:
            return False
        if not self.orders:
            return bool(self.staged) and self.feed(self.staged.popleft())
        order = self.orders.popleft()
        if isinstance(order, roles.PrepareRank):
            self._may_refuse(lambda: self.receiver.prepare(order.order, order.record))
        else:
            self._may_refuse(lambda: self.receiver.open_apply(order.record_id, order.epoch))
        return True

    def feed(self, item: Payload | Manifest) -> bool:
        """A payload or a manifest arrives; what is refused, since it comes too early, is fetched again."""
        if isinstance(item, Manifest):
            taken = self._may_refuse(lambda: self.receiver.manifest(item))
        else:
            self.fed = item
            base, entries = item.base, len(item.entries)
            taken = self._may_refuse(lambda: self.receiver.payload(item.identity, base, item.digest, entries))
        if taken:
            self.fetched.add(item.digest() if isinstance(item, Manifest) else item.digest)
        return taken

    def _may_refuse(self, call: Callable[[], list]) -> bool:
        r = self.receiver
        before = (r.state, dict(self.storage), r.fence, r.epoch, r.stage)
        try:
            effects = call()
        except RefusedError:
            after = (r.state, self.storage, r.fence, r.epoch, r.stage)
            assert before == after, "a refused input changed something"
            return False
        self.run(effects)
        return True

    # ------------------------------------------------------------ writes

    def write_step(self, *, fail: bool) -> bool:
        """Write one entry, or end the write; a write that fails leaves garbage where it stood."""
        if self.write is None:
            return False
        p, done = self.write
        assert self.engine.serving is None, "a write while the gate is open"
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
                base = self.engine.d.history[p.base.version]
                assert self.storage[i] == base[i], "RelativeOnce: a relative entry found other bits than its base's"
            self.storage[i] = operate(operation, self.storage[i], value)
            self.write = (p, done + 1)
        return True

    def synchronise_step(self, *, fail: bool) -> bool:
        """Everything has reached storage."""
        if not self.synchronising:
            return False
        epoch = self.synchronising.pop(0)
        self.run(self.receiver.synchronise_failed(epoch, "") if fail else self.receiver.synchronised(epoch))
        return True
