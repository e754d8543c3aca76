"""Boxes of a whole permutation, found in one pass: what a conversion of a layout is."""

import numpy as np
import numpy.typing as npt
import torch

from dcr.data_plane.index_map import Box, IndexMap, fit
from dcr.protocol.errors import RefusedError

Ints = npt.NDArray[np.int64]

CHUNK_ELEMENTS = 1 << 22
"""Elements that are fitted at a time: at most five int64 each in a layout of runs, about ten in any other."""
_ROWS_MAX = 1 << 12
"""Rows beyond which a chunk is not a regular layout for a pass over neighbours."""


def fit_regular(where: Ints, *, first: int = 0, unit: int = 1) -> IndexMap:
    """The exact map ``first + i -> where[i]``; a few ns an element where neighbours repeat, else what ``fit`` takes.

    Args:
        where: shape [n], distinct and not negative.
        first: the source index of the first one.
        unit: elements that are not to be torn apart, such as those of one expert, where they are few enough.

    Raises:
        RefusedError: see ``fit``.
    """
    chunk = max(CHUNK_ELEMENTS // unit * unit, CHUNK_ELEMENTS if unit > CHUNK_ELEMENTS else 1)
    boxes: list[Box] = []
    for start in range(0, where.size, chunk):
        part = np.ascontiguousarray(where[start : start + chunk])
        found = _nested(part, first + start)
        if found is None:
            sources = torch.arange(first + start, first + start + part.size)
            found = list(fit(sources, torch.from_numpy(part)).boxes)
        boxes += found
    return IndexMap(tuple(boxes))


def _nested(part: Ints, start: int) -> list[Box] | None:
    """Boxes of a chunk that begins at index ``start``; None where a pass over neighbours does not find few of them."""
    # Imported when it is needed: vLLM on a CPU cannot start in a process that has imported llvmlite.
    from dcr.data_plane.kernels import compiled  # noqa: PLC0415

    # By chance a run may go on where the next one begins: all are cut to what their lengths have in common.
    cut = np.int64(compiled.runs(part, np.int64(0), np.empty((4, 0), np.int64))[1])
    runs = np.empty((4, compiled.runs(part, cut, np.empty((4, 0), np.int64))[0]), np.int64)
    compiled.runs(part, cut, runs)
    rows = np.vstack([runs[:3], np.ones((1, runs.shape[1]), np.int64), runs[3:]])
    while True:
        nothing = np.empty((rows.shape[0] + 3, 0), np.int64)
        cut = np.int64(compiled.nest(rows, np.int64(0), nothing)[1])
        found = compiled.nest(rows, cut, nothing)[0]
        if found == rows.shape[1]:
            break
        more = np.empty((rows.shape[0] + 3, found), np.int64)
        compiled.nest(rows, cut, more)
        rows = more
    if rows.shape[1] > _ROWS_MAX:
        return None
    boxes = []
    for source, target, *dims in rows.T.tolist():
        try:
            boxes.append(Box.of(dims[0::3], dims[1::3], dims[2::3], source, target))
        except RefusedError:  # not nested on the side of the targets
            return None
    if not _exact(part, boxes):
        return None
    return [
        Box.of(b.sizes, b.source_strides, b.target_strides, b.source_offset + start, b.target_offset) for b in boxes
    ]


def _exact(part: Ints, boxes: list[Box]) -> bool:
    """Whether boxes hold every pair, and no other, each once."""
    seen = np.zeros(part.size, np.bool_)
    for box in boxes:
        targets = np.full((1,) * len(box.sizes), box.target_offset, np.int64)
        for dim, (size, stride) in enumerate(zip(box.sizes, box.target_strides, strict=True)):
            targets = targets + (np.arange(size) * stride).reshape(-1, *(1,) * (len(box.sizes) - dim - 1))
        view = strided(part, box.source_offset, box.sizes, box.source_strides)
        if not np.array_equal(view, targets):
            return False
        strided(seen, box.source_offset, box.sizes, box.source_strides)[...] = True
    return bool(seen.all()) and sum(box.numel for box in boxes) == part.size


def strided(array: np.ndarray, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A view of one side of a box over a flat array; strides in elements."""
    return np.lib.stride_tricks.as_strided(array[offset:], sizes, [stride * array.itemsize for stride in strides])
