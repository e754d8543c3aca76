"""What vLLM's worker is given in a scenario: the product's extension, whose receiver's moments are watched.

vLLM imports this module by its name, in the process of the node, where its one worker is too.
"""

from collections.abc import Sequence
from typing import cast

from dcr.chaos.hooks import ReceiverWatch
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.placement import Placement
from dcr.protocol.step import Step
from dcr.rollout.vllm.extension import DcrWorkerExtension


class WatchedExtension(DcrWorkerExtension):
    """As ``DcrWorkerExtension``."""

    _dcr_watch: ReceiverWatch | None = None
    """Set before the engine is made; None in a twin."""

    @classmethod
    def dcr_watched_by(cls, watch: ReceiverWatch | None) -> None:
        """Have the worker that is made next watched."""
        cls._dcr_watch = watch

    def _dcr_observe(self, step: Step) -> None:
        super()._dcr_observe(step)
        if self._dcr_watch is not None:
            self._dcr_watch.observe(step)

    def _dcr_storage(self, specs: Sequence[TensorSpec]) -> Placement:
        made = super()._dcr_storage(specs)
        return made if self._dcr_watch is None else cast("Placement", self._dcr_watch.storage(made))
