"""Conducting: everything that a leader may do, one guarded method for each action of the specification."""

from collections.abc import Collection, Iterable

from dcr.protocol.coordinator_effects import Effect, SendMember, SendOwner
from dcr.protocol.fleet import Engine
from dcr.protocol.identity import Base, Kind
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Emit, Fold, OpenApply, Prepare, Published, StorageState
from dcr.protocol.record import CommitRecord, Direction, Member, OpenTransition, OwnerRef
from dcr.protocol.registrar import Registrar
from dcr.protocol.session import Session
from dcr.protocol.step import Step

GATE_MODES = ("sync", "async")
"""When an engine's gate closes: before anything is sent, or after everything was staged (DESIGN D18)."""


class Conductor(Registrar):
    """What a leader may do.  What it should do next is the coordinator's to say.

    Every action raises RefusedError, which names it and says why, and changes nothing, if its guard does not hold.
    The guards look at K as this leader knows it, and at what was reported.

    ::

        idle -- open_attempt, roll_back --> attempt -- fail_attempt --> idle
                                            attempt -- commit --> folding, or idle after a rollback
        idle, folding -- open_restore --> restoring -- end_restore --> folding
        folding -- publish --> folding -- finish_transition --> idle
        idle -- stop, abandon, admit --> idle

    Args:
        record_id: the record to lead.
        leader: this leader's name, new with every start.
        owners: names of all owners.
        wire_version: version of the payload format.
        operations: relative operations that the owners can emit, the preferred one first.
        members_min: fewest members that an attempt needs.
        restores_max: failed restores of one incarnation before it is refused.
        gate_mode: one of GATE_MODES.

    Attributes:
        candidate: the token of the candidate that K named last: of the open transition, or of the last commit.
    """

    def __init__(
        self,
        record_id: str,
        leader: str,
        owners: Iterable[str],
        *,
        wire_version: int,
        operations: tuple[str, ...] = ("add", "xor"),
        members_min: int = 1,
        restores_max: int = 3,
        gate_mode: str = "sync",
    ) -> None:
        assert members_min >= 1
        assert gate_mode in GATE_MODES
        super().__init__(
            record_id, leader, owners, wire_version=wire_version, operations=operations, restores_max=restores_max
        )
        self.members_min = members_min
        self.gate_mode = gate_mode
        self.candidate = ""
        self.awaited: frozenset[str] = frozenset()
        """Engines that K named when it was taken over, and that have not come back since."""

    # ------------------------------------------------------------ attempts

    def open_attempt(
        self, kind: Kind, *, leave_out: Collection[str] = frozenset(), first_absolute: bool = False
    ) -> list[Effect]:
        """OpenAttempt: of a new transition, or the next one of the open transition (DESIGN D4, D14).

        A rollback goes on as a rollback (D17).

        Args:
            kind: relative, absolute or dense.
            leave_out: names of engines to do without.
            first_absolute: the first attempt may be absolute, because relative payloads are not used.
        """
        self._must("OpenAttempt", self.phase is Phase.IDLE, f"it is {self.phase.value}")
        tr = self._k.open
        attempts = 0 if tr is None else tr.attempts
        if tr is None:
            self._must("OpenAttempt", self.seats.ready, "not every owner has offered a candidate")
            refused = self.seats.refused
            self._must("OpenAttempt", not refused, f"an owner refuses its candidate: {refused}")
            self._must("OpenAttempt", not self.unaware, "an owner still waits with the push that ended last")
        self._must("OpenAttempt", kind is not Kind.RESTORE, "a restore is no attempt")
        self._must("OpenAttempt", kind is not Kind.RELATIVE or not attempts, "only the first attempt may be relative")
        absolute_first = kind is Kind.ABSOLUTE and not attempts and not first_absolute
        self._must("OpenAttempt", not absolute_first, "the first attempt is relative or dense")
        back = tr is not None and tr.direction is Direction.BACK
        self._must("OpenAttempt", not back or kind is Kind.ABSOLUTE, "a rollback is absolute")
        return self._open_attempt("OpenAttempt", kind, Direction.BACK if back else Direction.FORWARD, leave_out)

    def roll_back(self) -> list[Effect]:
        """RollBack: turn the open transition back to the committed version (DESIGN D17)."""
        return self._roll_back(frozenset())

    def _roll_back(self, leave_out: Collection[str]) -> list[Effect]:
        self._must("RollBack", self.phase is Phase.IDLE, f"it is {self.phase.value}")
        tr = self._k.open
        forward = tr is not None and tr.direction is Direction.FORWARD
        self._must("RollBack", forward, "no transition is open that goes forward")
        step = Step(self.leader, "RollBack", self._epoch)
        return [step, *self._open_attempt("RollBack", Kind.ABSOLUTE, Direction.BACK, leave_out)]

    def _open_attempt(self, action: str, kind: Kind, direction: Direction, leave_out: Collection[str]) -> list[Effect]:
        k, tr = self._k, self._k.open
        self._must(action, tr is None or self.candidate_alive, "the candidate died with an owner that pinned it")
        self._must(
            action, kind is Kind.DENSE or self._baseline_held, f"the baseline of version {k.version} is not held"
        )
        candidate = self._named(k.version + 1) if tr is None else tr.candidate
        base = self._base(kind, candidate)
        engines = self.fleet.admitting(k, base, leave_out)
        few = f"{len(engines)} engines can take part, and {self.members_min} are needed"
        self._must(action, len(engines) >= self.members_min, few)
        operations = self.fleet.common_operations(engines)
        record = k.open_attempt(
            OpenTransition(
                target=k.version + 1,
                candidate=candidate,
                attempts=1 if tr is None else tr.attempts + 1,
                kind=kind,
                owners=self.seats.refs,
                wire_version=self.fleet.wire_version,
                operations=operations,
                content_digest="" if tr is None else tr.content_digest or self._content_found,
                direction=direction,
                pushes=self._pushes_of(tr),
            ),
            tuple(e.member for e in engines),
        )
        evicted = [m for m in k.members if m not in record.members]
        for e in filter(None, map(self.fleet.of, evicted)):
            e.evicted = record.epoch
        self._opening = self._new_session(record, base, engines, operations[0] if kind is Kind.RELATIVE else "set")
        steps = [Step(self.leader, "Evict", record.epoch, f"{m.engine} ({m.incarnation})") for m in evicted]
        return [*steps, *self._cas(record, "OpenAttempt")]

    def order_open_apply(self) -> list[Effect]:
        """OrderOpenApply: every member is prepared or, with an asynchronous gate, has staged the epoch (D6, D18).

        The engines of a restore do not wait for one another, for nothing is committed by it.  One that is not prepared
        refuses, and gets the order again when it is.
        """
        under_way = self.phase in (Phase.ATTEMPT, Phase.RESTORING)
        self._must("OrderOpenApply", under_way, f"it is {self.phase.value}")
        s = self._s
        self._must("OrderOpenApply", not s.applying, "it was ordered before")
        self._must("OrderOpenApply", s.restore or s.ready, "not every member has reported that it may write")
        s.applying = True
        order = OpenApply(self.record_id, s.epoch)
        step = Step(self.leader, "OrderOpenApply", s.epoch)
        return [step, *(SendMember(m.engine, order) for m in sorted(s.members))]

    def fail_attempt(self, reason: str = "") -> list[Effect]:
        """AttemptFailed: the attempt cannot be committed any more, or takes too long (DESIGN D14).

        Args:
            reason: why it is given up, for one that is not known to be broken.
        """
        self._must("AttemptFailed", self.phase is Phase.ATTEMPT, f"it is {self.phase.value}")
        why = self._s.broken or reason
        self._must("AttemptFailed", why, "nothing is known to be wrong with the attempt")
        self.phase = Phase.IDLE
        return [Step(self.leader, "AttemptFailed", self._s.epoch, why)]

    def commit(self) -> list[Effect]:
        """Commit: every owner sealed, and every member acknowledged just that (DESIGN D8, D11)."""
        self._must("Commit", self.phase is Phase.ATTEMPT, f"it is {self.phase.value}")
        s = self._s
        self._must("Commit", not s.unsealed, f"{', '.join(s.unsealed)} did not seal")
        self._must("Commit", s.complete, "not every member has acknowledged what the owners sealed")
        self._must("Commit", self._content_as_named(s), "the owners sealed other content than the record names")
        operation_id = self._next_operation()
        return self._cas(self._k.commit(s.content_digest, s.root, operation_id), "Commit", operation_id)

    def stop(self) -> list[Effect]:
        """Stop: the transition stops and the last attempt is fenced (DESIGN D14)."""
        self._must("Stop", self.phase is Phase.IDLE, f"it is {self.phase.value}")
        tr = self._k.open
        self._must("Stop", tr is not None and not tr.stopped, "no transition is open that goes on")
        return self._cas(self._k.stop(self._content_found), "Stop")

    def abandon(self) -> list[Effect]:
        """Abandon: the transition is cleared and fenced; torn members restore (DESIGN D17)."""
        return self._abandon()

    def _abandon(self) -> list[Effect]:
        self._must("Abandon", self.phase is Phase.IDLE, f"it is {self.phase.value}")
        self._must("Abandon", self._k.open is not None, "no transition is open")
        return self._cas(self._k.abandon(), "Abandon")

    # ------------------------------------------------------------ after a commit

    def publish(self) -> list[Effect]:
        """Publish: engines read K, and owners fold what was committed (DESIGN D12, D13).  Once."""
        self._must("Publish", self.phase is Phase.FOLDING, f"it is {self.phase.value}")
        self._must("Publish", not self._published, "it was published before")
        self._published = True
        c = self._k.committed
        orders = [] if c is None else [SendOwner(o, Fold(self.record_id, c.epoch)) for o in self._owing]
        return [Step(self.leader, "Publish", self._epoch), *self._tell_engines(), *orders]

    def finish_transition(self) -> list[Effect]:
        """FinishTransition: every owner of the committed candidate has folded, or lost its baseline (D10, D13)."""
        self._must("FinishTransition", self.phase is Phase.FOLDING, f"it is {self.phase.value}")
        self._must("FinishTransition", not self._owing, f"{', '.join(self._owing)} did not fold yet")
        self.phase = Phase.IDLE
        c = self._k.committed
        return [Step(self.leader, "FinishTransition", 0 if c is None else c.epoch)]

    # ------------------------------------------------------------ membership

    def open_restore(self, *, leave_out: Collection[str] = frozenset()) -> list[Effect]:
        """OpenRestore: a session for every engine that does not hold the committed version (DESIGN D15).

        Args:
            leave_out: names of engines to leave alone.
        """
        folding = self.phase is Phase.FOLDING
        self._must("OpenRestore", self.phase is Phase.IDLE or folding, f"it is {self.phase.value}")
        self._must("OpenRestore", self._k.open is None, "a transition is open")
        c = self._k.committed
        told = self._published or c is None or c.direction is Direction.BACK
        self._must("OpenRestore", told or not folding, "the last commit is not published yet")
        owing = self._owing
        lost = [name for name, seat in self.seats if not seat.baseline_digest and name not in owing]
        self._must("OpenRestore", not lost, f"{', '.join(lost)} holds no baseline")
        self._must("OpenRestore", owing or self._baseline_held, "the baseline is not the committed version")
        engines = [e for e in self.fleet.present(leave_out) if not e.holds_committed(self._k)]
        self._must("OpenRestore", engines, "every engine holds the committed version")
        record = self._k.open_restore()
        self._opening = self._new_session(record, self._base(Kind.RESTORE, ""), engines, "set")
        return self._cas(record, "OpenRestore")

    def end_restore(self, reason: str = "") -> list[Effect]:
        """EndRestore: everybody acknowledged, or somebody failed, or it takes too long (DESIGN D15).

        Args:
            reason: why it is given up, for one that is neither over nor known to be broken.
        """
        self._must("EndRestore", self.phase is Phase.RESTORING, f"it is {self.phase.value}")
        s = self._s
        over = s.members <= set(s.roots)
        self._must("EndRestore", over or s.broken or reason, "engines are still being restored")
        self.phase = Phase.FOLDING
        return [Step(self.leader, "EndRestore", s.epoch, s.broken or reason)]

    def admit(self, *, leave_out: Collection[str] = frozenset()) -> list[Effect]:
        """Admit: engines that hold the committed version become members (DESIGN D15).

        Args:
            leave_out: names of engines to leave alone.
        """
        self._must("Admit", self.phase is Phase.IDLE, f"it is {self.phase.value}")
        self._must("Admit", self._k.open is None, "a transition is open")
        holding = [e.member for e in self.fleet.present(leave_out) if e.holds_committed(self._k)]
        joining = tuple(m for m in holding if m not in self._k.members)
        self._must("Admit", joining, "no engine that is not a member holds the committed version")
        return self._cas(self._k.admit(joining), "Admit")

    # ------------------------------------------------------------ the record

    def _found(self, record: CommitRecord | None, revision: int | None) -> list[Effect]:
        if record is None:
            total = self.seats.baseline_total
            if not total:
                return self._fatal("version 0 cannot be created: an owner has no baseline")
            return self._cas(CommitRecord.create(self.record_id, self.leader, total), "CreateRecord")
        self.record, self.revision = record, revision
        return self._cas(record.take_over(self.leader), "TakeOver")

    def _after(self, reason: str) -> list[Effect]:
        tr, c = self._k.open, self._k.committed
        if tr is not None:
            self.candidate = tr.candidate
        match reason:
            case "OpenAttempt" | "OpenRestore":
                self.phase = Phase.ATTEMPT if reason == "OpenAttempt" else Phase.RESTORING
                self.session, self._opening = self._opening, None
                return self._orders()
            case "Commit":
                return self._after_commit()
            case "TakeOver" if tr is None:
                self.phase = Phase.FOLDING
                self.candidate = "" if c is None else c.candidate
                return []
            case _:
                self.phase = Phase.IDLE
                return self._tell_engines()

    def _restoring(self, reason: str) -> tuple[tuple[Member, ...], tuple[OwnerRef, ...]]:
        s = self._opening
        return (tuple(sorted(s.members)), s.owners) if reason == "OpenRestore" and s is not None else ((), ())

    def _after_commit(self) -> list[Effect]:
        s, k = self._s, self._k
        for e in filter(None, map(self.fleet.of, s.members)):
            e.state = StorageState(k.version, k.baseline_id, ())
        self._published, self._folds, self._overdue = False, {}, set()
        self.phase = Phase.IDLE if s.back else Phase.FOLDING
        return self._tell_engines() if s.back else []

    def _orders(self) -> list[Effect]:
        """What an epoch that was opened is ordered to do."""
        s = self._s
        effects: list[Effect] = []
        for m in sorted(s.members):
            e = self.fleet.of(m)
            if e is not None:
                e.engaged = s.epoch
            order = Prepare(self.record_id, s.epoch, s.target, s.base, s.owners, m.incarnation, s.stage)
            effects.append(SendMember(m.engine, order))
        for o in s.owners:
            emit = Emit(self.record_id, s.epoch, s.target, s.base, s.operation, s.set_only, o.incarnation)
            effects.append(SendOwner(o.owner, emit))
        return effects

    def _tell_engines(self) -> list[Effect]:
        """K has changed; whoever needs to know reads it."""
        order = Published(self.record_id, self._epoch)
        return [SendMember(name, order) for name, e in sorted(self.fleet.engines.items()) if e.connected]

    # ------------------------------------------------------------ inside

    @property
    def _s(self) -> Session:
        assert self.session is not None
        return self.session

    def _named(self, version: int) -> str:
        """The name of what the owners offer, as a candidate for this version (DESIGN D10)."""
        return f"v{version}-{self.seats.candidate}"

    def _pushes_of(self, tr: OpenTransition | None) -> tuple[int, ...]:
        """The pushes that the next attempt is about; what is pushed while a rollback is under way comes after it."""
        if tr is None or (self.seats.ready and tr.direction is Direction.FORWARD):
            return self.seats.pushes
        return tr.pushes

    @property
    def unaware(self) -> set[str]:
        """Owners that wait with the push that was committed or turned back last: nobody has told them yet (D16)."""
        c = self._k.committed
        return set() if c is None else self.seats.waiting(c.owners, c.pushes)

    @property
    def _content_found(self) -> str:
        """The candidate's content digest, if the last attempt has found it."""
        s = self.session
        return "" if s is None or s.restore or s.back or s.base.candidate != self.candidate else s.content_digest

    def _why_waiting(self) -> str:
        """Who is missing for an attempt, for people."""
        if self.seats.missing:
            return f"no connection to {', '.join(self.seats.missing)}"
        if self.awaited:
            return f"not connected again since the last leader: {', '.join(sorted(self.awaited))}"
        few = f"too few engines can take part in record {self.record_id!r} (members_min is {self.members_min})"
        return f"{few}; engines: {self.fleet.describe()}"

    def _base(self, kind: Kind, candidate: str) -> Base:
        held = "" if kind is Kind.DENSE else self._k.baseline_id
        return Base(kind, self._k.version, held, candidate)

    def _new_session(self, record: CommitRecord, base: Base, engines: list[Engine], operation: str) -> Session:
        tr = record.open
        forward = tr is not None and tr.direction is Direction.FORWARD
        return Session(
            epoch=record.epoch,
            base=base,
            target=record.version + 1 if forward else record.version,
            attempt=0 if tr is None else tr.attempts,
            members={e.member for e in engines},
            owners=self.seats.refs,
            operation=operation,
            set_only=tuple(sorted({name for e in engines for name in e.join.set_only})),
            stage=self.gate_mode == "async" and tr is not None,
        )
