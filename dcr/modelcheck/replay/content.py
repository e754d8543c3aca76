"""Contents and digests of a replayed deployment: a cell's value stands for its bits, as in the specification."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

GARBAGE = -1
_MODULUS = 1 << 128

Content = dict[str, int]


@lru_cache(maxsize=4096)
def _term(cell: str, value: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{cell}={value}".encode()).digest()[:16], "little")


def digest(content: Mapping[str, int], cells: Iterable[str]) -> str:
    """Content digest of these cells, 32 hexadecimal digits: an order-free sum, so that shares add up (DESIGN D2)."""
    return f"{sum(_term(cell, content[cell]) for cell in cells) % _MODULUS:032x}"
