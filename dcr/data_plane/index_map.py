"""Index maps: partial injections between two flat index spaces, as unions of affine boxes (DESIGN section 5).

One abstraction for both sides of a refit: where a training shard's elements lie in canonical coordinates, and where
canonical elements lie in a receiver's storage.  Maps are learned from integer ids by ``fit`` and are always exact.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dcr.protocol.errors import RefusedError

BOXES_MAX = 1 << 16
"""Boxes a fitted map may have unless the caller says otherwise; a map of scattered elements needs one per two."""

_INT64_MAX = (1 << 63) - 1
_MIX = -7046029254386353131  # the odd constant of splitmix64, as int64


def _nested(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each stride reaches beyond everything inside it, so that an index decodes by repeated division."""
    inside = 0
    for stride, size in sorted(zip((abs(s) for s in strides), sizes, strict=True)):
        if stride <= inside:
            return False
        inside += stride * (size - 1)
    return True


@dataclass(frozen=True)
class Box:
    """The pairs ``source_offset + i . source_strides -> target_offset + i . target_strides``, 0 <= i < sizes.

    In normal form, which ``Box.of`` makes: sizes at least 2, source strides positive and decreasing, both sides nested
    (a stride exceeds the extent of everything inside it), and every index within [0, 2**63).  No dimension at all is a
    single pair.

    Raises:
        RefusedError: from the constructor, on anything else.
    """

    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source_offset: int
    target_offset: int

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.source_strides) == len(self.target_strides):
            raise RefusedError(f"{self}: sizes and strides must have the same length")
        if any(size < 2 for size in self.sizes):  # noqa: PLR2004 - one index is no dimension
            raise RefusedError(f"{self}: sizes must be at least 2; build boxes with Box.of")
        if any(stride <= 0 for stride in self.source_strides) or sorted(self.source_strides, reverse=True) != list(
            self.source_strides
        ):
            raise RefusedError(f"{self}: source strides must be positive and decreasing; build boxes with Box.of")
        if not _nested(self.sizes, self.source_strides) or not _nested(self.sizes, self.target_strides):
            raise RefusedError(f"{self}: strides are not nested; split the box")
        for low, high in (self.source_bounds, self.target_bounds):
            if low < 0 or high > _INT64_MAX:
                raise RefusedError(f"{self}: indices run from {low} to {high}, outside [0, 2**63)")

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        source_strides: Sequence[int],
        target_strides: Sequence[int],
        source_offset: int = 0,
        target_offset: int = 0,
    ) -> "Box":
        """A box in normal form from any order and sign of dimensions; sizes must be at least 1.

        Raises:
            RefusedError: if the box is not nested, not within [0, 2**63), or a size is below 1.
        """
        if any(size < 1 for size in sizes):
            raise RefusedError(f"box sizes {tuple(sizes)} must be at least 1")
        dims = []
        for size, source, target in zip(sizes, source_strides, target_strides, strict=True):
            if size == 1:
                continue
            if source < 0:  # count this dimension from its other end
                source_offset += (size - 1) * source
                target_offset += (size - 1) * target
                dims.append((size, -source, -target))
            else:
                dims.append((size, source, target))
        merged: list[tuple[int, int, int]] = []
        for size, source, target in sorted(dims, key=lambda dim: dim[1]):  # innermost first
            if merged:
                inner = merged[-1]
                if (source, target) == (inner[0] * inner[1], inner[0] * inner[2]):
                    merged[-1] = (size * inner[0], inner[1], inner[2])
                    continue
            merged.append((size, source, target))
        outer_first = merged[::-1]
        return cls(
            tuple(dim[0] for dim in outer_first),
            tuple(dim[1] for dim in outer_first),
            tuple(dim[2] for dim in outer_first),
            source_offset,
            target_offset,
        )

    @property
    def numel(self) -> int:
        """Number of pairs."""
        product = 1
        for size in self.sizes:
            product *= size
        return product

    @property
    def source_bounds(self) -> tuple[int, int]:
        """Lowest and highest source index."""
        return _bounds(self.sizes, self.source_strides, self.source_offset)

    @property
    def target_bounds(self) -> tuple[int, int]:
        """Lowest and highest target index."""
        return _bounds(self.sizes, self.target_strides, self.target_offset)

    def inverse(self) -> "Box":
        """The same pairs, target to source."""
        return Box.of(self.sizes, self.target_strides, self.source_strides, self.target_offset, self.source_offset)

    def moved(self, source: int, target: int) -> "Box":
        """The same box with both offsets moved."""
        return Box(
            self.sizes,
            self.source_strides,
            self.target_strides,
            self.source_offset + source,
            self.target_offset + target,
        )

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All pairs: int64 source indices in increasing order and their targets, both of shape [numel]."""
        source = torch.tensor([self.source_offset])
        target = torch.tensor([self.target_offset])
        for size, source_stride, target_stride in zip(
            self.sizes, self.source_strides, self.target_strides, strict=True
        ):
            steps = torch.arange(size)
            source = (source[:, None] + steps * source_stride).view(-1)
            target = (target[:, None] + steps * target_stride).view(-1)
        return source, target

    def decode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Targets of source indices within ``source_bounds``, and which of them the box holds (None: all of them)."""
        rest = source - self.source_offset
        if not self.sizes:
            return torch.full_like(rest, self.target_offset), None
        if self.source_strides == (1,):
            return rest.mul_(self.target_strides[0]).add_(self.target_offset), None
        target = torch.full_like(rest, self.target_offset)
        inside = torch.ones_like(rest, dtype=torch.bool)
        for size, source_stride, target_stride in zip(
            self.sizes, self.source_strides, self.target_strides, strict=True
        ):
            # In place, for these are the temporaries of a whole chunk.
            if source_stride == 1:  # the innermost dimension, if there is one: nothing is left after it
                inside &= rest < size
                return target.add_(rest, alpha=target_stride), inside
            step = torch.div(rest, source_stride, rounding_mode="floor")
            inside &= step < size
            target.add_(step, alpha=target_stride)
            rest.sub_(step, alpha=source_stride)
        inside &= rest == 0
        return target, inside


