"""A model's state dict as unique source tensors, and the save path that turns it into the checkpoint."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dcr.data_plane.bits import dtype_name
from dcr.protocol.errors import RefusedError

SavePath = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""From full (unsharded) tensors by state-dict name to the checkpoint's canonical tensors."""


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of the state dict, under all the names that share it (tied weights).

    Attributes:
        names: state-dict names, in the state dict's order.
        tensor: the live parameter or buffer, a plain tensor or a DTensor.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def layout(self) -> str:
        """Everything but the values: names, shapes, dtype and placement; equal layouts have equal projections."""
        placements = self.tensor.placements if isinstance(self.tensor, DTensor) else "not distributed"
        return (
            f"{' = '.join(self.names)}: {self.tensor.dtype} {tuple(self.tensor.shape)}, placed {placements}, "
            f"local shape {tuple(self.local().shape)}"
        )

    @property
    def distributed(self) -> bool:
        """Whether this rank's shard may be less than the whole."""
        return isinstance(self.tensor, DTensor)

    def local(self) -> torch.Tensor:
        """This rank's shard of the live tensor: no copy, no gradient."""
        tensor = self.tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def full(self) -> torch.Tensor:
        """A copy of the whole tensor in host memory; collective over the tensor's mesh."""
        tensor = self.tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """What the trainer's gather makes of shards with other contents; collective over the tensor's mesh.

        Args:
            local: shaped as this rank's shard, of any dtype.

        Returns:
            The full tensor, in host memory.
        """
        if not isinstance(self.tensor, DTensor):
            return local.cpu()
        whole = DTensor.from_local(
            local.to(self.local().device),
            self.tensor.device_mesh,
            self.tensor.placements,
            run_check=False,
            shape=self.tensor.shape,
            stride=self.tensor.stride(),
        )
        return whole.full_tensor().cpu()


def sources_of(model: nn.Module) -> tuple[SourceTensor, ...]:
    """The model's parameters and persistent buffers, tied names together, in the state dict's order; not collective.

    Raises:
        RefusedError: on extra state that is no tensor, a dtype that does not travel, a meta tensor, a partial sum, or
            a tensor that is not on this rank.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise RefusedError(f"state {name}: it is a {type(value).__name__}, only tensors can be refitted")
        dtype_name(value.dtype)
        if value.is_meta:
            raise RefusedError(f"state {name}: it is on the meta device; materialise the model first")
        if isinstance(value, DTensor):
            if any(placement.is_partial() for placement in value.placements):
                raise RefusedError(f"state {name}: it is a partial sum {value.placements}, reduce it first")
            if value.device_mesh.get_coordinate() is None:
                raise RefusedError(
                    f"state {name}: this rank is outside its mesh; every rank must hold a part of every tensor"
                )
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    return tuple(SourceTensor(tuple(names[key]), tensors[key]) for key in names)


def own_save_path(model: nn.Module) -> SavePath:
    """The save path a model comes with: what ``save_pretrained`` runs for transformers models, else identity."""
    transformers = sys.modules.get("transformers")  # a transformers model cannot exist without it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return dict
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - optional dependency
    from transformers.modeling_utils import remove_tied_weights_from_state_dict  # noqa: PLC0415 - optional dependency

    ignored = frozenset(model._keys_to_ignore_on_save or ())  # noqa: SLF001 - save_pretrained reads it too

    def save_path(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: tensor for name, tensor in state.items() if name not in ignored}
        saved: dict[str, torch.Tensor] = revert_weight_conversion(
            model, remove_tied_weights_from_state_dict(kept, model)
        )
        return saved

    return save_path


def run_save_path(
    save_path: SavePath, sources: Sequence[SourceTensor], tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The canonical tensors of some sources' full tensors; tied names get one tensor object.

    Raises:
        RefusedError: if the save path raises, or returns anything but tensors by name.
    """
    state = {name: tensor for source, tensor in zip(sources, tensors, strict=True) for name in source.names}
    try:
        with torch.no_grad():
            saved = save_path(state)
    except Exception as error:
        some = ", ".join(list(state)[:3])
        raise RefusedError(f"save path failed on {len(state)} tensors ({some}, ...): {error!r}") from error
    if not isinstance(saved, dict):
        raise RefusedError(f"save path returned a {type(saved).__name__}, not tensors by name")
    for name, tensor in saved.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise RefusedError(f"save path returned {name!r}: {type(tensor).__name__}, not tensors by name")
    return saved
