"""One coordinator: the leader, one that was replaced and does not know it yet, or a dead one whose writes are late."""

from collections import deque
from typing import TYPE_CHECKING, Any

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Effect, Fatal, ReadRecord, SendMember, SendOwner, StartTimer, WriteRecord
from dcr.protocol.errors import RefusedError
from dcr.protocol.intervention import intervene
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Intervention, Join
from dcr.protocol.record import CommitRecord
from dcr.simulator.cells import RECORD_ID
from dcr.simulator.clock import Timers
from dcr.simulator.invariants import holds
from dcr.simulator.network import Connected, Link, Lost, late
from dcr.simulator.store import Write
from dcr.simulator.waits import REJOIN, Waits
from dcr.simulator.whim import Whim

if TYPE_CHECKING:
    from dcr.simulator.deployment import Deployment
    from dcr.simulator.engine import SimulatedEngine
    from dcr.simulator.owner import SimulatedOwner
    from dcr.simulator.schedule import Move

Read = tuple[int | None, CommitRecord | None, str]


class SimulatedCoordinator:
    """Carries out the effects of ``Coordinator``.

    Args:
        world: the deployment.
        number: of this coordinator: ``c1``, ``c2``, ...
        trainer: number of the trainer whose owners it drives.
    """

    def __init__(self, world: "Deployment", number: int, trainer: int) -> None:
        self.world = world
        self.id = f"c{number}"
        self.trainer = trainer
        self.stalled = self.cut = False
        s = world.setup
        owners = [f"o{n}" for n in range(s.owners)]
        self.policy: Coordinator | None = None
        self.whim: Whim | None = None
        if s.policy == "any" and not world.calm:
            self.whim = Whim(
                RECORD_ID,
                self.id,
                owners,
                wire_version=0,
                operations=s.operations,
                members_min=s.members_min,
                restores_max=s.restores_max,
                gate_mode=s.gate_mode,
            )
        else:
            self.policy = Coordinator(
                RECORD_ID,
                self.id,
                owners,
                wire_version=0,
                operations=s.operations,
                members_min=s.members_min,
                attempts_max=s.attempts_max,
                restores_max=s.restores_max,
                gate_mode=s.gate_mode,
                stop_waits=s.stop_waits,
                rejoin_waits=s.rejoin_waits,
            )
        self.waits = None if self.policy is None else Waits(self.policy, rejoins=s.rejoin_waits)
        self.inbox: dict[str, deque[Any]] = {}  # of each party by its name: reports, and the loss of connections
        self.peers: dict[str, Link] = {}
        self.reads: list[Read | None] = []
        self.timers = Timers()
        self.fatal = ""

    @property
    def role(self) -> Coordinator | Whim:
        """The role that it runs."""
        role = self.whim if self.policy is None else self.policy
        assert role is not None
        return role

    # ------------------------------------------------------------ effects

    def run(self, effects: list[Effect]) -> None:
        """Carry out what the coordinator asks for; who leads no more writes and orders nothing."""
        for e in effects:
            if self.fatal:
                return
            match e:
                case SendMember():
                    self._send(e.engine, e.order)
                case SendOwner():
                    self._send(e.owner, e.order)
                case ReadRecord():
                    self.reads.append(None)
                case WriteRecord():
                    if self.waits is not None:
                        self.waits.writes(e)
                    self.world.store.writes.append(Write(self.id, e))
                case StartTimer():
                    self.timers.start(e.number)
                    if e.name == REJOIN:
                        self.world.actions.add("engines that K names are waited for")
                    if self.waits is not None:
                        self.waits.timer = e
                case Fatal():
                    self.fatal = e.reason
                    self._check_fatal()
                case _:
                    self.world.saw(e)

    def _check_fatal(self) -> None:
        """A leader gives up only because somebody else wrote K, or because its writes stay open again and again."""
        others = any(by != self.id for by in self.world.store.writers[self.role.revision or 0 :])
        known = "again and again" in self.fatal or "version 0 cannot be created" in self.fatal
        holds(others or known, "LeadsOn", lambda: f"{self.id} gives up, and nobody else wrote K: {self.fatal}")

    def _send(self, name: str, order: object) -> None:
        link = self.peers.get(name)
        if link is not None:
            link.send_down(order)

    # ------------------------------------------------------------ connections

    def accept(self, party: "SimulatedOwner | SimulatedEngine") -> None:
        """A party connects; the end of its last connection here is told first."""
        link = Link(self.inbox.setdefault(party.name, deque()), party.incarnation)
        party.link = link
        link.send_up(Connected(link))
        for report in party.joins():
            link.send_up(report)

    def hear(self, name: str) -> bool:
        """The next report of this party, or the loss of its connection, arrives."""
        inbox = self.inbox.get(name)
        if not inbox:
            return False
        report = inbox.popleft()
        if isinstance(report, Connected):
            self.peers[name] = report.link
            return True
        member = name[0] == "e"
        if isinstance(report, Lost):
            call = self.role.member_lost if member else self.role.owner_lost
            self.run(call(name, report.incarnation))
        elif member:
            if self.waits is not None and isinstance(report, Join):
                self.waits.heard.add(name)
            self.run(self.role.member_report(report))
        else:
            self.run(self.role.owner_report(report))
        return True

    def dies(self, kept: int) -> None:
        """The process ends: connections break, some of what it sent still comes, and its writes may be late."""
        for party in self.world.parties():
            if party.link is not None and party.link.inbox is self.inbox.get(party.name):
                party.late.extend(late(party.link.down, kept))
                party.link = None
        self.peers.clear()
        self.inbox.clear()
        for w in self.world.store.writes:
            if w.by == self.id:
                w.awaited = False

    # ------------------------------------------------------------ the control plane

    def read_step(self, at: int) -> bool:
        """Read K, or hand in what was read."""
        if at >= len(self.reads):
            return False
        found = self.reads[at]
        if found is None:
            self.reads[at] = self.world.store.read()
        else:
            del self.reads[at]
            self.run(self.role.record_read(*found))
        return True

    def look(self) -> bool:
        """A leader looks at K now and then, unless it waits for a write."""
        if self.role.record is None or self.role.phase in (Phase.WRITING, Phase.FATAL) or self.reads:
            return False
        self.reads.append(None)
        return True

    def writes(self) -> list[Write]:
        """Its compare-and-sets that are on their way and awaited."""
        return [w for w in self.world.store.writes if w.awaited and w.by == self.id]

    def answer(self, w: Write) -> None:
        """A compare-and-set takes effect, or does not, and the coordinator is told."""
        store, operation_id = self.world.store, w.order.operation_id
        if store.take_effect(w):
            assert store.revision is not None
            self.run(self.role.written(operation_id, store.revision))
        else:
            self.run(self.role.conflict(operation_id, store.revision, store.operation_id))

    def lose_answer(self, w: Write, how: int) -> None:
        """A compare-and-set has no answer: it took effect, or never will, or does so later."""
        store = self.world.store
        match how % 3:
            case 0:
                store.take_effect(w)
            case 1:
                store.writes.remove(w)
            case _:
                w.awaited = False
        self.run(self.role.unknown(w.order.operation_id))

    def run_out(self, which: int) -> bool:
        """A time-out runs out."""
        number = self.timers.run_out(which)
        if number is None or self.fatal or self.policy is None:
            return False
        if self.waits is not None:
            self.waits.ran_out(number)
        self.run(self.policy.expired(number))
        return True

    def go_on(self, what: Intervention) -> bool:
        """An operator has a stopped transition go on whose push waits; False if that makes no sense now."""
        if self.policy is None or self.waits is None or self.fatal or not self.policy.held:
            return False
        try:
            effects = intervene(self.policy, what)
        except RefusedError:
            return False
        self.waits.word = True
        self.world.actions.add("a stopped transition that went on")
        self.run(effects)
        return True

    def lead(self, n: int) -> bool:
        """A leader without a policy does something that it may do."""
        effects = None if self.whim is None or self.fatal else self.whim.act(n)
        if effects is None:
            return False
        self.run(effects)
        return True

    # ------------------------------------------------------------ what can happen

    def moves(self) -> "list[Move]":
        """What can happen here by itself."""
        if self.stalled or self.cut or self.fatal:
            return []
        out: list[Move] = []
        for name, inbox in self.inbox.items():
            if inbox:
                out.append(("hear", f"{self.id}:{name}", 0))
        if self.reads:
            out.append(("read", self.id, 0))
        if self.world.store.writes and self.writes():
            out.append(("answer", self.id, 0))
        if self.whim is not None:
            out += [("lead", self.id, n) for n in self.whim.due()]
        return out
