"""What a vLLM worker process is given: the rank host over its own model and loader, and what proofs ask of it.

Used through ``vllm.LLM(worker_extension_cls="dcr.rollout.vllm.extension.DcrWorkerExtension")``; vLLM adds the class to
the bases of its worker, and each ``dcr_*`` method is called through ``collective_rpc`` in the worker process.

``vllm.LLM(additional_config={"dcr_verify": "dense"})`` has every application done again through vLLM's own loader and
compared, and ``"written"`` has what was written read back; see :class:`dcr.data_plane.placement.placement.Placement`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.conversion import Conversion
from dcr.data_plane.placement.placement import Placement
from dcr.data_plane.resident import resident_digests
from dcr.protocol.errors import RefusedError
from dcr.protocol.step import Step
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.tied import tied_names
from dcr.rollout.vllm import post_load
from dcr.rollout.vllm.conversions import find_conversions
from dcr.rollout.vllm.layout import LayoutReport, check_converted, examine_layout
from dcr.runtime.observer import log_step
from dcr.runtime.rank_host import NOTHING_KNOWN, RankHost
from dcr.runtime.rank_messages import Answer, encode

_log = logging.getLogger("dcr.rank")

post_load.watch()


class DcrWorkerExtension:
    """Mixed into vLLM's worker; every name starts with ``dcr`` so that none hides one of the worker's."""

    model_runner: Any
    """The worker's own."""

    _dcr_host: RankHost | None = None
    _dcr_layout: LayoutReport | None = None
    _dcr_conversions: tuple[Conversion, ...] = ()

    def dcr_call(self, number: int, request: bytes) -> tuple[int, bytes]:
        """Forward one request of the node agent to this rank's host, which is built at the first.

        An engine that holds its weights in another layout than its loader's refuses the agent's first request, by the
        text of a RepackedError, before anything is written.

        Nothing is raised: of a call that fails on one rank vLLM keeps the other ranks' answers, and gives them out as
        answers to the next call.

        Args:
            number: of the call, which tells its answer from that of another one.
            request: see ``dcr.runtime.rank_messages``.

        Returns:
            The number, and the answer.
        """
        try:
            if self._dcr_host is None:
                self._dcr_host = RankHost(
                    self._dcr_storage,
                    state_incarnation=time.time_ns(),
                    observe=self._dcr_observe,
                    tied=lambda skipped, loaded: tied_names(self.model_runner.get_model(), skipped, loaded),
                )
            with torch.no_grad():
                return number, self._dcr_host.call(request)
        except (Exception, SystemExit) as e:  # noqa: BLE001  whatever it is, the engine is lost with it
            _log.exception("call of the node agent")
            return number, encode(Answer((), NOTHING_KNOWN, broken=f"{type(e).__name__}: {e}"))

    def _dcr_observe(self, step: Step) -> None:
        """Called with every protocol step of this rank, in its process."""
        log_step(step)

    def dcr_resident_digests(self) -> dict[str, str]:
        """Digest of the stored bits of every parameter and buffer, by name."""
        return resident_digests(self.model_runner.get_model())

    def dcr_layout_report(self) -> dict[str, Any]:
        """The fields of ``LayoutReport``; examined once, before the first refit, and remembered."""
        return asdict(self._dcr_examine())

    def _dcr_storage(self, specs: Sequence[TensorSpec]) -> Placement:
        import vllm  # noqa: PLC0415  it is loaded in a worker, and slow to import elsewhere

        self._dcr_examine().raise_if_repacked()
        model = self.model_runner.get_model()
        config = self.model_runner.vllm_config
        parallel = config.parallel_config
        settings = {
            "vllm": vllm.__version__,
            "load": repr(config.load_config),
            "quantization": str(config.model_config.quantization),
            "parallel": f"rank {parallel.rank} of {parallel.world_size}, expert {parallel.enable_expert_parallel}",
        }
        more = config.additional_config
        verify = more.get("dcr_verify", "") if isinstance(more, dict) else ""
        sharded = parallel.world_size > 1
        conversions = self._dcr_conversions
        placement = Placement(
            model,
            model.load_weights,
            specs,
            sharded=sharded,
            verify=verify,
            settings=settings,
            conversions=conversions,
        )
        if conversions:
            placement.prewarm()
            check_converted(placement, read_checkpoint(self.model_runner.model_config.model))
        return placement

    def _dcr_examine(self) -> LayoutReport:
        # All writes go through the storage that _dcr_storage makes, so the model was not refitted at the first call.
        if self._dcr_layout is None:
            model = self.model_runner.get_model()
            fed = read_checkpoint(self.model_runner.model_config.model)
            changes = post_load.changes_of(model)
            if changes is None and (why := post_load.unwatched()):
                raise RefusedError(f"what vLLM does to weights after loading cannot be watched: {why}")
            if changes is None:
                _log.warning(
                    "the model was loaded before dcr was imported: what vLLM did to weights after loading was not "
                    "watched, and is found only where the loader's own layout shows it; start the engine with "
                    "worker_extension_cls to have it watched"
                )
            self._dcr_conversions, unlearned = find_conversions(model, changes or ())
            self._dcr_layout = examine_layout(
                model,
                model.load_weights,
                fed,
                changes=changes or (),
                conversions=self._dcr_conversions,
                unlearned=unlearned,
            )
        return self._dcr_layout
