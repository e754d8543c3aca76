"""The coordinator: decides what a leader does next, and tells owners how their pushes ended (paper section 6.3)."""

from collections.abc import Iterable, Mapping

from dcr.protocol.announcer import Announcer
from dcr.protocol.backoff import Backoff
from dcr.protocol.coordinator_effects import Effect
from dcr.protocol.identity import Kind
from dcr.protocol.layer_changes import LayerChanges
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Join, MemberReport, OwnerReport, cut
from dcr.protocol.record import Direction, OpenTransition, OwnerRef
from dcr.protocol.session import Session, waits_for_operator, why_rolled_back, why_stopped
from dcr.protocol.step import Step
from dcr.protocol.timer import Timer

_TORN = "too few engines hold what changed elements alone would repair"
_NOT_TOLD = "an older attempt: the coordinator that led it is gone; its log has the reason"
_RESTORE_PAUSE, _ATTEMPT_PAUSE = _PAUSES = "restore_pause", "attempt_pause"


class Coordinator(Announcer):
    """The one leader of a record.

    The synchronous schedule of one transition::

        CandidateReady of every owner
        OpenAttempt   CAS: epoch + 1, the attempt is counted            -> Prepare to members, Emit to owners
        all Prepared                                                    -> OpenApply to members
        all Sealed, all Acknowledged with the root over the manifests
        Commit        CAS from the revision that OpenAttempt made       -> Published to members, Fold to owners
        all Folded                                                      -> Outcome to owners

    With an asynchronous gate OpenApply waits until all have Staged.  Whatever goes wrong before the commit fails the
    attempt; the next one is absolute, with whoever is left, after errors not at once (``Backoff``).  Between
    transitions engines that hold no version are restored and admitted.  After every report, answer and time-out the
    actions follow that are due.

    Args:
        record_id: the record to lead.
        leader: this coordinator's name, new with every start.
        owners: names of all owners.
        wire_version: version of the payload format.
        operations: relative operations this trainer can emit, the preferred one first.
        members_min: fewest members a commit needs.
        attempts_max: attempts of one push before the transition stops.
        restores_max: failed restores of one incarnation before it is refused.
        gate_mode: ``sync`` or ``async``.
        stop_waits: a push whose transition stopped waits for the operator's word; otherwise it ends with an error.
        rejoin_waits: a leader that took over waits a while for the engines that K names before it opens an attempt
            without them; they have to find it first.
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
        gate_mode: str = "sync",
        stop_waits: bool = False,
        rejoin_waits: bool = False,
    ) -> None:
        assert attempts_max >= 1
        super().__init__(
            record_id,
            leader,
            owners,
            wire_version=wire_version,
            operations=operations,
            members_min=members_min,
            restores_max=restores_max,
            gate_mode=gate_mode,
            attempts_max=attempts_max,
        )
        self.stop_waits = stop_waits
        self.rejoin_waits = rejoin_waits
        self._abandoning = ""  # why the open transition is to be abandoned; empty if it is not
        self._asked_in = 0  # the epoch in which the operator was last told that a transition waits
        self.resumed = False  # the operator's word that a stopped transition goes on
        self._cut_off = ""  # why the push that waits ends when K says that its transition is abandoned
        self._turning_back = False
        self._stopping = False  # an attempt failed for good
        self._given_back = ""  # why the rollback ends when K says that its transition is abandoned
        self._turned_back: dict[str, tuple[int, int]] | None = None  # who waited when the rollback was ordered, if here
        self._backoff = Backoff()
        self._dense_only = False
        self._staging = 0  # the epoch whose members were given their time to stage
        self._timer = Timer()

    # ------------------------------------------------------------ reports

    def owner_report(self, report: OwnerReport) -> list[Effect]:
        """Take an owner's report, and do what is due; reports of older incarnations are ignored."""
        return [*super().owner_report(report), *self._proceed()]

    def owner_lost(self, owner: str, incarnation: int) -> list[Effect]:
        """An owner's connection ended."""
        return [*super().owner_lost(owner, incarnation), *self._proceed()]

    def member_report(self, report: MemberReport) -> list[Effect]:
        """Take a member's report, and do what is due; reports of older incarnations are ignored."""
        if isinstance(report, Join):
            self.awaited -= {report.engine}
        return [*super().member_report(report), *self._proceed()]

    def member_lost(self, engine: str, incarnation: int) -> list[Effect]:
        """An engine's connection ended."""
        return [*super().member_lost(engine, incarnation), *self._proceed()]

    def _candidate_gone(self) -> None:
        self._abandoning = "its push was given up on a rank"

    # ------------------------------------------------------------ the operator

    def abandon(self) -> list[Effect]:
        """Abandon a stopped transition as soon as nothing is under way; torn members are then restored (D17)."""
        self._abandoning = "on the operator's order"
        return self._proceed()

    def resume(self) -> list[Effect]:
        """Go on with a stopped transition whose push waits for that, with ``attempts_max`` more attempts (D14)."""
        self.resumed = True
        return self._proceed()

    @property
    def held(self) -> set[str]:
        """Owners whose push waits in a stopped transition for the operator's word (DESIGN D14)."""
        tr = None if self.record is None else self.record.open
        stopped = self.stop_waits and tr is not None and tr.stopped
        return self.seats.waiting(tr.owners, tr.pushes) if stopped and tr is not None else set()

    def roll_back(self) -> list[Effect]:
        """Turn the open transition back to the committed version; the attempt under way fails (DESIGN D17).

        Torn members get the baseline's bits in place.  Where that cannot be done the transition is abandoned, which
        restores them.  Either way the push that waits ends with an error that says so.
        """
        self._turning_back = True
        self._turned_back = self.seats.took_part(self.seats.names)
        return self._proceed()

    def dense_next(self) -> None:
        """The operator orders the attempts of the next push to be dense (DESIGN D14)."""
        self._dense_only = True

    # ------------------------------------------------------------ the record

    def _after(self, reason: str) -> list[Effect]:
        effects = super()._after(reason)
        if reason in ("CreateRecord", "TakeOver"):
            self._budget.take_over(self._k.open)
            self._timer.stop()  # what is waited for from here on gets its full time
            named = {m.engine for m in self._k.members if self.rejoin_waits}
            self.awaited = frozenset(named - {name for name, e in self.fleet.engines.items() if e.connected})
        if reason == "Stop":
            # Whoever goes on with it, or pushes next, has attempts_max more, and the first one at once.
            self.resumed, self._backoff = False, Backoff()
            self._budget.stop()
            effects += [] if self.held else self._push_over(why_stopped(self._failures))
        elif reason == "Commit" and self._s.back:
            how = "every member serves that version again"
            effects += self._push_over(why_rolled_back(self._k.version, how), self._turned_back)
        elif reason == "Abandon" and self._given_back:
            why, self._given_back = self._given_back, ""
            how = f"abandoned, because {why}; engines that it tore are restored"
            effects += self._push_over(why_rolled_back(self._k.version, how), self._turned_back)
        elif reason == "Abandon" and self._cut_off:
            why, self._cut_off = self._cut_off, ""
            effects += self._push_over(
                f"the transition to version {self._k.version + 1}, which had stopped, was abandoned: {why}; engines "
                "that it tore are restored. The weights that were pushed are not committed"
            )
        return effects + self._proceed()

    def _orders(self) -> list[Effect]:
        s = self._s
        if s.hopeless or not s.members:
            return []  # somebody went while K was being written: it fails before anything is sent
        return [self._timer.start("restore" if s.restore else "prepare"), *super()._orders()]

    # ------------------------------------------------------------ time

    @property
    def pausing(self) -> str:
        """The failure that the next attempt is put off for; empty if it is not."""
        return self._failures[-1] if self._timer.runs(_ATTEMPT_PAUSE) else ""

    def expired(self, number: int) -> list[Effect]:
        """The timer that was started under this number ran out."""
        paused, rejoining = self._timer.runs(*_PAUSES), self._timer.runs("rejoin")
        if not self._timer.ended(number) or self.phase is Phase.FATAL:
            return []
        effects: list[Effect] = []
        match self.phase:
            case Phase.STARTING if self.seats.missing:
                effects = self._push_over(f"time-out: {self._why_waiting()}")
            case Phase.ATTEMPT:
                effects = self._fail(self._why_late(self._s))
            case Phase.RESTORING:
                effects = self._end_restore(self._why_late(self._s))
            case Phase.FOLDING:
                self._overdue = {OwnerRef(o, self.seats[o].incarnation) for o in self._owing}
                self._folds |= dict.fromkeys(self._overdue, "time-out: no answer to the order to fold")
            case Phase.IDLE if rejoining:
                self.awaited = frozenset()
            case Phase.IDLE if not paused:
                effects = self._waited()
        return effects + self._proceed()

    def _waited(self) -> list[Effect]:
        """Whoever was waited for did not come."""
        tr = self._k.open
        if tr is not None and (self._turning_back or tr.direction is Direction.BACK):
            self._given_back = self._abandoning = self._why_waiting()
        elif self.held:
            if self.resumed:  # in vain: it stays stopped
                self._failures.append(f"time-out: {self._why_waiting()}")
                self.resumed = False
        elif self.seats.ready:
            self._failures.append(f"time-out: {self._why_waiting()}")
            if tr is None or tr.stopped:
                return self._push_over(self._failures[-1])
            return self.stop()
        elif tr is not None and not tr.stopped:
            self._abandoning = "nobody waits for its push any more"  # it is an older leader's
        elif self.seats.late:
            return self._push_over(f"time-out: {', '.join(self.seats.late)} did not call push(); every rank has to")
        return []

    def _why_late(self, s: Session) -> str:
        """Why a time-out ran out; members that let it pass, with nobody else to blame, count as silent."""
        waiting, reason = s.late
        for m in waiting:
            e = self.fleet.of(m)
            if s.restore:
                self._restore_failed(m, f"time-out: {reason}")
            elif e is not None:
                e.fell_silent(f"time-out: {reason}")
        return f"time-out: {reason}"

    def _wait(self, name: str, why: str) -> list[Effect]:
        """Wait idly for somebody to come; whoever comes does not prolong the wait for the others.

        Args:
            name: of the time-out.
            why: what is waited for; empty for a wait so common that nobody wants to hear of it.
        """
        if self._timer.runs(name, _RESTORE_PAUSE):
            return []
        step = Step(self.leader, "Wait", self._epoch, why)
        return [*([step] if why else []), self._timer.start(name)]

    def _wait_for_peers(self) -> list[Effect]:
        """Wait for owners without a connection, and for engines that the last leader had."""
        return self._wait("owners" if self.seats.missing else "rejoin", self._why_waiting())

    def _pause(self) -> list[Effect] | None:
        """Wait before the next attempt, each time longer; None if it is due."""
        if self.pausing:
            return []
        if not (times := self._backoff.take()):
            return None
        step = Step(self.leader, "Wait", self._epoch, f"before the next attempt, for {self._failures[-1]}")
        return [step, self._timer.start(_ATTEMPT_PAUSE, times)]

    # ------------------------------------------------------------ what to do next

    def _proceed(self) -> list[Effect]:
        """Do whatever is due, until nothing is."""
        tr, effects = None if self.record is None else self.record.open, list[Effect]()
        if tr is not None and tr.direction is Direction.FORWARD and self.seats.took_back(tr.owners, tr.pushes):
            self._turning_back, self._turned_back = True, self.seats.took_part(self.seats.names)
        while more := self._next():
            effects += more
        return effects

    def _next(self) -> list[Effect]:
        """The next action that is due; nothing if none is."""
        match self.phase:
            case Phase.STARTING:
                return self._wait("owners", "") if self.seats.missing else []
            case Phase.ATTEMPT:
                return self._next_of_attempt(self._s)
            case Phase.RESTORING:
                return self._next_of_restore(self._s)
            case Phase.FOLDING:
                if not self._published:
                    return [*self.publish(), *([self._timer.start("fold")] if self._owing else [])]
                return [] if self._owing else self._finish()
            case Phase.IDLE:
                return self._next_of_idle()
            case _:
                return []

    def _next_of_attempt(self, s: Session) -> list[Effect]:
        if s.broken:
            return self._fail(s.broken)
        if self._turning_back and not s.back:
            return self._fail("the operator ordered a roll-back")
        if s.complete:
            return self.commit()
        if s.stage and self._staging != s.epoch and s.prepared >= s.members:
            self._staging = s.epoch
            return [self._timer.start("ack")]
        if s.ready and not s.applying:
            return [*self.order_open_apply(), self._timer.start("ack")]
        return []

    def _next_of_restore(self, s: Session) -> list[Effect]:
        if s.hopeless:
            return self._end_restore(s.broken)
        if not s.members:
            return self._end_restore("no engine is left in the restore")
        if s.acknowledged:
            return self.end_restore()
        # Whoever is not ready yet gets the order again when it is: an engine that never answers holds up no other.
        some = (s.staged if s.stage else s.prepared) & s.members
        return self.order_open_apply() if some and not s.applying else []

    def _next_of_idle(self) -> list[Effect]:
        tr = self._k.open
        abandoning, self._abandoning = self._abandoning, ""
        turning_back, self._turning_back = self._turning_back, False
        stopping, self._stopping = self._stopping, False
        if tr is None and self.unaware:
            return self._tell_late()
        if tr is None and self.seats.ready:
            return self._open_attempt_or_wait(None)
        if tr is None:
            return self._take_in() or self._wait_for_ranks()
        back = turning_back or tr.direction is Direction.BACK
        if abandoning or not self.candidate_alive:
            self._given_back = (self._given_back or "its candidate is gone") if back else ""
            self._cut_off = (abandoning or "its candidate is gone") if self.held and not back else ""
            return self._abandon()
        if back:
            return self._go_back(tr, stopping=stopping)
        if stopping:
            return self.stop()
        if self.held and not self.resumed:
            return self._wait_for_operator()
        if tr.stopped and not self.held and (waiting := self.seats.waiting(tr.owners, tr.pushes)):
            return self._push_over(why_stopped([_NOT_TOLD]), self.seats.took_part(waiting))
        if self.seats.ready:
            return self._open_attempt_or_wait(tr)
        if not tr.stopped:
            # An older leader's: it goes on if the ranks that offered its candidate still wait for it (DESIGN D16).
            return self._wait("owners", "the owners of the open transition have not offered its candidate again")
        return self._wait_for_ranks()

    def _wait_for_operator(self) -> list[Effect]:
        """Say so once; ``push_timeout_s`` of the owners bounds it."""
        if self._asked_in == self._epoch:
            return []
        self._asked_in = self._epoch
        return [Step(self.leader, "Wait", self._epoch, cut(waits_for_operator(self._failures or [_NOT_TOLD])))]

    def _wait_for_ranks(self) -> list[Effect]:
        return self._wait("ranks", "") if self.seats.late else []

    def _take_in(self) -> list[Effect]:
        """Admit engines that hold the committed version; restore those that do not (DESIGN D15)."""
        leave_out = self.fleet.at_fault
        there = self.fleet.present(leave_out)
        if any(e.holds_committed(self._k) and e.member not in self._k.members for e in there):
            return self.admit(leave_out=leave_out)
        joining = not all(e.holds_committed(self._k) for e in there)
        if joining and self._baseline_held and not self.seats.missing and not self._timer.runs(_RESTORE_PAUSE):
            return self.open_restore(leave_out=leave_out)
        return []

    # ------------------------------------------------------------ attempts

    def _open_attempt_or_wait(self, tr: OpenTransition | None) -> list[Effect]:
        if self.seats.refused:
            self._failures, self._warnings = [], []
            return self._push_over(
                f"{self.seats.refused}; nothing was opened or sent, and engines go on serving: push again with other "
                "weights"
            )
        counted = 0 if tr is None else tr.attempts
        if not self._budget.began:
            if tr is not None and not self._goes_on(tr):
                return self._abandon()
            if self._budget.begin(counted, held=bool(self.held)):
                self._failures, self._warnings = [_NOT_TOLD] if self._budget.taken(counted) else [], []
        if tr is None:
            self._budget.begin_transition()
        if self._budget.spent(counted):
            return self.stop()
        if (pause := self._pause()) is not None:
            return pause
        if self.seats.missing or self.awaited:
            return self._wait_for_peers()
        kind = self._choose_kind(counted)
        if kind is None and self.fleet.forgive():
            kind = self._choose_kind(counted)  # better the same engines once more, within attempts_max, than none
        if kind is None:
            # Too few engines: restore some first, if there are any to restore, or wait for one to come.
            return (self._take_in() if tr is None else []) or self._wait("members", self._why_waiting())
        self._sent_dense = (self._why_dense or _TORN) if kind is Kind.DENSE else ""
        return self.open_attempt(kind, leave_out=self.fleet.at_fault)

    def _goes_on(self, tr: OpenTransition) -> bool:
        """Whether those who wait offer the candidate of the open transition, as far as anything can tell (D10, D16).

        They do if they wait with the very pushes that it was opened with.  Others may bring the same weights after a
        stop, if an attempt has found their content, which the next one is then held to.
        """
        same = self.seats.waiting(tr.owners, tr.pushes) == self.seats.names
        return same or (tr.stopped and tr.content_digest != "")

    @property
    def next_dense(self) -> str:
        """Why the next push sends every element; empty if it does not, or as long as that is not known."""
        known = self.phase is Phase.IDLE and not self.seats.missing
        return self._why_dense if known else ""

    @property
    def _why_dense(self) -> str:
        """Why attempts have to be dense, whatever engines hold; empty if they have not (DESIGN D4)."""
        return self._why_no_baseline or ("the operator ordered it" if self._dense_only or self.seats.dense else "")

    def _choose_kind(self, attempts: int) -> Kind | None:
        """The cheapest kind that enough engines admit (DESIGN D4); None if there are not enough engines."""
        kinds = [Kind.RELATIVE] if attempts == 0 else [Kind.ABSOLUTE, Kind.DENSE]
        if self._why_dense:
            kinds = [Kind.DENSE]
        for kind in kinds:
            if self._enough(kind):
                return kind
        return None

    def _enough(self, kind: Kind) -> bool:
        """True if enough engines that are not at fault admit the next attempt, if it is of this kind."""
        tr = self._k.open
        base = self._base(kind, "" if tr is None else tr.candidate)
        return len(self.fleet.admitting(self._k, base, self.fleet.at_fault)) >= self.members_min

    def _go_back(self, tr: OpenTransition, *, stopping: bool) -> list[Effect]:
        """The next attempt of a rollback; it ends in a commit or, where that is out of reach, in an abandon."""
        turning = tr.direction is Direction.FORWARD
        if turning:
            self._budget.turn(tr.attempts)
        elif not self._budget.began and self._budget.begin(tr.attempts, held=False):
            self._failures = [_NOT_TOLD]
        why = ""
        if stopping or self._budget.spent(tr.attempts):
            why = self._failures[-1]
        elif not self._baseline_held:
            why = f"the baseline of version {self._k.version} is not held"
        elif self.seats.missing or self.awaited:
            self._turning_back = turning
            return self._wait_for_peers()
        elif len(self.fleet.present()) < self.members_min:
            self._turning_back = turning
            return self._wait("members", self._why_waiting())
        elif not self._enough(Kind.ABSOLUTE) and not (self.fleet.forgive() and self._enough(Kind.ABSOLUTE)):
            why = self._why_waiting()
        if why:
            self._given_back = why
            return self._abandon()
        if turning:
            return self._roll_back(self.fleet.at_fault)
        if (pause := self._pause()) is not None:
            return pause
        return self.open_attempt(Kind.ABSOLUTE, leave_out=self.fleet.at_fault)

    def _fail(self, reason: str) -> list[Effect]:
        s = self._s
        kind = "roll-back" if s.back else s.base.kind.value
        self._failures.append(f"{kind} attempt of epoch {s.epoch}: {s.broken or reason}")
        self._stopping = s.fatal
        self._backoff.failed(reported=s.reported)
        return self.fail_attempt(reason)

    def _end_restore(self, reason: str) -> list[Effect]:
        s = self._s
        told = self._tell_refused(filter(None, map(self.fleet.of, sorted(s.members))))
        # Owners that could not serve it, or a store that could not hold it, are left alone for a while.
        return [*self.end_restore(reason), *told, self._timer.start(_RESTORE_PAUSE)]

    def _push_over(
        self,
        error: str,
        took_part: Mapping[str, tuple[int, int]] | None = None,
        summary: Mapping[str, float | int | str | list[str]] | None = None,
        layers: tuple[LayerChanges, ...] = (),
    ) -> list[Effect]:
        self._dense_only = False
        self._backoff = Backoff()
        if self._timer.runs(*_PAUSES):
            self._timer.stop()
        return super()._push_over(error, took_part, summary, layers)
