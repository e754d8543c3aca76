"""What a leader may write, order and tell, by what was reported to it: the guards of spec/tla/RefitCoordinator.tla."""

from dcr.protocol.coordinator_effects import WriteRecord
from dcr.protocol.identity import Kind, manifest_root
from dcr.protocol.messages import Emit, Fold, OpenApply, Outcome, Prepare
from dcr.protocol.record import CommitRecord, Direction, Member, OwnerRef
from tests.unit.protocol.machines.heard import OWNERS, Heard


class LeaderGuards:
    """Each write, order and outcome beside the action that it belongs to."""

    heard: Heard
    known: CommitRecord | None
    known_revision: int | None
    write: WriteRecord | None
    why_again: bool
    stage: bool
    members_min: int
    prepares: dict[int, dict[str, Prepare]]
    emits: dict[int, dict[str, Emit]]
    applied: set[int]
    published: set[int]
    commits: dict[int, str]

    def _steps(self, action: str) -> None:
        if action == "Publish":
            assert self.known.committed is None or self.known.committed.epoch not in self.published
            self.published.add(0 if self.known.committed is None else self.known.committed.epoch)
        elif action == "FinishTransition":
            assert not self.heard.owing(self.known) or self.heard.waited, "the pin is released before the fold"
        elif action == "OpenAttempt":
            self.heard.waited = False

    def _writes(self, w: WriteRecord) -> None:
        if self.write is not None:
            assert w == self.write, "two writes at once"
            assert self.why_again, "a write is made again before K was read back (D3)"
            return
        assert w.expected_revision == self.known_revision
        k, old = w.record, self.known
        if old is None:
            assert w.reason == "CreateRecord"
            assert (k.version, k.epoch, k.baseline_id) == (0, 0, self.heard.baseline())
        else:
            self._record_step(old, k, w.reason)
            getattr(self, f"_may_{w.reason}")(old, k)
        self.write = w

    def _record_step(self, old: CommitRecord, k: CommitRecord, reason: str) -> None:
        """``RecordStep``."""
        assert k.epoch == old.epoch + (reason not in ("Commit", "Admit"))
        assert k.version == old.version or (reason == "Commit" and old.open.target == k.version == old.version + 1)
        assert k.leader == "c1"
        assert k.fencing_token == old.fencing_token + (reason == "TakeOver")
        if k.committed != old.committed:
            assert (reason, k.committed.epoch) == ("Commit", old.epoch)
            assert not old.open.stopped
        if k.open is not None and old.open is not None:
            assert k.open.candidate == old.open.candidate
            assert k.open.attempts == old.open.attempts + (reason == "OpenAttempt")
            assert old.open.direction is Direction.FORWARD or k.open.direction is Direction.BACK
        if k.open is not None:
            assert k.members
            assert k.open.kind is not Kind.RELATIVE or k.open.attempts == 1

    def _may_TakeOver(self, old, k) -> None:  # noqa: N802
        assert old.leader != "c1"
        assert (k.open, k.members, k.committed) == (old.open, old.members, old.committed)

    def _may_OpenAttempt(self, old, k) -> None:  # noqa: N802
        """``MayOpen``, ``Attempt``."""
        tr, kind = k.open, k.open.kind
        assert tr.target == old.version + 1
        assert tr.owners == self.heard.refs()
        if old.open is None:
            assert all(self.heard.waits(o) for o in OWNERS), "an attempt without a push"
            assert tr.pushes == tuple(self.heard.waits(o) for o in OWNERS)
            assert (tr.attempts, tr.direction) == (1, Direction.FORWARD)
        else:
            assert old.open.owners == tr.owners, "the candidate died with an owner"
        if kind is Kind.ABSOLUTE:
            assert tr.attempts > 1
        if kind is not Kind.DENSE:
            assert self.heard.baseline() == old.baseline_id, "the baseline is not held"
        assert tr.direction is Direction.FORWARD or kind is Kind.ABSOLUTE
        assert len(k.members) >= self.members_min
        for m in k.members:
            assert self.heard.admits(m, old, kind, tr.candidate), f"{m} does not admit a {kind} attempt"

    def _may_Commit(self, old, k) -> None:  # noqa: N802
        """``CommitOf`` (D8, D11)."""
        epoch, tr = old.epoch, old.open
        seals = {o.owner: self.heard.sealed.get((o.owner, o.incarnation, epoch)) for o in tr.owners}
        assert all(seals.values()), "a commit before every owner has sealed"
        root = manifest_root({o: seal.manifest_digest for o, seal in seals.items()})
        for m in old.members:
            assert self.heard.acked.get((m, epoch)) == root, f"a commit that {m} has not acknowledged"
        assert old.members
        assert epoch in self.applied
        assert len(old.members) >= self.members_min
        content = f"{sum(int(s.content_digest, 16) for s in seals.values()):032x}"
        back = tr.direction is Direction.BACK
        assert k.baseline_id == content
        assert content == old.baseline_id if back else tr.content_digest in ("", content)
        assert self.commits.setdefault(k.version, content) == content, "OneCommit"
        assert k.version == (old.version if back else tr.target)
        assert (k.committed.owners, k.committed.members) == (tr.owners, old.members)

    def _may_Stop(self, old, k) -> None:  # noqa: N802
        assert old.open is not None
        assert not old.open.stopped
        assert k.open.stopped

    def _may_Abandon(self, old, k) -> None:  # noqa: N802
        assert old.open is not None
        assert k.open is None

    def _may_OpenRestore(self, old, k) -> None:  # noqa: N802
        assert old.open is None
        owing = self.heard.owing(old)
        assert self.heard.baseline() == old.baseline_id or owing
        assert not owing or old.committed.epoch in self.published, "owners that nobody has told to fold cannot restore"

    def _may_Admit(self, old, k) -> None:  # noqa: N802
        """``AdmitThese``: what they hold is what K names."""
        assert old.open is None
        for m in set(k.members) - set(old.members):
            assert self.heard.admits(m, old, Kind.RELATIVE, ""), f"{m} is admitted and does not hold the version"
            ordered = self.prepares.get(old.epoch, {}).get(m.engine)
            engaged = ordered is not None and ordered.incarnation == m.incarnation
            assert not engaged or (m, old.epoch) in self.heard.over, f"{m} may still write"

    def _orders_member(self, engine: str, order) -> None:
        k = self.known
        assert self.write is None, "an order while K is being written"
        if isinstance(order, Prepare):
            assert order.epoch == k.epoch, "an order follows its write of K"
            assert order.stage == (self.stage and k.open is not None)
            assert order.incarnation <= self.heard.incarnation(engine)
            if k.open is not None:
                assert Member(engine, order.incarnation) in k.members
                assert (order.base.kind, order.base.candidate) == (k.open.kind, k.open.candidate)
                assert order.target == k.version + (k.open.direction is Direction.FORWARD)
            else:
                assert (order.base.kind, order.target) == (Kind.RESTORE, k.version)
            assert order.base.version == k.version
            self.prepares.setdefault(order.epoch, {})[engine] = order
        elif isinstance(order, OpenApply):
            self._may_apply(order.epoch)

    def _may_apply(self, epoch: int) -> None:
        """``OrderOpenApply`` (D6, D18)."""
        assert epoch == self.known.epoch
        for engine, p in self.prepares[epoch].items():
            ready = self.heard.staged if p.stage else self.heard.prepared
            assert p.base.kind is Kind.RESTORE or (engine, epoch) in ready, "an order to write before all are ready"
        self.applied.add(epoch)

    def _orders_owner(self, owner: str, order) -> None:
        k = self.known
        assert self.write is None, "an order while K is being written"
        if isinstance(order, Emit):
            assert order.epoch == k.epoch, "an order follows its write of K"
            assert order.epoch in self.prepares
            self.emits.setdefault(order.epoch, {})[owner] = order
        elif isinstance(order, Fold):
            c = k.committed
            assert (order.epoch, c.direction) == (c.epoch, Direction.FORWARD)
            assert OwnerRef(owner, self.heard.owner_incarnation(owner)) in c.owners
        elif isinstance(order, Outcome):
            self._outcome(owner, order)

    def _outcome(self, owner: str, order: Outcome) -> None:
        """``FinishTransition``: success is what K says of this very push, whose owners have folded (D10, D13)."""
        assert order.incarnation == self.heard.owner_incarnation(owner)
        if order.error:
            return
        c = self.known.committed
        assert c is not None
        assert c.direction is Direction.FORWARD
        if order.epoch == self.known.epoch:
            ended = {(o.owner, o.incarnation): push for o, push in zip(c.owners, c.pushes, strict=True)}
            assert ended.get((owner, order.incarnation)) == order.push, "another push is told that it was committed"
            assert not self.heard.owing(self.known) or self.heard.waited, "the pin is released before the fold"
