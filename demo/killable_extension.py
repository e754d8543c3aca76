"""A worker extension whose last rank kills itself in the middle of a refit, as a crash would."""

import os
import signal

from dcr.protocol.step import Step
from dcr.rollout.vllm.cpu_extension import DcrCpuWorkerExtension
from demo.kill import KILL_AT_VARIABLE

_PAYLOADS = 2
"""How many payloads are in place when it dies."""


class KillableExtension(DcrCpuWorkerExtension):
    """Counts the protocol steps of its rank: commits learned, and payloads begun since."""

    _dcr_version = 0
    _dcr_begun = 0

    def _dcr_observe(self, step: Step) -> None:
        super()._dcr_observe(step)
        if step.action == "LearnCommit":
            self._dcr_version, self._dcr_begun = self._dcr_version + 1, 0
        if step.action != "BeginWrite" or os.environ.get(KILL_AT_VARIABLE) != str(self._dcr_version + 1):
            return
        self._dcr_begun += 1
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]  # the worker's own
        if self.rank == parallel.world_size - 1 and self._dcr_begun > _PAYLOADS:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
