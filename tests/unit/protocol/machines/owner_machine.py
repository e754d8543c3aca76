"""An owner under any orders, ends of emissions and folds, and readings of K, beside spec/tla/RefitOwner.tla."""

from collections import deque
from dataclasses import dataclass, field

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcr.protocol import owner as roles
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest
from dcr.protocol.messages import Emit, Fold
from dcr.protocol.record import CommitRecord, Direction, OwnerRef
from dcr.protocol.step import Step
from tests.unit.protocol.machines.world import World, number, share

ROLES = ("Owner",)
ME = "o0"
HOW = (
    *("plain", "one more attempt", "stepped", "restarts", "folds other weights"),
    *("restored before the fold", "restored in the fold"),
)
AGO = st.sampled_from((0, 0, 0, 0, 1, 2))


@dataclass
class Own:
    """``own[o]``, ``tracker`` and ``weights``: this owner's share of them, as digests."""

    incarnation: int
    tracker: str
    base: int | None
    """Of the baseline, whether the owner has been told or not; None if it has none."""
    fence: int = 0
    folding: int = 0
    folded: int = 0
    emitting: Emit | None = None
    seals: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    """Candidate, content and target of what was sealed forward in the name of the last candidate, by epoch."""
    kept: Emit | None = None
    fold_ordered: int = 0
    given_up: str = ""
    last_candidate: str = ""
    told: tuple[int, str] | None = None
    """The last fold's epoch, and what the baseline was then."""

    def owes(self, version: int) -> bool:
        """It sealed this version and has not folded it: ``OwesFold``, from what an owner knows."""
        behind = self.base is None or self.base < version
        return behind and any(t == version and epoch > self.folded for epoch, (_, _, t) in self.seals.items())

    def stepped(self, candidate: str, weights: str) -> bool:
        """``Stepped`` (D10)."""
        return any(c == candidate and content != weights for c, content, _ in self.seals.values())


