"""Which combinations of writes can be repeated exactly: the rules on destinations (paper section 6.1)."""

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from dcr.data_plane.bits import bit_view
from dcr.data_plane.placement.write_watch import Write
from dcr.data_plane.region import Region, share_memory
from dcr.data_plane.resident import Residents
from dcr.protocol.errors import RefusedError

_Use = tuple[int, str, Write]  # position among the writes of its tensor, tensor, write


def find_clashes(writes: dict[str, tuple[Write, ...]]) -> dict[str, str]:
    """Canonical tensors that write a byte which another one writes, or which they themselves write in another shape.

    Tied names and last-writer-wins loaders are among them: which value remains depends on an order that items do not
    have.  Allowed: the same region again by the same tensor (a chain of transforms), a fill before copies that cover
    part of it, and equal constants.  Costs a sort, and a map of the memory where ranges of addresses overlap.

    Returns:
        Reason by name.
    """
    uses: dict[Region, list[_Use]] = {}
    for name, ws in writes.items():
        for position, w in enumerate(ws):
            uses.setdefault(w.region, []).append((position, name, w))
    copied = {region for region, users in uses.items() if any(w.constant is None for _, _, w in users)}
    reasons: dict[str, str] = {}
    for users in uses.values():
        first_copy = next((use for use in users if use[2].constant is None), users[0])
        for use in users:
            _note(reasons, users[0], use)
            _note(reasons, first_copy, use)
    for cluster in _clusters(uses):
        for a, b in _meeting(cluster, copied):
            for one in uses[a]:
                for other in uses[b]:
                    _note(reasons, one, other)
    return reasons


def _note(reasons: dict[str, str], one: _Use, other: _Use) -> None:
    if one is not other and (reason := _clash(one, other)):
        for name in (one[1], other[1]):
            reasons.setdefault(name, reason)


def _clusters(regions: Iterable[Region]) -> Iterator[list[Region]]:
    """Regions in order of address, those whose ranges overlap together; none that overlaps no other."""
    cluster: list[Region] = []
    end = 0
    for region in sorted(regions, key=lambda r: (r.address, r.end, r.size, r.stride, str(r.dtype))):
        if cluster and region.address >= end:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(region)
        end = max(end if len(cluster) > 1 else 0, region.end)
    if len(cluster) > 1:
        yield cluster


def _meeting(cluster: list[Region], copied: set[Region]) -> Iterator[tuple[Region, Region]]:
    """Pairs of regions that share a byte: a region that meets others comes with at least one of them.

    Every region is painted on a map of the memory, one int32 for the largest unit that divides all elements.  Copies
    and fills have a map each: two copies that meet are a clash whatever else they meet, but a fill may hide a copy.
    """
    start, end = cluster[0].address, max(r.end for r in cluster)
    unit = math.gcd(*(r.dtype.itemsize for r in cluster), *(r.address - start for r in cluster))
    copies, fills = np.zeros((2, (end - start) // unit), np.int32)
    for number, region in sorted(enumerate(cluster, 1), key=lambda x: x[1] not in copied):
        maps = (copies,) if region in copied else (copies, fills)
        for seen in maps:
            part = region.on(seen, start, unit)
            if part.any():
                yield from ((cluster[other - 1], region) for other in np.unique(part) if other)
        part[...] = number


def _clash(a: _Use, b: _Use) -> str:
    """Why these two writes, which share memory, may not; empty if they may."""
    (at, name, wa), (bt, other, wb) = a, b
    if wa.constant is not None and wb.constant is not None:
        same = wa.constant == wb.constant and wa.region.dtype == wb.region.dtype
        return "" if same else f"different constants for the same memory ({name}, {other})"
    if name != other:
        return f"the same memory is written from {name} and from {other}"
    if wa.constant is None and wb.constant is None:
        return "" if wa.region == wb.region else "it is written to regions that overlap in part"
    fill_first = (at < bt) if wa.constant is not None else (bt < at)
    return "" if fill_first else "a constant is written over it"


class Touched:
    """Some regions, asked whether another one shares a byte with any of them, and with whose.

    Args:
        regions: every region with the name that is answered for it.
    """

    def __init__(self, regions: Iterable[tuple[Region, str]]) -> None:
        self._regions = sorted(dict(regions).items(), key=lambda x: x[0].address)
        self._starts = [region.address for region, _ in self._regions]
        self._ends = list(np.maximum.accumulate([r.end for r, _ in self._regions], dtype=np.int64))

    def by(self, region: Region) -> str | None:
        """The name of one that shares a byte with ``region``."""
        at = bisect.bisect_left(self._starts, region.end) - 1
        while at >= 0 and self._ends[at] > region.address:
            if share_memory(self._regions[at][0], region):
                return self._regions[at][1]
            at -= 1
        return None


def fills_to_skip(writes: tuple[Write, ...], residents: Residents) -> frozenset[int]:
    """Positions of the fills that copies of the same tensor cover in part.

    Such a fill must not be repeated, as it would clear inactive elements; so the rest of it must hold the constant.

    Raises:
        RefusedError: it does not.
    """
    skip = set()
    for position, write in enumerate(writes):
        if write.constant is None:
            continue
        over = [w.region for w in writes if w.constant is None and share_memory(w.region, write.region)]
        if over:
            if not uncovered_holds(write, over, residents):
                raise RefusedError("the padding around it does not hold the constant that its load fills in")
            skip.add(position)
    return frozenset(skip)


def uncovered_holds(fill: Write, copies: Sequence[Region], residents: Residents) -> bool:
    """Whether what a fill writes and no copy covers holds its constant; RefusedError if element widths differ."""
    held, region = residents.at(fill.region), fill.region
    if any(c.dtype.itemsize != region.dtype.itemsize for c in copies):
        raise RefusedError("a fill and a copy see the same memory as elements of different widths")
    start = min(c.address for c in (*copies, region))
    end = max(c.end for c in (*copies, region))
    width = region.dtype.itemsize
    covered = torch.zeros((end - start) // width, dtype=torch.bool).numpy()
    for c in copies:
        c.on(covered, start, width)[...] = True
    rest = ~torch.from_numpy(region.on(covered, start, width)[..., 0].copy())
    return not bool((rest & (bit_view(held).cpu() != fill.constant)).any())
