"""A conductor that tries any action at any time: what its guards let through is held to the specification."""

import contextlib

import hypothesis.strategies as st
from hypothesis.stateful import rule

from dcr.protocol.conductor import Conductor
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind
from tests.unit.protocol.machines.coordinator_machine import HOLDS, STEPS, TROUBLE, CoordinatorMachine
from tests.unit.protocol.machines.heard import OWNERS

ROLES = ("Conductor", "Leader", "Session", "Registrar", "Engine")
ACTIONS = (
    *("open_attempt", "open_attempt", "roll_back", "order_open_apply", "fail_attempt", "commit", "stop", "abandon"),
    *("publish", "finish_transition", "open_restore", "end_restore", "admit"),
)
KINDS = st.sampled_from((Kind.RELATIVE, Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE))
WORTH_TRYING = (
    *("open_attempt", "open_attempt", "roll_back", "roll_back", "order_open_apply", "commit", "commit", "stop"),
    *("finish_transition", "finish_transition", "open_restore", "open_restore", "end_restore", "admit"),
)
LEADING_ON = (*("fail_attempt", "commit", "order_open_apply", "publish", "finish_transition", "end_restore", "admit"),)
EAGER = st.tuples(st.sampled_from(WORTH_TRYING), KINDS)


class ConductorMachine(CoordinatorMachine):
    """A leader without a policy: it does anything that its guards admit."""

    def role(self) -> Conductor:
        return Conductor("policy", "c1", OWNERS, **self.settings())

    @rule(steps=STEPS, holds=HOLDS, trouble=TROUBLE, at=st.integers(0, 12), eager=EAGER)
    def goes_on(self, steps, holds, trouble, at, eager) -> None:
        """The same, and one action is tried again and again meanwhile."""
        self.eager = eager
        super().goes_on(steps, holds, trouble, at)

    @rule(steps=STEPS, holds=HOLDS, trouble=TROUBLE, at=st.integers(0, 12), eager=EAGER)
    def goes_on_too(self, steps, holds, trouble, at, eager) -> None:
        self.goes_on(steps, holds, trouble, at, eager)

    def _goes_on(self, holds, trouble) -> None:
        self.tries(*self.eager, late="")
        if not self.fatal:
            super()._goes_on(holds, trouble)

    @rule(action=st.sampled_from(ACTIONS), kind=KINDS, late=st.sampled_from(("", "", "a time-out")))
    def tries(self, action, kind, late) -> None:
        if self.known is None or self.fatal:
            return
        given = {"open_attempt": (kind,), "fail_attempt": (late,), "end_restore": (late,)}.get(action, ())
        with contextlib.suppress(RefusedError):
            self.runs(getattr(self.c, action)(*given))

    def otherwise(self) -> None:
        """The first action that its guards admit, in an order that leads on."""
        if self.known is None:
            return
        for action in LEADING_ON:
            with contextlib.suppress(RefusedError):
                self.runs(getattr(self.c, action)())
                return
        kinds = (Kind.RELATIVE, Kind.ABSOLUTE, Kind.DENSE)
        for kind in kinds:
            with contextlib.suppress(RefusedError):
                self.runs(self.c.open_attempt(kind))
                return
        with contextlib.suppress(RefusedError):
            self.runs(self.c.open_restore())

    def time_runs_out(self, ago=0) -> None:
        """Time is the policy's."""
        with contextlib.suppress(RefusedError):
            self.runs(self.c.fail_attempt("a time-out"))

    def operator_says(self, what) -> None:
        with contextlib.suppress(RefusedError):
            self.runs(self.c.abandon() if what == "abandon" else self.c.roll_back())
