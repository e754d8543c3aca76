"""A coordinator under any reports, answers and time-outs, beside spec/tla/RefitCoordinator.tla.

Reports are what anybody might say, true or not.  Every write, order and outcome is held to the guard of its action, by
what was reported; every write besides to ``RecordStep``.
"""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcr.protocol.conductor import Conductor
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.coordinator_effects import Fatal, ReadRecord, SendMember, SendOwner, StartTimer, WriteRecord
from dcr.protocol.identity import manifest_root
from dcr.protocol.messages import (
    Acknowledged,
    AttemptFailed,
    CandidateReady,
    Emit,
    EmitFailed,
    Folded,
    Join,
    OwnerJoin,
    Prepare,
    Prepared,
    Sealed,
    Serving,
    Staged,
    StorageState,
    Withdraw,
)
from dcr.protocol.record import CommitRecord, Member, OwnerRef
from dcr.protocol.step import Step
from tests.unit.protocol.machines.heard import OWNERS, Heard, Store, share, total
from tests.unit.protocol.machines.leader_guards import LeaderGuards

ROLES = ("Conductor", "Leader", "Session", "Registrar", "Coordinator", "Engine")
ENGINES = ("e", "f")
FOREIGN = "c9"
HOLDS = st.sampled_from(("version", "version", "digest", "tears"))
STEPS = st.sampled_from((3, 9, 20, 40))
TROUBLE = st.sampled_from(
    ("", "members fail", "members fail", "owners fail", "time", "abandon", "roll back", "unanswered", "late")
)