class OwnerMachine(RuleBasedStateMachine):
    """Once per epoch, one content for one candidate, and a baseline that is what it says or marked."""

    @initialize()
    def begin(self) -> None:
        self.w = World(stage=False)
        self.sealed_by: dict[tuple[int, int], str] = {}
        self.orders: list[tuple[int, Emit]] = []
        self.start(0)

    def start(self, version: int | None) -> None:
        """``OwnerRestart``: without a baseline, or with one of which nobody has told it the version."""
        incarnation = self.m.incarnation + 1 if hasattr(self, "m") else 1
        tracker = "" if version is None else self.mine(self.w.contents[version])
        self.m = Own(incarnation, tracker, version)
        self.o = roles.Owner(ME, incarnation, "policy", tracker)
        self.w.owners = (OwnerRef(ME, incarnation), *self.w.owners[1:])
        self.reported, self.blank = tracker, version is None
        self.emitted_epochs: set[int] = set()
        self.manifests: deque[Manifest] = deque()
        self.broken_pin: str = ""
        self.highest = 0

    @staticmethod
    def mine(content) -> str:
        return number(share(ME, content))

    @property
    def weights(self) -> str:
        """Its share of the candidate; of something else once the pin was broken, or in another process."""
        return self.broken_pin or self.mine(self.w.weights)

    # ------------------------------------------------------------ the leader

    @rule(
        kind=st.sampled_from(Kind),
        what=st.sampled_from(("open", "open", "back", "commit", "stop", "abandon", "over", "restart", "step")),
        which=st.integers(0, 2),
    )
    def leads(self, kind, what, which) -> None:
        """Something happens to K, or to this owner."""
        if what == "restart":
            self.start(self.w.k.version - which if which <= self.w.k.version else None)
            self.broken_pin = number(2**90 + self.m.incarnation)
        elif what == "step":
            sealed = {candidate for candidate, _, _ in self.m.seals.values()}
            if sealed == {f"w{self.w.candidate}"} and self.m.emitting is None and not self.m.folding:
                self.broken_pin = number(2**91)
        elif what == "commit":
            self.commits()
        elif what in ("stop", "abandon", "over"):
            self.w.end("take over" if what == "over" else what)
        else:
            self.opens(kind, back=what == "back")

    def opens(self, kind, *, back=False) -> None:
        """An order of a leader that knows what this owner has reported; a new candidate has the weights of its name."""
        w = self.w
        if w.k.open is not None and w.k.open.owners != w.owners:
            w.end("abandon")
        owing = self._owes_k() or self.m.folding > 0
        held = self.reported == self.mine(w.baseline)
        if w.k.open is None and (kind is Kind.RESTORE or owing):
            if held or owing:
                w.open_restore(member=True)
                self._orders()
            return
        if w.k.open is None:
            self.broken_pin = ""
        kind = Kind.DENSE if kind is Kind.RESTORE or not held else kind
        if held or not (back or (w.k.open is not None and w.k.open.direction is Direction.BACK)):
            w.open_attempt(kind, member=True, back=back and w.k.open is not None)
            self._orders()

    def _orders(self) -> None:
        p = self.w.orders[self.w.k.epoch].prepare
        self.orders.append(
            (self.m.incarnation, Emit("policy", p.epoch, p.target, p.base, "add", (), self.m.incarnation))
        )

    def _owes_k(self) -> bool:
        c = self.w.k.committed
        mine = c is not None and c.direction is Direction.FORWARD and OwnerRef(ME, self.m.incarnation) in c.owners
        return mine and self.m.folded != c.epoch

    def commits(self) -> None:
        """``CommitOf``: K's owners, as those incarnations, have sealed its epoch."""
        tr = self.w.k.open
        if self.w.under_way and (tr.owners[0].incarnation, self.w.k.epoch) in self.sealed_by:
            self.w.commit("root")

    # ------------------------------------------------------------ what goes right

    @rule(
        steps=st.integers(1, 16),
        kind=st.sampled_from(Kind),
        how=st.sampled_from(
            ("plain", "one more attempt", "stepped", "restored before the fold", "restored in the fold")
        ),
    )
    def goes_on(self, steps, kind, how) -> None:
        """What is due, one thing after the other, from one transition to the next."""
        for _ in range(steps):
            m, k = self.m, self.w.k
            mine = self._reaching()
            last = 0 if k.committed is None else k.committed.epoch
            sealed_last = last in m.seals and m.folded != last
            due = bool(mine) and mine[-1].epoch == k.epoch > max(m.fence, 0 if m.kept is None else m.kept.epoch)
            eager = (m.folding and how == "restored in the fold") or (sealed_last and how == "restored before the fold")
            if self.manifests:
                self.seals(0)
            elif m.emitting is not None:
                self.emission_ends("well", 0)
            elif eager and (due or k.epoch == last):
                self.order_comes(0, "policy") if due else self.opens(Kind.RESTORE)
            elif m.folding:
                self.fold_ends("other weights" if how == "folds other weights" else "well")
            elif sealed_last and m.fold_ordered != last:
                self.fold_comes(0, "policy")
                if not self._owes_k():
                    self.reads_k(0)
            elif sealed_last and self._owes_k():
                self.reads_k(0)
            elif self.w.under_way and k.epoch in m.seals:
                self._after_the_seal(kind, how)
            elif due:
                self.order_comes(0, "policy")
            else:
                self.opens(kind)
            self.check()

    def _after_the_seal(self, kind: Kind, how: str) -> None:
        again = self.w.k.open.attempts == 1
        if how == "restarts" and self.w.orders[self.w.k.epoch].kind is Kind.DENSE and self.m.incarnation < 3:
            self.start(None)
        elif how in ("one more attempt", "stepped") and again:
            if how == "stepped":
                self.leads(kind, "step", 0)
            self.opens(kind)
        else:
            self.commits()
            if self.w.under_way:
                self.opens(kind)

    @rule(steps=st.integers(1, 16), kind=st.sampled_from(Kind), how=st.sampled_from(HOW))
    def goes_on_too(self, steps, kind, how) -> None:
        """The same: of each example hypothesis leaves some rules out, and without this one little happens."""
        self.goes_on(steps, kind, how)

    def _reaching(self) -> list[Emit]:
        """Orders to this incarnation; one that started with nothing, as all do in the specification, may get any."""
        return [o for i, o in self.orders if i == self.m.incarnation or (self.blank and o.base.kind is Kind.DENSE)]

    # ------------------------------------------------------------ emission

    @rule(ago=AGO, record=st.sampled_from(("policy", "policy", "policy", "other")))
    def order_comes(self, ago, record) -> None:
        """``Emit``, or why not (D7, D13)."""
        mine = self._reaching()
        if ago < len(mine):
            self.is_ordered(msgspec.structs.replace(mine[-1 - ago], record_id=record))

    def is_ordered(self, order: Emit) -> None:
        m, base = self.m, order.base
        needs = base.kind is not Kind.DENSE
        if order.record_id != "policy" or order.epoch < m.fence:
            expected = ["refused"]
        elif order.epoch == m.fence:
            expected = []
        elif m.folding or (needs and m.owes(base.version)):
            m.kept = order if m.kept is None or m.kept.epoch < order.epoch else m.kept
            expected = []
        elif needs and m.base is not None and m.base > base.version:
            expected = ["refused"]
        else:
            cancelled = ["CancelEmission"] if m.emitting is not None else []
            m.emitting, m.kept, m.fence = None, None, order.epoch
            gone = base.candidate and base.candidate == m.given_up
            lacks = needs and (m.base != base.version or order.incarnation != m.incarnation)
            expected = [*cancelled, *(["EmitFailed", "ReportEmitFailed"] if gone or lacks else self._emits(order))]
        self.does(expected, self.o.emit, order)

    def _emits(self, order: Emit) -> list[str]:
        m, base = self.m, order.base
        if base.kind is not Kind.DENSE:
            assert m.tracker == self.mine(self.w.contents[base.version]), "a delta against another baseline"
        assert order.epoch not in self.emitted_epochs, "an epoch is emitted twice"
        assert not m.folding
        self.emitted_epochs.add(order.epoch)
        m.last_candidate = base.candidate or m.last_candidate
        m.emitting = order
        return ["Emit", "StartEmission"]

    @rule(how=st.sampled_from(("well", "well", "fails", "given up")), ago=AGO)
    def emission_ends(self, how, ago) -> None:
        """Everything is delivered but the manifest, or it failed; perhaps of an order that was cancelled."""
        mine = [o for i, o in self.orders if i == self.m.incarnation]
        m = self.m
        order = m.emitting if ago == 0 else mine[-1 - ago] if ago < len(mine) else None
        if order is None:
            return
        now = m.emitting is not None and order.epoch == m.emitting.epoch
        if how == "given up":
            self.gives_up()
        elif how == "fails":
            m.emitting = None if now else m.emitting
            self.does(["EmitFailed", "ReportEmitFailed"] if now else [], self.o.emission_failed, order.epoch, "no")
        else:
            seal = self._manifest(order)
            stepped = order.base.candidate and m.stepped(order.base.candidate, self.weights)
            if now and stepped:
                m.emitting = None
            elif now:
                self.manifests.append(seal)
            expected = [] if not now else ["EmitFailed", "ReportEmitFailed"] if stepped else ["DeliverManifest"]
            found = self.does(expected, self.o.emitted, seal, self.weights)
            assert not stepped or not now or found[-1].fatal, "another attempt would fail the same way"

    def _manifest(self, order: Emit) -> Manifest:
        content = m_tracker if (m_tracker := self.m.tracker) and order.target == order.base.version else self.weights
        return Manifest("policy", order.target, order.epoch, ME, self.m.incarnation, order.base, (), content, 1, 3)

    @precondition(lambda self: self.manifests)
    @rule(at=st.integers(0, 2))
    def seals(self, at) -> None:
        """``Seal`` (D8)."""
        if not self.manifests:
            return
        seal, m = self.manifests[at % len(self.manifests)], self.m
        self.manifests.remove(seal)
        now = m.emitting is not None and m.emitting.epoch == seal.epoch
        if now:
            m.emitting = None
            self.sealed_by[m.incarnation, seal.epoch] = seal.content_digest
            if seal.target != seal.base.version:
                name = seal.base.candidate
                m.seals = {e: s for e, s in m.seals.items() if s[0] == name}
                m.seals[seal.epoch] = (name, seal.content_digest, seal.target)
                assert len({content for _, content, _ in m.seals.values()}) == 1, "one candidate, two contents"
        self.does(["Seal", "ReportSealed"] if now else [], self.o.sealed, seal)

    def gives_up(self) -> None:
        """The push is given up here: its candidate is no more (D10)."""
        m = self.m
        m.given_up = m.last_candidate
        if m.kept is not None and m.kept.base.kind is not Kind.RESTORE:
            m.kept = None
        stops = m.emitting is not None and m.emitting.base.kind is not Kind.RESTORE
        m.emitting = None if stops else m.emitting
        found = self.does(["CancelEmission", "EmitFailed", "ReportEmitFailed"] if stops else [], self.o.give_up, 3)
        assert not stops or (found[-1].fatal, found[-1].given_up) == (True, 3)

    # ------------------------------------------------------------ the fold

    @rule(ago=AGO, record=st.sampled_from(("policy", "policy", "policy", "other")))
    def fold_comes(self, ago, record) -> None:
        """Told of a commit, of this epoch or of an older one, or again: K decides (D13)."""
        epochs = sorted({k.committed.epoch for k in self.w.ks if k.committed is not None})
        if ago >= len(epochs):
            return
        epoch, m = epochs[-1 - ago], self.m
        if record != "policy":
            expected = ["refused"]
        elif m.folding:
            expected = []
        elif m.told is not None and m.told[0] == epoch:
            expected = ["ReportFolded"]
        else:
            m.fold_ordered = epoch
            expected = ["ReadRecord"]
        found = self.does(expected, self.o.fold, Fold(record, epoch))
        assert expected != ["ReportFolded"] or (found[0].epoch, found[0].baseline_digest) == m.told

    @rule(ago=AGO, record=st.sampled_from(("policy", "policy", "policy", "other")))
    def reads_k(self, ago, record="policy") -> None:
        """``BeginFold``: of its own seal only, and never of a rollback."""
        k: CommitRecord = self.w.ks[max(0, len(self.w.ks) - 1 - ago)]
        m, c = self.m, k.committed
        ordered = c is not None and c.epoch == m.fold_ordered and not m.folding and record == "policy"
        mine = ordered and c.direction is Direction.FORWARD and OwnerRef(ME, m.incarnation) in c.owners
        begins = mine and c.epoch in m.seals and m.folded != c.epoch
        if begins:
            m.base, m.folded, m.folding, m.fold_ordered = c.version, c.epoch, c.epoch, 0
        found = self.does(
            ["BeginFold", "FoldBaseline"] if begins else [],
            self.o.learned,
            msgspec.structs.replace(k, record_id=record),
        )
        if begins:
            assert found[-1] == roles.FoldBaseline(c.epoch, self.mine(self.w.contents[c.version])), "another seal"

    @precondition(lambda self: self.m.folding)
    @rule(how=st.sampled_from(("well", "well", "other weights", "fails")))
    def fold_ends(self, how) -> None:
        """``EndFold``, ``LoseBaseline``; what waited for it is ordered again."""
        m, epoch = self.m, self.m.folding
        goal = self.mine(self.w.contents[m.base])
        again = ["Again"] if m.kept is not None else []
        m.folding, kept, m.kept = 0, m.kept, None
        if how == "well":
            m.tracker = goal
            found = self.does(["EndFold", "ReportFolded", *again], self.o.folded, epoch, goal)
        else:
            m.tracker, m.base = "", None
            call = (self.o.folded, epoch, number(5)) if how == "other weights" else (self.o.fold_failed, epoch, "no")
            found = self.does(["LoseBaseline", "ReportFolded", *again], *call)
        m.told = (epoch, m.tracker)
        self.reported = m.tracker
        assert (found[1].epoch, found[1].baseline_digest, bool(found[1].reason)) == (epoch, m.tracker, not m.tracker)
        if kept is not None:
            assert found[-1].order == kept
            self.is_ordered(kept)

    # ------------------------------------------------------------ what must hold

    def does(self, expected, call, *arguments) -> list:
        """The call gives just these steps and effects, by name, or is refused."""
        if expected == ["refused"]:
            with pytest.raises(RefusedError):
                call(*arguments)
            return []
        found = call(*arguments)
        names = [e.action if isinstance(e, Step) else type(e).__name__ for e in found]
        assert names == expected, f"{names}, where the specification has {expected}"
        return found

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "m"):
            return
        o, m = self.o, self.m
        assert (o.fence, o.folding, o.folded_epoch) == (m.fence, bool(m.folding), m.folded)
        assert o.emitting == (0 if m.emitting is None else m.emitting.epoch)
        assert set(o.sealed_epochs) == set(m.seals)
        assert o.base in (None, m.base)
        assert o.fence >= self.highest, "the fence fell"
        self.highest = o.fence
        if not o.folding:
            assert o.baseline_digest == m.tracker
        if not o.folding and o.base is not None:
            assert o.baseline_digest == self.mine(self.w.contents[o.base]), "BaselineExact"
