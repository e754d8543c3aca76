"""Your own models in a scenario of `dcr chaos`: what is trained, and how it is served.

    PYTHONPATH=examples/chaos dcr chaos run examples/chaos/own_models.yaml

from anywhere: ``PYTHONPATH`` is the folder of this file.
"""

from collections.abc import Iterable

import torch
from torch import nn


class Trained(nn.Module):
    """The trainer's side; its state dict is the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(40, 24, generator=torch.Generator().manual_seed(1)), requires_grad=False)
        self.up = nn.Parameter(torch.randn(40, 24, generator=torch.Generator().manual_seed(2)), requires_grad=False)

    def train_step(self, seed: int, rate: float) -> None:
        """A step that is the same for the same seed; without this method the harness changes the weights itself."""
        g = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            weight.add_(torch.randn(weight.shape, generator=g) * (torch.rand(weight.shape, generator=g) < rate))


class Served(nn.Module):
    """The engine's side: gate and up in one, transposed, and in half the bits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(24, 80, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The native loader, to which dcr and the untouched twin leave it where the weights go."""
        for name, weight in weights:
            first = {"gate": 0, "up": 40}[name]
            self.gate_up[:, first : first + 40].copy_(weight.t())
        return {"gate_up"}
