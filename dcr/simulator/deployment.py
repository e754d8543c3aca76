"""A whole deployment in one process: parties, the control plane, the delivery store, and history to compare with."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dcr.protocol.record import CommitRecord, Direction
from dcr.protocol.step import Step
from dcr.simulator.cells import MODULUS, Cells, content_digest, mixed
from dcr.simulator.coordinator import SimulatedCoordinator
from dcr.simulator.delivery import DeliveryStore
from dcr.simulator.engine import SimulatedEngine
from dcr.simulator.invariants import holds, under_way
from dcr.simulator.network import late, message_name
from dcr.simulator.owner import SimulatedOwner
from dcr.simulator.store import Store

if TYPE_CHECKING:
    from dcr.protocol.messages import Outcome
    from dcr.simulator.schedule import Setup

CELLS = 6
TRAIL_MAX = 5000
"""So many of the last steps are kept for the story."""
OLD_COORDINATORS_MAX = 2
"""So many coordinators that were replaced live on; of more the oldest dies."""

Party = SimulatedOwner | SimulatedEngine
Process = Party | SimulatedCoordinator


class Deployment:
    """Everything that is there, and the few rules by which processes start, die and find each other.

    Args:
        setup: what is deployed.

    Attributes:
        history: bits of every version that was committed.
        licensed: (engine, incarnation, version) that K ever let serve.
        emitted: content that was emitted by (epoch, owner, incarnation).
        actions: actions that were taken, by the specification's names, and special cases of them.
        trail: the last steps that roles took.
    """

    def __init__(self, setup: "Setup") -> None:
        self.setup = setup
        self.history: dict[int, Cells] = {0: {i: mixed(setup.salt, i) % MODULUS for i in range(CELLS)}}
        self.licensed: set[tuple[str, int, int]] = set()
        self.emitted: dict[tuple[int, str, int], Cells] = {}
        self.outcomes: list[Outcome] = []
        self.actions: set[str] = set()
        self.trail: deque[Step] = deque(maxlen=TRAIL_MAX)
        self.steps = 0
        self.calm = False  # faults have stopped: whoever leads from here on has the coordinator's policy
        self.notes: list[str] | None = None  # for the story: what was sent, and what was lost
        self.store = Store(setup.members_min, self._on_write)
        self.delivery = DeliveryStore()
        self._incarnations: dict[str, int] = {}
        self._coordinators_made = 0
        self._opened_by = ""  # who led when the last attempt was opened
        self.trainer = 0
        self.owners: list[SimulatedOwner] = []
        self.old_owners: list[SimulatedOwner] = []
        self.old: list[SimulatedCoordinator] = []
        self.engines = [SimulatedEngine(self, f"e{n}", width) for n, width in enumerate(setup.ranks)]
        self.leader: SimulatedCoordinator
        self._start_trainer([(self.history[0], True)] * setup.owners)

    # ------------------------------------------------------------ who is there

    def parties(self) -> Iterator[Party]:
        """Every owner and engine that lives."""
        yield from self.owners
        yield from self.old_owners
        yield from self.engines

    def coordinators(self) -> Iterator[SimulatedCoordinator]:
        """Every coordinator that lives, the newest first."""
        yield self.leader
        yield from self.old

    def processes(self) -> list[Process]:
        """Everything that lives: coordinators, the newest first, owners, engines."""
        return [self.leader, *self.old, *self.owners, *self.old_owners, *self.engines]

    def party(self, who: str) -> Party | None:
        """The owner or engine of this id."""
        return self._parties.get(who)

    def engine(self, who: str) -> SimulatedEngine | None:
        """The engine of this id."""
        p = self._parties.get(who)
        return p if isinstance(p, SimulatedEngine) else None

    def owner(self, who: str) -> SimulatedOwner | None:
        """The owner of this id."""
        p = self._parties.get(who)
        return p if isinstance(p, SimulatedOwner) else None

    def coordinator(self, who: str) -> SimulatedCoordinator | None:
        """The coordinator of this id."""
        if self.leader.id == who:
            return self.leader
        return next((c for c in self.old if c.id == who), None)

    def share(self, version: int, indices: list[int]) -> Cells:
        """Some cells of a committed version."""
        whole = self.history[version]
        return {i: whole[i] for i in indices}

    @property
    def newest(self) -> int:
        """The last version that was committed."""
        return max(self.history)

    def next_owner_incarnation(self, name: str) -> int:
        """New with every start of an owner, whoever's trainer it belongs to."""
        self._incarnations[name] = self._incarnations.get(name, 0) + 1
        return self._incarnations[name]

    # ------------------------------------------------------------ starts and ends

    def _start_trainer(self, checkpoint: list[tuple[Cells, bool]]) -> None:
        self.trainer += 1
        self.owners = []
        for n, (cells, baselined) in enumerate(checkpoint):
            indices = [i for i in range(CELLS) if i % self.setup.owners == n]
            mine = {i: cells[i] for i in indices}
            self.owners.append(SimulatedOwner(self, f"o{n}", self.trainer, indices, mine, baselined=baselined))
        self._parties = {p.id: p for p in self.parties()}
        self._start_coordinator()

    def _start_coordinator(self) -> None:
        self._coordinators_made += 1
        self.leader = SimulatedCoordinator(self, self._coordinators_made, self.trainer)

    def checkpoint(self, choice: int) -> Cells:
        """What a process may find when it starts: the last committed version, an older one, or weights of nobody's."""
        match choice % 6:
            case 4:
                versions = sorted(self.history)
                return self.history[versions[choice // 6 % len(versions)]]
            case 5 if self.store.record is not None:
                return {i: mixed(choice, i) % MODULUS for i in range(CELLS)}
        return self.history[self.newest]

    def boot_trainer(self, choice: int, *, old_lives: bool) -> None:
        """The whole trainer starts anew from its checkpoint, coordinator included: it knows its weights, no more.

        Another one of the same record may still live: it leads until it finds out (D16).
        """
        before = self.owners
        self._replaced(lives=old_lives, kept=choice)
        if not old_lives:
            for o in before:
                self._ends(o)
        for o in self.old_owners:
            self._ends(o)
        self.old_owners = before if old_lives else []
        self.old = [c for c in self.old if c.trainer == self.trainer and old_lives]
        cells = self.checkpoint(choice)
        self._start_trainer([(cells, True)] * self.setup.owners)

    def succeed(self, kept: int, *, old_lives: bool) -> None:
        """Another coordinator takes over; owners and engines live on and come to it when they find out (D16)."""
        self._replaced(lives=old_lives, kept=kept)
        self._start_coordinator()

    def _replaced(self, *, lives: bool, kept: int) -> None:
        if lives and not self.leader.fatal:
            self.old.insert(0, self.leader)
        else:
            self.leader.dies(kept)
        for c in self.old[OLD_COORDINATORS_MAX:]:
            c.dies(kept)
        self.old = self.old[:OLD_COORDINATORS_MAX]

    @staticmethod
    def _ends(o: SimulatedOwner) -> None:
        if o.link is not None:
            o.link.breaks(0)
            o.link = None

    # ------------------------------------------------------------ connections

    def connect(self, p: Party) -> bool:
        """A party connects to the leader that is registered; an owner only to its own trainer's (README)."""
        target = self._target(p)
        if target is None or target.cut or target.stalled:
            return False
        if p.link is not None:
            if p.link.inbox is target.inbox.get(p.name) and p.link.open:
                return False
            self.disconnect(p, lost=0, kept=2)
        target.accept(p)
        return True

    def _target(self, p: Party) -> SimulatedCoordinator | None:
        mine = [c for c in self.coordinators() if not c.fatal]
        if isinstance(p, SimulatedOwner):
            mine = [c for c in mine if c.trainer == p.trainer]
        else:
            mine = mine[:1] if mine[:1] == [self.leader] else []
        return mine[0] if mine else None

    def disconnect(self, p: Party, *, lost: int, kept: int) -> bool:
        """A connection breaks: the last reports are lost, the first orders may still come, late."""
        if p.link is None:
            return False
        if self.notes is not None:
            gone = [message_name(m) for m in [*p.link.inbox][-lost:]] if lost else []
            self.notes += [f"lost: {what}" for what in gone]
            self.notes += [f"lost or late: {message_name(m)}" for m in p.link.down]
        p.late.extend(late(p.link.down, kept))
        p.link.breaks(lost)
        p.link = None
        return True

    # ------------------------------------------------------------ what happens

    def saw(self, step: object) -> None:
        """A role took a step."""
        assert isinstance(step, Step), f"an effect that nobody carries out: {step}"
        self.actions.add(step.action)
        self.trail.append(step)

    def note_fold(self) -> None:
        """An owner begins to fold."""
        k = self.store.record
        assert k is not None
        assert k.committed is not None
        if not k.committed.operation_id.startswith(f"{self.leader.id}-"):
            self.actions.add("a fold that another leader ordered")

    def late_write(self, which: int) -> bool:
        """A compare-and-set that nobody waits for any more arrives: it takes effect, or finds another revision."""
        late_ones = [w for w in self.store.writes if not w.awaited]
        if not late_ones:
            return False
        w = late_ones[which % len(late_ones)]
        took = self.store.take_effect(w)
        self.actions.add("LateWrite")
        self.actions.add("a late write that took effect" if took else "a late write that was refused")
        return True

    # ------------------------------------------------------------ what must hold

    def _on_write(self, old: CommitRecord | None, new: CommitRecord, reason: str) -> None:
        if old is None:
            named = new.baseline_id == content_digest(self.history[0])
            holds(named, "BaselineExact", "K begins with other content than the owners' baseline")
        self._note(new, reason)
        if reason == "Commit":
            assert old is not None
            self._on_commit(old, new)
        if not under_way(new):
            self.licensed.update((m.engine, m.incarnation, new.version) for m in new.members)
        if reason == "Commit":
            for e in self.engines:
                for r in e.ranks:
                    r.check()

    def _note(self, new: CommitRecord, reason: str) -> None:
        if reason == "OpenAttempt" and new.open is not None:
            self.actions.add(f"OpenAttempt {new.open.kind.value} {new.open.direction.value}")
            if new.open.attempts > 1 and new.leader != self._opened_by:
                self.actions.add("an attempt of another leader's transition")
        if reason == "OpenAttempt":
            self._opened_by = new.leader
        if reason == "Commit" and new.committed is not None and new.committed.direction is Direction.BACK:
            self.actions.add("a rollback that was committed")

    def _on_commit(self, old: CommitRecord, new: CommitRecord) -> None:
        tr, epoch = old.open, old.epoch
        assert tr is not None
        target: Cells = {}
        for o in tr.owners:
            target |= self.emitted.get((epoch, o.owner, o.incarnation), {})
        holds(len(target) == CELLS, "CommitStored", "a commit of an epoch that not every owner emitted")
        holds(new.baseline_id == content_digest(target), "CommitStored", "K names other content than was emitted")
        if tr.direction is Direction.BACK:
            same = target == self.history[new.version]
            holds(same, "CommitStored", "a rollback to other bits than the committed version's")
        else:
            named = tr.content_digest in ("", new.baseline_id)
            holds(named, "CommitStored", "a commit of another candidate than K named")
            holds(new.version not in self.history, "OneCommit", f"version {new.version} was committed twice")
            self.history[new.version] = target
        for m in new.members:
            e = self.engine(m.engine)
            if e is None or e.incarnation != m.incarnation:
                continue  # it died since it acknowledged
            for r in e.ranks:
                stored = epoch in r.acknowledged and r.write is None and r.storage == target
                holds(stored, "CommitStored", f"rank {r.name} of {e.name} does not hold what K commits")
