"""A node under any orders, readings of K and answers of its ranks, beside the gate of spec/tla/RefitReceiver.tla.

Its two ranks are the model's.  Every effect is held to the guard of the action that it carries out, and a gate order is
given exactly where ``LearnCommit`` gives one.
"""

from collections import deque

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcr.protocol import node as roles
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.protocol.messages import OpenApply, Prepare, Published, Refuse, StorageState
from dcr.protocol.receiver import PrepareRank, RankAcknowledged, RankFailed, RankPrepared, RankStaged, RankState
from dcr.protocol.record import CommitRecord, Member
from dcr.protocol.step import Step
from tests.unit.protocol.machines.rank import Rank
from tests.unit.protocol.machines.world import ME, World, digest

ROLES = ("Node",)
RANKS = ("0", "1")
BUSY = {"fenced", "staged", "applying"}
AGO = st.sampled_from((0, 0, 0, 0, 1, 2))


def under_way(k: CommitRecord) -> bool:
    return k.open is not None and not k.open.stopped


class NodeMachine(RuleBasedStateMachine):
    """What the node asks for is allowed; what it must ask for, it does."""

    @initialize(stage=st.booleans())
    def begin(self, stage) -> None:
        self.w = World(stage=stage)
        self.start(0)

    def start(self, which: int) -> None:
        """``EngineRestart``: with the checkpoint of a version, or with nothing."""
        contents = self.w.contents
        loaded = digest(contents[which]) if which < len(contents) else ""
        self.ranks = {r: Rank(None, loaded, set() if loaded else {"unknown"}) for r in RANKS}
        self.n = roles.Node(ME, self.w.incarnation, "policy", RANKS)
        self.gate, self.fence, self.serving, self.opening = "closed", 0, None, None
        self.handed: deque[tuple[str, PrepareRank | OpenApply]] = deque()
        self.gate_orders: deque[roles.CloseGate | roles.OpenGate] = deque()
        self.reads: list[CommitRecord | None] = []
        self.heard: dict[int, Prepare] = {}
        self.applies: set[int] = set()
        self.answers: dict[tuple[str, int], dict[str, object]] = {}
        self.reported: dict[tuple[str, int], object] = {}
        self.lost: set[int] = set()
        self.licensed: set[tuple[int, int]] = set()

    # ------------------------------------------------------------ the leaders

    @rule(
        kind=st.sampled_from(Kind),
        what=st.sampled_from(("open", "without us", "back", "commit", "stop", "abandon", "admit", "over", "restart")),
        which=st.integers(0, 3),
    )
    def leads(self, kind, what, which) -> None:
        """Something happens to K, or to this engine."""
        w = self.w
        if what == "restart":
            w.incarnation += 1
            self.start(which)
        elif what == "commit":
            self.commits()
        elif what == "admit":
            self.admits()
        elif what in ("stop", "abandon", "over"):
            w.end("take over" if what == "over" else what)
        else:
            self.opens(kind, member=what != "without us", back=what == "back")

    def opens(self, kind, *, member=True, back=False) -> None:
        if kind is Kind.RESTORE and self.w.k.open is None:
            self.w.open_restore(member=member)
        else:
            kind = Kind.DENSE if kind is Kind.RESTORE else kind
            self.w.open_attempt(kind, member=member, back=back and self.w.k.open is not None)

    def commits(self) -> None:
        """Without this engine, or after it said that it acknowledged."""
        if self.w.under_way and not self.w.member:
            self.w.commit("theirs")
        elif self.w.under_way and ("acknowledged", self.w.k.epoch) in self.reported:
            self.w.commit(self.reported["acknowledged", self.w.k.epoch])

    def admits(self) -> None:
        """``Admit``: it is ``Settled``, as far as K's epoch goes."""
        k, o = self.w.k, self.w.orders.get(self.w.k.epoch)
        engaged = o is not None and o.prepare.incarnation == self.w.incarnation
        if k.open is None and all(self._holds(r, k) for r in self.ranks.values()) and not engaged:
            self.w.admit()

    def _holds(self, r: Rank, k: CommitRecord) -> bool:
        loaded = r.version is None and r.loaded == k.baseline_id
        return (not r.torn and (r.version == k.version or loaded)) or r.committed_here(k)

    # ------------------------------------------------------------ what goes right

    @rule(
        steps=st.integers(1, 25),
        kind=st.sampled_from(Kind),
        stays=st.booleans(),
        how=st.sampled_from(("well", "well", "otherwise")),
    )
    def goes_on(self, steps, kind, stays, how) -> None:
        """What is due, one thing after the other, from one attempt to the next."""
        for _ in range(steps):
            k = self.w.k
            o = self.w.orders.get(k.epoch)
            ours = o is not None and o.prepare.incarnation == self.w.incarnation
            if self.gate_orders:
                self.gate_moves(stuck=False)
            elif self.handed:
                self.rank_takes()
            elif self.reads:
                self.reads_k(0)
            elif ours and o.epoch not in self.heard and o.epoch >= self.fence:
                self.order_comes(0, "prepare")
            elif ours and any(r.order is o and r.stage in BUSY for r in self.ranks.values()):
                self._session_goes_on(o, how)
            elif ("acknowledged", k.epoch) in self.reported and self.w.under_way:
                self.commits()
                self.polls()
            elif self.gate == "closed" and not under_way(k) and Member(ME, self.w.incarnation) not in k.members:
                self.admits()
                self.polls()
                if Member(ME, self.w.incarnation) not in self.w.k.members:
                    self.opens(Kind.RESTORE)
            elif self.gate == "closed" and not under_way(k) and not ours and self._would_open(k):
                self.polls()
            elif stays:
                return
            else:
                self.opens(kind)
            self.check()

    @rule(steps=st.integers(1, 25), kind=st.sampled_from(Kind), stays=st.booleans())
    def goes_on_too(self, steps, kind, stays) -> None:
        """The same: of each example hypothesis leaves some rules out, and without this one little happens."""
        self.goes_on(steps, kind, stays, "well")

    def _would_open(self, k) -> bool:
        return all(self._holds(r, k) for r in self.ranks.values()) and self.opening is None

    def _session_goes_on(self, o, how: str) -> None:
        for name, r in self.ranks.items():
            if r.stage == "applying" or (r.stage == "fenced" and o.prepare.stage):
                self.rank_finishes(name, how)
                return
        if o.epoch not in self.applies:
            self.order_comes(0, "apply")
        else:
            self.w.end("take over")

    # ------------------------------------------------------------ orders

    @precondition(lambda self: self.w.orders)
    @rule(
        ago=AGO,
        what=st.sampled_from(
            ("prepare", "prepare", "apply", "apply", "record", "apply of another record", "incarnation", "another")
        ),
    )
    def order_comes(self, ago, what) -> None:
        """``Prepare`` and ``OpenApply``: refused below the fence, of another record, for another incarnation (D6)."""
        epochs = sorted(self.w.orders)
        if ago >= len(epochs):
            return
        order = self.w.orders[epochs[-1 - ago]].prepare
        changes = {"record": {"record_id": "x"}, "incarnation": {"incarnation": 77}, "another": {"target": 77}}
        self.reads = [None] * len(self.reads)
        if "apply" in what:
            self._apply_comes(order.epoch, "x" if "record" in what else "policy")
            return
        order = msgspec.structs.replace(order, **changes.get(what, {}))
        other = what == "another" and order.epoch in self.heard
        if what == "another" and not other:
            return  # a leader gives one order an epoch
        if other and order.epoch < max(self.heard):
            return  # late, whatever it says
        wrong = order.incarnation != self.w.incarnation or order.record_id != "policy" or order.epoch < self.fence
        if wrong or (other and self._awaited(order.epoch)):
            self.is_refused(self.n.order, order)
        elif not other:
            self.heard.setdefault(order.epoch, order)
            self.runs(self.n.order(order))

    def _awaited(self, epoch: int) -> bool:
        """The order of this epoch was noted or handed on, and nothing has ended it."""
        return any(r.epoch == epoch for r in self.ranks.values()) and max(k.epoch for k in self.w.ks) == epoch

    def _apply_comes(self, epoch: int, record: str) -> None:
        stages = [r.stage if r.epoch == epoch else "none" for r in self.ranks.values()]
        staged = self.w.orders[epoch].prepare.stage
        needed = ("prepared", "staged")[staged]
        answered = len(self.answers.get((needed, epoch), {})) == len(RANKS)
        if record != "policy" or epoch < self.fence or not answered:
            self.is_refused(self.n.order, OpenApply(record, epoch))
            return
        try:
            found = self.n.order(OpenApply(record, epoch))
        except RefusedError:
            ready = set(stages) == {"staged" if staged else "fenced"}
            assert not ready or epoch in self.lost, "an order to write was refused, though every rank is ready"
            return
        self.applies.add(epoch)
        self.runs(found, closes=staged)

    @rule(what=st.sampled_from(("published", "published elsewhere", "refuse")))
    def word_comes(self, what) -> None:
        record = "x" if "elsewhere" in what else "policy"
        if what == "refuse":
            assert self.n.order(Refuse(record, 0, "no")) == [roles.GiveUp("no")]
        elif record == "x":
            self.is_refused(self.n.order, Published(record, 0))
        else:
            self.runs(self.n.order(Published(record, 0)))

    # ------------------------------------------------------------ K

    @rule()
    def polls(self) -> None:
        if len(self.reads) < 3:
            self.reads.append(None)

    @precondition(lambda self: self.reads)
    @rule(at=st.integers(0, 2))
    def read_starts(self, at) -> None:
        """K is read; what was read is handed in later."""
        self.reads[at % len(self.reads)] = self.w.k

    @precondition(lambda self: self.reads)
    @rule(at=st.integers(0, 2))
    def reads_k(self, at) -> None:
        """``CloseGate``, or an order goes to the ranks; then ``LearnCommit``: all at once."""
        k = self.reads.pop(at % len(self.reads)) or self.w.k
        ordered = self.heard.get(k.epoch)
        newer = self.gate == "open" and self.serving != k.version and k.epoch >= self.fence
        try:
            found = self.n.read(k)
        except RefusedError:
            found = []
        self.k = k
        self.runs(found, closes=newer or (ordered is not None and k.epoch > self.fence and not ordered.stage))
        # An order to stage that waited for this K goes to the ranks first; then the next reading closes the gate.
        stages = any(isinstance(e, roles.ToRank) and ordered is not None and ordered.stage for e in found)
        assert not newer or stages or self.gate != "open", "it goes on serving an older version"
        states = {}
        for name, r in self.ranks.items():
            r.learn(k)
            if k.epoch > r.fence:
                r.fence = k.epoch
                r.drop()
            states[name] = RankState(r.state, r.fence, r.committed_here(k), r.epoch, r.stage)
        found = self.n.learned(k, states)
        ordered = [(e.epoch, e.version) for e in found if isinstance(e, roles.OpenGate)]
        assert ordered == self._gate_order(k)
        assert not (ordered and any(isinstance(e, roles.AskToJoin) for e in found))
        self.runs(found)

    def _gate_order(self, k: CommitRecord) -> list[tuple[int, int]]:
        """What ``LearnCommit`` orders of a gate, if anything new."""
        ranks = self.ranks.values()
        clean = all(r.version == k.version and not r.torn for r in ranks)
        here = all(r.committed_here(k) for r in ranks)
        admitted = Member(ME, self.w.incarnation) in k.members and not under_way(k)
        busy = any(r.epoch == k.epoch and (under_way(k) or r.stage in BUSY) for r in ranks)
        old = k.epoch < max(self.fence, *(r.fence for r in ranks))
        order = (k.committed.epoch if under_way(k) and k.committed else k.epoch, k.version)
        if self.gate != "closed" or old or not clean or not (here or admitted) or busy or order == self.opening:
            return []
        return [order]

    @rule()
    def record_is_lost(self) -> None:
        """``LoseRecord``."""
        found = self.n.record_lost()
        assert [type(e) for e in found] == ([Step, roles.CloseGate] if self.gate == "open" else [])
        self.runs(found, closes=True)

    # ------------------------------------------------------------ the gate

    @precondition(lambda self: self.gate_orders)
    @rule(stuck=st.sampled_from((False, False, False, True)))
    def gate_moves(self, stuck) -> None:
        """``GateClosed``, ``OpenGate``; or the gate will not move."""
        order = self.gate_orders.popleft()
        if stuck:
            if isinstance(order, roles.CloseGate) and self.gate == "closing" and self.opening is None:
                self.gate = "open"
            self.opening = None
            self.lost |= self.applies
            self.runs(self.n.gate_stuck("it will not"))
        elif isinstance(order, roles.CloseGate):
            if self.gate == "closing" and order.epoch <= self.fence:
                self.gate, self.serving = "closed", None
            self.runs(self.n.gate_closed(order.epoch))
        elif self.opening is None or self.opening[0] != order.epoch:
            self.is_refused(self.n.gate_ready, order.epoch)
        elif order.epoch < self.fence or self._may_write():
            self.opening = None
            self.is_refused(self.n.gate_ready, order.epoch)
        else:
            self.runs(self.n.gate_ready(order.epoch))

    def _may_write(self) -> bool:
        """A rank was prepared, or will be, and may come to write."""
        waiting = any(isinstance(o, PrepareRank) and o.order.epoch >= self.ranks[r].fence for r, o in self.handed)
        return waiting or any(r.stage in BUSY for r in self.ranks.values())

    # ------------------------------------------------------------ the ranks

    @precondition(lambda self: self.handed)
    @rule()
    def rank_takes(self) -> None:
        """``Fence`` or ``OpenApply`` at a rank, in the order in which they were handed on."""
        name, order = self.handed.popleft()
        r = self.ranks[name]
        if isinstance(order, OpenApply):
            if r.epoch == order.epoch and r.stage in ("fenced", "staged"):
                r.stage = "applying"
            return
        epoch = order.order.epoch
        if epoch < r.fence or order.record.epoch != epoch:
            self._says(name, RankFailed(epoch, "refused"))
            return
        r.drop()
        r.learn(order.record)
        r.fence, r.order = epoch, self.w.orders[epoch]
        r.stage = "fenced" if r.armed(r.order) else "failed"
        self._says(name, RankPrepared(epoch, r.state) if r.stage == "fenced" else RankFailed(epoch, "not armed"))

    @rule(name=st.sampled_from(RANKS), how=st.sampled_from(("well", "well", "otherwise", "badly")))
    def rank_finishes(self, name, how) -> None:
        """``Stage``; or all its writes, and then ``Acknowledge`` or ``FailWrite``."""
        r = self.ranks[name]
        if r.stage not in ("fenced", "applying") or (r.stage == "fenced" and not r.order.prepare.stage):
            return
        if r.stage == "fenced":
            r.stage = "staged" if how != "badly" else "failed"
            self._says(name, RankStaged(r.epoch) if how != "badly" else RankFailed(r.epoch, "undeliverable"))
            return
        assert self.gate == "closed", "ServingExact: a rank writes under an open gate"
        base = r.order.prepare.base
        r.torn, r.acknowledged = (
            r.torn | {{Kind.RESTORE: "restore", Kind.DENSE: "dense"}.get(base.kind, base.candidate)},
            None,
        )
        r.stage = "failed" if how == "badly" else "acknowledged"
        if how == "badly":
            self._says(name, RankFailed(r.epoch, "torn"))
            return
        root = f"root{r.epoch}{name if how == 'otherwise' else ''}"
        r.acknowledged = (r.epoch, r.order.prepare.target, root)
        if base.kind is Kind.RESTORE:
            r.version, r.loaded, r.torn = base.version, base.baseline_id, set()
        self._says(name, RankAcknowledged(r.epoch, root))

    @rule(name=st.sampled_from(RANKS), ago=AGO, what=st.sampled_from(("prepared", "staged", "acknowledged", "failed")))
    def rank_repeats(self, name, ago, what) -> None:
        """An answer comes late, or again: it changes nothing that was not so."""
        said = sorted(e for w, e in self.answers if w == what and name in self.answers[w, e])
        if ago < len(said):
            self._says(name, self.answers[what, said[-1 - ago]][name])

    def _says(self, name: str, answer) -> None:
        kinds = {RankPrepared: "prepared", RankStaged: "staged", RankAcknowledged: "acknowledged", RankFailed: "failed"}
        what = kinds[type(answer)]
        self.answers.setdefault((what, answer.epoch), {})[name] = answer
        self.runs(getattr(self.n, f"rank_{what}")(name, answer))

    # ------------------------------------------------------------ what the node may ask for

    def runs(self, effects: list[roles.Effect], *, closes: bool = False) -> None:
        """Hold each effect to its guard, and carry it out.

        Args:
            effects: of one event.
            closes: this event may close the gate: ``CloseGate``, ``LoseRecord``, or an asynchronous ``OpenApply``.
        """
        for e in effects:
            match e:
                case roles.CloseGate():
                    assert closes
                    assert self.gate == "open"
                    self.gate, self.fence = "closing", self.n.fence
                    self.gate_orders.append(e)
                case roles.OpenGate():
                    self.opening = (e.epoch, e.version)
                    self.gate_orders.append(e)
                case roles.LetIn():
                    self._lets_in(e.version)
                case roles.ReadRecord():
                    self.reads.append(None)
                case roles.ToRank():
                    self._hands(e.rank, e.order)
                case roles.ReportServing():
                    assert (self.gate, self.serving) == ("open", e.version)
                case roles.AskToJoin():
                    assert self.gate == "closed"
                    assert not under_way(self.k)
                case roles.ReportPrepared() | roles.ReportStaged() | roles.ReportAcknowledged() | roles.ReportFailed():
                    self._reports(e)
                case roles.StartFetch():
                    self._fetches(e.order)

    def _lets_in(self, version: int) -> None:
        """``OpenGate`` and ``ServingExact``."""
        assert self.opening is not None
        assert self.opening[0] >= self.fence
        assert version == self.opening[1]
        assert not self._may_write(), "a gate opens while a rank may come to write"
        assert all(r.version == version and not r.torn for r in self.ranks.values()), "ServingExact"
        self.gate, self.serving, self.opening = "open", version, None

    def _hands(self, name: str, order) -> None:
        if isinstance(order, PrepareRank):
            p = order.order
            assert p == self.heard[p.epoch]
            assert p.incarnation == self.w.incarnation
            assert order.record.epoch == p.epoch, "K is as new as the order"
            assert p.epoch >= self.fence
            assert self.gate == "closed" or p.stage
            self.fence = p.epoch
        else:
            needed = "staged" if self.w.orders[order.epoch].prepare.stage else "prepared"
            assert order.epoch in self.applies or order.epoch == self.n.applying
            assert set(self.answers[needed, order.epoch]) == set(RANKS)
            assert self.gate == "closed", "no rank writes under an open gate"
        self.handed.append((name, order))

    def _reports(self, e) -> None:
        what = {"ReportPrepared": "prepared", "ReportStaged": "staged", "ReportAcknowledged": "acknowledged"}
        name = what.get(type(e).__name__, "failed")
        assert (name, e.epoch) not in self.reported or name == "prepared", f"{name} twice"
        said = self.answers.get((name, e.epoch), {})
        if name == "failed":
            roots = {a.root for a in self.answers.get(("acknowledged", e.epoch), {}).values()}
            assert said or len(roots) > 1 or "will not" in e.reason
        else:
            assert set(said) == set(RANKS), f"{name} before every rank is"
        if name == "prepared":
            assert e.state == _together([a.state for a in said.values()])
        if name == "acknowledged":
            assert {a.root for a in said.values()} == {e.root}
        self.reported[name, e.epoch] = getattr(e, "root", True)

    def _fetches(self, order: Prepare) -> None:
        """Payloads come once ranks are prepared to hold them, or may write them (D6, D18)."""
        assert order == self.heard[order.epoch]
        assert set(self.answers[("prepared"), order.epoch]) == set(RANKS)
        assert order.stage or self.gate == "closed"

    def is_refused(self, call, *arguments) -> None:
        with pytest.raises(RefusedError):
            call(*arguments)

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "n"):
            return
        n = self.n
        assert n.fence >= self.fence, "the fence fell"
        self.fence = n.fence
        assert (n.gate, n.serving, n.opening) == (self.gate, self.serving, self.opening)
        if self.gate != "closed":
            ranks = self.ranks.values()
            assert all(r.version == self.serving and not r.torn for r in ranks), "ServingExact"


def _together(states: list[StorageState]) -> StorageState:
    a, b = states
    return StorageState(
        a.version if a.version == b.version else None,
        a.content_digest if a.content_digest == b.content_digest else "",
        tuple(sorted({*a.torn_by, *b.torn_by})),
    )
