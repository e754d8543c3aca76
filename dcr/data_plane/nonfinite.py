"""NaN and infinities among stored bits: found in one reading that keeps nothing, and counted where there are any."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dcr.data_plane.bits import bit_view

_SUMMED = (torch.bfloat16, torch.float32, torch.float64)
"""Their sums are of the same range as they, so that a finite sum proves that all are."""
_NAMED_MAX = 8
_TILE = 1 << 16
"""Elements that are looked at one by one at a time, where the copies that this takes stay in the cache."""


@dataclass(frozen=True)
class NonFinite:
    """How many elements are no finite number.

    Attributes:
        nan: NaN of any kind.
        infinite: infinities of either sign.
    """

    nan: int = 0
    infinite: int = 0

    def __add__(self, other: "NonFinite") -> "NonFinite":
        return NonFinite(self.nan + other.nan, self.infinite + other.infinite)

    def __str__(self) -> str:
        return f"{self.nan} NaN, {self.infinite} infinite"


def nonfinite_positions(stored: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Where NaN and infinities are, in increasing order.

    Args:
        stored: bits, flat, on any device.
        dtype: what they are bits of; of one that is no floating point there is nothing to find.

    Returns:
        int64 positions, on the device of the bits; only parts that have some.
    """
    if not dtype.is_floating_point or not stored.numel():
        return
    values = stored.view(dtype)
    # One vectorised reading without copies: NaN and infinities stay in the sum, and so does what overflows it, where
    # looking closely then finds nothing.
    if dtype in _SUMMED and bool(values.sum().isfinite()):
        return
    for start in range(0, values.numel(), _TILE):
        found = (~_widened(values[start : start + _TILE]).isfinite()).nonzero().flatten()
        if found.numel():
            yield found + start


def count_nonfinite(stored: torch.Tensor, dtype: torch.dtype) -> NonFinite:
    """How many of some elements, given as bits, are NaN and infinite."""
    values = _widened(bit_view(stored).view(dtype))
    return NonFinite(int(values.isnan().sum()), int(values.isinf().sum()))


def listed(found: Mapping[str, NonFinite]) -> str:
    """What was found in each tensor, the worst first and not all of many, for people."""
    worst = sorted(found.items(), key=lambda item: (-item[1].nan - item[1].infinite, item[0]))
    named = ", ".join(f"{name} ({count})" for name, count in worst[:_NAMED_MAX])
    more = f" and {len(worst) - _NAMED_MAX} more" if len(worst) > _NAMED_MAX else ""
    return f"{sum(found.values(), NonFinite())} elements in {len(found)} tensors: {named}{more}"


def _widened(values: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch can look into, exact."""
    return values if values.dtype in _SUMMED else values.to(torch.float32)
