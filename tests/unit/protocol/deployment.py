"""A whole deployment of the pure roles in one process: links, faults and their schedule come from one seed.

What is checked does not ask the roles: it looks at concrete cells, at K as it was stored, and at what was emitted.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cells import MODULUS, RECORD_ID, content_digest
from deployed_engine import DeployedEngine
from deployed_store import Store, Write
from deployed_trainer import DeployedOwner

from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Fatal, ReadRecord, SendMember, SendOwner, StartTimer, WriteRecord
from dcr.protocol.identity import Manifest
from dcr.protocol.record import CommitRecord, Direction
from dcr.protocol.step import Step

if TYPE_CHECKING:
    from dcr.protocol.messages import Outcome

T = TypeVar("T")
CELLS = 6
ROUNDS_MAX = 60
STEPS_MAX = 4000


class Link:
    """One connection to the coordinator: in order, and what was on its way may be lost when it breaks."""

    def __init__(self) -> None:
        self.up: deque = deque()
        self.down: deque = deque()
        self.connected = False

    def send_up(self, report: object) -> None:
        if self.connected:
            self.up.append(report)

    def send_down(self, order: object) -> None:
        if self.connected:
            self.down.append(order)

    def breaks(self, kept: int, lost: object) -> None:
        self.connected = False
        self.down.clear()
        while len(self.up) > kept:
            self.up.pop()
        self.up.append(lost)


class Lost:
    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation


class Deployment:
    def __init__(self, seed: int) -> None:
        r = self.random = random.Random(seed)
        self.history: dict[int, dict[int, int]] = {0: {i: r.randrange(MODULUS) for i in range(CELLS)}}
        self.targets: dict[int, int] = {}  # epoch -> target
        self.emitted: dict[int, dict[int, int]] = {}  # epoch -> the candidate's cells, as its owners held them
        self.pool: dict[int, list] = {}  # epoch -> payloads and manifests that were delivered
        self.outcomes: list[Outcome] = []
        self.actions: Counter[str] = Counter()
        self.trail: list[str] = []
        owners, engines = r.randint(1, 2), r.randint(1, 3)
        self.members_min = r.randint(1, min(2, engines))
        self.store = Store(self.members_min, self._on_commit)
        self.owners = [
            DeployedOwner(self, f"o{n}", [i for i in range(CELLS) if i % owners == n]) for n in range(owners)
        ]
        self.engines = [DeployedEngine(self, f"e{n}") for n in range(engines)]
        self.links = {x.name: Link() for x in (*self.owners, *self.engines)}
        self.names = list(self.links)
        self.hosts = {x.name: x for x in (*self.owners, *self.engines)}
        self.leaders = 0
        self.attempts_max = r.randint(1, 4)
        self.gate_mode = r.choice(["sync", "async"])
        self.fault_rate = r.choice([0.01, 0.03, 0.1])
        self.orphaned = False
        self.replaced: set[str] = set()
        self._lead()

    def _lead(self) -> None:
        self.leaders += 1
        self.coordinator = Coordinator(
            RECORD_ID,
            f"c{self.leaders}",
            [o.name for o in self.owners],
            wire_version=0,
            operations=self.random.choice([("add", "xor"), ("xor",)]),
            members_min=self.members_min,
            attempts_max=self.attempts_max,
            restores_max=self.random.choice([1, 3]),
            gate_mode=self.gate_mode,
        )
        self.reads = 0
        self.timers: list[int] = []
        self.fatal = ""

    def saw(self, step: Step) -> None:
        self.actions[step.action] += 1
        self.trail.append(f"{step.actor} {step.action} {step.epoch} {step.detail}")

    # ------------------------------------------------------------ what must hold

    def _on_commit(self, old: CommitRecord, new: CommitRecord) -> None:
        epoch, opened = old.epoch, old.open
        assert opened is not None
        target = self.emitted.get(epoch, {})
        assert len(target) == CELLS, "a commit of an epoch that not every owner emitted"
        assert new.baseline_id == content_digest(target), "K names other content than was emitted"
        if opened.direction is Direction.BACK:
            assert target == self.history[new.version], "a rollback to other bits than the committed version's"
        else:
            assert opened.content_digest in ("", new.baseline_id), "a commit of another candidate than K named"
            self.history[new.version] = target
        for m in new.members:
            e = next(e for e in self.engines if e.name == m.engine)
            if e.incarnation != m.incarnation:
                continue  # it died since it acknowledged
            assert epoch in e.acknowledged, f"a commit that {m.engine} did not acknowledge"
            assert e.write is None
            assert e.storage == target, f"CommitStored: {m.engine} holds other bits"

    def check_serving(self, e: DeployedEngine) -> None:
        if e.serving is None:
            return
        v = e.serving
        assert v in self.history, f"ServingExact: {e.name} serves {v}, which was never committed"
        assert e.storage == self.history[v], f"ServingExact: {e.name} serves {v} with other bits"
        loaded = e.loaded and self.history[v] == self.history[0]
        assert loaded or v in e.acknowledged.values(), f"ServingExact: {e.name} serves {v}, which it never took in"

    def check(self) -> None:
        for e in self.engines:
            self.check_serving(e)
        for o in self.owners:
            if o.role.baseline_digest and not o.role.folding:
                assert o.baseline is not None
                assert content_digest(o.baseline) == o.role.baseline_digest, "BaselineExact: digest"
                assert any(o.baseline == o.share(v) for v in self.history), "BaselineExact: not a committed version"
                if o.role.base is not None:
                    assert o.baseline == o.share(o.role.base), "BaselineExact: another version than the owner says"

    # ------------------------------------------------------------ the coordinator's shell

    def run(self, effects: list) -> None:
        for e in effects:
            match e:
                case Step():
                    self.saw(e)
                case ReadRecord():
                    self.reads += 1
                case WriteRecord():
                    self.store.writes.append(Write(e))
                case SendMember():
                    self.links[e.engine].send_down(e.order)
                case SendOwner():
                    self.links[e.owner].send_down(e.order)
                case StartTimer():
                    self.timers.append(e.number)
                case Fatal():
                    self.fatal = e.reason
                case _:
                    raise AssertionError(e)

    def _read(self) -> bool:
        if not self.reads:
            return False
        self.reads -= 1
        s = self.store
        self.run(self.coordinator.record_read(s.revision, s.record, s.operation_id))
        return True

    def _write(self, *, fault: float = 0.0) -> bool:
        s, r = self.store, self.random
        if not s.writes:
            return False
        w = r.choice(s.writes)
        c, o = self.coordinator, w.order.operation_id
        x = r.random()
        if w.awaited and x < fault:
            w.awaited = False  # no answer; it may still take effect, later or never
            if x < fault / 3:
                s.writes.remove(w)
            self.run(c.unknown(o))
            return True
        took = s.take_effect(w)
        if took:
            self._count(w.order)
        if not w.awaited:
            self.orphaned |= took
        elif x < 1.7 * fault:
            self.run(c.unknown(o))
        elif x < 2 * fault:
            self.replace_leader()  # it dies before it has the answer
        elif took:
            assert s.revision is not None
            self.run(c.written(o, s.revision))
        else:
            self.run(c.conflict(o, s.revision, s.operation_id))
        return True

    def _count(self, w: WriteRecord) -> None:
        """What a schedule came by, beside the steps that roles emit."""
        k = w.record
        if w.reason == "OpenAttempt" and k.open is not None and f"-{k.leader}-" not in k.open.candidate:
            self.actions["an attempt of another leader's transition"] += 1
        if w.reason == "Commit" and k.committed is not None and k.committed.direction is Direction.BACK:
            self.actions["a rollback that was committed"] += 1

    # ------------------------------------------------------------ links

    def _up(self, name: str) -> bool:
        link = self.links[name]
        if not link.up:
            return False
        report = link.up.popleft()
        member = name[0] == "e"
        c = self.coordinator
        if isinstance(report, Lost):
            self.run((c.member_lost if member else c.owner_lost)(name, report.incarnation))
        else:
            self.run((c.member_report if member else c.owner_report)(report))
        return True

    def _down(self, name: str) -> bool:
        link = self.links[name]
        if not link.down:
            return False
        self.hosts[name].order(link.down.popleft())
        return True

    def connect(self, name: str) -> bool:
        link, host = self.links[name], self.hosts[name]
        if link.connected:
            return False
        link.connected = True
        for report in [host.join()] if isinstance(host, DeployedEngine) else host.joins():
            link.send_up(report)
        return True

    def disconnect(self, name: str) -> None:
        link = self.links[name]
        link.down.clear()
        if link.connected:
            link.breaks(self.random.randint(0, len(link.up)), Lost(self.hosts[name].incarnation))

    # ------------------------------------------------------------ what the trainer does

    def push(self, *, step: bool = True) -> bool:
        """Every rank calls push, with new weights unless a stopped transition is resumed."""
        if any(o.pushing for o in self.owners):
            return False
        for o in self.owners:
            if step:
                o.train()
            o.push()
        return True

    def boot_trainer(self, *, resumed: bool) -> None:
        """The whole trainer, coordinator included, dies and comes back."""
        for o in self.owners:
            self.links[o.name].down.clear()
            o.start(resumed=resumed)
        self.replace_leader()

    def replace_leader(self) -> None:
        """Another coordinator leads; owners and engines live on and come to it.  What the old one sent may be late."""
        for link in self.links.values():
            link.connected = False
            link.up.clear()
            while len(link.down) > self.random.randint(0, 3):
                link.down.pop()
        for w in self.store.writes:
            w.awaited = False
        self._lead()

    # ------------------------------------------------------------ the schedule

    def step(self) -> None:
        """One thing happens: progress most of the time, else a fault."""
        r = self.random
        if self.fatal:
            first = "version 0 cannot be created" in self.fatal
            assert first or self.orphaned or "again and again" in self.fatal, self.fatal
            self.orphaned = False
            if first or r.random() < 0.6:
                self.boot_trainer(resumed=first or r.random() < 0.7)
            else:
                self.replace_leader()
        e, o, name = self._pick(self.engines), self._pick(self.owners), self._pick(self.names)
        x = r.random()
        if x >= self.fault_rate:
            self._some_progress(e, o, name)
        else:
            self._fault(e, o, name)
        self.check()

    def _some_progress(self, e: DeployedEngine, o: DeployedOwner, name: str) -> None:
        r = self.random
        for _ in range(6):
            n = int(13 * r.random())
            if (
                (n < 2 and self._up(name))
                or (n == 2 and self._down(name))
                or (n == 3 and (self._write(fault=0.08) or self._read()))
                or (n == 4 and e.rank_step())
                or (n == 5 and e.reads and e.read_step(r.randrange(len(e.reads))))
                or (n == 6 and self._gate(e))
                or (n == 7 and self._deliver(e))
                or (n == 8 and e.write_step(fail=r.random() < 2 * self.fault_rate))
                or (n == 9 and e.synchronise_step(fail=r.random() < 0.02))
                or (n == 10 and o.emission_step(fail=r.random() < 0.03))
                or (n == 11 and (o.fold_step(fail=r.random() < 0.02) or (o.reads and o.read_step(0))))
                or (n == 12 and r.random() < 0.3 and (self.push() or e.poll()))
            ):
                return
            e, o, name = self._pick(self.engines), self._pick(self.owners), self._pick(self.names)
        self.connect(name)

    def _pick(self, among: Sequence[T]) -> T:
        return among[int(self.random.random() * len(among))]  # much quicker than random.choice

    def _deliver(self, e: DeployedEngine, *, fresh: bool = False) -> bool:
        """Something of the epoch that this engine fetches arrives: in any order, perhaps not for the first time."""
        items = [] if e.fetching is None else self.pool.get(e.fetching, [])
        if fresh:
            items = [p for p in items if (p.digest() if isinstance(p, Manifest) else p.digest) not in e.fetched]
        return bool(items) and e.feed(self._pick(items))

    def _gate(self, e: DeployedEngine) -> bool:
        """The gate moves; what was on its way to the rank may still arrive right after."""
        moved = e.gate_step(stuck=self.random.random() < self.fault_rate)
        if moved and e.serving is not None and self.random.random() < 0.3:
            self._replay(e)
        return moved

    def _replay(self, e: DeployedEngine) -> None:
        """A payload or a manifest comes late, or again: of the last epochs, or of any."""
        if self.pool:
            epochs = list(self.pool)
            e.feed(self._pick(self.pool[self._pick(epochs[-2:] if self.random.random() < 0.7 else epochs)]))

    def _fault(self, e: DeployedEngine, o: DeployedOwner, name: str) -> None:
        r = self.random
        n = r.random()
        if n < 0.14:
            self.disconnect(name)
        elif n < 0.36:
            self.connect(name)
        elif n < 0.50:
            self._replay(e)
        elif n < 0.57:
            self.disconnect(e.name)
            e.start(loaded=r.random() < 0.7)
        elif n < 0.68:
            self.disconnect(o.name)
            o.start(resumed=r.random() < 0.6)
            if r.random() < 0.5:  # it comes to the same push as the others, with weights of its own
                o.train()
                o.push()
        elif n < 0.69:
            self.boot_trainer(resumed=r.random() < 0.5)
        elif n < 0.71:
            self.replace_leader()
        elif n < 0.79:
            if self.timers and (self.timers[-1] != r.choice(self.timers) or r.random() < 0.5):
                self.run(self.coordinator.expired(r.choice(self.timers)))
        elif n < 0.81:
            self.run(self.coordinator.abandon())
        elif n < 0.83:
            self.run(self.coordinator.roll_back())
        elif n < 0.84:
            self.coordinator.dense_next()
        elif n < 0.88:
            self._step_candidate(next((x for x in self.owners if x.pushing and x.sealed), o))
            if r.random() < 0.6:
                self.run(self.coordinator.roll_back())
        elif n < 0.90 and o.pushing:
            o.give_up()
            if r.random() < 0.6:
                o.push()
                if r.random() < 0.4:
                    self.replace_leader()  # which hears of the second push alone
        elif n < 0.92 and any(x.pushing for x in self.owners):
            for x in self.owners:
                if not x.pushing:
                    x.push()
        elif n < 0.94:
            e.record_lost()
        else:
            e.poll()

    def _step_candidate(self, o: DeployedOwner) -> None:
        """The trainer breaks its word and steps, or goes on with other weights after a stop."""
        if o.pushing and not o.sealed:
            return  # nothing that was sealed tells the two apart: the trainer's pin (hold, snapshot) must prevent it
        i = self.random.choice(o.indices)
        back = o.baseline is not None and o.baseline[i] != o.weights[i] and self.random.random() < 0.8
        o.weights[i] = o.baseline[i] if o.baseline is not None and back else (o.weights[i] + 1) % MODULUS
        o.stepped = o.pushing

    # ------------------------------------------------------------ when faults stop

    def finish(self) -> None:
        """No more faults: the push ends, the next ones do, and every engine serves the committed version."""
        self._until(lambda: not any(o.pushing for o in self.owners), "the push does not end")
        for _ in range(4):
            k = self.store.record
            if k is not None and k.open is not None:
                self.run(self.coordinator.abandon())
                self._quiet()
            before = len(self.outcomes)
            self.push()
            self._until(lambda: not any(o.pushing for o in self.owners), "a push without faults does not end")
            if all(not outcome.error for outcome in self.outcomes[before:]):
                break
        else:
            raise AssertionError(f"no push succeeds without faults: {self.outcomes[-1].error}")
        self._until(self._converged, "Converges: an engine does not come to serve the committed version")

    def _converged(self) -> bool:
        k = self.store.record
        return k is not None and k.open is None and all(e.serving == k.version for e in self.engines)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        for _ in range(ROUNDS_MAX):
            if self.fatal:
                self.boot_trainer(resumed=True)
            for e in self.engines:
                if e.refused and e.name not in self.replaced:
                    self.replaced.add(e.name)  # once: nothing is refused for what happens without faults
                    self.disconnect(e.name)
                    e.start(loaded=False)
            for name in self.links:
                self.connect(name)
            self._quiet()
            if done():
                return
            if any(o.pushing for o in self.owners):
                for o in self.owners:
                    if not o.pushing:
                        o.push()  # ranks go in step: whoever restarted comes to the same push
                self._quiet()
                if done():
                    return
            for e in self.engines:
                e.poll()
            self._quiet()
            if done():
                return
            if self.timers:
                self.run(self.coordinator.expired(self.timers[-1]))
            self.check()
        held = [(e.name, e.incarnation, e.serving, e.node.gate, e.receiver.state, e.refused) for e in self.engines]
        raise AssertionError(f"{what}: {self.coordinator.phase}, {held}, K {self.store.record}")

    def _quiet(self) -> None:
        """Everything that can happen by itself happens."""
        for _ in range(STEPS_MAX):
            moved = [self._write(), self._read()]
            for name in self.links:
                moved += [self._up(name), self._down(name)]
            for e in self.engines:
                moved += [e.rank_step(), e.gate_step(), e.read_step(0), e.write_step(), e.synchronise_step()]
                moved.append(self._deliver(e, fresh=True))
            for o in self.owners:
                moved += [o.emission_step(), o.fold_step(), o.read_step(0)]
            self.check()
            if not any(moved):
                return
        raise AssertionError("it never comes to rest")


def run_schedule(seed: int, steps: int) -> Deployment:
    """One whole schedule; an AssertionError names the seed, and its notes are the trail."""
    d = Deployment(seed)
    try:
        for _ in range(steps):
            d.step()
        d.finish()
    except AssertionError as e:
        e.add_note(f"seed {seed}, {steps} steps")
        e.add_note("\n".join(d.trail[-60:]))
        raise
    return d
