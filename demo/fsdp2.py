"""The FSDP2 trainer of the demo, over gloo: AdamW on FP32 masters, BF16 weights rewritten from them."""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dcr import TrainerRefit
from demo import policy
from demo.train import BETAS, GRADIENT_NORM_MAX, RATE, Trainer


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
        self._adamw = torch.optim.AdamW(self.masters, lr=rate, betas=BETAS, weight_decay=0.0)

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


class Fsdp2Trainer(Trainer):
    """One rank of the policy as transformers writes it.

    Attributes:
        model: the policy, sharded in place; its parameters are BF16 DTensors.
        optimizer: holds the FP32 masters.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.model = policy.build(seed)
        policy.shard(self.model, init_device_mesh("cpu", (self._ranks,)))
        self.optimizer = MasterAdamW(self.model.parameters(), RATE)

    def set_rate(self, rate: float) -> None:
        """See ``Trainer``."""
        self.optimizer.set_rate(rate)

    def step_on(self, batch: torch.Tensor) -> float:
        """See ``Trainer``; every rank takes its share of the batch."""
        mine = batch.chunk(self._ranks)[self._rank]
        loss = self.model(input_ids=mine, labels=mine).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        self.optimizer.step()
        mean = loss.detach() / self._ranks
        dist.all_reduce(mean)
        return float(mean)

    def save(self, directory: Path) -> None:
        """See ``Trainer``."""
        policy.save(self.model, directory)

    def refit(self, *, control: str, delivery: str, settings: dict[str, object]) -> TrainerRefit:
        """See ``Trainer``."""
        return TrainerRefit(self.model, control=control, delivery=delivery, settings=settings)
