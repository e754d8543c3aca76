"""Other bits in a model's live tensors for a while, to see what depends on them; put back exactly, without a copy.

Stored bits are flipped where a mask says, and flipped again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from dcr.data_plane.bits import bit_view

Mask = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor of integers to the bits to flip in each PERIOD of its elements: of its dtype and device."""

PERIOD = 1 << 14
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


def scrambled(like: torch.Tensor) -> torch.Tensor:
    """Bits anywhere: NaN, infinities, other magnitudes and signs."""
    mixed = torch.arange(1, PERIOD + 1, device=like.device) * _MIX
    mixed ^= mixed >> 29
    return (mixed >> 16 if like.element_size() < mixed.element_size() else mixed).to(like.dtype) | 1


def enlarged(like: torch.Tensor) -> torch.Tensor:
    """The two highest bits of the exponent: of floats what is below 2 becomes big, and finite."""
    return torch.full((PERIOD,), 0b11 << (8 * like.element_size() - 3), dtype=like.dtype, device=like.device)


def flip(tensor: torch.Tensor, mask: Mask) -> None:
    """Flip the bits of a mask in place, all of a bool; twice is not at all."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
        return
    bits = bit_view(tensor)
    period = mask(bits)
    if not bits.is_contiguous():
        bits.bitwise_xor_(period.repeat(-(-bits.numel() // PERIOD))[: bits.numel()].view(bits.shape))
        return
    flat, whole = bits.view(-1), bits.numel() // PERIOD * PERIOD
    flat[:whole].view(-1, PERIOD).bitwise_xor_(period)
    flat[whole:].bitwise_xor_(period[: flat.numel() - whole])


@contextmanager
def flipped(tensors: Iterable[torch.Tensor], mask: Mask) -> Iterator[None]:
    """Flip live tensors for a while; what is there twice, in one shape or another, is flipped once."""
    by_size = sorted(tensors, key=lambda tensor: tensor.nbytes)  # of those that begin together the biggest stays
    unique = {tensor.data_ptr(): tensor for tensor in by_size if tensor.numel()}
    done: list[torch.Tensor] = []
    try:
        for tensor in unique.values():
            flip(tensor, mask)
            done.append(tensor)
        yield
    finally:
        for tensor in done:  # one that cannot be flipped leaves the others as they were
            flip(tensor, mask)


@contextmanager
def others_changed(others: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give tensors other ordinary values for a while; integers stay."""
    saved = [(tensor, tensor.clone()) for tensor in others.values() if tensor.is_floating_point()]
    random = torch.Generator().manual_seed(0)
    try:
        for tensor, _ in saved:
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        yield
    finally:
        for tensor, copy in saved:
            tensor.copy_(copy)
