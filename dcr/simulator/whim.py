"""A leader without a policy: it does anything that the guards of the conductor admit, in an order that a schedule says.

What the coordinator never asks for stays untried where only its policy leads; the specification lets a leader do all of
it.  Pushes end as they do with the coordinator, for the trainer's pin depends on it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dcr.protocol.conductor import Conductor
from dcr.protocol.coordinator_effects import Effect, SendOwner
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from dcr.protocol.leader import Phase
from dcr.protocol.messages import Outcome
from dcr.protocol.record import Direction

if TYPE_CHECKING:
    from dcr.protocol.record import OpenTransition

_LATE = "it took too long"
_Act = Callable[["Whim", frozenset[str]], list[Effect]]

ACTS: tuple[tuple[Phase, _Act], ...] = (
    (Phase.IDLE, lambda w, out: w.open_attempt(Kind.RELATIVE, leave_out=out)),
    (Phase.IDLE, lambda w, out: w.open_attempt(Kind.ABSOLUTE, leave_out=out)),
    (Phase.IDLE, lambda w, out: w.open_attempt(Kind.DENSE, leave_out=out)),
    (Phase.IDLE, lambda w, out: w.admit(leave_out=out)),
    (Phase.IDLE, lambda w, out: w.open_restore(leave_out=out)),
    (Phase.ATTEMPT, lambda w, _: w.order_open_apply()),
    (Phase.ATTEMPT, lambda w, _: w.commit()),
    (Phase.ATTEMPT, lambda w, _: w.fail_attempt()),
    (Phase.RESTORING, lambda w, _: w.order_open_apply()),
    (Phase.RESTORING, lambda w, _: w.end_restore()),
    (Phase.FOLDING, lambda w, _: w.publish()),
    (Phase.FOLDING, lambda w, _: w.finish_transition()),
    (Phase.FOLDING, lambda w, out: w.open_restore(leave_out=out)),
    (Phase.IDLE, lambda w, _: w.roll_back()),
    (Phase.IDLE, lambda w, _: w.stop()),
    (Phase.IDLE, lambda w, _: w.abandon()),
    (Phase.ATTEMPT, lambda w, _: w.fail_attempt(_LATE)),
    (Phase.RESTORING, lambda w, _: w.end_restore(_LATE)),
)
"""What it may try, with the phase in which there is a point; the last ones are an operator's or a time-out's."""

_DUE = 13
"""So many of them need no operator and no time-out."""


class Whim(Conductor):
    """See the head of this file; the arguments are the conductor's."""

    _gone = False

    def due(self) -> list[int]:
        """What there is a point in trying now, by its number."""
        if self.phase is Phase.IDLE and self._must_abandon():
            return [len(ACTS) - 3]
        return [n for n, (phase, _) in enumerate(ACTS[:_DUE]) if phase is self.phase]

    def act(self, n: int) -> list[Effect] | None:
        """Try something; None if a guard refused it.

        Args:
            n: which of ``ACTS``, and which engine is left out.
        """
        if self.phase is Phase.IDLE and self.unaware:
            return self._over(self.seats.took_part(self.unaware), "")
        phase, act = ACTS[n % len(ACTS)]
        if phase is not self.phase:
            return None
        if phase is Phase.IDLE and self._must_abandon():
            act = ACTS[len(ACTS) - 3][1]
        names = sorted(self.fleet.engines)
        which = n // len(ACTS) % (2 * len(names) + 1)
        out = frozenset(names[which - 1 : which])  # nobody, with 0
        before = self.session
        try:
            effects = act(self, out)
        except RefusedError:
            return None
        c = self._k.committed
        ended = phase is Phase.FOLDING and self.phase is Phase.IDLE
        if ended and c is not None and before is not None and before.epoch == c.epoch:
            named = zip(c.owners, c.pushes, strict=True)
            effects += self._over({o.owner: (o.incarnation, push) for o, push in named}, "")
        return effects

    def _after(self, reason: str) -> list[Effect]:
        effects = super()._after(reason)
        if reason == "Abandon" or (reason == "Commit" and self._s.back):
            self._gone = False
            effects += self._over(self.seats.took_part(self.seats.names), "the transition was given up")
        return effects

    def _orders(self) -> list[Effect]:
        s = self._s
        return [] if s.hopeless or not s.members else super()._orders()  # as the coordinator: who went is sent nothing

    def _candidate_gone(self) -> None:
        self._gone = True

    def _must_abandon(self) -> bool:
        """The candidate of the open transition is not what waits: only an abandon goes on (DESIGN D10, D16)."""
        tr = self._k.open if self.record is not None else None
        if tr is None:
            self._gone = False
            return False
        return self._gone or not self.candidate_alive or not self._goes_on(tr)

    def _goes_on(self, tr: "OpenTransition") -> bool:
        if tr.direction is Direction.BACK or not self.seats.ready:
            return True
        same = self.seats.waiting(tr.owners, tr.pushes) == self.seats.names
        return same or (tr.stopped and tr.content_digest != "")

    def _over(self, took_part: Mapping[str, tuple[int, int]], error: str) -> list[Effect]:
        effects: list[Effect] = []
        for name, seat in self.seats:
            if seat.ready and took_part.get(name) == (seat.incarnation, seat.ready):
                seat.done, seat.ready = seat.ready, 0
                k = self._k
                told = Outcome(
                    self.record_id, k.epoch, k.version, self.candidate, error, {}, seat.incarnation, seat.done
                )
                effects.append(SendOwner(name, told))
        return effects
