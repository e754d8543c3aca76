"""One push as its rank waits with it: from the call that offers the weights until it has ended."""

import threading
import time
from collections.abc import Callable

from dcr.protocol.errors import DcrError
from dcr.protocol.messages import Outcome


class OwnerError(DcrError):
    """This rank's owner failed in a way that it does not know; the push on this rank cannot go on."""


class PushTimeoutError(DcrError):
    """A push did not end in time on this rank; what became of it is in the commit record."""


class Offer:
    """Ends once, with the outcome that the leader tells, or without one: given up here, for a reason.

    Args:
        number: of the push; grows from 1 in one incarnation of an owner.
        dense: whether every element is asked for (DESIGN D14).
        timeout_s: the whole push.

    Attributes:
        refusal: why what is offered may not become a version; empty if it may, None as long as that is not known.
        taken_back: why it may not become one any more, whatever was found; empty if it may.
    """

    def __init__(self, number: int, *, dense: bool, timeout_s: float) -> None:
        self.number = number
        self.dense = dense
        self.refusal: str | None = None
        self.taken_back = ""
        self._deadline = time.monotonic() + timeout_s
        self._how: Outcome | DcrError | None = None
        self._acts: list[Callable[[], None]] = []
        self._changed = threading.Condition()

    @property
    def waiting(self) -> bool:
        """Whether it has not ended."""
        return self._how is None

    @property
    def late(self) -> bool:
        """Whether it waits still, and its time is over."""
        return self.waiting and time.monotonic() >= self._deadline

    @property
    def committed(self) -> bool:
        """Whether it has ended, and well."""
        return isinstance(self._how, Outcome) and not self._how.error

    def end(self, how: Outcome | DcrError) -> bool:
        """End it with an outcome, or give it up; False, and nothing is changed, if it had ended before."""
        with self._changed:
            if self._how is not None:
                return False
            for act in self._acts:
                act()
            self._how = how
            self._changed.notify_all()
            return True

    def when_ended(self, act: Callable[[], None]) -> None:
        """Call this once it ends, on the thread that ends it and before anybody hears of it; now if it has ended."""
        with self._changed:
            if self._how is None:
                self._acts.append(act)
            else:
                act()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, at most as long as it has time; whether it has ended.

        Args:
            timeout_s: wait no longer than this; None for no other bound.
        """
        left = max(self._deadline - time.monotonic(), 0.0)
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting, left if timeout_s is None else min(timeout_s, left))

    @property
    def outcome(self) -> Outcome:
        """How it ended; raises what it was given up for.  Only once it has ended."""
        assert self._how is not None
        if isinstance(self._how, DcrError):
            raise self._how
        return self._how
