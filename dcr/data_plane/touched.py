"""Which elements the payloads of one epoch change: owners never overlap, for the order would decide (DESIGN D7)."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcr.data_plane.item import Item

_RUN_BYTES = 256
"""What a run takes beside its offsets, about; the first one of a tensor does not count."""


@dataclass(frozen=True)
class _Run:
    """Elements of one item: all between two flat indices, or those listed."""

    low: int
    high: int
    offsets: npt.NDArray[np.uint32] | npt.NDArray[np.int64] | None
    """From ``low``, in order; None if all are in it."""

    @classmethod
    def of(cls, indices: npt.NDArray[np.int64]) -> "_Run":
        low, high = int(indices[0]), int(indices[-1])
        if high - low + 1 == indices.size:
            return cls(low, high, None)
        offsets = indices - low
        return cls(low, high, offsets.astype(np.uint32) if high - low < 1 << 32 else offsets)

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        if self.offsets is None:
            return np.arange(self.low, self.high + 1)
        return self.offsets.astype(np.int64) + self.low


@dataclass
class _Tensor:
    """What was changed of one canonical tensor."""

    numel: int
    runs: list[_Run] = field(default_factory=list)
    """In order, while their ranges do not meet, and together they are smaller than a map."""
    nbytes: int = 0
    bitmap: npt.NDArray[np.uint64] | None = None

    def add(self, indices: npt.NDArray[np.int64]) -> bool:
        """Note elements; False if one of them was noted before."""
        if self.bitmap is None:
            run = _Run.of(indices)
            at = bisect.bisect(self.runs, run.low, key=_low)  # a payload may have 65,536 items of one tensor
            apart = (at == 0 or self.runs[at - 1].high < run.low) and (
                at == len(self.runs) or run.high < self.runs[at].low
            )
            listed = self.nbytes + (0 if run.offsets is None else run.offsets.nbytes)
            if apart and listed + _RUN_BYTES * len(self.runs) <= self.numel // 8:
                self.runs.insert(at, run)
                self.nbytes = listed
                return True
            self.bitmap = np.zeros(-(-self.numel // 64), np.uint64)
            for other in self.runs:
                _mark(self.bitmap, other.indices)
            self.runs, self.nbytes = [], self.bitmap.nbytes
        return _mark(self.bitmap, indices)


def _low(run: _Run) -> int:
    return run.low


def _mark(bitmap: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> bool:
    # Imported when it is needed: vLLM on a CPU cannot start in a process that has imported llvmlite.
    from dcr.data_plane.kernels import compiled  # noqa: PLC0415

    return bool(compiled.mark(bitmap, np.ascontiguousarray(indices)))


class TouchedElements:
    """The elements that the payloads of one epoch change, so that no element is changed by two of them.

    One payload may not name an element twice, and its decoder sees to that; two payloads, of two owners or of one, must
    not either, for ``add`` and ``xor`` would both take effect, and of two ``set`` the later one.

    Holds four bytes an entry (eight in a tensor that spans more than 2**32 elements), or one bit an element of those
    tensors where that is less, or where the ranges of two items meet; nothing for a run of elements without a gap.
    Where one owner cuts a large tensor into several payloads ranges do not meet, and no entry is looked at twice.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, _Tensor] = {}

    def add(self, items: Sequence[Item]) -> str:
        """Note the elements of one payload.

        Args:
            items: on the host, each in increasing order within its tensor.

        Returns:
            The name of a tensor of which an element was noted before; then only a part of the items is noted.  Empty
            if there is none.
        """
        for item in items:
            if not item.entries:
                continue
            if not self._tensors.setdefault(item.spec.name, _Tensor(item.spec.numel)).add(item.indices.numpy()):
                return item.spec.name
        return ""

    @property
    def nbytes(self) -> int:
        """Bytes held for entries."""
        return sum(tensor.nbytes for tensor in self._tensors.values())
