"""Conducting a session: one attempt or one restore, from its first order to its last acknowledgement."""

from abc import abstractmethod
from collections.abc import Iterable

from dcr.protocol.coordinator_effects import Effect, SendMember, SendOwner
from dcr.protocol.fleet import Engine, Fleet
from dcr.protocol.leader import Leader, Phase
from dcr.protocol.messages import (
    Acknowledged,
    AttemptFailed,
    Emit,
    EmitFailed,
    OpenApply,
    Prepare,
    Prepared,
    Published,
    Refuse,
    Sealed,
)
from dcr.protocol.receiver import admits
from dcr.protocol.record import Member
from dcr.protocol.seats import Seats
from dcr.protocol.session import Session
from dcr.protocol.step import Step


class Conductor(Leader):
    """What attempts and restores have in common.  When to start one, and what its end means, is the coordinator's.

    Args:
        record_id: the record to lead.
        leader: this leader's name, new with every start.
        seats: the owners.
        fleet: the engines.
        restores_max: failed restores of one incarnation before it is refused.
    """

    def __init__(self, record_id: str, leader: str, seats: Seats, fleet: Fleet, restores_max: int) -> None:
        super().__init__(record_id, leader)
        self.fleet = fleet
        self.restores_max = restores_max
        self._seats = seats
        self._session: Session | None = None

    # ------------------------------------------------------------ for the coordinator

    @abstractmethod
    def _complete(self, s: Session) -> list[Effect]:
        """Somebody sealed or acknowledged: go on if that was the last."""

    @abstractmethod
    def _session_failed(self, reason: str, *, fatal: bool = False) -> list[Effect]:
        """The session cannot be completed."""

    # ------------------------------------------------------------ orders

    def _start_session(self) -> list[Effect]:
        s = self._session
        assert s is not None
        gone = sorted(m.engine for m in s.members if (e := self.fleet.of(m)) is None or not e.connected)
        if gone or s.owners != self._seats.refs or self._seats.missing:
            # They went while K was being written.
            return self._session_failed(f"{', '.join(gone) or 'an owner'} was lost")
        prepare = Prepare(self.record_id, s.epoch, s.target, s.base, s.owners)
        emit = Emit(self.record_id, s.epoch, s.target, s.base, s.operation, s.set_only)
        effects = self._start_timer("restore" if s.restore else "prepare")
        effects += [SendMember(m.engine, prepare) for m in sorted(s.members)]
        return effects + [SendOwner(o.owner, emit) for o in s.owners]

    def _open_apply(self, s: Session) -> list[Effect]:
        if s.applying or s.prepared != s.members:
            return []
        s.applying = True
        effects: list[Effect] = [Step(self.leader, "OrderOpenApply", s.epoch)]
        if not s.restore:
            effects += self._start_timer("ack")
        order = OpenApply(self.record_id, s.epoch)
        return effects + [SendMember(m.engine, order) for m in sorted(s.members)]

    def _publish(self) -> list[Effect]:
        """Publish: K has changed; whoever needs to know reads it."""
        order = Published(self.record_id, self._epoch)
        return [SendMember(name, order) for name, e in sorted(self.fleet.engines.items()) if e.connected]

    def _tell_refused(self, engines: Iterable[Engine]) -> list[Effect]:
        effects: list[Effect] = []
        for e in engines:
            if e.refused:
                effects.append(Step(self.leader, "RefuseMember", self._epoch, f"{e.join.engine}: {e.refused}"))
                effects.append(SendMember(e.join.engine, Refuse(self.record_id, self._epoch, e.refused)))
        return effects

    # ------------------------------------------------------------ reports

    def _in_session(self, epoch: int) -> Session | None:
        s = self._session
        if s is None or s.epoch != epoch or self.phase not in (Phase.ATTEMPT, Phase.RESTORING):
            return None
        return s

    def _prepared(self, engine: Engine, report: Prepared) -> list[Effect]:
        engine.state = report.state
        s = self._in_session(report.epoch)
        m = Member(report.engine, report.incarnation)
        if s is None or m not in s.members:
            return []
        if not admits(engine.seen(self._k), s.base):
            return self._out_of_session(m, f"cannot take a {s.base.kind.value} attempt: it holds {report.state}")
        if s.restore and engine.holds_committed(self._k):
            s.drop(m)  # it learned meanwhile that it needs none
            step = Step(self.leader, "SkipRestore", s.epoch, m.engine)
            return [step, *self._go_on(s)]
        s.prepared.add(m)
        return self._open_apply(s)

    def _sealed(self, report: Sealed) -> list[Effect]:
        s = self._in_session(report.epoch)
        if s is None or report.owner in s.sealed:
            return []
        s.sealed[report.owner] = report
        s.took(report.seconds)
        tr = self._k.open
        if tr is not None and tr.content_digest and s.content_digest not in ("", tr.content_digest):
            reason = "candidate changed: this attempt found other content than the one before"
            return self._session_failed(reason, fatal=True)
        return self._complete(s)

    def _acknowledged(self, report: Acknowledged) -> list[Effect]:
        s = self._in_session(report.epoch)
        m = Member(report.engine, report.incarnation)
        if s is None or m not in s.members or not s.applying:
            return []
        s.roots[m] = report.manifest_root
        s.took(report.seconds)
        return self._complete(s)

    # ------------------------------------------------------------ failures

    def _emit_failed(self, report: EmitFailed) -> list[Effect]:
        if self._in_session(report.epoch) is None:
            return []
        return self._session_failed(report.reason, fatal=report.fatal)

    def _member_failed(self, engine: Engine, report: AttemptFailed) -> list[Effect]:
        engine.state = report.state
        if self.phase is Phase.ATTEMPT and self._in_session(report.epoch) is not None:
            engine.attempt_failures += 1
        return self._out_of_session(Member(report.engine, report.incarnation), report.reason, report.epoch)

    def _out_of_session(self, m: Member, reason: str, epoch: int | None = None) -> list[Effect]:
        """A member can no longer take part: an attempt fails by it, a restore goes on without it."""
        s = self._session
        if s is None or m not in s.members or self.phase not in (Phase.ATTEMPT, Phase.RESTORING):
            return []
        if epoch is not None and epoch != s.epoch:
            return []
        if self.phase is Phase.ATTEMPT:
            return self._session_failed(f"{m.engine} {reason}")
        self._restore_failed(m, reason)
        s.drop(m)
        step = Step(self.leader, "RestoreFailed", s.epoch, f"{m.engine}: {reason}")
        told = self._tell_refused(filter(None, [self.fleet.of(m)]))
        return [step, *told, *self._go_on(s)]

    def _go_on(self, s: Session) -> list[Effect]:
        """Go on with a restore that a member has left."""
        if not s.members:
            return self._session_failed("no engine is left in the restore")
        return [*self._open_apply(s), *self._complete(s)]

    def _restore_failed(self, m: Member, reason: str) -> None:
        e = self.fleet.of(m)
        if e is None:
            return
        e.restore_failures += 1
        if e.restore_failures >= self.restores_max:
            e.refused = f"its restore failed {e.restore_failures} times, last: {reason}"

    def _why_late(self, s: Session) -> str:
        """Why a time-out ran out; members that let it pass, with nobody else to blame, count as silent."""
        waiting, reason = s.late
        for m in waiting:
            e = self.fleet.of(m)
            if s.restore:
                self._restore_failed(m, f"time-out: {reason}")
            elif e is not None:
                e.silent = True
        return f"time-out: {reason}"