def _bounds(sizes: Sequence[int], strides: Sequence[int], offset: int) -> tuple[int, int]:
    extents = [stride * (size - 1) for stride, size in zip(strides, sizes, strict=True)]
    return offset + sum(e for e in extents if e < 0), offset + sum(e for e in extents if e > 0)


@dataclass(frozen=True, eq=False)
class IndexMap:
    """A partial injection between flat index spaces, as boxes that share no source and no target index.

    ``IndexMap.union`` checks that the boxes are disjoint, the constructor does not.  Two maps are equal if they have
    the same pairs, whatever their boxes; comparing maps with different boxes costs their expansion.
    """

    boxes: tuple[Box, ...] = ()

    @classmethod
    def union(cls, boxes: Iterable[Box]) -> "IndexMap":
        """A map of boxes; RefusedError if two of them share a source or a target index."""
        index_map = cls(tuple(boxes))
        for side, bounds in (
            ("source", [box.source_bounds for box in index_map.boxes]),
            ("target", [box.target_bounds for box in index_map.boxes]),
        ):
            bounds.sort()
            if all(left[1] < right[0] for left, right in itertools.pairwise(bounds)):
                continue
            if torch.unique(index_map.expand()[side == "target"]).numel() != index_map.numel:
                raise RefusedError(f"index map: two of its {len(bounds)} boxes share a {side} index")
        return index_map

    @cached_property
    def numel(self) -> int:
        """Number of pairs: the size of the domain."""
        return sum(box.numel for box in self.boxes)

    @cached_property
    def source_bounds(self) -> tuple[int, int]:
        """Lowest and highest source index; (0, -1) if there are no pairs."""
        bounds = [box.source_bounds for box in self.boxes]
        return min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=-1)

    @cached_property
    def _ordered(self) -> tuple[tuple[Box, ...], torch.Tensor]:
        """Boxes by source offset, and their int64 source bounds [2, boxes]."""
        boxes = tuple(sorted(self.boxes, key=lambda box: box.source_offset))
        return boxes, torch.tensor([box.source_bounds for box in boxes], dtype=torch.int64).view(-1, 2).T.contiguous()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexMap):
            return NotImplemented
        if self.numel != other.numel:
            return False
        if sorted(self.boxes, key=_box_key) == sorted(other.boxes, key=_box_key):
            return True
        mine, theirs = self.expand(), other.expand()
        return torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])

    def __hash__(self) -> int:
        return hash(self.numel)

    def inverse(self) -> "IndexMap":
        """The same pairs, target to source."""
        return IndexMap(tuple(box.inverse() for box in self.boxes))

    def moved(self, source: int = 0, target: int = 0) -> "IndexMap":
        """The same map between moved index spaces; RefusedError if that leaves [0, 2**63)."""
        return IndexMap(tuple(box.moved(source, target) for box in self.boxes))

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All pairs: int64 source indices in increasing order and their targets, both of shape [numel]."""
        if not self.boxes:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        pairs = [box.expand() for box in self._ordered[0]]
        source, target = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
        if bool((source[1:] < source[:-1]).any()):
            source, order = source.sort()
            target = target[order]
        return source, target

    def apply(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map source indices, box by box.

        Args:
            indices: int64, shape [n], strictly increasing.

        Returns:
            ``(kept, targets)``, both int64 of shape [m], m <= n: positions in ``indices`` of those in the domain, and
            their targets.  ``kept`` is in no particular order across boxes.

        Raises:
            RefusedError: if the indices are not strictly increasing int64.
        """
        if indices.dtype != torch.int64 or indices.dim() != 1 or bool((indices[1:] <= indices[:-1]).any()):
            raise RefusedError("index map: indices to map must be one-dimensional, strictly increasing int64")
        boxes, bounds = self._ordered
        starts = torch.searchsorted(indices, bounds[0].to(indices.device)).tolist()
        ends = torch.searchsorted(indices, bounds[1].to(indices.device), right=True).tolist()
        kept, targets = [], []
        for box, start, end in zip(boxes, starts, ends, strict=True):
            if start == end:
                continue
            target, inside = box.decode(indices[start:end])
            position = torch.arange(start, end, device=indices.device)
            kept.append(position if inside is None else position[inside])
            targets.append(target if inside is None else target[inside])
        if not kept:
            return indices.new_empty(0), indices.new_empty(0)
        if len(kept) == 1:
            return kept[0], targets[0]
        return torch.cat(kept), torch.cat(targets)

    def then(self, other: "IndexMap", *, boxes_max: int = BOXES_MAX) -> "IndexMap":
        """This map followed by ``other``: the pairs whose middle index both have.  Costs this map's expansion."""
        source, middle = self.expand()
        middle, order = middle.sort()
        kept, target = other.apply(middle)
        return fit(source[order[kept]], target, boxes_max=boxes_max)


