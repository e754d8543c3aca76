"""What the demo's trainers have in common: real text, a warm-up, and one rank's place in the group."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dcr.trainer.torch.refit import Refit
from demo import text

BATCH = 8
WINDOW = 64
GRADIENT_NORM_MAX = 1.0
WARM_UP_STEPS = 160
WARM_UP_RATE = 3e-3
PROGRESS_STEPS = 40
RATE = 5e-6
BETAS = (0.9, 0.95)
COLLECTIVE_TIMEOUT_S = 120


class Trainer(ABC):
    """One training rank: a real forward, backward and optimizer step on real text.

    Every rank of the group builds it, and calls each method at the same time as the others.  The rank is told by the
    environment as ``torchrun`` does: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._seed = seed
        self._tokens = text.corpus()
        self._steps = 0

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps that follow."""

    @abstractmethod
    def step_on(self, batch: torch.Tensor) -> float:
        """One optimizer step on a given batch, int64 of shape [windows, length]; returns what ``step`` does."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the policy as a Hugging Face checkpoint; the first rank writes, all wait."""

    @abstractmethod
    def refit(self, *, control: str, delivery: str, settings: dict[str, object]) -> Refit:
        """The front door that pushes the present weights."""

    def warm_up(self, steps: int = WARM_UP_STEPS, progress: Callable[[int, float], None] = lambda *_: None) -> float:
        """Train at a high rate, so that the policy has something to say; returns the last loss.

        ``progress`` is called with the steps done and the loss, every so often.
        """
        for step in range(steps):
            self.set_rate(WARM_UP_RATE * min(1.0, (step + 1) / 8, (steps - step) / (steps / 2)))
            loss = self.step()
            if step == 0 or (step + 1) % PROGRESS_STEPS == 0:
                progress(step + 1, loss)
        self.set_rate(RATE)
        return loss

    def step(self) -> float:
        """One optimizer step on the next batch; returns the mean loss of the batch, in nats a byte."""
        batch = text.batch(self._tokens, self._steps, BATCH, WINDOW, self._seed)
        self._steps += 1
        return self.step_on(batch)

    def close(self) -> None:
        """Leave the group when every rank is done with it."""
        dist.barrier()
        dist.destroy_process_group()
