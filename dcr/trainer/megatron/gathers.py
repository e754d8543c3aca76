"""What Megatron's distributed optimizer leaves to the next forward pass, finished before weights are read."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def finish_gathers(model: Sequence[nn.Module]) -> None:
    """Have every rank hold whole parameters after an optimizer step; collective.

    With ``overlap_param_gather`` a step renews each rank's share alone, and the next forward pass gathers the others'
    shares: until then replicas are mixtures of two versions.  Megatron does the same before it saves a checkpoint.
    Gathering again changes nothing.

    Args:
        model: chunks, as they were before Megatron's ``DistributedDataParallel`` was put around them or after.
    """
    for wrapper in _wrappers(model):
        config = wrapper.ddp_config
        if config.overlap_param_gather and not config.use_megatron_fsdp:
            with torch.no_grad():
                wrapper.start_param_sync(force_sync=True)


def _wrappers(model: Sequence[nn.Module]) -> Iterator[Any]:
    """What gathers: around a chunk, inside it, or, where only a wrapped module is known, by its hooks."""
    seen: set[int] = set()
    for chunk in model:
        for module in chunk.modules():
            for found in (module, *(one for hook in module._forward_pre_hooks.values() for one in _held(hook))):  # noqa: SLF001 - torch has no public way
                if id(found) not in seen and isinstance(found, nn.Module) and hasattr(found, "ddp_config"):
                    seen.add(id(found))
                    yield found


def _held(hook: Callable[..., object]) -> Iterator[object]:
    yield getattr(hook, "__self__", None)
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
