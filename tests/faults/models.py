"""A small policy in two layouts: as the trainer holds it, and as the rollout side does."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

BF16 = torch.bfloat16


class Policy(nn.Module):
    """The trainer's layout; its state dict is the checkpoint."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def p(*shape: int, dtype: torch.dtype = BF16) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=g).to(dtype), requires_grad=False)

        self.embed = p(64, 24)
        self.q = p(24, 24)
        self.k = p(12, 24)
        self.gate = p(40, 24)
        self.up = p(40, 24)
        self.scale = p(24, dtype=torch.float32)

    def step(self, seed: int, rate: float = 0.05) -> None:
        """An update that changes about this share of the elements, specials included."""
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for t in self.parameters():
                noise = torch.randn(t.shape, generator=g).to(t.dtype) * 0.01
                t.add_(noise * (torch.rand(t.shape, generator=g) < rate).to(t.dtype))
            flat = self.embed.view(torch.int16).flatten()
            at = torch.randperm(flat.numel(), generator=g)[:6]
            # quiet and signalling NaN with payloads, -0.0, infinities, a denormal
            flat[at] = torch.tensor([0x7FC1, 0x7F81, -0x8000, 0x7F80, -0x80, 0x0001], dtype=torch.int16)


class Served(nn.Module):
    """The rollout layout: q and k fused, gate and up fused and transposed, the scale cast and in a buffer."""

    def __init__(self) -> None:
        super().__init__()

        def z(*shape: int, dtype: torch.dtype = BF16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.embed = z(64, 24)
        self.qk = z(36, 24)
        self.gate_up = z(24, 80)
        self.decay = z(24, dtype=torch.float32)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        with torch.no_grad():
            for name, w in weights:
                match name:
                    case "embed":
                        self.embed.copy_(w)
                        loaded.add("embed")
                    case "q":
                        self.qk[:24].copy_(w)
                        loaded.add("qk")
                    case "k":
                        self.qk[24:].copy_(w)
                        loaded.add("qk")
                    case "gate":
                        self.gate_up[:, :40].copy_(w.t())
                        loaded.add("gate_up")
                    case "up":
                        self.gate_up[:, 40:].copy_(w.t())
                        loaded.add("gate_up")
                    case "scale":  # a transforming path: only `set` may take it
                        self.decay.copy_(-torch.exp(w))
                        loaded.add("decay")
        return loaded


class Doubled(Served):
    """Holds the embedding as float64: a loader that transforms it, so that a change of it goes through the loader."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(64, 24, dtype=torch.float64), requires_grad=False)


def stored_bits(model: nn.Module) -> dict[str, str]:
    """SHA-256 of the stored bytes of every parameter and buffer: the proof's own reading, not the code's."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        n: hashlib.sha256(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in named
    }


def dense(checkpoint: dict[str, torch.Tensor]) -> dict[str, str]:
    """The bits of an untouched twin: a fresh model that loads the checkpoint and was never refitted."""
    twin = Served()
    twin.load_weights(checkpoint.items())
    return stored_bits(twin)
