"""The Megatron trainer of the demo, over gloo: Megatron-Core's own schedule, gradient buffers and optimizer.

Megatron Bridge makes the model from the policy's configuration and gives it the policy's untrained weights.  On two
ranks attention and embeddings are split by tensor parallelism, whole experts by expert parallelism: no engine of the
demo lies so.  Masters are FP32, in Megatron's distributed optimizer.
"""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from dcr.trainer import cpu_megatron

cpu_megatron.install()

from megatron.bridge import AutoBridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from dcr import MegatronRefit  # noqa: E402
from demo import policy  # noqa: E402
from demo.train import BETAS, GRADIENT_NORM_MAX, RATE, Trainer  # noqa: E402


class MegatronTrainer(Trainer):
    """One rank of the policy as Megatron-Core writes it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        split = {
            "tensor_model_parallel_size": self._ranks,
            "expert_model_parallel_size": self._ranks,
            "expert_tensor_parallel_size": 1,
        }
        parallel_state.initialize_model_parallel(**split)
        untrained = policy.build(seed)
        self._bridge = AutoBridge.from_hf_config(untrained.config)
        provider = cpu_megatron.provider_of(self._bridge, **split, sequence_parallel=self._ranks > 1)
        provider.finalize_model_grads_func = finalize_model_grads
        chunk = provider.provide(pre_process=True, post_process=True).bfloat16()
        with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(None):  # it draws a progress bar
            shared = [own]
            dist.broadcast_object_list(shared)
            if self._rank == 0:
                untrained.save_pretrained(own)
            dist.barrier()
            self._bridge.load_hf_weights([chunk], shared[0])
            dist.barrier()  # the first rank's folder goes when all have read it
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        adam = OptimizerConfig(
            optimizer="adam",
            lr=RATE,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            clip_grad=GRADIENT_NORM_MAX,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        with cpu_megatron.on_cpu():
            self._model = DistributedDataParallel(provider, reduction, chunk)
            self._optimizer = get_megatron_optimizer(adam, [self._model])

    def set_rate(self, rate: float) -> None:
        """See ``Trainer``."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def step_on(self, batch: torch.Tensor) -> float:
        """See ``Trainer``; every rank takes the whole batch."""
        windows, length = batch.shape
        positions = torch.arange(length).expand(windows, -1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1).view(1, 1, length, length)

        def forward(_: object, model: Any) -> tuple[torch.Tensor, Any]:
            labels = batch.roll(-1, 1)
            return model(input_ids=batch, position_ids=positions, attention_mask=future, labels=labels), mean_loss

        def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses[:, :-1].float().mean()  # the last token of a window has no label
            return loss, {"loss": loss.detach()}

        with cpu_megatron.on_cpu():
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            (said,) = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=None,
                model=[self._model],
                num_microbatches=1,
                seq_length=length,
                micro_batch_size=windows,
                forward_only=False,
            )
            self._optimizer.step()
        return float(said["loss"])

    def save(self, directory: Path) -> None:
        """See ``Trainer``; by the Bridge's own export."""
        exported = self._bridge.export_hf_weights([self._model], cpu=True, show_progress=False)
        state = {name: tensor.contiguous() for name, tensor in exported}
        if self._rank == 0:
            self._bridge.hf_pretrained.save_pretrained(directory)
            save_file(state, directory / "model.safetensors", {"format": "pt"})
        dist.barrier()

    def refit(self, *, control: str, delivery: str, settings: dict[str, object]) -> MegatronRefit:
        """See ``Trainer``."""
        return MegatronRefit([self._model], self._bridge, control=control, delivery=delivery, settings=settings)