class CoordinatorMachine(LeaderGuards, RuleBasedStateMachine):
    """It writes, orders and tells only what follows from what was reported."""

    @initialize(stage=st.booleans(), members_min=st.sampled_from((1, 1, 2)), found=st.booleans())
    def begin(self, stage, members_min, found) -> None:
        self.stage, self.members_min = stage, members_min
        self.c = self.role()
        self.store = Store()
        if found:
            self.store.put(CommitRecord("policy", 0, 3, "c0", 1, total(0), (Member("e", 1),)), "theirs")
        self.heard = Heard()
        self.known: CommitRecord | None = None
        self.known_revision: int | None = None
        self.write: WriteRecord | None = None
        self.why_again = False
        self.reads = 0
        self.timer = 0
        self.fatal = False
        self.doomed = False
        self.late: list[WriteRecord] = []
        self.prepares: dict[int, dict[str, Prepare]] = {}
        self.emits: dict[int, dict[str, Emit]] = {}
        self.applied: set[int] = set()
        self.published: set[int] = {0}
        self.commits: dict[int, str] = {0: total(0)}
        self.owners = dict.fromkeys(OWNERS, 1)
        self.pushes = dict.fromkeys(OWNERS, 0)
        self.engines = dict.fromkeys(ENGINES, 1)

    def role(self) -> Conductor:
        return Coordinator("policy", "c1", OWNERS, attempts_max=2, **self.settings())

    def settings(self) -> dict:
        gate = "async" if self.stage else "sync"
        return {"wire_version": 0, "members_min": self.members_min, "gate_mode": gate}

    # ------------------------------------------------------------ the control plane

    @precondition(lambda self: self.write is not None)
    @rule(how=st.sampled_from(("written", "written", "lost", "late", "unanswered")))
    def store_answers(self, how) -> None:
        """``CompareAndSet``: it takes effect or not, and its writer hears so, or does not."""
        w, stored = self.write, self.store
        fits = stored.revision == w.expected_revision
        if fits and how in ("written", "unanswered"):
            stored.put(w.record, w.operation_id)
        elif how == "late":
            self.late.append(w)
        if how != "written":
            self.runs(self.c.unknown(w.operation_id))
        elif fits:
            self._took_effect(w)
            self.runs(self.c.written(w.operation_id, stored.revision))
        else:
            self._is_doomed()
            if stored.operation_id == w.operation_id:
                self._took_effect(w)
            self.runs(self.c.conflict(w.operation_id, stored.revision, stored.operation_id))

    @precondition(lambda self: self.reads)
    @rule()
    def k_is_read(self) -> None:
        self.reads -= 1
        w, stored = self.write, self.store
        if stored.record is not None and self.known is None and w is None:
            self.known, self.known_revision = stored.record, stored.revision
        if w is not None and stored.operation_id == w.operation_id:
            self._took_effect(w)
        elif w is not None:
            self.why_again = stored.revision == w.expected_revision
        self._is_doomed()
        self.runs(self.c.record_read(stored.revision, stored.record, stored.operation_id))
        self.why_again = False

    def _is_doomed(self) -> None:
        record = self.store.record
        ours = record is None or record.leader == "c1" or self.known is None
        self.doomed = self.doomed or not (ours or record == self.known)

    @precondition(lambda self: self.late)
    @rule()
    def late_write(self) -> None:
        """``LateWrite``."""
        w = self.late.pop(0)
        if self.store.revision == w.expected_revision:
            self.store.put(w.record, w.operation_id)

    @precondition(lambda self: self.store.record is not None and self.known is not None)
    @rule(really=st.integers(0, 3))
    def another_leads(self, really) -> None:
        k = self.store.record
        if really == 0 and k.leader == "c1":
            self.store.put(k.take_over(FOREIGN), "theirs")

    def _took_effect(self, w: WriteRecord) -> None:
        """The writer hears that its write took effect."""
        self.known, self.known_revision, self.write = w.record, self.store.revision, None
        if w.reason == "Commit":
            self.heard.committed(w.record)

    # ------------------------------------------------------------ what is reported

    @rule(
        owner=st.sampled_from(OWNERS),
        what=st.sampled_from(
            (
                "join",
                "restart",
                "push",
                "withdraw",
                "sealed",
                "sealed other",
                "failed",
                "fatal",
                "folded",
                "lost baseline",
            )
        ),
        ago=st.sampled_from((0, 0, 0, 1)),
        stale=st.sampled_from((0, 0, 0, 1)),
    )
    def owner_says(self, owner, what, ago, stale) -> None:
        """Of this epoch or an older one, as this incarnation or the one before."""
        if what == "restart":
            self.owners[owner] += 1
            self.pushes[owner] = 0
        if what == "push":
            self.pushes[owner] += 1
        me, epoch = self.owners[owner] - stale, self._epoch(ago)
        content = self._content(owner, epoch) if what != "sealed other" else share(owner, 77)
        version = 0 if self.known is None else self.known.version
        folded = "" if what == "lost baseline" else share(owner, version)
        report = {
            "push": CandidateReady(owner, me, self.pushes[owner]),
            "withdraw": Withdraw(owner, me, self.pushes[owner]),
            "failed": EmitFailed(owner, me, epoch, "no", fatal=False),
            "fatal": EmitFailed(owner, me, epoch, "no", fatal=True),
        }.get(what)
        if what in ("join", "restart"):
            digest = share(owner, version if ago == 0 else 0) if stale == 0 else ""
            report = OwnerJoin(owner, self.owners[owner], 1, digest)
        elif "sealed" in what:
            report = Sealed(owner, me, epoch, f"m{owner}{me}{epoch}", content, 1, 8, 1, 3, {})
        elif report is None:
            report = Folded(owner, me, epoch, folded, "" if folded else "lost", {})
        self.heard.of_owner(report, self.known)
        self.runs(self.c.owner_report(report))

    def _content(self, owner: str, epoch: int) -> str:
        """Its share of what this epoch brings."""
        order = self.emits.get(epoch, {}).get(owner)
        return share(owner, 1 if order is None else order.target)

    @rule(
        engine=st.sampled_from(ENGINES),
        what=st.sampled_from(
            ("join", "restart", "prepared", "staged", "acknowledged", "other root", "failed", "serving", "lost")
        ),
        holds=st.sampled_from(("version", "version", "digest", "tears", "other tears", "nothing", "older")),
        ago=st.sampled_from((0, 0, 0, 1)),
        stale=st.sampled_from((0, 0, 0, 1)),
    )
    def member_says(self, engine, what, holds, ago, stale) -> None:
        if what == "restart":
            self.engines[engine] += 1
        me, epoch, state = self.engines[engine] - stale, self._epoch(ago), self._state(holds)
        if what == "lost":
            self.heard.engine_lost(engine, me)
            self.runs(self.c.member_lost(engine, me))
            return
        root = "f" * 64 if what == "other root" else self._root(epoch)
        report = {
            "prepared": Prepared(engine, me, epoch, state),
            "staged": Staged(engine, me, epoch),
            "failed": AttemptFailed(engine, me, epoch, "torn", state),
            "serving": Serving(engine, me, epoch, 0),
        }.get(what)
        if what in ("join", "restart"):
            report = Join(engine, self.engines[engine], 1, 0, ("add", "xor"), state, (), {})
        elif report is None:
            report = Acknowledged(engine, me, epoch, root, {})
        self.heard.of_member(report, self.known)
        self.runs(self.c.member_report(report))

    def _root(self, epoch: int) -> str:
        sealed = {o.owner: f"m{o.owner}{o.incarnation}{epoch}" for o in self._owners_of(epoch)}
        return manifest_root(sealed)

    def _owners_of(self, epoch: int) -> tuple[OwnerRef, ...]:
        orders = self.prepares.get(epoch, {})
        return next(iter(orders.values())).owners if orders else ()

    def _state(self, holds: str) -> StorageState:
        k = self.known
        version, digest = (0, total(0)) if k is None else (k.version, k.baseline_id)
        candidate = "w" if k is None or k.open is None else k.open.candidate
        return {
            "version": StorageState(version, digest, ()),
            "digest": StorageState(None, digest, ()),
            "tears": StorageState(version, digest, (candidate,)),
            "other tears": StorageState(version, digest, ("w", candidate)),
            "nothing": StorageState(None, "", ("unknown",)),
            "older": StorageState(max(0, version - 1), total(max(0, version - 1)), ()),
        }[holds]

    def _epoch(self, ago: int) -> int:
        return max(0, (0 if self.known is None else self.known.epoch) - ago)

    @rule(owner=st.sampled_from(OWNERS))
    def owner_is_lost(self, owner) -> None:
        self.heard.owner_lost(owner, self.owners[owner])
        self.runs(self.c.owner_lost(owner, self.owners[owner]))

    # ------------------------------------------------------------ time, people

    @rule(ago=st.sampled_from((0, 0, 1)))
    def time_runs_out(self, ago) -> None:
        self.heard.waited = self.heard.waited or ago == 0
        self.runs(self.c.expired(self.timer - ago))

    @rule(what=st.sampled_from(("abandon", "roll back", "dense")))
    def operator_says(self, what) -> None:
        if what == "dense":
            self.c.dense_next()
        else:
            self.runs(self.c.abandon() if what == "abandon" else self.c.roll_back())

    # ------------------------------------------------------------ what goes right

    @rule(steps=STEPS, holds=HOLDS, trouble=TROUBLE, at=st.integers(0, 12))
    def goes_on(self, steps, holds, trouble, at) -> None:
        """What is due, one thing after the other, from one transition to the next; once there is trouble."""
        for n in range(steps):
            if self.fatal:
                return
            self._goes_on(holds, trouble if n >= at else "")
            trouble = "" if n >= at and trouble not in ("members fail", "owners fail") else trouble
            self.check()

    @rule(steps=STEPS, holds=HOLDS, trouble=TROUBLE, at=st.integers(0, 12))
    def goes_on_too(self, steps, holds, trouble, at) -> None:
        """The same: of each example hypothesis leaves some rules out, and without this one little happens."""
        self.goes_on(steps, holds, trouble, at)

    def _goes_on(self, holds: str, trouble: str) -> None:
        epoch = self._epoch(0)
        orders, emits = self.prepares.get(epoch, {}), self.emits.get(epoch, {})
        mine = [e for e, p in orders.items() if p.incarnation == self.engines[e]]
        if self.write is not None:
            self.store_answers(trouble if trouble in ("unanswered", "late") else "written")
        elif self.reads:
            self.k_is_read()
        elif missing := [o for o in OWNERS if not self.heard.is_connected(o)]:
            self.owner_says(missing[0], "join", 0, 0)
        elif absent := [e for e in ENGINES if not self.heard.engine_is_connected(e)]:
            self.member_says(absent[0], "join", holds, 0, 0)
        elif trouble == "members fail" and epoch in self.applied and mine:
            self.member_says(mine[0], "failed", "tears", 0, 0)
        elif trouble == "owners fail" and emits:
            self.owner_says(next(iter(emits)), "failed", 0, 0)
        elif trouble == "time":
            self.time_runs_out(0)
        elif trouble == "abandon" or (trouble == "roll back" and self.known.open is not None and mine):
            self.operator_says(trouble)
        elif todo := [e for e in mine if (e, epoch) not in self.heard.prepared]:
            self.member_says(todo[0], "prepared", "version", 0, 0)
        elif todo := [o for o in emits if (o, self.owners[o], epoch) not in self.heard.sealed]:
            self.owner_says(todo[0], "sealed", 0, 0)
        elif todo := [e for e in mine if orders[e].stage and (e, epoch) not in self.heard.staged]:
            self.member_says(todo[0], "staged", "version", 0, 0)
        elif epoch in self.applied and (todo := [e for e in mine if (e, epoch) not in self.heard.acknowledged]):
            self.member_says(todo[0], "acknowledged", "version", 0, 0)
        elif todo := self.heard.owing(self.known):
            self.owner_says(todo[0], "folded", 0, 0)
        elif todo := [o for o in OWNERS if not self.heard.waits(o)]:
            self.owner_says(todo[0], "push", 0, 0)
        else:
            self.otherwise()

    def otherwise(self) -> None:
        """Nobody has anything to say."""
        self.time_runs_out(0)

    # ------------------------------------------------------------ what it may ask for

    def runs(self, effects: list) -> None:
        assert not (self.fatal and effects), "it goes on after it gave up"
        for e in effects:
            match e:
                case WriteRecord():
                    self._writes(e)
                case ReadRecord():
                    self.reads += 1
                case StartTimer():
                    assert e.number > self.timer
                    self.timer = e.number
                case Step():
                    self._steps(e.action)
                case SendMember():
                    self._orders_member(e.engine, e.order)
                case SendOwner():
                    self._orders_owner(e.owner, e.order)
                case Fatal():
                    self.fatal, self.write = True, None
                    lacks = not all(self.heard.digests()) or "again and again" in e.reason
                    assert self.doomed or lacks, "it gives up, though nobody else leads"

    @invariant()
    def check(self) -> None:
        if hasattr(self, "c") and not self.fatal and self.known is not None:
            assert self.c.record in (self.known, None)
