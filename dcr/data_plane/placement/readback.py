"""What a rank holds of every canonical tensor, as digests that owners can compare without weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcr.data_plane.content_digest import ContentDigest, digest_elements
from dcr.data_plane.index_map import Box
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.kernels.box_table import BoxTable
from dcr.data_plane.kernels.interface import Kernels
from dcr.data_plane.placement.prewarm import LoaderClass, Prewarm
from dcr.data_plane.placement.rules import uncovered_holds
from dcr.data_plane.resident import Residents


@dataclass(frozen=True)
class Extent:
    """A strided set of flat indices of a canonical tensor: ``offset + i . strides``, 0 <= i < sizes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, box: Box) -> "Extent":
        """The source side of a box, in a form that two boxes of the same elements share, wherever they lie."""
        dims: list[tuple[int, int]] = []
        for size, stride in reversed(list(zip(box.sizes, box.source_strides, strict=True))):  # innermost first
            if dims and stride == dims[-1][0] * dims[-1][1]:
                dims[-1] = (size * dims[-1][0], dims[-1][1])
            else:
                dims.append((size, stride))
        dims.reverse()
        return cls(tuple(size for size, _ in dims), tuple(stride for _, stride in dims), box.source_offset)

    @property
    def numel(self) -> int:
        """How many indices."""
        return math.prod(self.sizes)

    @property
    def last(self) -> int:
        """The highest index."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def indices(self) -> torch.Tensor:
        """The indices in increasing order: int64, shape [elements]."""
        return Box(self.sizes, self.strides, self.strides, self.offset, self.offset).expand()[0]

    def digest(self, spec: TensorSpec, bits: torch.Tensor) -> ContentDigest:
        """The digest of these elements of a whole tensor; ``bits`` of ``bits_dtype(spec.dtype)``, shape [numel]."""
        indices = self.indices().to(bits.device)
        return digest_elements(spec, indices, bits[indices])


@dataclass(frozen=True)
class HeldExtent:
    """Elements of a canonical tensor that lie on this rank, at one place each.

    Attributes:
        extent: which.
        elements: how many.
        digest: of their stored bits.
    """

    extent: Extent
    elements: int
    digest: ContentDigest


@dataclass(frozen=True)
class Readback:
    """What a rank holds.

    Attributes:
        held: of every ``box`` tensor, and of every tied one that was asked for, its extents; an element that lies at
            two places is in two of them.
        wrong: what can be told without an owner, by canonical tensor: low halves of widened elements that are not zero,
            constants that are not what the loader fills in.
        unread: names of transforming tensors, which have no way back; compare them by loading version v again under a
            journal.
    """

    held: dict[str, tuple[HeldExtent, ...]]
    wrong: dict[str, str]
    unread: tuple[str, ...]


def read_back(
    kernels: Kernels, parts: Sequence[tuple[BoxTable, Sequence[TensorSpec]]], learned: Prewarm, residents: Residents
) -> Readback:
    """Read every box and every constant.

    Args:
        kernels: the backend.
        parts: boxes, and the tensors that they are of: each ``box`` tensor, and those tied to one.
        learned: what prewarm learned.
        residents: the storage.
    """
    held: dict[str, tuple[HeldExtent, ...]] = {}
    wrong: dict[str, str] = {}
    for table, specs in parts:
        contents = iter(kernels.contents(table, specs))
        for spec, tensor in zip(specs, table.tensors, strict=True):
            extents = []
            for placed in tensor.boxes:
                content = next(contents)
                extents.append(HeldExtent(Extent.of(placed.box), placed.box.numel, content.digest))
                if not content.low_halves_zero:
                    wrong[spec.name] = "the low halves of its widened elements are not all zero"
            held[spec.name] = tuple(extents)
    for name, one in learned.learned.items():
        copies = [write.region for write in one.writes if write.constant is None]
        for position, write in enumerate(one.writes):
            if write.constant is not None and not uncovered_holds(
                write, copies if position in one.skip else (), residents
            ):
                wrong.setdefault(name, "the constant that its load fills in around it is not there")
    unread = tuple(n for n, c in learned.classes.items() if c is LoaderClass.TRANSFORMING)
    return Readback(held, wrong, unread)
