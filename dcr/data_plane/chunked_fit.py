"""Index maps that are fitted chunk by chunk, in memory that follows the chunks and not the tensors."""

import torch

from dcr.data_plane.index_map import BOXES_MAX, Box, IndexMap, fit, merge_boxes
from dcr.protocol.errors import RefusedError

_NEAR = 8
"""Boxes, counted back from the last one, that a new one may go on from."""


class ChunkedFit:
    """The exact map of pairs that come in chunks, as ``fit`` makes it of all of them at once.

    Boxes of a chunk are joined with those of earlier ones which they go on from, and repeated ones with each other.
    The map is exact whatever the chunks are; it has few boxes where they are ranges of sources, one after the other.

    Args:
        boxes_max: refuse a map that needs more boxes.
    """

    def __init__(self, *, boxes_max: int = BOXES_MAX) -> None:
        self._boxes: list[Box] = []
        self._boxes_max = boxes_max
        self._chunks = 0
        self._pairs = 0

    def add(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The pairs of a chunk, of which no source and no target was in another; that is for the caller to see to.

        Args:
            source: int64, shape [n], distinct and not negative, in any order.
            target: int64, shape [n], distinct and not negative.

        Raises:
            RefusedError: on other input, or when the pairs so far do not fit into ``boxes_max`` boxes.
        """
        self._chunks += 1
        self._pairs += source.numel()
        for box in sorted(fit(source, target, boxes_max=self._boxes_max).boxes, key=lambda b: b.source_offset):
            _push(self._boxes, box)
        if len(self._boxes) > self._boxes_max:
            self._tidy()
        if len(self._boxes) > self._boxes_max:
            raise RefusedError(
                f"index map: {self._pairs} pairs need {len(self._boxes)} boxes, more than boxes_max = "
                f"{self._boxes_max}; the layout is scattered: raise boxes_max or treat the tensor as residual"
            )

    def result(self) -> IndexMap:
        """The map of all pairs."""
        if self._chunks > 1:
            self._tidy()
        self._chunks = 1
        return IndexMap(tuple(self._boxes))

    def _tidy(self) -> None:
        while True:
            count = len(self._boxes)
            merged: list[Box] = []
            for box in sorted(merge_boxes(self._boxes), key=lambda b: b.source_offset):
                _push(merged, box)
            self._boxes = merged
            if len(merged) == count:
                return


def maps_exactly(index_map: IndexMap, source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a map has exactly these targets for some source indices, which are strictly increasing."""
    kept, found = index_map.apply(source)
    if kept.numel() != source.numel():
        return False
    if bool((kept[1:] < kept[:-1]).any()):  # of several boxes that lie one in the other
        kept, order = kept.sort()
        found = found[order]
    return torch.equal(kept, torch.arange(kept.numel())) and torch.equal(found, target)


def _push(boxes: list[Box], box: Box) -> None:
    """Add a box, joined with all that it goes on from or leads to among the last ones."""
    at = len(boxes) - 1
    while at >= max(0, len(boxes) - _NEAR):
        joined = _joined(boxes[at], box) or _joined(box, boxes[at])
        if joined is None:
            at -= 1
        else:
            del boxes[at]
            box, at = joined, len(boxes) - 1
    boxes.append(box)


def _joined(first: Box, second: Box) -> Box | None:
    """One box for the pairs of two, if the second goes on where the first ends in one dimension and is like it else."""
    ours, theirs = ({(s, t): n for n, s, t in zip(*_dims(box), strict=True)} for box in (first, second))
    source, target = second.source_offset - first.source_offset, second.target_offset - first.target_offset
    for along in ours | theirs:
        size = ours.get(along, 1)
        if (source, target) != (size * along[0], size * along[1]):
            continue
        whole = {**ours, along: size + theirs.get(along, 1)}
        if whole == {**theirs, along: whole[along]}:
            strides, sizes = list(whole), list(whole.values())
            try:
                return Box.of(
                    sizes, [s for s, _ in strides], [t for _, t in strides], first.source_offset, first.target_offset
                )
            except RefusedError:  # they would lie one in the other
                return None
    return None


def _dims(box: Box) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return box.sizes, box.source_strides, box.target_strides
