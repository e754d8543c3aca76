"""Where a write lands: a strided region of memory, and the exact question whether two regions share a byte."""

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Region:
    """The memory behind one strided tensor.

    Attributes:
        address: address of the first element, in bytes.
        size: shape.
        stride: strides, in elements.
        dtype: the dtype the memory is seen as.
    """

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Region":
        """The region of a tensor that holds memory."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def end(self) -> int:
        """Address of the byte after the last element."""
        last = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.address + (last + 1) * self.dtype.itemsize

    @property
    def hits_itself(self) -> bool:
        """Whether two elements may share memory (broadcast or sliding views); never False by mistake."""
        reach = 0
        for stride, n in sorted((s, n) for n, s in zip(self.size, self.stride, strict=True) if n > 1):
            if stride <= reach:
                return True
            reach += (n - 1) * stride
        return False

    def on(self, flat: np.ndarray, start: int, unit: int) -> np.ndarray:
        """The region's part of ``flat``, which has one element for every ``unit`` bytes from ``start``.

        ``unit`` divides the element size, every distance between elements, and ``address - start``.
        """
        units = self.dtype.itemsize // unit
        strides = tuple(s * units * flat.itemsize for s in self.stride)
        return np.lib.stride_tricks.as_strided(
            flat[(self.address - start) // unit :], (*self.size, units), (*strides, flat.itemsize)
        )


def share_memory(a: Region, b: Region) -> bool:
    """Whether any byte belongs to both regions; exact.

    Only regions whose address ranges meet are looked at element by element, in a temporary map of one byte for each
    element of the two ranges together.
    """
    if a.address >= b.end or b.address >= a.end:
        return False
    start, end = min(a.address, b.address), max(a.end, b.end)
    unit = math.gcd(a.dtype.itemsize, b.dtype.itemsize, a.address - start, b.address - start)
    seen = np.zeros((end - start) // unit, bool)
    a.on(seen, start, unit)[...] = True
    return bool(b.on(seen, start, unit).any())
