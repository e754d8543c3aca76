"""A trainer without a coordinator of its own, and coordinators that stand by in processes of their own."""

import threading
from contextlib import closing, suppress

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlaneUnavailableError
from tests.faults.coordinator_process import CoordinatorProcess
from tests.faults.thread_fleet import WAIT_S, Fleet

LEASE_S = 300.0
"""Longer than any machine is busy: the lease of a leader that lives does not run out."""


class FailoverFleet(Fleet):
    """A trainer without a coordinator of its own, whose first leader ends at a point.

    The lease of a leader that is dead or held still ends here as soon as it is, and of no other: what a lease that runs
    out leads to is seen without a wait, and no leader loses its lease to a machine that was busy with other things.
    That leases do run out is tried with the control planes, and by ``dcr chaos``.
    """

    def __init__(self, folder, settings=None, *, control=None, point=None):
        self.coordinators = []
        self._point = point
        super().__init__(
            folder,
            {"coordinator": "elsewhere", "leader_lease_s": LEASE_S, "rejoin_timeout_s": 20.0, **(settings or {})},
            control=control,
        )
        self._closing = threading.Event()
        self._leases = threading.Thread(target=self._end_leases, daemon=True)
        self._leases.start()

    def start_trainer(self):
        if not self.coordinators:
            self.coordinator("one", self._point)
        return super().start_trainer()

    def coordinator(self, name, point=None):
        self.coordinators.append(CoordinatorProcess(name, self.folder, self.addresses, point))
        return self.coordinators[-1]

    def standby(self, name):
        made = self.coordinator(name)
        made.wait_said("stands by: one")
        return made

    def history(self):
        return self.refit._control.history("default", 1000)

    def close(self):
        super().close()
        self._closing.set()
        self._leases.join(WAIT_S)
        for c in self.coordinators:
            c.close()

    def _end_leases(self):
        with closing(open_control_plane(self.addresses["control"])) as control:
            while not self._closing.wait(0.02):
                with suppress(ControlPlaneUnavailableError):  # a test may end its server first
                    lease = control.leader("default")
                    if lease is not None and any(lease.holder.startswith(f"{c.name}-") for c in self._halted()):
                        control.release(lease)

    def _halted(self):
        return [c for c in list(self.coordinators) if not c.runs]
