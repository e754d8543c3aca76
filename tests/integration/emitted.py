"""What several owners emit, put together and compared with checkpoints that were made without them."""

import torch

from dcr.data_plane.bits import bit_view
from dcr.data_plane.content_digest import ContentDigest, digest_elements


def bits_of(checkpoint):
    return {name: bit_view(tensor).reshape(-1) for name, tensor in checkpoint.items()}


def union(changes_by_rank, start, *, check_old, chunk):
    """The bits after all ranks' changes; every element named at most once, by one rank; and how many were."""
    result = {name: bits.clone() for name, bits in start.items()}
    counts = {name: torch.zeros(bits.numel(), dtype=torch.int64) for name, bits in start.items()}
    for changes in changes_by_rank:
        for name, indices, old, new in changes:
            assert bool((indices[1:] > indices[:-1]).all())
            assert new.numel() <= chunk
            if check_old:
                assert torch.equal(old, start[name][indices])
            result[name][indices] = new
            counts[name][indices] += 1
    assert all(int(c.max()) <= 1 for c in counts.values() if c.numel())
    return result, sum(int(c.sum()) for c in counts.values())


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def digest(specs, checkpoint):
    return sum((digest_elements(s, None, bits_of(checkpoint)[s.name]) for s in specs), ContentDigest())
