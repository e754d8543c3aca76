"""One rank of an engine: a receiver around concrete storage, and what must be true of it."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcr.protocol import receiver as roles
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.record import CommitRecord, Member
from dcr.simulator.cells import RECORD_ID, Cells, Payload, content_digest, operate
from dcr.simulator.invariants import BrokenError, holds

if TYPE_CHECKING:
    from dcr.protocol.messages import OpenApply
    from dcr.simulator.engine import SimulatedEngine

_GARBAGE = 0x5555


class SimulatedRank:
    """Carries out the effects of ``Receiver``, one small step at a time; what it answers goes to the engine's node.

    Args:
        engine: whose rank it is.
        name: of the rank: its number.
        storage: what lies there when it starts.
        loaded: that is a checkpoint's content, and not garbage.
    """

    def __init__(self, engine: "SimulatedEngine", name: str, storage: Cells, *, loaded: bool) -> None:
        self.engine = engine
        self.world = engine.world
        self.name = name
        self.storage = storage
        self.receiver = roles.Receiver(engine.name, RECORD_ID, content_digest(storage) if loaded else "")
        self.orders: deque[roles.PrepareRank | OpenApply] = deque()
        self.held: dict[object, Payload] = {}  # in host memory, of an attempt that stages
        self.staged: deque[Payload] = deque()  # of these, what is to be written now
        self.write: tuple[Payload, int] | None = None  # and how many of its entries are in place
        self.fed: Payload | None = None
        self.synchronising: list[int] = []
        self.fetched: set[str] = set()
        self.prepared = -1  # highest epoch that it answered a prepare for
        self.acknowledged: set[int] = set()

    # ------------------------------------------------------------ effects

    def run(self, effects: list[roles.Effect]) -> None:
        """Carry out what the receiver asks for."""
        for e in effects:
            match e:
                case roles.Hold():
                    assert self.fed is not None
                    self.held[e.identity] = self.fed
                case roles.ApplyStaged():
                    self.staged.extend(self.held.values())
                case roles.DropStage():
                    self.held = {i: p for i, p in self.held.items() if p.identity.epoch > e.epoch}
                    self.staged.clear()
                case roles.BeginWrite():
                    self._begin_write(e)
                case roles.Synchronise():
                    self.synchronising.append(e.epoch)
                case roles.RankPrepared() | roles.RankStaged() | roles.RankAcknowledged() | roles.RankFailed():
                    self._answer(e)
                case roles.RankState():
                    raise AssertionError(e)
                case _:
                    self.world.saw(e)

    def _answer(self, e: "roles.RankPrepared | roles.RankStaged | roles.RankAcknowledged | roles.RankFailed") -> None:
        node = self.engine.node
        match e:
            case roles.RankPrepared():
                self.prepared = max(self.prepared, e.epoch)
                self.engine.run(node.rank_prepared(self.name, e))
            case roles.RankStaged():
                self.engine.run(node.rank_staged(self.name, e))
            case roles.RankAcknowledged():
                self.acknowledged.add(e.epoch)
                self.engine.run(node.rank_acknowledged(self.name, e))
            case roles.RankFailed():
                self.engine.run(node.rank_failed(self.name, e))

    def _begin_write(self, e: roles.BeginWrite) -> None:
        p = self.fed
        assert p is not None
        assert p.identity == e.identity
        assert self.write is None
        self.held.pop(e.identity, None)
        self.write = (p, 0)
        holds(self.engine.serving is None, "ServingExact", lambda: f"{self._me} writes under an open gate")
        if p.base.kind is Kind.RELATIVE:
            base = self.world.history[p.base.version]
            for operation, i, _ in p.entries:
                met = operation == "set" or self.storage[i] == base[i]
                holds(met, "RelativeOnce", lambda: f"{self._me}: a relative payload met other bits than its base's")

    # ------------------------------------------------------------ what comes

    def work(self) -> bool:
        """Take the oldest order, or else a payload of the stage that is applied; never during a write."""
        if self.write is not None:
            return False
        if not self.orders:
            if not self.staged:
                return False
            self.feed(self.staged.popleft())
            return True
        order = self.orders.popleft()
        if isinstance(order, roles.PrepareRank):
            epoch, refused = order.order.epoch, self._may_refuse(self.receiver.prepare, order.order, order.record)
        else:
            epoch, refused = order.epoch, self._may_refuse(self.receiver.open_apply, order.record_id, order.epoch)
        if refused:
            # An order that is refused will not be carried out: nobody need wait for it.
            self.engine.run(self.engine.node.rank_failed(self.name, roles.RankFailed(epoch, refused)))
        return True

    def feed(self, item: Payload | Manifest) -> bool:
        """A payload or a manifest arrives; what is refused, since it comes too early, is fetched again."""
        if isinstance(item, Manifest):
            key = self.world.delivery.key(item)
            refused = self._may_refuse(self.receiver.manifest, item)
        elif self.write is not None:
            return False  # one payload is written at a time
        else:
            self.fed, key = item, item.digest
            refused = self._may_refuse(self.receiver.payload, item.identity, item.base, item.digest, len(item.entries))
        if refused:
            return False
        self.fetched.add(key)
        return True

    def _may_refuse(self, call: Callable[..., list[roles.Effect]], *arguments: Any) -> str:
        """Why it was refused; empty if it was not."""
        r = self.receiver
        before = (r.version, r.torn_by, r.fence, r.epoch, r.stage)
        try:
            effects = call(*arguments)
        except RefusedError as e:
            after, why = (r.version, r.torn_by, r.fence, r.epoch, r.stage), str(e)
            holds(before == after, "RefusedChangesNothing", lambda: f"{self._me}: {why}: {before} -> {after}")
            return why
        self.run(effects)
        self.check()
        return ""

    def learn(self, record: CommitRecord) -> roles.RankState:
        """K was read."""
        *effects, state = self.receiver.learn(record)
        self.run(effects)
        self.check()
        assert isinstance(state, roles.RankState)
        return state

    # ------------------------------------------------------------ writes

    def write_step(self, *, fail: bool = False) -> bool:
        """Write one entry, or end the write; a write that fails leaves garbage where it stood."""
        if self.write is None:
            return False
        p, done = self.write
        holds(self.engine.serving is None, "ServingExact", lambda: f"{self._me} writes under an open gate")
        fenced = p.identity.epoch >= max(self.prepared, self.receiver.fence)
        holds(fenced, "FencedWrites", lambda: f"{self._me}: a write of epoch {p.identity.epoch} below the fence")
        if fail:
            self.write = None
            if done < len(p.entries):
                self.storage[p.entries[done][1]] ^= _GARBAGE
            self.run(self.receiver.write_failed(p.identity, "the loader raised"))
            self.check()
        elif done == len(p.entries):
            self.write = None
            self.run(self.receiver.write_ended(p.identity))
            self.check()
        else:
            operation, i, value = p.entries[done]
            if operation != "set":
                met = self.storage[i] == self.world.history[p.base.version][i]
                holds(met, "RelativeOnce", lambda: f"{self._me}: a relative entry met other bits than its base's")
            self.storage[i] = operate(operation, self.storage[i], value)
            self.write = (p, done + 1)
        return True

    def synchronise_step(self, *, fail: bool = False) -> bool:
        """Everything has reached storage, or a check after it found an error."""
        if not self.synchronising:
            return False
        epoch = self.synchronising.pop(0)
        if fail:
            self.run(self.receiver.synchronise_failed(epoch, "the readback differs"))
        else:
            self.run(self.receiver.synchronised(epoch))
        self.check()
        return True

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """CommitHeld, CommitStored and FencedWrites of this rank."""
        r, world = self.receiver, self.world
        if r.version is not None and not r.torn_by:
            held = r.version in world.history and self.storage == world.history[r.version]
            holds(held, "CommitHeld", lambda: f"{self._me} is unmarked at version {r.version} and holds other bits")
        if self.write is not None:
            holds(
                self.write[0].identity.epoch >= r.fence,
                "FencedWrites",
                lambda: f"{self._me}: the fence passed a write that was under way",
            )
        k = world.store.record
        if k is None or k.committed is None:
            return
        c = k.committed
        if Member(self.engine.name, self.engine.incarnation) not in c.members:
            return
        if r.acknowledged_epoch == c.epoch:
            stored = self.write is None and self.storage == world.history[k.version]
            holds(stored, "CommitStored", lambda: f"{self._me} acknowledged what was committed and holds other bits")
        elif not r.torn_by and r.version != k.version:
            raise BrokenError("CommitHeld", f"{self._me} was a member of the last commit, and is clean at {r.version}")

    @property
    def _me(self) -> str:
        return f"rank {self.name} of {self.engine.name}"
