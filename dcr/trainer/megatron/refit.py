"""The front door of Megatron trainers: every rank pushes its weights to the rollout engines."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from dcr.runtime.observer import Observer, log_step
from dcr.runtime.progress_log import Steps
from dcr.runtime.settings import Settings
from dcr.trainer.megatron.conversion import BridgeConversion, BuildTasks
from dcr.trainer.megatron.gathers import finish_gathers
from dcr.trainer.megatron.inspection import Inspection
from dcr.trainer.megatron.lockstep import PEER_GRACE_S
from dcr.trainer.megatron.source import MegatronSource
from dcr.trainer.torch.ranks import Ranks
from dcr.trainer.torch.refit import Refit

_log = logging.getLogger("dcr.trainer")


class MegatronRefit(Refit):
    """One on every training rank, made after the model; the construction, ``push`` and ``begin_push`` are collective.

    ::

        refit = MegatronRefit(model, bridge, control="sqlite:///run/record.db", delivery="file:///run/payloads")
        report = refit.push()     # after optimizer.step(), on every rank; returns once committed and folded

    A push first gathers the parameters that Megatron's distributed optimizer would gather in the next forward pass, and
    converts residual tensors that the change reaches, on all ranks together, once for all attempts.  Both may raise, on
    every rank alike and before anything was sent: ``RefusedError`` (``MegatronSource.prepare`` says when), or
    ``OutOfStepError``, if a conversion failed on one rank inside its collectives: the trainer has to be started again.

    Args:
        model: this rank's model chunks.
        bridge: the ``AutoBridge`` that exports them.
        control: address of the control plane.
        delivery: address of the delivery store.
        record_id: the commit record of this trainer; unique among trainers that share a control plane.
        build_tasks: builds the conversion tasks anew where they are not the Bridge's own; see ``BridgeConversion``.
        process_group: all ranks that hold the model; the default group, or one rank alone.
        check_replicas: compare the bits of replicas on different ranks by digests, once.
        check_replicas_always: compare them in every push too, before anything is sent; costs a digest of what several
            ranks hold.
        peer_grace_s: how long a rank may still be inside a conversion task that another rank has failed in.
        cache_folder: where what was learned of the conversion is kept, so that the next start learns less; one for all
            ranks or one each.  None keeps nothing.
        settings: bounds, as ``Settings`` or as a mapping of some of its fields.
        observe: called with every protocol step of this rank's roles.

    Attributes:
        source: this rank's share; says what is residual, and how bytes are balanced.
    """

    def __init__(
        self,
        model: Sequence[nn.Module],
        bridge: Any,
        *,
        control: str,
        delivery: str,
        record_id: str = "default",
        build_tasks: BuildTasks | None = None,
        process_group: dist.ProcessGroup | None = None,
        check_replicas: bool = True,
        check_replicas_always: bool = False,
        peer_grace_s: float = PEER_GRACE_S,
        cache_folder: Path | str | None = None,
        settings: Settings | dict[str, object] | None = None,
        observe: Observer = log_step,
    ) -> None:
        ranks = Ranks(process_group)
        bounds = ranks.together(lambda: settings if isinstance(settings, Settings) else Settings.of(settings or {}))
        ranks.refuse_differing(record_id=record_id)
        self._model = model
        with Steps(_log, f"refit of record {record_id!r}") as step:
            finish_gathers(self._model)
            self.source = MegatronSource(
                BridgeConversion(bridge, model, build_tasks),
                process_group=process_group,
                chunk_elements=bounds.chunk_elements,
                check_replicas=check_replicas,
                check_replicas_always=check_replicas_always,
                peer_grace_s=peer_grace_s,
                cache_folder=None if cache_folder is None else Path(cache_folder),
                step=step,
            )
            super().__init__(
                self.source,
                ranks,
                control=control,
                delivery=delivery,
                record_id=record_id,
                settings=bounds,
                observe=observe,
                step=step,
            )

    def _prepare(self) -> None:
        """Have every rank hold whole parameters, and convert what is residual; collective."""
        finish_gathers(self._model)
        self.source.prepare()

    def inspect(self) -> Inspection:
        """What is projected directly, what is not and why, who owns it and what it costs; collective.

        ``print(refit.inspect())`` shows a table; it is the same on every rank.
        """
        return self.source.inspect()
