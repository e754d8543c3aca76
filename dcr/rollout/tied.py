"""Which names that a loader skips are only other names of memory that it loads."""

from collections.abc import Iterable

import torch


def tied_names(model: torch.nn.Module, skipped: Iterable[str], loaded: Iterable[str]) -> list[str]:
    """Names that the model has for a tensor which it also has under the name of a loaded one.

    That is what a tied embedding is: ``lm_head.weight`` is the same tensor as ``model.embed_tokens.weight``, and the
    loader takes it from one of the two.  Equal values alone prove nothing, nor does memory that overlaps in part.

    Args:
        model: the runtime's model on this rank.
        skipped: canonical tensors of which its loader writes nothing.
        loaded: canonical tensors that its loader writes.
    """
    resident = dict(model.named_parameters(remove_duplicate=False))
    places = {_place(tensor) for name in loaded if (tensor := resident.get(name)) is not None and tensor.numel()}
    return sorted(n for n in skipped if (tensor := resident.get(n)) is not None and _place(tensor) in places)


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
