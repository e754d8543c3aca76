"""A receiver under any messages in any order, beside a rank that was written from spec/tla/RefitReceiver.tla."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind, Manifest, manifest_root
from dcr.protocol.receiver import RankAcknowledged, RankPrepared, RankState, Receiver
from dcr.protocol.step import Step
from tests.unit.protocol.machines.rank import NOTHING, Rank
from tests.unit.protocol.machines.world import FIRST, GARBAGE, ME, Order, Payload, World, digest

ROLES = ("Receiver", "RankAttempt", "receiver")
REFUSED = ["refused"]
STEPS = st.integers(1, 16)
SEALS = st.sampled_from(("last", "first", "while writing"))
FAILS = st.sampled_from((0, 0, 0, 1, 2, 3))
AGO = st.sampled_from((0, 0, 0, 0, 1, 2, 5))
"""How many epochs, or versions of K, ago: mostly the newest."""


class ReceiverMachine(RuleBasedStateMachine):
    """Every event gives just the steps and effects that the model allows, and storage is what the properties say."""

    @initialize(stage=st.booleans())
    def begin(self, stage) -> None:
        self.w = World(stage=stage)
        self.start(0)

    def start(self, which: int) -> None:
        """``EngineRestart``, with the checkpoint of a version, with weights that are not committed, or with nothing."""
        contents = [*self.w.contents, self.w.weights]
        content = contents[which] if which < len(contents) else dict.fromkeys(FIRST, GARBAGE)
        loaded = digest(content) if which < len(contents) else ""
        self.r = Receiver(ME, "policy", loaded)
        self.m = Rank(None, loaded, set() if loaded else {"unknown"})
        self.mem = dict(content)
        self.highest = 0

    # ------------------------------------------------------------ the leaders

    @rule(
        kind=st.sampled_from(Kind),
        what=st.sampled_from(
            ("open", "open", "without us", "back", "commit", "stop", "abandon", "take over", "restart")
        ),
        which=st.integers(0, 6),
    )
    def leads(self, kind, what, which) -> None:
        """Something happens to K, or to this engine."""
        if what == "restart":
            self.w.incarnation += 1
            self.start(which)
        elif what == "commit":
            self.commits()
        elif what in ("stop", "abandon", "take over"):
            self.w.end(what)
        else:
            self.opens(kind, member=what != "without us", back=what == "back")

    def opens(self, kind, *, member, back=False) -> None:
        if kind is Kind.RESTORE and self.w.k.open is None:
            self.w.open_restore(member=member)
        else:
            kind = Kind.DENSE if kind is Kind.RESTORE else kind
            self.w.open_attempt(kind, member=member, back=back and self.w.k.open is not None)

    def commits(self) -> None:
        """Without this engine, or after its acknowledgement of what the owners sealed."""
        if self.w.under_way and not self.w.member:
            self.w.commit("theirs")
        elif self.w.under_way and self.m.acknowledged is not None:
            epoch, _, root = self.m.acknowledged
            if epoch == self.w.k.epoch and root == _root(self.w.orders[epoch].manifests):
                self.w.commit(root)

    # ------------------------------------------------------------ what goes right

    @rule(steps=STEPS, kind=st.sampled_from(Kind), seals=SEALS, fails=FAILS, gives_up=st.booleans())
    def goes_on(self, steps, kind, seals, fails, gives_up) -> None:
        """The next messages in their order, from one attempt to the next; one of the writes may fail."""
        for _ in range(steps):
            o = self.w.orders.get(self.w.k.epoch)
            over = o is None or o.prepare.incarnation != self.w.incarnation or self.m.stage == "failed"
            if self.m.writing is not None:
                if seals == "while writing" and o is not None and len(self.m.seen) == len(o.payloads):
                    while self._delivers_seal(o):
                        pass
                fails -= 1
                self.write_ends(fails=fails == 0)
            elif over or (self.m.stage == "acknowledged" and not self.w.under_way):
                if gives_up:
                    self.w.end("abandon")
                self.learns(0)
                self.opens(kind, member=True)
            elif self.m.stage == "acknowledged":
                self.commits()
                if self.w.under_way:
                    return
            elif self.m.fence > o.epoch or self.m.order is not o:
                self.prepared(0, 0, "right")
            elif self.m.stage == "staged" or (self.m.stage == "fenced" and not o.prepare.stage):
                self.opens_apply(0, "right")
            elif self.m.synchronising:
                self.synchronises(0, fails=False)
            elif not (seals == "first" and self._delivers_seal(o)) and not self._delivers_payload(o):
                self._delivers_seal(o)
            self.check()

    @rule(steps=STEPS, kind=st.sampled_from(Kind), seals=SEALS, fails=FAILS, gives_up=st.booleans())
    def goes_on_too(self, steps, kind, seals, fails, gives_up) -> None:
        """The same: of each example hypothesis leaves some rules out, and without this one little happens."""
        self.goes_on(steps, kind, seals, fails, gives_up)

    def _delivers_payload(self, o: Order) -> bool:
        have = self.m.seen if self.m.stage == "applying" else self.m.held
        missing = [n for n, p in enumerate(o.payloads) if p.identity not in have]
        if missing:
            self.payload_comes(missing[0], 0, "right")
        return bool(missing)

    def _delivers_seal(self, o: Order | None) -> bool:
        unsealed = [n for n, m in enumerate(o.manifests) if m.owner not in self.m.manifests] if o else []
        if unsealed:
            self.manifest_comes(unsealed[0], 0, "right")
        return bool(unsealed)

    # ------------------------------------------------------------ orders

    def _order(self, ago: int) -> Order | None:
        epochs = sorted(self.w.orders)
        return self.w.orders[epochs[-1 - ago]] if ago < len(epochs) else None

    @precondition(lambda self: self.m.writing is None and self.w.orders)
    @rule(ago=AGO, k_ago=AGO, how=st.sampled_from(("right", "right", "right", "record", "another", "K of another")))
    def prepared(self, ago, k_ago, how) -> None:
        """``Fence`` (D6)."""
        o, k = self._order(ago), self.w.ks[max(0, len(self.w.ks) - 1 - k_ago)]
        if o is None:
            return
        order, m = o.prepare, self.m
        if how == "record":
            order = msgspec.structs.replace(order, record_id="policy2")
        elif how == "another":
            order = msgspec.structs.replace(order, target=order.target + 7)
        elif how == "K of another":
            k = msgspec.structs.replace(k, record_id="policy2")
        again = m.order is not None and m.order.epoch == order.epoch
        wrong = how in ("record", "K of another") or order.epoch < m.fence or k.epoch != order.epoch
        if wrong or (again and how == "another"):
            expected = REFUSED
        elif again:
            expected = ["RankFailed" if m.stage == "failed" else "RankPrepared"]
        elif how == "another":
            return  # a leader gives one order an epoch: as good as the right one
        else:
            dropped = m.drop()
            m.learn(k)
            m.fence, m.order = order.epoch, o
            m.stage = "fenced" if m.armed(o) else "failed"
            expected = ["Fence", *dropped, "RankFailed" if m.stage == "failed" else "RankPrepared"]
        self.does(expected, self.r.prepare, order, k)

    @rule(ago=AGO, how=st.sampled_from(("right", "right", "right", "record", "future")))
    def opens_apply(self, ago, how) -> None:
        """``OpenApply`` (D6, D18)."""
        o, m = self._order(ago), self.m
        epoch = (0 if o is None else o.epoch) + (how == "future")
        ready = m.order is not None and m.order.epoch == epoch and m.stage not in ("failed", "idle")
        if how == "record" or epoch < m.fence or not ready:
            expected = REFUSED
        elif m.stage in ("applying", "acknowledged"):
            expected = NOTHING
        elif m.order.prepare.stage and m.stage != "staged":
            expected = REFUSED
        else:
            m.stage = "applying"
            expected = ["OpenApply", *(["ApplyStaged"] if m.order.prepare.stage else []), *m.follows()]
        self.does(expected, self.r.open_apply, "policy2" if how == "record" else "policy", epoch)

    # ------------------------------------------------------------ payloads and manifests

    @precondition(lambda self: self.m.writing is None and self.w.orders)
    @rule(
        which=st.integers(0, 2),
        ago=AGO,
        how=st.sampled_from(
            ("right",) * 3 + ("record_id", "epoch", "owner", "owner_incarnation", "bytes", "base", "entries", "target")
        ),
    )
    def payload_comes(self, which, ago, how) -> None:
        """``BeginWrite``, or the payload is held (D5, D7, D18)."""
        o, m = self._order(ago), self.m
        if o is None or not o.payloads:
            return
        p = o.payloads[which % len(o.payloads)]
        base, entries, i = o.prepare.base, 1 + (how == "entries"), p.identity
        changes = {"record_id": "policy2", "epoch": i.epoch + 1, "owner": "o9", "owner_incarnation": 2, "target": 9}
        if how in changes:
            i = msgspec.structs.replace(i, **{how: changes[how]})
        elif how == "bytes":
            p = Payload(i, p.cell, p.old, 77)
        elif how == "base":
            base = msgspec.structs.replace(base, version=base.version + 1)
        arrived = m.seen if m.stage == "applying" else m.held
        ours = m.order is not None and m.order.epoch == i.epoch
        open_for_it = ours and (m.stage in ("applying", "acknowledged") or m.order.prepare.stage)
        if ours and m.stage == "failed":
            open_for_it = None  # whether it had been opened before it failed does not matter: nothing may happen
        if i.record_id != "policy":
            expected = REFUSED
        elif i.epoch < m.fence:
            expected = NOTHING
        elif not ours or open_for_it is False or i.owner == "o9" or i.owner_incarnation != 1:
            expected = REFUSED
        elif open_for_it is None:
            self.does_nothing(self.r.payload, i, base, p.digest, entries)
            return
        elif m.stage == "acknowledged":
            expected = NOTHING
        elif self._contradicts(i, base, p.digest, entries):
            expected = m.fail()
        elif i in arrived:
            expected = NOTHING
        elif m.stage == "applying":
            m.entries[i] = entries
            self._begins(p, o)
            expected = ["BeginWrite", "BeginWrite"]
        else:
            m.held[i], m.entries[i] = p.digest, entries
            expected = ["Hold", *m.follows()]
        self.does(expected, self.r.payload, i, base, p.digest, entries)

    def _contradicts(self, i, base, of_bytes, entries) -> bool:
        m = self.m
        other = {m.held.get(i, of_bytes), m.seen.get(i, of_bytes)} != {of_bytes}
        strange = base != m.order.prepare.base or i.target != m.order.prepare.target
        return other or strange or not m.agrees(i, of_bytes, entries)

    def _begins(self, p: Payload, o: Order) -> None:
        """``BeginWriteOf``, the marks and the void before the first byte; the cell is torn until the write ends."""
        m = self.m
        assert m.writing is None
        m.seen[p.identity] = p.digest
        m.torn = m.torn | {{Kind.DENSE: "dense", Kind.RESTORE: "restore"}.get(o.kind, o.prepare.base.candidate)}
        m.acknowledged, m.writing = None, p
        self.meets = self.mem[p.cell]
        if p.old is not None:
            assert self.meets == p.old, f"RelativeOnce: a relative payload for {p.old} meets {self.meets}"
        self.mem[p.cell] = GARBAGE

    @precondition(lambda self: self.m.writing is not None)
    @rule(fails=st.sampled_from((False, False, False, True)))
    def write_ends(self, fails) -> None:
        """``EndWrite``, ``FailWrite`` (D5)."""
        m, p = self.m, self.m.writing
        m.writing = None
        if fails:
            self.does(["FailWrite", *m.fail()], self.r.write_failed, p.identity, "torn")
            return
        self.mem[p.cell] = p.new
        m.written.add(p.identity)
        self.does(["EndWrite", *m.follows()], self.r.write_ended, p.identity)

    @precondition(lambda self: self.w.orders)
    @rule(
        which=st.integers(0, 1),
        ago=AGO,
        how=st.sampled_from(
            ("right",) * 3 + ("record_id", "epoch", "owner", "owner_incarnation", "payloads", "base", "content_digest")
        ),
    )
    def manifest_comes(self, which, ago, how) -> None:
        """An owner's seal (D8)."""
        o, m = self._order(ago), self.m
        if o is None:
            return
        seal = o.manifests[which]
        changes = {
            "record_id": "policy2",
            "epoch": seal.epoch + 1,
            "owner": "o9",
            "owner_incarnation": 2,
            "payloads": seal.payloads[:-1],
            "base": msgspec.structs.replace(seal.base, candidate="w99"),
            "content_digest": "0" * 32,
        }
        if how in changes:
            seal = msgspec.structs.replace(seal, **{how: changes[how]})
        ours = m.order is not None and m.order.epoch == seal.epoch
        if seal.record_id != "policy":
            expected = REFUSED
        elif seal.epoch < m.fence:
            expected = NOTHING
        elif not ours or seal.owner == "o9" or seal.owner_incarnation != 1:
            expected = REFUSED
        elif m.stage in ("failed", "acknowledged"):
            expected = NOTHING
        elif seal.base != m.order.prepare.base or m.manifests.get(seal.owner, seal) != seal or self._unlisted(seal):
            expected = m.fail()
        elif seal.owner in m.manifests:
            expected = NOTHING
        else:
            m.manifests[seal.owner] = seal
            expected = ["DeliverManifest", *m.follows()]
        self.does(expected, self.r.manifest, seal)

    def _unlisted(self, seal: Manifest) -> bool:
        """Something of this owner arrived that the seal does not list."""
        listed = {(seal.identity(p.sequence), p.digest, p.entries) for p in seal.payloads}
        came = {(i, d, self.m.entries[i]) for i, d in (self.m.held | self.m.seen).items() if i.owner == seal.owner}
        return not came <= listed

    @rule(ago=AGO, fails=st.sampled_from((False, False, True)))
    def synchronises(self, ago, fails) -> None:
        """``Acknowledge``, or a check found an error (D8)."""
        o, m = self._order(ago), self.m
        if o is None or (m.order is o and not m.synchronising):
            return
        ours = m.order is o
        if fails:
            self.does(m.fail() if ours else NOTHING, self.r.synchronise_failed, o.epoch, "a digest differs")
        elif not ours or m.stage != "applying":
            self.does(NOTHING, self.r.synchronised, o.epoch)
        else:
            assert m.writing is None
            assert m.all_in(m.written)
            root = _root(m.manifests.values())
            m.stage, m.acknowledged, m.held = "acknowledged", (o.epoch, o.prepare.target, root), {}
            if o.kind is Kind.RESTORE:
                m.version, m.loaded, m.torn = o.prepare.target, o.prepare.base.baseline_id, set()
            found = self.does(["Acknowledge", "RankAcknowledged"], self.r.synchronised, o.epoch)
            assert found[-1] == RankAcknowledged(o.epoch, root)

    @rule(ago=AGO)
    def undeliverable(self, ago) -> None:
        o = self._order(ago)
        if o is not None and ago:
            self.does(self.m.fail() if self.m.order is o else NOTHING, self.r.undeliverable, o.epoch, "gone")

    # ------------------------------------------------------------ K

    @precondition(lambda self: self.m.writing is None)
    @rule(ago=AGO)
    def learns(self, ago) -> None:
        """``LearnCommit``, with K as it is, or as it was read a while ago."""
        k, m = self.w.ks[max(0, len(self.w.ks) - 1 - ago)], self.m
        before, here = (m.version, m.torn), m.committed_here(k)
        m.learn(k)
        learned = ["LearnCommit"] if here and (m.version, m.torn) != before else []
        dropped = []
        if k.epoch > m.fence:
            m.fence = k.epoch
            dropped = m.drop()
        found = self.does([*learned, *dropped, "RankState"], self.r.learn, k)
        assert found[-1] == RankState(m.state, m.fence, here, m.epoch, m.stage)

    # ------------------------------------------------------------ what must hold

    def does(self, expected, call, *arguments) -> list:
        """The call gives just these steps and effects, by name; or it is refused, and nothing changes."""
        if expected == REFUSED:
            with pytest.raises(RefusedError):
                call(*arguments)
            return []
        found = call(*arguments)
        names = [e.action if isinstance(e, Step) else type(e).__name__ for e in found]
        assert names == expected, f"{names}, where the specification has {expected}"
        for e in found:
            if isinstance(e, RankPrepared):
                assert e == RankPrepared(self.m.fence, self.m.state)
        return found

    def does_nothing(self, call, *arguments) -> None:
        try:
            assert call(*arguments) == []
        except RefusedError:
            return

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "m"):
            return
        r, m, k = self.r, self.m, self.w.k
        assert (r.fence, r.stage, r.state) == (m.fence, m.stage, self.m.state)
        assert r.epoch == m.epoch
        assert r.seen == set(m.seen)
        assert r.writing == (m.writing is not None)
        assert r.acknowledged_epoch == (0 if m.acknowledged is None else m.acknowledged[0])
        assert r.fence >= self.highest, "the fence fell"
        self.highest = r.fence
        assert m.writing is None or m.writing.identity.epoch >= r.fence, "FencedWrites"
        if r.version is not None and not r.torn_by:
            assert self.mem == self.w.contents[r.version], "CommitHeld"
        if m.committed_here(k) and k.committed.epoch == r.acknowledged_epoch:
            assert self.mem == self.w.baseline, "CommitStored"


def _root(manifests) -> str:
    return manifest_root({m.owner: m.digest() for m in manifests})
