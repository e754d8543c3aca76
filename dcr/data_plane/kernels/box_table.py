"""Boxes as flat arrays: built once, read by every kernel call, so that no call costs Python for a box."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from dcr.data_plane.index_map import Box
from dcr.protocol.errors import RefusedError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlacedBox:
    """Some elements of one canonical tensor, and where they lie in resident memory.

    Attributes:
        box: flat index into the canonical tensor -> address, in bytes, of the resident element's first byte.
        widened: a bfloat16 element lies in a float32 one: its bits are the high half, and the low half is zero.
    """

    box: Box
    widened: bool = False

    def span(self, width: int) -> tuple[int, int]:
        """Address of the first byte, and of the byte after the last one, that the elements take."""
        low, high = self.box.target_bounds
        return low, high + (2 * width if self.widened else width)


@dataclass(frozen=True)
class PlacedTensor:
    """Where a rank holds a canonical tensor.

    Attributes:
        numel: elements of the whole canonical tensor.
        width: bytes a canonical element.
        boxes: an element lies in as many boxes as it has places.
    """

    numel: int
    width: int
    boxes: tuple[PlacedBox, ...]

    @cached_property
    def places(self) -> int:
        """How many places every element has, if all have equally many; else 0, as for a shard."""
        if all(placed.box.numel == self.numel for placed in self.boxes):
            return len(self.boxes)
        if sum(placed.box.numel for placed in self.boxes) < self.numel:
            return 0
        count = torch.zeros(self.numel, dtype=torch.int32)
        for placed in self.boxes:
            count[placed.box.expand()[0]] += 1
        return int(count[0]) if bool((count == count[0]).all()) else 0

    def absent(self, indices: torch.Tensor) -> int:
        """How many of some indices, int64 of shape [n] and in increasing order, lie in no box."""
        here = torch.zeros_like(indices, dtype=torch.bool)
        for placed in self.boxes:
            low, high = placed.box.source_bounds
            near = ((indices >= low) & (indices <= high)).nonzero().flatten()
            inside = placed.box.decode(indices[near])[1]
            here[near if inside is None else near[inside]] = True
        return int((~here).sum())


@dataclass(frozen=True)
class BoxTable:
    """The boxes of many tensors, tensor after tensor.  All arrays are int64 unless stated.

    Attributes:
        tensors: what the table was built from; a tensor's number is its position.
        first: shape [tensors + 1]; the boxes of tensor t are ``first[t]`` up to ``first[t + 1]``.
        numel: shape [tensors].
        width: shape [tensors], bytes.
        places: shape [tensors]; see :attr:`PlacedTensor.places`.
        address: shape [boxes], bytes; of the element at the lowest source index.
        low: shape [boxes], lowest source index.
        high: shape [boxes], highest source index.
        numbers: shape [boxes, 2]: dimensions, and 1 if widened.
        dims: shape [boxes, 3, dimensions_max]: sizes, source strides in elements, target strides in canonical widths.
    """

    tensors: tuple[PlacedTensor, ...]
    first: Ints
    numel: Ints
    width: Ints
    places: Ints
    address: Ints
    low: Ints
    high: Ints
    numbers: Ints
    dims: Ints

    @classmethod
    def of(cls, tensors: Sequence[PlacedTensor]) -> "BoxTable":
        """Lay out boxes; RefusedError for strides that are no multiple of the width, or a host that is big-endian."""
        if sys.byteorder != "little":
            raise RefusedError("learned placement needs a little-endian host")
        rows = [(tensor, placed) for tensor in tensors for placed in tensor.boxes]
        depth = max((len(placed.box.sizes) for _, placed in rows), default=0)
        dims = np.zeros((len(rows), 3, max(depth, 1)), np.int64)
        for row, (tensor, placed) in zip(dims, rows, strict=True):
            box = placed.box
            if any(stride % tensor.width for stride in box.target_strides):
                raise RefusedError(f"{box}: target strides are no multiples of {tensor.width} bytes")
            row[0, : len(box.sizes)] = box.sizes
            row[1, : len(box.sizes)] = box.source_strides
            row[2, : len(box.sizes)] = [stride // tensor.width for stride in box.target_strides]
        bounds = _ints([placed.box.source_bounds for _, placed in rows]).reshape(-1, 2)
        return cls(
            tensors=tuple(tensors),
            first=np.cumsum([0, *(len(tensor.boxes) for tensor in tensors)], dtype=np.int64),
            numel=_ints([tensor.numel for tensor in tensors]),
            width=_ints([tensor.width for tensor in tensors]),
            places=_ints([tensor.places for tensor in tensors]),
            address=_ints([placed.box.target_offset for _, placed in rows]),
            low=bounds[:, 0].copy(),
            high=bounds[:, 1].copy(),
            numbers=_ints([(len(p.box.sizes), p.widened) for _, p in rows]).reshape(-1, 2),
            dims=dims,
        )


def _ints(values: Sequence[object]) -> Ints:
    return np.array(values, np.int64)
