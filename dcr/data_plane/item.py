"""The currency of the data plane: canonical tensors, and one owner's changed entries of one of them."""

import enum
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from dcr.data_plane.bits import bits_dtype
from dcr.protocol.errors import RefusedError


class Operation(enum.StrEnum):
    """How an entry acts on the resident bits (DESIGN section 5)."""

    SET = "set"
    """Replace the stored bits."""
    XOR = "xor"
    """Exclusive-or with the stored bits."""
    ADD = "add"
    """Add to the stored bits as an unsigned integer, modulo 2 to the width."""


@dataclass(frozen=True)
class TensorSpec:
    """A canonical tensor: name, shape and dtype as the checkpoint has them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Item:
    """One owner's entries of one canonical tensor (paper section 6.1).

    Attributes:
        spec: the canonical tensor.
        operation: how every entry of the item acts.
        indices: int64, shape [n], strictly increasing flat indices into the canonical tensor.
        values: shape [n], dtype ``bits_dtype(spec.dtype)`` (uint8, int16, int32 or int64): stored bit patterns for
            ``set``; masks for ``xor``; differences of bit patterns modulo 2**width for ``add``.
    """

    spec: TensorSpec
    operation: Operation
    indices: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.operation, Operation):
            raise RefusedError(f"item {self.spec.name}: {self.operation!r} is no Operation")
        if self.indices.dtype != torch.int64 or self.indices.dim() != 1:
            raise RefusedError(f"item {self.spec.name}: indices must be one-dimensional int64")
        if self.values.dtype != bits_dtype(self.spec.dtype) or self.values.shape != self.indices.shape:
            raise RefusedError(
                f"item {self.spec.name}: values must be {bits_dtype(self.spec.dtype)} of shape "
                f"{tuple(self.indices.shape)}, not {self.values.dtype} of {tuple(self.values.shape)}"
            )

    @property
    def entries(self) -> int:
        """Number of entries."""
        return self.indices.numel()

    def check_indices(self) -> None:
        """Raise RefusedError unless the indices are strictly increasing and inside the tensor."""
        i = self.indices
        if i.numel() == 0:
            return
        if int(i[0]) < 0 or int(i[-1]) >= self.spec.numel or bool((i[1:] <= i[:-1]).any()):
            raise RefusedError(
                f"item {self.spec.name}: indices must be strictly increasing within [0, {self.spec.numel})"
            )


@dataclass(frozen=True)
class Change:
    """What detection found in one owner's part of one canonical tensor, before an operation is chosen.

    Attributes:
        spec: the canonical tensor.
        indices: int64, shape [n], strictly increasing flat indices into the canonical tensor.
        old: stored bits of the committed baseline at the indices, or None for dense and restore kinds.
        new: stored bits of the target at the indices, shape [n], dtype ``bits_dtype(spec.dtype)``.
    """

    spec: TensorSpec
    indices: torch.Tensor
    old: torch.Tensor | None
    new: torch.Tensor
