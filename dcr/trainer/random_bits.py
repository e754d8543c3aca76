"""Random stored bits, for proofs that a conversion only moves elements."""

import math

import torch

from dcr.data_plane.bits import bit_view, bits_dtype


def random_bits(like: torch.Tensor, seed: int) -> torch.Tensor:
    """A host tensor of the shape and dtype of another, of random stored bits; of four floats one is a NaN, one -0.0."""
    dtype, numel = like.dtype, like.numel()
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:  # its only stored bits are 0 and 1
        return torch.randint(0, 2, (numel,), generator=random).to(torch.bool).view(like.shape)
    info = torch.iinfo(bits_dtype(dtype))
    bits = torch.randint(info.min, info.max, (numel,), dtype=bits_dtype(dtype), generator=random)
    if dtype.is_floating_point:
        nan, minus_zero = bit_view(torch.tensor([math.nan, -0.0], dtype=dtype))
        bits[0::4] |= nan  # a random payload and sign
        bits[1::4] = minus_zero
    return bits.view(dtype).view(like.shape)
