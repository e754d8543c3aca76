"""What the log says while nobody leads: who waits, for whom, and for how long at most."""

import logging
import time

from dcr.control_plane.interface import ControlPlane
from dcr.protocol.errors import DcrError
from dcr.runtime.eligibility import unfit_coordinators
from dcr.runtime.roster import roster

FIRST_S, LAST_S = 3.0, 600.0
"""A wait is told of after so many seconds; then each pause is twice the one before, up to the second number."""


class LeaderWait:
    """Tells of one process's wait for a leader; everything is called from one thread, now and again.

    Args:
        log: where lines go, at level WARNING.
        control: asked who holds the lease.
        record_id: the record.
    """

    def __init__(self, log: logging.Logger, control: ControlPlane, record_id: str) -> None:
        self._log = log
        self._control = control
        self._record_id = record_id
        self._began: float | None = None
        self._due = self._pause = 0.0
        self._told = False

    def over(self, who: str) -> None:
        """Nobody is waited for, or not any more; said if the wait was."""
        if self._began is not None and self._told:
            self._log.info("%s has waited %.0f s for a leader, and waits no more", who, time.monotonic() - self._began)
        self._began, self._told = None, False

    def look(self, who: str, at_most: str) -> None:
        """It waits still.

        Args:
            who: waits, and with what.
            at_most: how long it waits at most.
        """
        now = time.monotonic()
        if self._began is None:
            self._began, self._pause = now, FIRST_S
            self._due = now + FIRST_S
        if now < self._due:
            return
        self._pause = min(2 * self._pause, LAST_S)
        self._due, self._told = now + self._pause, True
        self._log.warning(
            "%s has waited %.0f s for a leader of record %r, %s: %s",
            who,
            now - self._began,
            self._record_id,
            at_most,
            why_unled(self._control, self._record_id),
        )


def why_unled(control: ControlPlane, record_id: str) -> str:
    """Why nobody may lead a record whose coordinator is elsewhere, as far as the control plane tells; for people."""
    try:
        lease = control.leader(record_id)
        asked = roster(control, record_id)
        unfit = {} if asked is None else unfit_coordinators(control, record_id, asked)
    except DcrError as e:
        return f"who leads is not known: {e}"
    if lease is not None:
        leads = (
            f"{lease.holder} holds the lease, and is not reached; if it is gone, another one may lead in at most "
            f"{lease.lease_s:.0f} s"
        )
    elif asked is None:
        leads = "nobody leads, and no trainer asks for a coordinator: is one running, with this control plane?"
    elif asked.closed:
        leads = "the trainer was closed, and asks for none"
    else:
        leads = f"nobody holds the lease: start a `dcr coordinator --record-id {record_id}`, or see the log of those"
    return "; ".join([leads, *(f"{name} stands by and must not lead: {why}" for name, why in unfit.items())])
