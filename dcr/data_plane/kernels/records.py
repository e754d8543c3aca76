"""A bucket's entries as a kernel takes them: one item a row, its entries where the item holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dcr.data_plane.item import Item, Operation
from dcr.data_plane.kernels.box_table import Ints

_SET, _XOR = Operation.SET, Operation.XOR  # finding an enumeration's member costs more than all else of a row


@dataclass(frozen=True)
class Records:
    """Items and the numbers of their tensors in a table.

    Attributes:
        tensors: of every item, the tensor's number in the table.
        items: with contiguous indices and values, on the host.
        numbers: shape [5, items]: tensor number, entries, action, addresses of the indices and of the values.
    """

    tensors: Sequence[int]
    items: Sequence[Item]
    numbers: Ints

    @classmethod
    def of(cls, tensors: Sequence[int], items: Sequence[Item]) -> "Records":
        """Records of items from anywhere; those that are not contiguous on the host are copied."""
        # One look at each item: a bucket may hold thousands, none of which is in the processor's cache by now.
        rows = [_row(item) for item in items]
        if None in rows:
            items = [item if row is not None else _moved(item) for item, row in zip(items, rows, strict=True)]
            rows = [_row(item) for item in items]
        numbers = np.empty((5, len(items)), np.int64)
        numbers[0] = tensors
        flat = chain.from_iterable(row for row in rows if row is not None)
        numbers[1:] = np.fromiter(flat, np.int64, 4 * len(items)).reshape(-1, 4).T
        return cls(tensors, items, numbers)


def _row(item: Item) -> tuple[int, int, int, int] | None:
    """Entries, action and addresses of an item; None if it must be copied first."""
    indices, values, operation = item.indices, item.values, item.operation
    if not (indices.is_cpu and values.is_cpu and indices.is_contiguous() and values.is_contiguous()):
        return None
    action = 0 if operation is _SET else 1 if operation is _XOR else 2
    return indices.numel(), action, indices.data_ptr(), values.data_ptr()


def _moved(item: Item) -> Item:
    indices, values = (t.cpu().contiguous() for t in (item.indices, item.values))
    return Item(item.spec, item.operation, indices, values)
