"""Which rank owns which shard: one owner an element, bytes balanced, the same answer everywhere (DESIGN section 5)."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from dcr.protocol.errors import RefusedError


@dataclass(frozen=True)
class Shard:
    """A set of source elements that one or more ranks hold, as identical replicas.

    Attributes:
        name: the source tensor.
        part: names the elements of the tensor and their local order; equal on replicas.
        size_bytes: bytes of one replica.
        holders: the ranks that hold one, at least one.
    """

    name: str
    part: str
    size_bytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Ownership:
    """The answer.

    Attributes:
        owner: rank by (name, part).
        bytes_by_rank: bytes each rank owns.
    """

    owner: dict[tuple[str, str], int]
    bytes_by_rank: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest rank over the mean; 1.0 is perfect."""
        total = sum(self.bytes_by_rank)
        return max(self.bytes_by_rank) * len(self.bytes_by_rank) / total if total else 1.0


def assign(shards: Iterable[Shard], ranks: int) -> Ownership:
    """Give each shard to the least loaded of its holders, biggest shards first, ties by a stable hash of the name.

    Depends on its arguments alone, not on their order nor on the process.
    """
    loads = [0] * ranks
    owner: dict[tuple[str, str], int] = {}
    for shard in sorted(shards, key=lambda s: (-s.size_bytes, _stable_hash(s.name, s.part))):
        key = (shard.name, shard.part)
        if not shard.holders or key in owner:
            raise RefusedError(f"shard {shard.name} ({shard.part}): it must be listed once, with its holders")
        chosen = min(shard.holders, key=lambda rank: (loads[rank], _stable_hash(*key, str(rank))))
        owner[key] = chosen
        loads[chosen] += shard.size_bytes
    return Ownership(owner, tuple(loads))


def _stable_hash(*parts: str) -> bytes:
    """The same in every process and release, unlike ``hash``."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
