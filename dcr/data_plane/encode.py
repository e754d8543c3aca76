"""From a change to an item, and from an item's values to new bits: the meaning of the operations (paper section 5)."""

import torch

from dcr.data_plane.item import Change, Item, Operation
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Kind


def to_item(change: Change, kind: Kind, preserving: bool, relative: Operation = Operation.ADD) -> Item:
    """Choose the operation of a change.

    Args:
        change: what detection found.
        kind: of the attempt; only a relative one may depend on the resident bits (DESIGN D4).
        preserving: whether projection and loader preserve stored bits and nothing else writes the same bytes.
        relative: the operation to use where both allow it.

    Raises:
        RefusedError: a relative operation is due, but the change has no old bits of the same dtype and shape.
    """
    if kind is not Kind.RELATIVE or not preserving or relative is Operation.SET:
        return Item(change.spec, Operation.SET, change.indices, change.new)
    old, new = change.old, change.new
    if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
        raise RefusedError(f"change of {change.spec.name}: {relative} needs the old bits at every changed index")
    values = new ^ old if relative is Operation.XOR else new - old
    return Item(change.spec, relative, change.indices, values)


def apply_operation(resident_bits: torch.Tensor, operation: Operation, values: torch.Tensor) -> torch.Tensor:
    """The new bits of some elements; what every faster way to apply entries has to equal.

    Args:
        resident_bits: stored bits, an integer tensor of 1, 2, 4 or 8 bytes an element.
        operation: how the values act.
        values: an item's values for the same elements, same shape and dtype.

    Returns:
        A new tensor of the same shape and dtype; integer arithmetic wraps around, which is modulo 2 to the width.

    Raises:
        RefusedError: shape or dtype differ.
    """
    if (resident_bits.dtype, resident_bits.shape) != (values.dtype, values.shape):
        raise RefusedError(
            f"{operation} of {values.dtype} {tuple(values.shape)} to resident bits of "
            f"{resident_bits.dtype} {tuple(resident_bits.shape)}"
        )
    if operation is Operation.SET:
        return values.clone()
    return resident_bits ^ values if operation is Operation.XOR else resident_bits + values
