"""A fault of a run, and what came of it; and what a run did in all."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dcr.chaos.point import Who
from dcr.chaos.scenario import Fault
from dcr.chaos.trigger import Armed


@dataclass
class Strike:
    """A fault; times on the monotonic clock, seconds.

    Attributes:
        number: of the fault in its scenario.
        fault: what is to happen.
        fired_s: when its point was reached.
        struck: name of the process that it struck.
        committed_s: when the next commit was known to the trainer.
        told: whether a push ended with the error that the fault calls for.
        recovered_s: when every engine served what is committed, with every process back.
        over_s: when it was over, where that was the machine's to say: a killed server that answers again, for one.
        short_items: the most items that its payload had, where the point wants more; None if it never was short.
    """

    number: int
    fault: Fault
    fired_s: float | None = None
    struck: str = ""
    committed_s: float | None = None
    told: bool = False
    recovered_s: float | None = None
    over_s: float = 0.0
    short_items: int | None = None

    @property
    def quiet_s(self) -> float:
        """When what it does is over: recovery is counted from here."""
        if self.fired_s is None:
            return 0.0
        return max(self.fired_s + self.fault.for_s + self.fault.restart_after_s, self.over_s)

    @property
    def missed(self) -> str:
        """For an error: why it never came, and what to do, where that is known; otherwise empty."""
        if self.short_items is None:
            return ""
        point = self.fault.point
        return (
            f": payload {point.payload} of that refit had no more than {self.short_items} items when {point.who} wrote "
            "it: name fewer items, or another payload"
        )

    def __str__(self) -> str:
        which = f" ({self.struck})" if self.struck.startswith("coordinator") else ""
        return f"{self.fault}{which}"

    def armed(self, epoch: int, processes_of: Callable[[Who], tuple[str, ...]]) -> Armed:
        """What the process of its point is told.

        Args:
            epoch: K's now: every attempt has an epoch of its own, and nothing else is under way.
            processes_of: names the processes in which a role may live.
        """
        point = self.fault.point
        taker = point.taken_by
        return Armed(
            number=self.number,
            role=taker.role,
            index=taker.index,
            kind="again" if self.fault.do == "duplicate" else point.kind,
            action=point.action,
            count=point.count,
            items=point.items,
            payload=point.payload,
            epoch_min=epoch + point.attempt if point.refit else 0,
            do=self.fault.do,
            for_s=self.fault.for_s,
            own=processes_of(self.fault.victim) == processes_of(taker),
        )


@dataclass
class Totals:
    """What a run did.

    ``held_up_s`` is how long the harness itself stood still, seconds, with nothing to do but to wait for less.
    """

    commits: int = 0
    kills: int = 0
    faults: int = 0
    retries: int = 0
    restarts: int = 0
    held_up_s: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
