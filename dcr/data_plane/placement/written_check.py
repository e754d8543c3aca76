"""Was every entry written?  What storage must hold afterwards is worked out before, by the torch reference."""

from dataclasses import dataclass

import torch

from dcr.data_plane.encode import apply_operation
from dcr.data_plane.item import Operation
from dcr.data_plane.kernels.box_table import BoxTable
from dcr.data_plane.kernels.records import Records
from dcr.data_plane.kernels.reference import ReferenceKernels
from dcr.data_plane.resident import PartialWriteError, Residents


@dataclass(frozen=True)
class _Expected:
    """Of one item in one box: the memory, the positions in it, and the bits that must be there."""

    name: str
    memory: torch.Tensor
    at: torch.Tensor
    bits: torch.Tensor


class WrittenCheck:
    """Every place of every entry, before a kernel writes it and after, read by plain torch (DESIGN D8, "if asked").

    Counting what a kernel says that it wrote cannot tell how many entries of a shard lie on this rank, nor that what
    was counted was written.  This can, for about 60 ns and 18 bytes a place.

    Args:
        residents: the storage.
        table: the boxes.
        records: what is to be written, checked; constants of the loader are in place already.
    """

    def __init__(self, residents: Residents, table: BoxTable, records: Records) -> None:
        reference = ReferenceKernels(residents.spans)
        self._expected: list[_Expected] = []
        for tensor, item in zip(records.tensors, records.items, strict=True):
            for placed in table.tensors[tensor].boxes:
                memory, at, values = reference.located(placed, item)
                name = item.spec.name
                bits = apply_operation(memory[at], item.operation, values)
                self._expected.append(_Expected(name, memory, at, bits))
                if placed.widened:
                    low = memory[at - 1]
                    clear = item.operation is Operation.SET
                    self._expected.append(_Expected(name, memory, at - 1, torch.zeros_like(low) if clear else low))

    def compare(self) -> None:
        """PartialWriteError, naming the tensor, if a place does not hold what it must."""
        for one in self._expected:
            wrong = int((one.memory[one.at] != one.bits).sum())
            if wrong:
                raise PartialWriteError(
                    f"item {one.name}: {wrong} of {one.at.numel()} places do not hold what they must after the write; "
                    "resident storage is torn, fail the attempt.  Report this with the processor's name"
                )
