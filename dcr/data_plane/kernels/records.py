"""A bucket's entries as a kernel takes them: one item a row, its entries where the item holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dcr.data_plane.item import Item, Operation
from dcr.data_plane.kernels.box_table import Ints

ACTIONS = {Operation.SET: 0, Operation.XOR: 1, Operation.ADD: 2}
"""Operations as numbers."""


@dataclass(frozen=True)
class Records:
    """Items and the numbers of their tensors in a table.

    Attributes:
        tensors: of every item, the tensor's number in the table.
        items: with contiguous indices and values, on the host.
    """

    tensors: Sequence[int]
    items: Sequence[Item]

    @classmethod
    def of(cls, tensors: Sequence[int], items: Sequence[Item]) -> "Records":
        """Records of items from anywhere; those that are not contiguous on the host are copied."""
        return cls(tensors, [item if _ready(item) else _moved(item) for item in items])

    @cached_property
    def numbers(self) -> Ints:
        """Shape [5, items]: tensor number, entries, action, addresses of the indices and of the values."""
        rows = [
            (tensor, item.indices.numel(), ACTIONS[item.operation], item.indices.data_ptr(), item.values.data_ptr())
            for tensor, item in zip(self.tensors, self.items, strict=True)
        ]
        return np.array(rows, np.int64).reshape(-1, 5).T.copy()


def _ready(item: Item) -> bool:
    i, v = item.indices, item.values
    return i.is_contiguous() and v.is_contiguous() and i.is_cpu and v.is_cpu


def _moved(item: Item) -> Item:
    def on_host(t: torch.Tensor) -> torch.Tensor:
        return t.cpu().contiguous()

    return Item(item.spec, item.operation, on_host(item.indices), on_host(item.values))
