"""A trainer without a coordinator of its own, and coordinators that stand by in processes of their own."""

from tests.faults.coordinator_process import CoordinatorProcess
from tests.faults.thread_fleet import Fleet

LEASE_S = 1.0


class FailoverFleet(Fleet):
    """A trainer without a coordinator of its own, whose first leader ends at a point."""

    def __init__(self, folder, settings=None, *, control=None, point=None):
        self.coordinators = []
        self._point = point
        super().__init__(
            folder,
            {"coordinator": "elsewhere", "leader_lease_s": LEASE_S, "rejoin_timeout_s": 5.0, **(settings or {})},
            control=control,
        )

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
        for c in self.coordinators:
            c.close()
