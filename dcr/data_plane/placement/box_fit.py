"""From the storage writes of a canonical tensor to boxes: only views copied as they are, or widened, have them."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch

from dcr.data_plane.index_map import Box
from dcr.data_plane.kernels.box_table import PlacedBox
from dcr.data_plane.placement.write_watch import Write
from dcr.protocol.errors import RefusedError

REPLICAS_MAX = 64
"""Places that one element may have by one broadcast copy; a copy of more goes through the loader."""


def fit_boxes(writes: Sequence[Write]) -> tuple[PlacedBox, ...]:
    """The boxes that repeat these writes exactly; none if there are no copies, or one of them cannot be repeated so.

    A box stands for a copy of a view of the canonical tensor, into memory of the same dtype or, from bfloat16, into
    float32, which keeps every bit pattern in the high half and leaves zeros in the low one.  Fills have no box.
    """
    copies = [write for write in writes if write.constant is None]
    if max(Counter(write.region for write in copies).values(), default=0) > 1:
        return ()  # a chain: what is copied first does not stay
    boxes: list[PlacedBox] = []
    for write in copies:
        fitted = _boxes_of(write)
        if not fitted:
            return ()
        boxes += fitted
    return tuple(boxes)


def _boxes_of(write: Write) -> list[PlacedBox]:
    region, width = write.region, write.region.dtype.itemsize
    widened = write.dtype == torch.bfloat16 and region.dtype == torch.float32
    if write.view is None or (write.dtype != region.dtype and not widened) or region.address % width:
        return []
    offset, strides = write.view
    dims = list(zip(region.size, strides, (width * stride for stride in region.stride), strict=True))
    repeated = [(size, step) for size, stride, step in dims if stride == 0 and size > 1]
    dims = [dim for dim in dims if dim[1] or dim[0] == 1]
    if math.prod(size for size, _ in repeated) > REPLICAS_MAX:
        return []
    places = itertools.product(*([i * step for i in range(size)] for size, step in repeated))
    sizes, source, target = ([dim[k] for dim in dims] for k in range(3))
    try:
        return [
            PlacedBox(Box.of(sizes, source, target, offset, region.address + sum(place)), widened) for place in places
        ]
    except RefusedError:  # a view with overlapping windows: an index does not tell its place
        return []
