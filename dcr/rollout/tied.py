"""Which names that a loader skips are only other names of memory that it loads."""

from collections.abc import Iterable

import torch


def tied_names(model: torch.nn.Module, skipped: Iterable[str], loaded: Iterable[str]) -> dict[str, str]:
    """Names that the model has for a tensor which it also has under the name of a loaded one: that name.

    That is what a tied embedding is: ``lm_head.weight`` is the same tensor as ``model.embed_tokens.weight``, and the
    loader takes it from one of the two.  Equal values alone prove nothing, nor does memory that overlaps in part.

    Args:
        model: the runtime's model on this rank.
        skipped: canonical tensors of which its loader writes nothing.
        loaded: canonical tensors that its loader writes.
    """
    resident = dict(model.named_parameters(remove_duplicate=False))
    places = {_place(tensor): name for name in loaded if (tensor := resident.get(name)) is not None and tensor.numel()}
    found = {n: places.get(_place(tensor)) for n in skipped if (tensor := resident.get(n)) is not None}
    return {n: partner for n, partner in sorted(found.items()) if partner is not None}


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
