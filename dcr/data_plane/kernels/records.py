"""A bucket's entries as a kernel takes them: one item a row, its entries where the item holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcr.data_plane.item import Item, Operation
from dcr.data_plane.kernels.box_table import Ints


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
        if not all(item.indices.is_contiguous() and item.values.is_contiguous() for item in items) or not all(
            item.indices.is_cpu and item.values.is_cpu for item in items
        ):
            items = [_moved(item) for item in items]
        return cls(tensors, items)

    @cached_property
    def numbers(self) -> Ints:
        """Shape [5, items]: tensor number, entries, action, addresses of the indices and of the values."""
        # A column at a time: this is most of what an item costs, and a bucket may hold thousands.
        columns = (
            self.tensors,
            [item.indices.numel() for item in self.items],
            [_action(item.operation) for item in self.items],
            [item.indices.data_ptr() for item in self.items],
            [item.values.data_ptr() for item in self.items],
        )
        return np.array([np.array(column, np.int64) for column in columns])


def _action(operation: Operation) -> int:
    # Not looked up: the hash of an enumeration's member is a Python function.
    return 0 if operation is Operation.SET else 1 if operation is Operation.XOR else 2


def _moved(item: Item) -> Item:
    indices, values = (t.cpu().contiguous() for t in (item.indices, item.values))
    return Item(item.spec, item.operation, indices, values)