def _box_key(box: Box) -> tuple[int, tuple[int, ...]]:
    return box.source_offset, box.sizes


def fit(source: torch.Tensor, target: torch.Tensor, *, boxes_max: int = BOXES_MAX) -> IndexMap:
    """The exact map of the pairs ``source[i] -> target[i]``.

    Pairs, in order of source, are merged into runs of constant stride, equal runs at constant distance into
    two-dimensional boxes, and so on; the result is expanded and compared with the input.  Needs about ten int64 a pair.

    Args:
        source: int64, shape [n], distinct and not negative, in any order.
        target: int64, shape [n], distinct and not negative.
        boxes_max: refuse a map that needs more boxes.

    Raises:
        RefusedError: on other input, or when the pairs do not fit into ``boxes_max`` boxes.
    """
    if source.dtype != torch.int64 or target.dtype != torch.int64 or source.dim() != 1 or source.shape != target.shape:
        raise RefusedError("index map: fit needs two one-dimensional int64 tensors of one shape")
    if source.numel() == 0:
        return IndexMap()
    if bool((source[1:] <= source[:-1]).any()):
        source, order = source.sort()
        target = target[order]
    if int(source[0]) < 0 or int(target.min()) < 0:
        raise RefusedError("index map: indices must not be negative")
    if bool((source[1:] == source[:-1]).any()):
        raise RefusedError("index map: a source index occurs twice; only one-to-one maps have a fit")
    table = _Table.of_pairs(source, target).merged()
    if table.rows > boxes_max:
        raise RefusedError(
            f"index map: {source.numel()} pairs need {table.rows} boxes, more than boxes_max = {boxes_max}; "
            "the layout is scattered: raise boxes_max or treat the tensor as residual"
        )
    index_map = IndexMap.union(table.boxes())  # refuses a target that occurs twice
    expanded = index_map.expand()
    assert torch.equal(expanded[0], source), "a fitted index map must hold exactly its sources"
    assert torch.equal(expanded[1], target), "a fitted index map must hold exactly its targets"
    return index_map


