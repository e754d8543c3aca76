"""What a leader knows: who owns, who serves, what each one said last, and what a session has come to."""

from collections.abc import Iterable

from dcr.protocol.coordinator_effects import Effect, ReadRecord, SendMember, SendOwner
from dcr.protocol.fleet import Engine, Fleet
from dcr.protocol.leader import Leader, Phase
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
    OpenApply,
    OwnerJoin,
    OwnerReport,
    Prepared,
    Refuse,
    Sealed,
    Serving,
    Staged,
    Withdraw,
)
from dcr.protocol.receiver import admits
from dcr.protocol.record import Direction, Member, OwnerRef
from dcr.protocol.seats import Seat, Seats
from dcr.protocol.session import Session
from dcr.protocol.step import Step

_DIGITS = 8
"""Of a content digest, for people."""


class Registrar(Leader):
    """Writes down every report.  A report changes what is known and nothing else: it starts no action.

    What cannot be completed any more is marked as broken, with the reason.  A question that was lost with a connection
    is answered again.

    Args:
        record_id: the record to lead.
        leader: this leader's name, new with every start.
        owners: names of all owners.
        wire_version: version of the payload format.
        operations: relative operations that the owners can emit, the preferred one first.
        restores_max: failed restores of one incarnation before it is refused.

    Attributes:
        seats: the owners.
        fleet: the engines.
        session: the attempt or restore that was opened last, under way or over; None before the first.
    """

    def __init__(
        self,
        record_id: str,
        leader: str,
        owners: Iterable[str],
        *,
        wire_version: int,
        operations: tuple[str, ...],
        restores_max: int,
    ) -> None:
        super().__init__(record_id, leader)
        self.restores_max = restores_max
        self.seats = Seats(owners)
        self.fleet = Fleet(wire_version, operations)
        self.session: Session | None = None
        self._opening: Session | None = None  # the compare-and-set that opens it is on its way
        self._published = False  # the last commit, by this leader
        self._folds: dict[OwnerRef, str] = {}  # of the last commit: who answered, and why a baseline was lost
        self._overdue: set[OwnerRef] = set()  # whose fold is not waited for any more, though it may still come

    # ------------------------------------------------------------ reports of owners

    def owner_report(self, report: OwnerReport) -> list[Effect]:
        """Take an owner's report; reports of older incarnations are ignored."""
        if report.owner not in self.seats or self.phase is Phase.FATAL:
            return []
        seat = self.seats[report.owner]
        if isinstance(report, OwnerJoin):
            return self._owner_joined(seat, report)
        if report.incarnation != seat.incarnation:
            return []
        match report:
            case CandidateReady():
                return self._offered(seat, report)
            case Withdraw():
                if seat.ready == report.push:
                    self._withdrawn(seat, report.owner, report.push)
            case Sealed():
                self._sealed(report)
            case EmitFailed():
                s = self._session_of(report.epoch)
                if s is not None and OwnerRef(report.owner, report.incarnation) in s.owners:
                    s.reported = True
                    s.break_off(report.reason, fatal=report.fatal)
                    if report.given_up:
                        self._withdrawn(seat, report.owner, report.given_up)
            case Folded():
                self._folded(seat, report)
        return []

    def owner_lost(self, owner: str, incarnation: int) -> list[Effect]:
        """An owner's connection ended."""
        if owner not in self.seats:
            return []  # of an older trainer with more ranks
        seat = self.seats[owner]
        if seat.incarnation != incarnation or not seat.connected:
            return []
        seat.connected = False
        self._break_off(f"owner {owner} was lost")
        return []

    def _owner_joined(self, seat: Seat, report: OwnerJoin) -> list[Effect]:
        if report.control_version != CONTROL_VERSION:
            return self._fatal(
                f"{report.owner} speaks control version {report.control_version}, this coordinator {CONTROL_VERSION}: "
                "run the same version of dcr on every training rank"
            )
        if seat.take(report):
            self._break_off(f"owner {report.owner} restarted")
        if self.phase is Phase.STARTING:
            return [] if self.seats.missing else [ReadRecord()]
        c = self._k.committed if self.record is not None else None
        waited_for = self.phase is Phase.FOLDING and self._published and c is not None and report.owner in self._owing
        if c is not None and (waited_for or OwnerRef(report.owner, report.incarnation) in self._overdue):
            return [SendOwner(report.owner, Fold(self.record_id, c.epoch))]
        return []

    def _offered(self, seat: Seat, report: CandidateReady) -> list[Effect]:
        if seat.ready not in (0, report.push):
            self._withdrawn(seat, report.owner, seat.ready)
        seat.ready, seat.refused, seat.dense = report.push, report.refused, report.dense
        return []

    def _withdrawn(self, seat: Seat, owner: str, push: int) -> None:
        """A push was given up on a rank: the weights there may be others by now (DESIGN D10)."""
        if seat.ready == push:
            seat.ready = 0
        s = self._current
        if s is not None and not s.restore:
            s.break_off(f"{owner} gave push {push} up")
        self._candidate_gone()

    def _candidate_gone(self) -> None:
        """The weights that an owner had pinned for the open transition are no more; for the coordinator to act on."""

    def _sealed(self, report: Sealed) -> None:
        s = self._session_of(report.epoch)
        if s is None or report.owner in s.sealed or OwnerRef(report.owner, report.incarnation) not in s.owners:
            return
        s.sealed[report.owner] = report
        s.took(report.seconds)
        if s.unsealed or s.restore:
            return
        if not self._content_as_named(s):
            what = "the roll-back carries" if s.back else "candidate changed: this attempt found"
            s.break_off(f"{what} other content than the record names", fatal=True)
        self._compare_roots(s)

    def _folded(self, seat: Seat, report: Folded) -> None:
        c = self._k.committed if self.record is not None else None
        ref = OwnerRef(report.owner, report.incarnation)
        if c is None or report.epoch != c.epoch or ref not in c.owners:
            return
        seat.baseline_digest = report.baseline_digest
        self._folds.setdefault(ref, report.reason)
        self._overdue.discard(ref)
        if self.session is not None and self.session.epoch == c.epoch:
            self.session.took(report.seconds)

    # ------------------------------------------------------------ reports of members

    def member_report(self, report: MemberReport) -> list[Effect]:
        """Take a member's report; reports of older incarnations are ignored."""
        if self.phase is Phase.FATAL:
            return []
        if isinstance(report, Join):
            return self._joined(report)
        m = Member(report.engine, report.incarnation)
        engine = self.fleet.of(m)
        if engine is None:
            return []
        engine.silent = False
        match report:
            case Prepared():
                return self._prepared(engine, report)
            case Staged():
                return self._staged(m, report)
            case Acknowledged():
                self._acknowledged(engine, report)
                return []
            case AttemptFailed():
                return self._member_failed(engine, report)
            case Serving():
                k = self.record
                if k is not None and k.open is None and (report.epoch, report.version) == (k.epoch, k.version):
                    engine.restored(k)  # it may have finished a restore that was given up
                return [Step(self.leader, "MemberServes", report.epoch, f"{report.engine} at {report.version}")]

    def member_lost(self, engine: str, incarnation: int) -> list[Effect]:
        """An engine's connection ended."""
        e = self.fleet.of(Member(engine, incarnation))
        if e is None or not e.connected:
            return []
        self.fleet.lost(e)
        return self._cannot_go_on(e.member, "was lost")

    def _joined(self, report: Join) -> list[Effect]:
        old = self.fleet.engines.get(report.engine)
        e = self.fleet.join(report)
        if self.record is not None and e.clean_at(self.record):
            e.restored(self.record)
        effects: list[Effect] = []
        if old is not None and old.join.incarnation != report.incarnation:
            effects = self._cannot_go_on(old.member, "restarted")
        s = self._current
        self.fleet.forget([*(() if self.record is None else self.record.members), *(() if s is None else s.members)])
        return [*effects, *self._tell_refused([e])]

    def _prepared(self, engine: Engine, report: Prepared) -> list[Effect]:
        engine.state = report.state
        s = self._session_of(report.epoch)
        if s is None or engine.member not in s.members:
            return []
        if not admits(engine.seen(self._k), s.base):
            reason = f"cannot take a {s.base.kind.value} attempt: it holds {report.state}"
            return self._cannot_go_on(engine.member, reason)
        s.prepared.add(engine.member)
        return [] if s.stage else self._order_again(s, report.engine)

    def _staged(self, m: Member, report: Staged) -> list[Effect]:
        s = self._session_of(report.epoch)
        if s is None or m not in s.members:
            return []
        s.staged.add(m)
        return self._order_again(s, report.engine)

    def _order_again(self, s: Session, engine: str) -> list[Effect]:
        """Whoever was not ready when a restore was let go refused the order then."""
        return [SendMember(engine, OpenApply(self.record_id, s.epoch))] if s.restore and s.applying else []

    def _acknowledged(self, engine: Engine, report: Acknowledged) -> None:
        s = self._session_of(report.epoch)
        if s is not None and not s.applying:
            return  # it was not ordered to write yet
        if engine.engaged == report.epoch:
            engine.engaged = 0
        engine.failure = ""
        if s is not None and engine.member in s.members:
            s.roots[engine.member] = report.manifest_root
            s.took(report.seconds)
            self._compare_roots(s)
        if self.record is not None and self.record.open is None and report.epoch == self.record.epoch:
            # What it took in was whole: a restore is held to the digest of the version, a commit to its root.
            engine.restored(self.record)

    def _compare_roots(self, s: Session) -> None:
        if s.restore or s.unsealed:
            return
        for m in sorted(m for m, root in s.roots.items() if root != s.root):
            s.break_off(f"{m.engine} acknowledged other manifests than the owners sealed")

    def _member_failed(self, engine: Engine, report: AttemptFailed) -> list[Effect]:
        engine.state = report.state
        engine.failed(f"epoch {report.epoch} failed there: {report.reason}")
        if engine.engaged == report.epoch:
            engine.engaged = 0
        s = self._session_of(report.epoch)
        if s is None:
            return []
        if not s.restore:
            engine.attempt_failures += 1
        s.reported = True
        return self._cannot_go_on(engine.member, report.reason)

    # ------------------------------------------------------------ the session

    @property
    def _current(self) -> Session | None:
        """The session that is being opened, or that is under way."""
        if self.phase is Phase.WRITING:
            return self._opening
        return self.session if self.phase in (Phase.ATTEMPT, Phase.RESTORING) else None

    def _session_of(self, epoch: int) -> Session | None:
        """The session under way, if it is of this epoch."""
        s = self._current
        return s if s is not None and s.epoch == epoch and self.phase is not Phase.WRITING else None

    def _break_off(self, reason: str) -> None:
        s = self._current
        if s is not None:
            s.break_off(reason)

    def _cannot_go_on(self, m: Member, reason: str) -> list[Effect]:
        """A member can no longer take part: an attempt is broken by it, a restore goes on without it."""
        s = self._current
        if s is None or m not in s.members:
            return []
        s.drop(m, reason)
        if not s.restore:
            return []
        self._restore_failed(m, reason)
        step = Step(self.leader, "RestoreFailed", s.epoch, f"{m.engine}: {reason}")
        return [step, *self._tell_refused(filter(None, [self.fleet.of(m)]))]

    def _restore_failed(self, m: Member, reason: str) -> None:
        e = self.fleet.of(m)
        if e is not None:
            e.restore_failed(reason, self.restores_max)

    def _tell_refused(self, engines: Iterable[Engine]) -> list[Effect]:
        effects: list[Effect] = []
        for e in engines:
            if e.refused:
                effects.append(Step(self.leader, "RefuseMember", self._epoch, f"{e.join.engine}: {e.refused}"))
                effects.append(SendMember(e.join.engine, Refuse(self.record_id, self._epoch, e.refused)))
        return effects

    # ------------------------------------------------------------ what follows from it

    @property
    def candidate_alive(self) -> bool:
        """True if the owners of the open transition are still the incarnations that pinned its candidate (D10, D17)."""
        tr = self._k.open
        return tr is not None and tr.owners == self.seats.refs

    @property
    def _baseline_held(self) -> bool:
        """True if the owners' baseline is the committed version, as far as they said.

        Not while an owner has still to fold, even if its share of the two versions is the same.
        """
        return self.seats.baseline_total == self._k.baseline_id and self._overdue.isdisjoint(self.seats.refs)

    @property
    def _why_no_baseline(self) -> str:
        """Why the owners' baseline is not the committed version, for people; empty if it is."""
        if self._baseline_held:
            return ""
        total, held = self.seats.baseline_total, self._k.baseline_id
        if lost := [name for name, seat in self.seats if not seat.baseline_digest]:
            return f"{', '.join(lost)} has lost its baseline"
        if total == held:
            return "an owner did not say in time that it folded the committed version"
        return (
            f"the weights that the trainer started with are not those of the committed version {self._k.version}: "
            f"their content digest is {total[:_DIGITS]}..., the record's is {held[:_DIGITS]}..."
        )

    @property
    def _owing(self) -> list[str]:
        """Owners that have the committed candidate and have not answered for their fold (DESIGN D13)."""
        c = self._k.committed
        if c is None or c.direction is Direction.BACK:
            return []
        return [o.owner for o in c.owners if o in self.seats.refs and o not in self._folds]

    def _content_as_named(self, s: Session) -> bool:
        """True if what an attempt's owners sealed is the content that K names, as far as K names any (DESIGN D10)."""
        tr = self._k.open
        if s.back:
            return s.content_digest == self._k.baseline_id
        return tr is not None and tr.content_digest in ("", s.content_digest)
