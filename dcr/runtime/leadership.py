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


def take_lease(control: ControlPlane, record_id: str, leader: str, lease_s: float) -> Lease | None:
    """Lead at once, whoever led before: who starts a trainer with its own coordinator says that this one leads.

    Where the control plane keeps no leases there is none, and a warning says what has to be seen to instead.

    Args:
        control: control plane.
        record_id: the record to lead.
        leader: a name new with every start.
        lease_s: how long to lead without a renewal, seconds.

    Raises:
        LeaseHeldError: others took it as often as this one did.
        ControlPlaneUnavailableError: it could not be asked.
    """
    if not control.leases:
        _log.warning(
            "record %s is kept where there are no leases: that only one coordinator runs is guaranteed by whoever "
            "starts trainers (a scheduler that never runs two of this job), not by dcr; a second one overtakes "
            "this one, which then ends by name",
            record_id,
        )
        return None
    for left in reversed(range(_TAKE_OVERS_MAX)):
        current = control.leader(record_id)
        try:
            return control.acquire(record_id, leader, lease_s, replaces=None if current is None else current.token)
        except LeaseHeldError:  # another one that starts was faster, or gave up meanwhile
            if not left:
                raise
    raise AssertionError  # the loop returns or raises


class Leadership:
    """The lease of one leader, and the thread that renews it.

    While the control plane is away nothing is known, and the thread asks on; every write is held to the lease by the
    control plane itself.

    Args:
        control: control plane.
        lease: what was granted; given back by ``close``.  None where none are kept.
        lost: called once, in the thread, when the lease is not the record's any more.
    """

    def __init__(self, control: ControlPlane, lease: Lease | None, lost: Callable[[LeadershipLostError], None]) -> None:
        self._control = control
        self.lease = lease
        self._lost = lost
        self._ended = threading.Event()
        if lease is None:
            return
        self._thread = threading.Thread(target=self._renew, args=(lease,), name="dcr-lease", daemon=True)
        self._thread.start()

    @property
    def stands(self) -> bool:
        """Whether the lease is the record's now; False too if there is none, or the control plane does not say."""
        if self.lease is None:
            return False
        try:
            current = self._control.leader(self.lease.record_id)
        except DcrError as e:
            _log.warning("%s: whether it stands is not known: %s", self.lease, e)
            return False
        return current is not None and current.token == self.lease.token

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
        return (
            f"{error}; the control plane was not reached for that long: start a trainer with its own coordinator again"
        )
    now = error.current
    return (
        f"another coordinator ({now.holder}) leads record {now.record_id!r}; if that is another trainer's, stop one of "
        f"the two, or give each its own record_id ({error})"
    )
