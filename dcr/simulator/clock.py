"""Time as the protocol knows it: time-outs that run out, at any moment.  No duration is simulated.

A clock that jumps, a process that stalls and a peer that is slow look the same to the roles: a time-out comes early
compared with everything else.  So a schedule says when each one runs out, and nothing says how long that is.
"""


class Timers:
    """The time-outs that one coordinator started."""

    __slots__ = ("started",)

    def __init__(self) -> None:
        self.started: list[int] = []

    def start(self, number: int) -> None:
        """A time-out starts to run."""
        self.started.append(number)

    def run_out(self, which: int) -> int | None:
        """The one that runs out now: 0 is the latest; others were answered or replaced, and come all the same."""
        if not self.started:
            return None
        return self.started[-1 - which % len(self.started)]
