"""The coordinator: drives attempts and restores, and is the only writer of K while it leads (paper section 6.3)."""

from collections.abc import Iterable

import msgspec

from dcr.protocol.conductor import Conductor
from dcr.protocol.coordinator_effects import Effect, ReadRecord, SendOwner
from dcr.protocol.fleet import Engine, Fleet
from dcr.protocol.identity import Base, Kind
from dcr.protocol.leader import Phase
from dcr.protocol.messages import (
    CONTROL_VERSION,
    Acknowledged,
    AttemptFailed,
    CandidateReady,
    EmitFailed,
    Fold,
    Folded,
    Join,
    MemberReport,
    Outcome,
    OwnerJoin,
    OwnerReport,
    Prepared,
    Sealed,
    Serving,
    StorageState,
    Withdraw,
    cut,
)
from dcr.protocol.record import CommitRecord, Member, OpenTransition
from dcr.protocol.seats import Seat, Seats
from dcr.protocol.session import Session, why_stopped
from dcr.protocol.step import Step

MESSAGES_MAX = 64
"""Most failures, and most warnings, that an outcome tells of."""


class Coordinator(Conductor):
    """The one leader of a record.

    The synchronous schedule of one transition::

        CandidateReady of every owner
        OpenAttempt   CAS: epoch + 1, the attempt is counted            -> Prepare to members, Emit to owners
        all Prepared                                                    -> OpenApply to members
        all Sealed, all Acknowledged with the root over the manifests
        Commit        CAS from the revision that OpenAttempt made       -> Published to members, Fold to owners
        all Folded                                                      -> Outcome to owners

    Whatever goes wrong before the commit fails the attempt; the next one is absolute, with whoever is left.  Between
    transitions engines that hold no version are restored and admitted.

    Args:
        record_id: the record to lead.
        leader: this coordinator's name, new with every start.
        owners: names of all owners.
        wire_version: version of the payload format.
        operations: relative operations this trainer can emit, the preferred one first.
        members_min: fewest members a commit needs.
        attempts_max: attempts of one push before the transition stops.
        restores_max: failed restores of one incarnation before it is refused.
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
        attempts_max: int = 4,
        restores_max: int = 3,
    ) -> None:
        assert members_min >= 1
        assert attempts_max >= 1
        super().__init__(record_id, leader, Seats(owners), Fleet(wire_version, operations), restores_max)
        self.members_min = members_min
        self.attempts_max = attempts_max
        self._candidates = 0
        self._outcome: Outcome | None = None
        self._budget_from: int | None = None  # attempts in K when the push in progress began
        self._candidate = ""
        self._failures: list[str] = []
        self._warnings: list[str] = []
        self._abandoning = False
        self._resting = False  # a restore failed a moment ago
        self._dense_only = False

    # ------------------------------------------------------------ reports of owners

    def owner_report(self, report: OwnerReport) -> list[Effect]:
        """Take an owner's report; reports of older incarnations are ignored."""
        if report.owner not in self._seats or self.phase is Phase.FATAL:
            return []
        seat = self._seats[report.owner]
        if isinstance(report, OwnerJoin):
            return self._owner_joined(seat, report)
        if report.incarnation != seat.incarnation:
            return []
        match report:
            case CandidateReady():
                if report.push <= seat.done and self._outcome is not None:
                    return [self._tell(report.owner, self._outcome)]  # it may have been lost with a connection
                given_up, seat.ready = seat.ready, report.push
                return self._proceed() if given_up in (0, report.push) else self._withdrawn(report.owner, given_up)
            case Withdraw():
                if seat.ready != report.push:
                    return []
                seat.ready = 0
                return self._withdrawn(report.owner, report.push)
            case Sealed():
                return self._sealed(report)
            case EmitFailed():
                return self._emit_failed(report)
            case Folded():
                return self._folded(seat, report)

    def _withdrawn(self, owner: str, push: int) -> list[Effect]:
        """A push was given up on a rank: the weights there may be others by now, so its candidate is dropped (D10)."""
        self._abandoning = True
        if self.phase is Phase.ATTEMPT:
            return self._session_failed(f"{owner} gave push {push} up")
        return self._proceed()

    def owner_lost(self, owner: str, incarnation: int) -> list[Effect]:
        """An owner's connection ended."""
        if owner not in self._seats:
            return []  # of an older trainer with more ranks
        seat = self._seats[owner]
        if seat.incarnation != incarnation or not seat.connected:
            return []
        seat.connected = False
        if self._session is None or self.phase is Phase.WRITING:
            return []
        if self.phase is Phase.FOLDING:
            return []  # it may come back and fold; the time-out decides
        return self._session_failed(f"owner {owner} was lost")

    def _owner_joined(self, seat: Seat, report: OwnerJoin) -> list[Effect]:
        if report.control_version != CONTROL_VERSION:
            return self._fatal(
                f"{report.owner} speaks control version {report.control_version}, this coordinator {CONTROL_VERSION}: "
                "run the same version of dcr on every training rank"
            )
        restarted = seat.take(report)
        if self.phase is Phase.STARTING:
            return [] if self._seats.missing else [ReadRecord()]
        effects: list[Effect] = []
        if restarted and self._session is not None and self.phase in (Phase.ATTEMPT, Phase.RESTORING):
            effects = self._session_failed(f"owner {report.owner} restarted")
        elif self.phase is Phase.FOLDING and self._session is not None:
            if restarted:
                effects = self._fold_ended(report.owner, "it restarted before its baseline was folded")
            elif report.owner not in self._session.folded:
                effects = [SendOwner(report.owner, Fold(self.record_id, self._session.epoch))]
        return effects + self._proceed()

    # ------------------------------------------------------------ reports of members

    def member_report(self, report: MemberReport) -> list[Effect]:
        """Take a member's report; reports of older incarnations are ignored."""
        if self.phase is Phase.FATAL:
            return []
        if isinstance(report, Join):
            return self._joined(report)
        engine = self.fleet.of(Member(report.engine, report.incarnation))
        if engine is None:
            return []
        engine.silent = False
        match report:
            case Prepared():
                return self._prepared(engine, report)
            case Acknowledged():
                return self._acknowledged(report)
            case AttemptFailed():
                return self._member_failed(engine, report)
            case Serving():
                step = Step(self.leader, "MemberServes", report.epoch, f"{report.engine} at {report.version}")
                return [step, *self._proceed()]

    def member_lost(self, engine: str, incarnation: int) -> list[Effect]:
        """An engine's connection ended."""
        e = self.fleet.of(Member(engine, incarnation))
        if e is None or not e.connected:
            return []
        e.connected = False
        return self._out_of_session(e.member, "was lost")

    def _joined(self, report: Join) -> list[Effect]:
        old = self.fleet.engines.get(report.engine)
        e = self.fleet.join(report)  # first, so that no attempt is opened with the incarnation that died
        effects: list[Effect] = []
        if old is not None and old.join.incarnation != report.incarnation:
            effects += self._out_of_session(old.member, "restarted")
        return [*effects, *self._tell_refused([e]), *self._proceed()]

    # ------------------------------------------------------------ the record

    def _found(self, record: CommitRecord | None, revision: int | None) -> list[Effect]:
        if record is None:
            total = self._seats.baseline_total
            if not total:
                return self._fatal("version 0 cannot be created: an owner has no baseline")
            return self._cas(CommitRecord.create(self.record_id, self.leader, total), "CreateRecord")
        self.record, self.revision = record, revision
        return self._cas(record.take_over(self.leader), "TakeOver")

    def _after(self, reason: str) -> list[Effect]:
        match reason:
            case "OpenAttempt":
                self.phase = Phase.ATTEMPT
                if self._session is not None and self._session.pushes != self._seats.pushes:
                    return self._session_failed("a rank gave its push up")
                return self._start_session()
            case "OpenRestore":
                self.phase = Phase.RESTORING
                return self._start_session()
            case "Commit":
                self.phase = Phase.FOLDING
                return self._committed()
            case "TakeOver" if self._k.open is not None:
                # The candidate died with the process that held it (DESIGN D17).
                return self._cas(self._k.abandon(), "Abandon")
            case "Stop":
                self.phase = Phase.IDLE
                return [*self._publish(), *self._push_over(why_stopped(self._failures))]
            case _:
                self._session = None
                self.phase = Phase.IDLE
                return [*self._publish(), *self._proceed()]

    # ------------------------------------------------------------ time

    def expired(self, number: int) -> list[Effect]:
        """The timer that was started under this number ran out."""
        if number != self._timer or self.phase is Phase.FATAL:
            return []
        self._timer += 1  # spent: whoever waits again starts another
        s = self._session
        if self.phase in (Phase.ATTEMPT, Phase.RESTORING) and s is not None:
            return self._session_failed(self._why_late(s))
        if self.phase is Phase.FOLDING and s is not None:
            effects: list[Effect] = []
            for owner in sorted(self._seats.names - s.folded):
                self._seats[owner].baseline_digest = ""
                effects += self._fold_ended(owner, "time-out: no answer to the order to fold")
            return effects
        if self.phase is Phase.IDLE and self._resting:
            self._resting = False
            return self._proceed()
        if self.phase is Phase.IDLE and self._seats.ready:
            self._failures.append(f"time-out: {self._why_waiting()}")
            if self._k.open is not None and not self._k.open.stopped:
                return self._stop()
            return self._push_over(self._failures[-1])
        if self.phase is Phase.IDLE and self._seats.late:
            return self._push_over(f"time-out: {', '.join(self._seats.late)} did not call push(); every rank has to")
        return []

    def _why_waiting(self) -> str:
        if self._seats.missing:
            return f"no connection to {', '.join(self._seats.missing)}"
        few = f"too few engines can take part in record {self.record_id!r} (members_min is {self.members_min})"
        return f"{few}; engines: {self.fleet.describe()}"

    # ------------------------------------------------------------ what to do next

    @property
    def _baseline_held(self) -> bool:
        return self._seats.baseline_total == self._k.baseline_id

    def _proceed(self) -> list[Effect]:
        """Start whatever is due, if nothing is under way."""
        if self.phase is not Phase.IDLE:
            return []
        abandoning, self._abandoning = self._abandoning, False
        if self._k.open is not None and (abandoning or self._candidate_lost(self._k.open)):
            return self._cas(self._k.abandon(), "Abandon")
        if self._seats.ready:
            return self._open_attempt()
        effects = self._take_in() if self._k.open is None else []
        return effects or (self._wait("ranks", "") if self._seats.late else [])

    def _take_in(self) -> list[Effect]:
        """Admit engines that hold the committed version; restore those that do not (DESIGN D15)."""
        joining = self.fleet.joining(self._k)
        holding = tuple(e.member for e in joining if e.holds_committed(self._k))
        if holding:
            return self._cas(self._k.admit(holding), "Admit")
        if joining and self._baseline_held and not self._seats.missing and not self._resting:
            return self._open_restore(joining)
        return []

    def _base(self, kind: Kind) -> Base:
        held = "" if kind is Kind.DENSE else self._k.baseline_id
        return Base(kind, self._k.version, held, "" if kind is Kind.RESTORE else self._candidate)

    # ------------------------------------------------------------ attempts

    def _open_attempt(self) -> list[Effect]:
        k, tr = self._k, self._k.open
        counted = 0 if tr is None else tr.attempts
        if self._budget_from is None:
            if tr is not None and not tr.content_digest:
                # Nothing can tell whether these are still the weights that tore the members: start anew (DESIGN D10).
                return self._cas(k.abandon(), "Abandon")
            self._budget_from = counted
            self._failures, self._warnings = [], []
        if tr is None:
            self._budget_from = 0
            self._candidates += 1
            self._candidate = f"v{k.version + 1}-{self.leader}-{self._candidates}"
        else:
            self._candidate = tr.candidate
        if counted - self._budget_from >= self.attempts_max:
            return self._stop()
        if self._seats.missing:
            return self._wait("owners", self._why_waiting())
        chosen = self._choose_kind(counted)
        if chosen is None and self.fleet.forgive():
            chosen = self._choose_kind(counted)  # better the same engines once more, within attempts_max, than none
        if chosen is None:
            # Too few engines: restore some first, if there are any to restore, or wait for one to come.
            return (self._take_in() if tr is None else []) or self._wait("members", self._why_waiting())
        base, engines = chosen
        operations = self.fleet.common_operations(engines)
        transition = OpenTransition(
            target=k.version + 1,
            candidate=self._candidate,
            attempts=counted + 1,
            kind=base.kind,
            owners=self._seats.refs,
            wire_version=self.fleet.wire_version,
            operations=operations,
            content_digest="" if tr is None else tr.content_digest or self._content_found,
        )
        refs = tuple(e.member for e in engines)
        evicted = [m for m in k.members if m not in refs]
        record = k.open_attempt(transition, refs)
        operation = operations[0] if base.kind is Kind.RELATIVE else "set"
        self._session = self._new_session(record, base, engines, operation)
        steps = [Step(self.leader, "Evict", record.epoch, f"{m.engine} ({m.incarnation})") for m in evicted]
        return [*steps, *self._cas(record, "OpenAttempt")]

    def _new_session(self, record: CommitRecord, base: Base, engines: list[Engine], operation: str = "set") -> Session:
        tr = record.open
        return Session(
            epoch=record.epoch,
            base=base,
            target=record.version if tr is None else tr.target,
            attempt=0 if tr is None else tr.attempts,
            members={e.member for e in engines},
            owners=self._seats.refs,
            operation=operation,
            set_only=tuple(sorted({name for e in engines for name in e.join.set_only})),
            pushes=self._seats.pushes,
        )

    def _choose_kind(self, attempts: int) -> tuple[Base, list[Engine]] | None:
        """The cheapest kind that enough engines admit (DESIGN D4); None if there are not enough engines."""
        kinds = [Kind.RELATIVE] if attempts == 0 else [Kind.ABSOLUTE, Kind.DENSE]
        if not self._baseline_held or self._dense_only:
            kinds = [Kind.DENSE]
        for kind in kinds:
            base = self._base(kind)
            engines = self.fleet.admitting(self._k, base)
            if len(engines) >= self.members_min:
                return base, engines
        return None

    @property
    def _content_found(self) -> str:
        """The candidate's content digest, if the last attempt has found it."""
        s = self._session
        return "" if s is None or s.restore else s.content_digest

    def _candidate_lost(self, tr: OpenTransition) -> bool:
        """True if an owner restarted since: its weights may be others, and the candidate died with it (D17)."""
        return any(o not in self._seats.refs for o in tr.owners)

    def _stop(self) -> list[Effect]:
        return self._cas(self._k.stop(self._content_found), "Stop")

    def _complete(self, s: Session) -> list[Effect]:
        if not s.complete:
            return []
        wrong = sorted(m for m, root in s.roots.items() if root != s.root)
        if wrong:
            return self._out_of_session(wrong[0], "acknowledged other manifests than the owners sealed")
        if s.restore:
            for m in s.members:
                e = self.fleet.engines[m.engine]
                e.state, e.restore_failures = StorageState(s.target, s.base.baseline_id, ()), 0
            self._session = None
            return self._cas(self._k.admit(tuple(sorted(s.members))), "Admit")
        operation_id = self._next_operation()
        return self._cas(self._k.commit(s.content_digest, s.root, operation_id), "Commit", operation_id)

    # ------------------------------------------------------------ failures

    def _session_failed(self, reason: str, *, fatal: bool = False) -> list[Effect]:
        s = self._session
        assert s is not None
        if s.restore:
            told = self._tell_refused(filter(None, map(self.fleet.of, sorted(s.members))))
            self._session = None
            self.phase = Phase.IDLE
            # Owners that could not serve it, or a store that could not hold it, are left alone for a while.
            self._resting = True
            effects = [Step(self.leader, "EndRestore", s.epoch, reason), *told, *self._start_timer("restore_pause")]
            return effects + self._proceed()
        self._failures.append(f"{s.base.kind.value} attempt of epoch {s.epoch}: {reason}")
        self.phase = Phase.IDLE
        step = Step(self.leader, "AttemptFailed", s.epoch, reason)
        return [step, *(self._stop() if fatal else self._proceed())]

    # ------------------------------------------------------------ after the commit

    def _committed(self) -> list[Effect]:
        s = self._session
        assert s is not None
        for e in filter(None, map(self.fleet.of, s.members)):
            e.state = StorageState(self._k.version, self._k.baseline_id, ())
        fold = Fold(self.record_id, s.epoch)
        effects = self._publish() + self._start_timer("fold")
        return effects + [SendOwner(o.owner, fold) for o in s.owners]

    def _folded(self, seat: Seat, report: Folded) -> list[Effect]:
        s = self._session
        if s is None or self.phase is not Phase.FOLDING or report.epoch != s.epoch:
            return []
        seat.baseline_digest = report.baseline_digest
        s.took(report.seconds)
        return self._fold_ended(report.owner, report.reason)

    def _fold_ended(self, owner: str, reason: str) -> list[Effect]:
        s = self._session
        assert s is not None
        if owner in s.folded:
            return []
        s.folded.add(owner)
        if reason:
            self._warnings.append(f"{owner} lost its baseline, so the next push sends every element: {reason}")
        if s.folded != self._seats.names:
            return []
        self.phase = Phase.IDLE
        return [Step(self.leader, "FinishTransition", s.epoch), *self._push_over("")]

    def _push_over(self, error: str) -> list[Effect]:
        """Tell every owner that took part how the push ended, and go on to what waited meanwhile."""
        s = self._session
        epoch = self._k.epoch if s is None else s.epoch
        summary = {} if s is None or error else s.summary(self._budget_from or 0)
        summary |= {"failures": self._failures[-MESSAGES_MAX:], "warnings": self._warnings[-MESSAGES_MAX:]}
        self._outcome = Outcome(self.record_id, epoch, self._k.version, self._candidate, cut(error), summary)
        # An owner that restarted, or gave its push up and pushed again, waits with other weights: this is not its push.
        took_part = {} if s is None or error else {o.owner: (o.incarnation, s.pushes[o.owner]) for o in s.owners}
        effects: list[Effect] = []
        for name, seat in self._seats:
            pushed = (seat.incarnation, seat.ready)
            if seat.ready and took_part.get(name, pushed) == pushed:
                seat.done, seat.ready = seat.ready, 0
                effects.append(self._tell(name, self._outcome))
        for e in self.fleet.engines.values():
            e.attempt_failures = 0
        self._session = None
        self._resting = False
        self._budget_from = None
        self._dense_only = False
        return effects + self._proceed()

    def _tell(self, owner: str, outcome: Outcome) -> SendOwner:
        seat = self._seats[owner]
        return SendOwner(owner, msgspec.structs.replace(outcome, incarnation=seat.incarnation, push=seat.done))

    # ------------------------------------------------------------ restores

    def _open_restore(self, joining: list[Engine]) -> list[Effect]:
        record = self._k.open_restore()
        self._session = self._new_session(record, self._base(Kind.RESTORE), joining)
        return self._cas(record, "OpenRestore")

    # ------------------------------------------------------------ the operator

    def abandon(self) -> list[Effect]:
        """Abandon a stopped transition as soon as nothing is under way; torn members are then restored (D17)."""
        self._abandoning = True
        return self._proceed()

    def dense_next(self) -> None:
        """The operator orders the attempts of the next push to be dense (DESIGN D14)."""
        self._dense_only = True
