"""The trainer's steps and pushes, as the harness orders them: retried by whoever would retry them in earnest."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from dcr.chaos.fleet import Fleet
from dcr.chaos.process import ChildError
from dcr.chaos.strike import Strike, Totals

KINDS_MAX = 100
"""Commits whose kinds are remembered."""


class Pushes:
    """One push after the other.

    A trainer that died starts again from its last checkpoint, takes another step and pushes that.  A push that ended in
    an error that a fault calls for is followed by what the fault's operator does.

    Args:
        fleet: whose trainer.
        strikes: faults, whose errors are expected once they have struck.
        totals: counted here.
        tell: takes a line of progress.
    """

    def __init__(self, fleet: Fleet, strikes: Sequence[Strike], totals: Totals, tell: Callable[[str], None]) -> None:
        self.checkpoint = fleet.first
        """From which a trainer starts again."""
        self.refit = 0
        self.kinds: deque[str] = deque(maxlen=KINDS_MAX)
        """Of the last commits that the trainer knew of: relative, absolute or dense."""
        self._fleet = fleet
        self._strikes = strikes
        self._totals = totals
        self._tell = tell
        self._candidate = fleet.first
        self._steps = 0
        self._under_way = False
        self._when_ready = False
        self._operator: Strike | None = None

    @property
    def waits_for(self) -> str:
        """What is not over; empty if all is."""
        return "the push to end" if self._under_way or self._when_ready or self._operator else ""

    def begin(self, *, step: bool = True, dense: bool = False) -> None:
        """Have every rank take a step, and push."""
        scenario = self._fleet.scenario
        if step:
            self._steps += 1
            self._candidate = self._fleet.folder / "checkpoints" / f"c{self._steps}"
        rate, seed = scenario.deployment.trainer.rate, scenario.seed * 1_000_003 + self._steps
        for trainer in self._fleet.trainers.values():
            if step:
                trainer.send("step", seed=seed, rate=rate, checkpoint=str(self._candidate))
            trainer.send("push", dense=dense)
        self._under_way = True

    def interrupted(self) -> None:
        """The trainer is gone: what it pushed is pushed by the next one, if it is not over."""
        self._when_ready = self._when_ready or self._under_way or self._operator is not None
        self._under_way, self._operator = False, None

    def look(self) -> None:
        """Go on with what came in: end a push that every rank ended, begin one that waits until all are back."""
        trainers = self._fleet.trainers.values()
        back = all(child.ready and not child.gone for child in self._fleet.children if not child.zombie)
        if back and self._operator is not None and time.monotonic() > self._operator.quiet_s:
            self._operate(self._operator.fault.operator)
        if back and self._when_ready:
            self._when_ready = False
            self.begin()
        if self._under_way and all("push" in t.answers for t in trainers):
            self._under_way = False
            self._ended([t.answers.pop("push") for t in trainers])

    def _operate(self, what: str) -> None:
        """What the operator does about a push that ended in an error, once its cause is over and all are back."""
        self._operator = None
        if what == "abandon":
            self._fleet.trainers["trainer-0"].send("abandon")
        self.begin(step=what == "abandon", dense=what == "dense")

    def _ended(self, reports: list[dict[str, object]]) -> None:
        report = reports[0]
        if report["error"]:
            self._totals.retries += 1
            self._failed(str(report["error"]))
            return
        attempts = report["attempts"]
        assert isinstance(attempts, int)
        self.checkpoint = self._candidate
        self._totals.commits += 1
        self.kinds.append(str(report["kind"]))
        self._totals.retries += max(attempts - 1, 0)  # a push that another leader ended has none to tell of
        now = time.monotonic()
        for strike in self._strikes:
            if strike.fired_s is not None and strike.committed_s is None:
                strike.committed_s = now
        for child in [c for c in self._fleet.past if c.zombie and c.stopped]:
            child.go_on()  # its place is taken: it must be told so, and do no harm
        retried = f", {attempts} attempts" if attempts > 1 else ""
        self._tell(f"refit {self.refit}: version {report['version']} committed, {report['kind']}{retried}")

    def _failed(self, error: str) -> None:
        for strike in self._strikes:
            fault = strike.fault
            due = strike.fired_s is not None and not strike.told
            if due and fault.push_error and fault.push_error in error:
                strike.told = True
                self._tell(f"refit {self.refit}: as it should: {error[:140]}")
                self._operator = strike
                return
        raise ChildError(f"refit {self.refit} failed: {error}")
