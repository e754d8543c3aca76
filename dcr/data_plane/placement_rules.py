"""Which combinations of writes can be repeated exactly: the rules on destinations (paper section 6.1)."""

import torch

from dcr.data_plane.bits import bit_view
from dcr.data_plane.region import Region, share_memory
from dcr.data_plane.resident import Residents
from dcr.data_plane.write_watch import Write
from dcr.protocol.errors import RefusedError


def find_clashes(writes: dict[str, tuple[Write, ...]]) -> dict[str, str]:
    """Canonical tensors that write a byte which another one writes, or which they themselves write in another shape.

    Tied names and last-writer-wins loaders are among them: which value remains depends on an order that items, applied
    one at a time, do not have.  Allowed: the same region again by the same tensor (a chain of transforms), a fill
    before copies that cover part of it, and equal constants.

    Returns:
        Reason by name.
    """
    flat = sorted(
        (
            (w.region.address, w.region.end, position, name, w)
            for name, ws in writes.items()
            for position, w in enumerate(ws)
        ),
        key=lambda x: x[:4],
    )
    reasons: dict[str, str] = {}
    active: list[tuple[int, int, int, str, Write]] = []
    for entry in flat:
        active = [a for a in active if a[1] > entry[0]]
        for other in active:
            reason = _clash(other, entry)
            if reason and not {other[3], entry[3]} <= reasons.keys() and share_memory(other[4].region, entry[4].region):
                for name in (other[3], entry[3]):
                    reasons.setdefault(name, reason)
        active.append(entry)
    return reasons


def _clash(a: tuple[int, int, int, str, Write], b: tuple[int, int, int, str, Write]) -> str:
    """Why these two writes may not share memory; empty if they may."""
    (_, _, at, name, wa), (_, _, bt, other, wb) = (a, b)
    if wa.constant is not None and wb.constant is not None:
        same = wa.constant == wb.constant and wa.region.dtype == wb.region.dtype
        return "" if same else f"different constants for the same memory ({name}, {other})"
    if name != other:
        return f"the same memory is written from {name} and from {other}"
    if wa.constant is None and wb.constant is None:
        return "" if wa.region == wb.region else "it is written to regions that overlap in part"
    fill_first = (at < bt) if wa.constant is not None else (bt < at)
    return "" if fill_first else "a constant is written over it"


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
            _check_constant(write, over, residents)
            skip.add(position)
    return frozenset(skip)


def _check_constant(fill: Write, copies: list[Region], residents: Residents) -> None:
    held = residents.at(fill.region)
    region = fill.region
    if any(c.dtype.itemsize != region.dtype.itemsize for c in copies):
        raise RefusedError("a fill and a copy see the same memory as elements of different widths")
    start = min(c.address for c in (*copies, region))
    end = max(c.end for c in (*copies, region))
    width = region.dtype.itemsize
    covered = torch.zeros((end - start) // width, dtype=torch.bool).numpy()
    for c in copies:
        c.on(covered, start, width)[...] = True
    rest = ~torch.from_numpy(region.on(covered, start, width)[..., 0].copy())
    if bool((rest & (bit_view(held).cpu() != fill.constant)).any()):
        raise RefusedError("the padding around it does not hold the constant that its load fills in")
