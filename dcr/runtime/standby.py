"""A coordinator that waits for its turn: one of several leads a record, the others stand by (DESIGN D16)."""

import contextlib
import logging
import math
import secrets
import threading
import time

from dcr.control_plane.interface import ControlPlane, ControlPlaneUnavailableError
from dcr.control_plane.lease import Lease, LeaseHeldError
from dcr.delivery.interface import Delivery
from dcr.protocol.errors import DcrError, RefusedError
from dcr.runtime.coordinator_host import CoordinatorHost
from dcr.runtime.eligibility import Eligibility
from dcr.runtime.observer import Observer, log_step
from dcr.runtime.progress_log import ProgressLog
from dcr.runtime.roster import Roster, roster
from dcr.runtime.settings import Settings

_log = logging.getLogger("dcr.coordinator")
_AGAIN_S, _AGAIN_S_MAX = 10.0, 600.0
"""A wait is told of again after so many seconds; then each pause is twice the one before, up to the second number."""


class CoordinatorFailedError(DcrError):
    """A leader could not lead on, and not because another one may: the same would happen again."""


class Standby:
    """One coordinator process.

    ::

        wait for a trainer's roster and for the lease --> lead --.-- the lease is lost, or another trainer starts:
             ^                                                   |   wait again
             '---------------------------------------------------'
                                                                 '-- it fails by itself: give the lease back and end

    It never takes a lease that somebody holds: the lease runs out, or is given back.  It leads no trainer whose
    settings, delivery or secret are others than its own (``Eligibility``): that one may be started again, or another
    coordinator lead it.  To lose the lease is what standbys are for, so it waits again; what the record or the protocol
    does not allow would not be otherwise the next time, so that ends it by name.  Each wait is told in the log
    ``dcr.coordinator``, now and then again, and lasts until ``stop``.

    Args:
        record_id: the record to lead.
        name: of this coordinator; each time that it leads it does so under a new name that begins with this.
        control: control plane.
        delivery: delivery store, swept of old epochs after a commit.
        secret: the secret of the run.
        settings: bounds; ``record_poll_s`` is how often it looks.
        observe: called with every step of the coordinator role.
        events: folder in which each leader writes its steps down; empty to write none.
    """

    def __init__(
        self,
        *,
        record_id: str,
        name: str,
        control: ControlPlane,
        delivery: Delivery,
        secret: bytes,
        settings: Settings,
        observe: Observer = log_step,
        events: str = "",
    ) -> None:
        self._record_id = record_id
        self._name = name
        self._control = control
        self._delivery = delivery
        self._secret = secret
        self._settings = settings
        self._observe = observe
        self._events = events
        self._eligibility = Eligibility(
            record_id, name, control=control, delivery=delivery, secret=secret, settings=settings
        )
        self._stop = threading.Event()
        self._told = ""
        self._due = self._pause = 0.0
        self.terms = 0
        """How often it has led."""

    def stop(self) -> None:
        """Lead no more, give the lease back, and return from ``run``; from any thread."""
        self._stop.set()

    def run(self) -> None:
        """Stand by and lead, until ``stop``.

        Raises:
            CoordinatorFailedError: it led, and failed by itself; the lease was given back.
            RefusedError: the control plane keeps no leases, or the setting ``channel`` is no good here.
        """
        try:
            while not self._stop.is_set():
                turn = self._turn()
                if turn is not None:
                    self._lead(*turn)
                self._stop.wait(self._settings.record_poll_s)
        finally:
            self._eligibility.withdraw()

    def _turn(self) -> tuple[Roster, Lease] | None:
        """The ranks to lead and the lease to lead them by; None if somebody else does, or nobody asks for it."""
        try:
            try:
                asked = roster(self._control, self._record_id)
            except RefusedError as e:  # a damaged entry, which the next trainer that asks writes anew
                self._tell(f"does not lead record {self._record_id!r}: {e}", logging.WARNING)
                return None
            if asked is None or asked.closed:
                before = "" if asked is None else ": the one that it stood by for was closed"
                self._tell(
                    f"waits for a trainer of record {self._record_id!r} that asks for a coordinator "
                    f"(setting coordinator = elsewhere){before}"
                )
                return None
            if problem := self._eligibility.problem(asked):
                self._tell(f"does not lead record {self._record_id!r}: {problem}", logging.WARNING)
                return None
            current = self._control.leader(self._record_id)
            if current is not None:
                self._stand_by(current)
                return None
            leader = f"{self._name}-{time.time_ns():x}-{secrets.token_hex(4)}"
            lease = self._control.acquire(self._record_id, leader, self._settings.leader_lease_s)
        except LeaseHeldError:
            return None  # another one was faster
        except ControlPlaneUnavailableError as e:
            self._tell(f"waits for the control plane: {e}")
            return None
        return asked, lease  # if another trainer asks by now, the leader finds that out first of all

    def _stand_by(self, current: Lease) -> None:
        """Somebody else leads, and shows it by renewing the lease three times while it lasts."""
        if self._control.lease_left_s(current) >= current.lease_s / 2:
            self._tell(
                f"stands by: {current.holder} leads record {self._record_id!r}, with token {current.token}", again=False
            )
        else:
            self._tell(
                f"waits for the lease of {current.holder}, which has not renewed it for more than half of its "
                f"{current.lease_s:.0f} s, to end, as it does in at most {math.ceil(current.lease_s / 2)} s"
            )

    def _lead(self, asked: Roster, lease: Lease) -> None:
        self._tell(f"leads record {self._record_id!r} as {lease.holder}, for {', '.join(asked.names)}")
        host = self._host(asked, lease)
        if host is None:
            return
        self.terms += 1
        progress = ProgressLog(_log, "dcr-progress", lambda: self._waits(host))
        try:
            while not host.ended.wait(self._settings.record_poll_s) and not self._stop.is_set():
                pass
        finally:
            progress.close()
            host.close()
        if host.failure and not host.lost:
            raise CoordinatorFailedError(f"coordinator {lease.holder} failed: {host.failure}")

    @staticmethod
    def _waits(host: CoordinatorHost) -> dict[str, str]:
        return {"fleet": f"coordinator, {host.status}"} if host.status.waits_for else {}

    def _host(self, asked: Roster, lease: Lease) -> CoordinatorHost | None:
        """A leader; None if what it needs is away, so that another one may be luckier."""
        try:
            return CoordinatorHost(
                record_id=self._record_id,
                leader=lease.holder,
                owners=asked.owners,
                control=self._control,
                delivery=self._delivery,
                secret=self._secret,
                settings=self._settings,
                observe=self._observe,
                events=self._events,
                lease=lease,
            )
        except DcrError as e:
            with contextlib.suppress(DcrError):  # then it runs out by itself
                self._control.release(lease)
            if isinstance(e, RefusedError):
                raise
            self._tell(f"could not begin to lead record {self._record_id!r}: {e}")
            return None

    def _tell(self, what: str, level: int = logging.INFO, *, again: bool = True) -> None:
        """Say what it does when that changes; of a wait, which nobody else may know of, also now and then."""
        now = time.monotonic()
        if what != self._told:
            self._told, self._pause = what, _AGAIN_S
            _log.log(level, "coordinator %s %s", self._name, what)
        elif again and now >= self._due:
            self._pause = min(2 * self._pause, _AGAIN_S_MAX)
            _log.log(level, "coordinator %s still %s", self._name, what)
        else:
            return
        self._due = now + self._pause
