"""The CPU worker extension, which registers the backend ``dcr`` too: an older install does not know the entry point."""

from dcr.rollout.vllm.cpu_extension import DcrCpuWorkerExtension
from dcr.rollout.vllm.register import register

register()


class DoorExtension(DcrCpuWorkerExtension):
    """As it is."""
