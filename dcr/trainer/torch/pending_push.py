"""A push that has begun: its end, whether the trainer waits for it or trains on (DESIGN D10)."""

import time
from collections.abc import Callable

from dcr.delivery.interface import Delivery
from dcr.protocol.errors import DcrError
from dcr.runtime.fleet_status import FleetStatus
from dcr.runtime.offer import Offer, PushTimeoutError
from dcr.runtime.owner_host import OwnerHost
from dcr.runtime.seconds import seconds
from dcr.trainer.torch.refit_report import RefitReport, report_of


class PushError(DcrError):
    """A push did not end in a commit; the message says what stopped it, and what can be done."""


class PushPendingError(DcrError):
    """A push has not ended yet; it goes on."""


class PendingPush:
    """What ``begin_push`` returns on every rank; ``result`` is to be called on every rank, before the next push."""

    def __init__(
        self, host: OwnerHost, offer: Offer, delivery: Delivery, fleet: Callable[[], FleetStatus | None]
    ) -> None:
        self._host = host
        self._offer = offer
        self._delivery = delivery
        self._fleet = fleet
        self._began, self._before = time.perf_counter(), delivery.traffic
        self._wall_s, self._traffic = 0.0, self._before
        self._told = False
        offer.when_ended(self._ended)

    @property
    def done(self) -> bool:
        """Whether the push has ended, however; ``result`` returns or raises at once then.

        Ranks hear of the end one after the other.  Where a trainer decides by it what it does next, let one rank look
        and tell the others.
        """
        return not self._offer.waiting

    @property
    def told(self) -> bool:
        """Whether ``result`` has told how it ended."""
        return self._told

    def result(self, timeout_s: float | None = None) -> RefitReport:
        """Wait for the end of the push; it may be called again, and says the same.

        Args:
            timeout_s: wait no longer than this; None waits until the push has ended, which ``push_timeout_s`` bounds.

        Raises:
            PushPendingError: it has not ended within ``timeout_s``, and goes on.
            PushError: nothing was committed; the error of every rank is the same, and names what stopped the push.
            PushTimeoutError: no outcome within ``push_timeout_s``; the push was given up.
            RefusedError: the refit was closed meanwhile; or ``timeout_s`` is no number of seconds.
        """
        if timeout_s is not None:
            timeout_s = seconds(timeout_s, "result(timeout_s)")
        try:
            outcome = self._host.wait(self._offer, timeout_s)
        except PushTimeoutError as e:
            self._told, fleet = True, self._fleet()
            raise PushTimeoutError(str(e) if fleet is None else f"{e}; the coordinator: {fleet}") from e
        except DcrError:
            self._told = True
            raise
        if outcome is None:
            raise PushPendingError(
                f"push {self._offer.number} has no outcome after another {timeout_s} s; it goes on: call result() again"
            )
        self._told = True
        if outcome.error:
            raise PushError(outcome.error)
        return report_of(outcome, self._wall_s, self._traffic)

    def _ended(self) -> None:
        self._wall_s = time.perf_counter() - self._began
        self._traffic = self._delivery.traffic.since(self._before)
