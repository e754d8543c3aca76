"""Delta-compressed refit: policy updates from a training cluster to running rollout engines, bit for bit.

The front doors are ``dcr.TrainerRefit`` or ``dcr.MegatronRefit``, on every training rank, and ``dcr.RolloutNode``,
beside each engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcr.rollout.node import RolloutNode
    from dcr.trainer.megatron.refit import MegatronRefit
    from dcr.trainer.torch.pending_push import PendingPush, PushError, PushPendingError
    from dcr.trainer.torch.refit import TrainerRefit
    from dcr.trainer.torch.refit_report import RefitReport

__all__ = [
    "MegatronRefit",
    "PendingPush",
    "PushError",
    "PushPendingError",
    "RefitReport",
    "RolloutNode",
    "TrainerRefit",
]

_HOMES = {
    "MegatronRefit": "dcr.trainer.megatron.refit",
    "PendingPush": "dcr.trainer.torch.pending_push",
    "PushError": "dcr.trainer.torch.pending_push",
    "PushPendingError": "dcr.trainer.torch.pending_push",
    "RefitReport": "dcr.trainer.torch.refit_report",
    "RolloutNode": "dcr.rollout.node",
    "TrainerRefit": "dcr.trainer.torch.refit",
}


def __getattr__(name: str) -> Any:
    # Imported on demand: a rollout host needs nothing of the trainer, and the protocol needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'dcr' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name]), name)
