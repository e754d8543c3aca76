"""The training side of the demo: FSDP2 over gloo, AdamW on FP32 masters, BF16 weights rewritten from them."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from demo import policy, text

BATCH = 8
WINDOW = 64
GRADIENT_NORM_MAX = 1.0
WARM_UP_STEPS = 160
WARM_UP_RATE = 3e-3
PROGRESS_STEPS = 40
RATE = 5e-6
COLLECTIVE_TIMEOUT_S = 120


class MasterAdamW:
    """AdamW on FP32 masters of this rank's shards; the BF16 weights are rounded from the masters after every step.

    Without masters an update smaller than half a BF16 spacing would be lost for good; with them it adds up until the
    stored bits change, which is why few of them change in a step (paper section 2.2).

    Attributes:
        weights: this rank's BF16 shards.
        masters: FP32, one beside each shard, of the same shape.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> None:
        self._parameters = list(parameters)
        self.weights = [parameter.detach().to_local() for parameter in self._parameters]
        self.masters = [weight.float() for weight in self.weights]
        self._adamw = torch.optim.AdamW(self.masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps that follow."""
        for group in self._adamw.param_groups:
            group["lr"] = rate

    def step(self) -> None:
        """Update masters and weights from the gradients, and drop the gradients."""
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            master.grad = parameter.grad.to_local().float()
            parameter.grad = None
        self._adamw.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)


class Trainer:
    """One training rank: a real forward, backward and optimizer step on real text.

    Every rank of the group builds it, and calls each method at the same time as the others.  The rank is told by the
    environment as ``torchrun`` does: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Attributes:
        model: the policy, sharded in place; its parameters are BF16 DTensors.
        optimizer: holds the FP32 masters.
    """

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._seed = seed
        self._tokens = text.corpus()
        self._steps = 0
        self.model = policy.build(seed)
        policy.shard(self.model, init_device_mesh("cpu", (self._ranks,)))
        self.optimizer = MasterAdamW(self.model.parameters(), RATE)

    def warm_up(self, steps: int = WARM_UP_STEPS, progress: Callable[[int, float], None] = lambda *_: None) -> float:
        """Train at a high rate, so that the policy has something to say; returns the last loss.

        ``progress`` is called with the steps done and the loss, every so often.
        """
        for step in range(steps):
            self.optimizer.set_rate(WARM_UP_RATE * min(1.0, (step + 1) / 8, (steps - step) / (steps / 2)))
            loss = self.step()
            if (step + 1) % PROGRESS_STEPS == 0:
                progress(step + 1, loss)
        self.optimizer.set_rate(RATE)
        return loss

    def step(self) -> float:
        """One optimizer step on the next batch; returns the mean loss over all ranks, in nats a byte."""
        batch = text.batch(self._tokens, self._steps, BATCH, WINDOW, self._seed)
        self._steps += 1
        return self.step_on(batch)

    def step_on(self, batch: torch.Tensor) -> float:
        """One optimizer step on a given batch, int64 of shape [windows, length]; every rank takes its share of it."""
        mine = batch.chunk(self._ranks)[self._rank]
        loss = self.model(input_ids=mine, labels=mine).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self.optimizer.step()
        mean = loss.detach() / self._ranks
        dist.all_reduce(mean)
        return float(mean)

    def save(self, directory: Path) -> None:
        """Write the policy as a Hugging Face checkpoint; the first rank writes, all wait."""
        policy.save(self.model, directory)

    def close(self) -> None:
        """Leave the group when every rank is done with it."""
        dist.barrier()
        dist.destroy_process_group()
