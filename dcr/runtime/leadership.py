"""Leading a record: the lease of the control plane, renewed for as long as this process leads (DESIGN D16)."""

import contextlib
import logging
import threading
from collections.abc import Callable

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.control_plane.lease import LeadershipLostError, Lease, LeaseHeldError
from dcr.protocol.errors import DcrError

_log = logging.getLogger("dcr.coordinator")

_TAKE_OVERS_MAX = 16
_RENEWALS_A_LEASE = 3


class Leadership:
    """The lease of one leader, and the thread that renews it.

    Whoever starts a coordinator says with it that this one leads: the lease of an older one is taken over.  While the
    control plane is away nothing is known, and the thread asks on; every write is held to the lease by the control
    plane itself.  Where that keeps no leases there is neither, and a warning says what has to be seen to instead.

    Args:
        control: control plane.
        record_id: the record to lead.
        leader: a name new with every start.
        lease_s: how long to lead without a renewal, seconds.
        lost: called once, in the thread, when the lease is not the record's any more.

    Raises:
        LeaseHeldError: others took it as often as this one did.
        ControlPlaneUnavailableError: it could not be asked.
    """

    def __init__(
        self,
        control: ControlPlane,
        record_id: str,
        leader: str,
        lease_s: float,
        lost: Callable[[LeadershipLostError], None],
    ) -> None:
        self._control = control
        self._lost = lost
        self._ended = threading.Event()
        self.lease: Lease | None = None  # of a control plane that keeps none
        if not control.leases:
            _log.warning(
                "record %s is kept where there are no leases: that only one coordinator runs is guaranteed by whoever "
                "starts trainers (a scheduler that never runs two of this job), not by dcr; a second one overtakes "
                "this one, which then ends by name",
                record_id,
            )
            return
        for left in reversed(range(_TAKE_OVERS_MAX)):
            current = control.leader(record_id)
            try:
                self.lease = control.acquire(
                    record_id, leader, lease_s, replaces=None if current is None else current.token
                )
                break
            except LeaseHeldError:  # another one that starts was faster, or gave up meanwhile
                if not left:
                    raise
        self._thread = threading.Thread(target=self._renew, args=(self.lease,), name="dcr-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lead no more; the next leader need not wait for it."""
        if self.lease is None:
            return
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(DcrError):  # then it runs out by itself
            self._control.release(self.lease)

    def _renew(self, lease: Lease) -> None:
        while not self._ended.wait(lease.lease_s / _RENEWALS_A_LEASE):
            try:
                self._control.renew(lease)
            except ControlPlaneUnavailableError as e:
                _log.warning("%s: not renewed: %s", lease, e)
            except LeadershipLostError as e:
                self._lost(e)
                return
            except DcrError as e:
                _log.error("%s: not renewed: %s", lease, e)


def why_lost(error: LeadershipLostError) -> str:
    """Why a leader whose lease is not the record's any more leads no more, and what to do."""
    if error.current is None:
        return f"{error}; the control plane was not reached for that long: start the trainer again"
    now = error.current
    return (
        f"another trainer ({now.holder}) leads record {now.record_id!r}; stop one of the two, or give each its own "
        f"record_id ({error})"
    )