def merge_boxes(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Fewer boxes with the same pairs, where equal ones lie at constant distance.

    Args:
        boxes: that share no source and no target.
    """
    if not boxes:
        return ()
    dims = torch.zeros(3, max(len(box.sizes) for box in boxes), len(boxes), dtype=torch.int64)
    dims[0] = 1
    ordered = sorted(boxes, key=_box_key)
    for row, box in enumerate(ordered):
        columns = torch.tensor([box.sizes, box.source_strides, box.target_strides], dtype=torch.int64)
        dims[:, : len(box.sizes), row] = columns.flip(1)
    offsets = torch.tensor([[box.source_offset, box.target_offset] for box in ordered]).T.contiguous()
    return _Table(offsets[0], offsets[1], dims).merged().boxes()


@dataclass(frozen=True)
class _Table:
    """Boxes of one number of dimensions as int64 columns; ``dims`` [3, d, rows], innermost first.

    The three planes of ``dims`` are sizes, source strides and target strides; what a row lacks is (1, 0, 0).  Rows of
    equal dims are in order of source.
    """

    source: torch.Tensor
    target: torch.Tensor
    dims: torch.Tensor

    @classmethod
    def of_pairs(cls, source: torch.Tensor, target: torch.Tensor) -> "_Table":
        return cls(source, target, source.new_empty(3, 0, source.numel()))

    @property
    def rows(self) -> int:
        return self.source.numel()

    def merged(self) -> "_Table":
        """As few rows as merging again and again leads to."""
        table = self
        while (fewer := table.merge()).rows < table.rows:
            table = fewer
        return table

    def merge(self) -> "_Table":
        """Merge rows of equal dims at constant distance, greedily in order of source, into one more dimension."""
        if self.rows == 1:
            return self
        if self.dims.shape[1]:
            return self._by_dims()._merge_neighbours()  # noqa: SLF001 - another value of this class
        return self._merge_neighbours()

    def _by_dims(self) -> "_Table":
        """Rows of equal dims next to each other, so that what a regular layout repeats between others is found too."""
        key = torch.zeros_like(self.source)
        for column in self.dims.flatten(0, 1):
            key = (key ^ column) * _MIX  # wraps around; rows of other dims with the same key just do not merge
        order = key.argsort(stable=True)
        return _Table(self.source[order], self.target[order], self.dims[:, :, order])

    def _merge_neighbours(self) -> "_Table":
        distance = torch.stack([self.source.diff(), self.target.diff()])
        alike = (self.dims[:, :, 1:] == self.dims[:, :, :-1]).all(dim=1).all(dim=0)
        internal = _internal(distance, alike)
        merged = self._take(internal, distance)
        flawed = ~merged._nested()  # noqa: SLF001 - another value of this class
        if bool(flawed.any()):  # take apart the rows that an inverse could not decode
            row_of = torch.cat([internal.new_ones(1), ~internal]).cumsum(0) - 1
            merged = self._take(internal & ~flawed[row_of[1:]], distance)
        return merged

    def _take(self, internal: torch.Tensor, distance: torch.Tensor) -> "_Table":
        first = torch.cat([internal.new_ones(1), ~internal]).nonzero().view(-1)
        size = torch.cat([first, first.new_tensor([self.rows])]).diff()
        step = torch.where(size > 1, distance[:, first.clamp(max=self.rows - 2)], 0)
        outer = torch.cat([size[None], step])[:, None]
        return _Table(self.source[first], self.target[first], torch.cat([self.dims[:, :, first], outer], dim=1))

    def _nested(self) -> torch.Tensor:
        """Whether each row's strides are nested on both sides."""
        strides, order = self.dims[1:].abs().sort(dim=1)
        extents = strides * (self.dims[:1].expand_as(strides).gather(1, order) - 1)
        inside = extents.cumsum(1) - extents
        return ((strides > inside) | (strides == 0)).all(dim=1).all(dim=0)

    def boxes(self) -> tuple[Box, ...]:
        sizes, source_strides, target_strides = self.dims.permute(0, 2, 1).tolist()
        return tuple(
            Box.of(*row)
            for row in zip(
                sizes, source_strides, target_strides, self.source.tolist(), self.target.tolist(), strict=True
            )
        )


def _internal(distance: torch.Tensor, alike: torch.Tensor) -> torch.Tensor:
    """Which gaps between neighbours lie inside a run, when runs are taken greedily from the left.

    Gaps form groups of equal distance.  A run takes a whole group if the neighbour at its left end is free; else the
    group's first gap is a jump and the run takes the rest.  A gap between unlike neighbours is always a jump.

    Args:
        distance: int64, shape [2, gaps].
        alike: bool, shape [gaps].

    Returns:
        bool, shape [gaps].
    """
    begins = torch.ones_like(alike)
    begins[1:] = (distance[:, 1:] != distance[:, :-1]).any(dim=0) | ~alike[1:] | ~alike[:-1]
    first = begins.nonzero().view(-1)
    length = torch.cat([first, first.new_tensor([alike.numel()])]).diff()
    number = torch.arange(first.numel(), device=first.device)
    # Whether the left end is taken: a barrier frees it, a long group takes it, a group of one gap flips it.
    barrier = ~alike[first]
    fixed = barrier | (length > 1)
    last_fixed = torch.where(fixed, number, -1).cummax(0).values
    before = torch.cat([last_fixed.new_tensor([-1]), last_fixed[:-1]])
    taken = torch.where(before >= 0, ~barrier[before.clamp(min=0)], False)
    taken ^= (number - before - 1) % 2 == 1
    group = begins.cumsum(0) - 1
    return alike & ~(begins & taken[group])
