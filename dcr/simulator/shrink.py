"""Fewer moves that break the same invariant: delta debugging over a schedule and its deployment."""

import time
from collections.abc import Iterator

import msgspec

from dcr.simulator.run import Failure, run_schedule
from dcr.simulator.schedule import Move, Schedule, Setup

RUNS_MAX = 4000
"""So many schedules are tried at most."""


class Shrinker:
    """Makes one failure small.

    Args:
        failure: what was found.
        seconds_max: no more is tried after so many seconds; what there is by then is the result.
    """

    def __init__(self, failure: Failure, seconds_max: float) -> None:
        self.failure = failure
        self.runs = 0
        self._until = time.monotonic() + seconds_max

    def shrink(self) -> Failure:
        """The smallest failure that was found; it breaks the invariant that the first one broke, and replays."""
        before = -1
        while before != self._size and not self._spent:
            before = self._size
            self._fewer_moves()
            self._smaller_deployment()
            self._smaller_numbers()
        return self.failure

    @property
    def _size(self) -> int:
        s = self.failure.schedule
        return len(s.moves) * 100_000 + sum(min(n, 999) for _, _, n in s.moves) + s.setup.owners + sum(s.setup.ranks)

    @property
    def _spent(self) -> bool:
        return self.runs >= RUNS_MAX or time.monotonic() > self._until

    def _try(self, schedule: Schedule) -> bool:
        """Keep a schedule if it breaks the same invariant."""
        if self._spent:
            return False
        self.runs += 1
        found = run_schedule(schedule).failure
        if found is None or found.invariant != self.failure.invariant:
            return False
        self.failure = found
        return True

    def _with(self, moves: tuple[Move, ...]) -> Schedule:
        return msgspec.structs.replace(self.failure.schedule, moves=moves, seed=None)

    def _fewer_moves(self) -> None:
        chunk = max(1, len(self.failure.schedule.moves) // 2)
        while True:
            at = 0
            while at < len(moves := self.failure.schedule.moves) and not self._spent:
                if not self._try(self._with(moves[:at] + moves[at + chunk :])):
                    at += chunk
            if chunk == 1:
                return
            chunk //= 2

    def _smaller_numbers(self) -> None:
        for at in range(len(self.failure.schedule.moves)):
            moves = self.failure.schedule.moves
            name, who, n = moves[at]
            for smaller in (0, 1, 2, 3):
                if smaller < n and self._try(self._with((*moves[:at], (name, who, smaller), *moves[at + 1 :]))):
                    break

    def _smaller_deployment(self) -> None:
        for setup in self._simpler(self.failure.schedule.setup):
            self._try(msgspec.structs.replace(self.failure.schedule, setup=setup, seed=None))

    @staticmethod
    def _simpler(s: Setup) -> Iterator[Setup]:
        replace = msgspec.structs.replace
        if len(s.ranks) > s.members_min:
            yield replace(s, ranks=s.ranks[:-1])
        if s.members_min > 1:
            yield replace(s, members_min=1)
        if sum(s.ranks) > len(s.ranks):
            yield replace(s, ranks=(1,) * len(s.ranks))
        if s.owners > 1:
            yield replace(s, owners=1)
        if s.cold:
            yield replace(s, cold=False)
        if s.stop_waits:
            yield replace(s, stop_waits=False)
        if s.rejoin_waits:
            yield replace(s, rejoin_waits=False)
