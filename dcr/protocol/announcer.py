"""Announcing: what owners are told of how their pushes ended, by the leader that ended them or by a later one."""

from collections.abc import Iterable, Mapping

import msgspec

from dcr.protocol.budget import Budget
from dcr.protocol.conductor import Conductor
from dcr.protocol.coordinator_effects import Effect, SendOwner
from dcr.protocol.layer_changes import LayerChanges
from dcr.protocol.messages import CandidateReady, Outcome, cut
from dcr.protocol.record import Direction
from dcr.protocol.seats import Seat
from dcr.protocol.session import why_rolled_back

MESSAGES_MAX = 64
"""Most failures, and most warnings, that an outcome tells of."""


class Announcer(Conductor):
    """Keeps what there is to tell of the push in progress, and tells it when the push is over.

    Args:
        record_id: the record to lead.
        leader: this leader's name, new with every start.
        owners: names of all owners.
        wire_version: version of the payload format.
        operations: relative operations that the owners can emit, the preferred one first.
        members_min: fewest members that an attempt needs.
        restores_max: failed restores of one incarnation before it is refused.
        gate_mode: one of ``conductor.GATE_MODES``.
        attempts_max: attempts of one push before the transition stops.
    """

    def __init__(
        self,
        record_id: str,
        leader: str,
        owners: Iterable[str],
        *,
        wire_version: int,
        operations: tuple[str, ...],
        members_min: int,
        restores_max: int,
        gate_mode: str,
        attempts_max: int,
    ) -> None:
        super().__init__(
            record_id,
            leader,
            owners,
            wire_version=wire_version,
            operations=operations,
            members_min=members_min,
            restores_max=restores_max,
            gate_mode=gate_mode,
        )
        self._outcome: Outcome | None = None  # of the last push
        self._budget = Budget(attempts_max)
        self._sent_dense = ""  # why the last attempt is dense; empty if it is not
        self._failures: list[str] = []
        self._warnings: list[str] = []

    @property
    def failures(self) -> tuple[str, ...]:
        """Why attempts of the push that waits have failed, the last ones."""
        return tuple(self._failures[-MESSAGES_MAX:])

    def _offered(self, seat: Seat, report: CandidateReady) -> list[Effect]:
        if report.push <= seat.done and self._outcome is not None:
            return [self._tell(report.owner, self._outcome)]  # it may have been lost with a connection
        return super()._offered(seat, report)

    def _finish(self) -> list[Effect]:
        c, s = self._k.committed, self.session
        effects = self.finish_transition()
        if c is None or s is None or s.epoch != c.epoch:
            return effects  # after a restore, or a take-over: no push of this leader ends by it
        for o in c.owners:
            reason = self._folds.get(o, "it restarted before its baseline was folded")
            if reason:
                self._warnings.append(f"{o.owner} lost its baseline, so the next push sends every element: {reason}")
        # An owner that restarted, or gave its push up and pushed again, waits with other weights: this is not its push.
        took_part = {o.owner: (o.incarnation, push) for o, push in zip(c.owners, c.pushes, strict=True)}
        summary = s.summary(self._budget.taken(s.attempt)) | {"why_dense": self._sent_dense}
        return effects + self._push_over("", took_part, summary, s.layers)

    def _tell_late(self) -> list[Effect]:
        """Whoever waits hears how its push ended, from another leader than the one that ended it (DESIGN D16)."""
        c = self._k.committed
        assert c is not None
        took_part = self.seats.took_part(self.unaware)
        self._failures, self._warnings = [], []
        self.candidate = c.candidate
        if c.direction is Direction.BACK:
            return self._push_over(why_rolled_back(self._k.version, "by a coordinator that is gone"), took_part)
        self._warnings = ["a coordinator that is gone committed it: how many attempts and bytes it took is not known"]
        nothing = dict.fromkeys(("attempts", "changed_entries", "elements", "payloads", "payload_bytes"), 0)
        members = sorted(m.engine for m in c.members)
        return self._push_over("", took_part, {"kind": "unknown", "members": members, **nothing})

    def _push_over(
        self,
        error: str,
        took_part: Mapping[str, tuple[int, int]] | None = None,
        summary: Mapping[str, float | int | str | list[str]] | None = None,
        layers: tuple[LayerChanges, ...] = (),
    ) -> list[Effect]:
        """Tell every owner that took part how the push ended.

        Args:
            error: what stopped it; empty if it was committed.
            took_part: (incarnation, push) of each owner; None for whoever waits.
            summary: what there is to tell of the attempt that was committed.
            layers: what it changed.
        """
        told = dict(summary or {})
        told |= {"failures": self._failures[-MESSAGES_MAX:], "warnings": self._warnings[-MESSAGES_MAX:]}
        version = -1 if self.record is None else self.record.version
        self._outcome = Outcome(self.record_id, self._epoch, version, self.candidate, cut(error), told, layers=layers)
        effects: list[Effect] = []
        for name, seat in self.seats:
            pushed = (seat.incarnation, seat.ready)
            if seat.ready and (took_part is None or took_part.get(name) == pushed):
                seat.done, seat.ready = seat.ready, 0
                effects.append(self._tell(name, self._outcome))
        for e in self.fleet.engines.values():
            e.attempt_failures = 0
        self._budget.over()
        return effects

    def _tell(self, owner: str, outcome: Outcome) -> SendOwner:
        seat = self.seats[owner]
        return SendOwner(owner, msgspec.structs.replace(outcome, incarnation=seat.incarnation, push=seat.done))
