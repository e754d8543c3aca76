"""Real text to train on: the Python documentation's topics, which come with every Python; a token is a byte."""

from pydoc_data.topics import topics

import torch

VOCABULARY = 256


def corpus() -> torch.Tensor:
    """All topics in the order of their names; int64, shape [about 466,000]."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def batch(tokens: torch.Tensor, step: int, size: int, length: int, seed: int) -> torch.Tensor:
    """The windows of one training step, a function of its arguments alone.

    Args:
        tokens: int64, shape [n], from ``corpus``.
        step: number of the training step.
        size: how many windows.
        length: tokens a window.
        seed: of the whole run.

    Returns:
        int64, shape [size, length].
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)  # it takes 32 bits of a seed
    starts = torch.randint(tokens.numel() - length, (size, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def encode(text: str) -> list[int]:
    """The tokens of a text."""
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    """The text of tokens; bytes that are no UTF-8 show as replacement characters."""
    return bytes(tokens).decode(errors="replace")
