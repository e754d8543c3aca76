"""The CPU worker extension, which registers the backend ``dcr`` too: an older install does not know the entry point."""

from dcr.rollout.vllm.cpu_extension import DcrCpuWorkerExtension
from dcr.rollout.vllm.register import register

register()


class DoorExtension(DcrCpuWorkerExtension):
    """With a way to make one rank alone fail at whatever comes, and to mend it."""

    def door_break(self, rank):
        def fail(request):
            raise RuntimeError("broken by the test")

        if self.rank == rank:
            self.weight_transfer_engine._take = fail

    def door_mend(self, rank):
        if self.rank == rank:
            del self.weight_transfer_engine._take
