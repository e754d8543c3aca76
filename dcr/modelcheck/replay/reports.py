"""What a coordinator hears: every message that was sent, and what the parties are when it acts."""

from collections.abc import Hashable

from dcr.modelcheck.replay.world import WIRE_VERSION, World
from dcr.protocol.leader import Phase
from dcr.protocol.messages import (
    CONTROL_VERSION,
    Acknowledged,
    AttemptFailed,
    CandidateReady,
    EmitFailed,
    Folded,
    Join,
    OwnerJoin,
    Prepared,
    Staged,
    StorageState,
)
from dcr.protocol.node import engine_state

OPERATIONS = ("add", "xor")


class Reports:
    """Tells one coordinator what it has not heard yet, in the order in which each party would have said it.

    The specification lets a leader see the truth about engines and owners when it acts; so it hears of it just before.

    Args:
        world: the deployment.
        coordinator: who is told.
    """

    def __init__(self, world: World, coordinator: str) -> None:
        self._world = world
        self._name = coordinator
        self._messages: set[Hashable] = set()
        self._last: dict[Hashable, Hashable] = {}

    def bring(self, *, stale: bool = False) -> None:
        """Deliver what is new.

        Args:
            stale: every engine says that it is clean at the committed version, as an old report may.
        """
        c = self._world.coordinators[self._name]
        if c.record is None or c.phase is Phase.FATAL:
            return  # it does not lead yet, or no more
        self._attempt_messages()
        self._owners()
        self._engines(stale=stale)
        self._attempt_messages()

    def _new(self, message: Hashable) -> bool:
        if message in self._messages:
            return False
        self._messages.add(message)
        return True

    def _changed(self, key: Hashable, value: Hashable) -> bool:
        if self._last.get(key) == value:
            return False
        self._last[key] = value
        return True

    # ------------------------------------------------------------ of the last session, even if it is over

    def _attempt_messages(self) -> None:
        c, said = self._world.coordinators[self._name], self._world.said
        if c.phase is Phase.WRITING or c.session is None:
            return
        epoch = c.session.epoch
        for report in said.sealed:
            if report.epoch == epoch and self._new(("sealed", report.owner, report.incarnation, epoch)):
                c.owner_report(report)
        for e in self._world.engines:
            for incarnation in range(1, self._world.node[e].incarnation + 1):
                self._engine_messages(e, incarnation, epoch)
        for failed in said.engines_failed:
            if failed[0] == epoch and self._new(("engine failed", *failed)):
                _, e, incarnation = failed
                c.member_report(AttemptFailed(e, incarnation, epoch, "a payload failed", self._state(e)))
        for failed in said.owners_failed:
            if failed[0] == epoch and self._new(("owner failed", *failed)):
                _, o, incarnation = failed
                c.owner_report(EmitFailed(o, incarnation, epoch, "could not emit", fatal=False))

    def _engine_messages(self, e: str, incarnation: int, epoch: int) -> None:
        """Prepared, staged and acknowledged: said by the node when its last rank has."""
        c, said = self._world.coordinators[self._name], self._world.said
        keys = [(epoch, e, r, incarnation) for r in self._world.ranks]
        if all(k in said.prepared for k in keys) and self._new(("prepared", e, incarnation, epoch)):
            if self._world.staging(e, epoch):
                c.member_report(Staged(e, incarnation, epoch))
            else:
                # It was armed when it said so; what it holds now is told by its next report.
                c.member_report(Prepared(e, incarnation, epoch, self._world.prepared_state[epoch, e, incarnation]))
        roots = {said.acks.get(k, "") for k in keys}
        if "" not in roots and len(roots) == 1 and self._new(("acknowledged", e, incarnation, epoch)):
            c.member_report(Acknowledged(e, incarnation, epoch, roots.pop(), {}))

    # ------------------------------------------------------------ of the parties

    def _owners(self) -> None:
        w = self._world
        c = w.coordinators[self._name]
        for o in w.owners:
            owner = w.owner[o]
            if self._changed(("owner", o), (owner.incarnation, owner.baseline_digest)):
                c.owner_report(OwnerJoin(o, owner.incarnation, CONTROL_VERSION, owner.baseline_digest))
            if not w.push_over and self._changed(("push", o), (owner.incarnation, w.pushes)):
                c.owner_report(CandidateReady(o, owner.incarnation, w.pushes))
            if w.push_over:
                c.seats[o].ready = 0  # its outcome was told: the policy's part
            committed = None if c.record is None else c.record.committed
            folded = committed is not None and owner.folded_epoch == committed.epoch and not owner.folding
            if folded and self._new(("folded", o, owner.incarnation, owner.folded_epoch)):
                digest = owner.baseline_digest
                reason = "" if digest else "the baseline was lost"
                c.owner_report(Folded(o, owner.incarnation, owner.folded_epoch, digest, reason, {}))

    def _state(self, e: str) -> StorageState:
        w = self._world
        return engine_state(w.receiver[e, r].seen_through(w.record) for r in w.ranks)

    def _engines(self, *, stale: bool) -> None:
        w = self._world
        c = w.coordinators[self._name]
        for e in w.engines:
            state = StorageState(w.record.version, w.record.baseline_id, ()) if stale else self._state(e)
            if self._changed(("engine", e), (w.node[e].incarnation, state)):
                incarnation = w.node[e].incarnation
                c.member_report(Join(e, incarnation, CONTROL_VERSION, WIRE_VERSION, OPERATIONS, state, (), {}))
