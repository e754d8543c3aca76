"""The policy of the demo: a small Qwen3-MoE that transformers trains and vLLM serves."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from demo.text import VOCABULARY

CONTEXT_LENGTH = 512


def build(seed: int) -> Qwen3MoeForCausalLM:
    """The untrained policy in BF16, 3.4 million parameters; the same seed gives the same bits on every rank."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.04,
        use_cache=False,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def shard(policy: Qwen3MoeForCausalLM, mesh: DeviceMesh) -> None:
    """Shard the policy in place with FSDP2: each decoder layer is one group, what remains is another.

    Parameters stay BF16.  They are gathered as FP32, which is exact, and computed with in FP32: three times as fast as
    BF16 on processors without BF16 arithmetic.  Gradients are reduced in FP32.
    """
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def save(policy: Qwen3MoeForCausalLM, directory: Path) -> None:
    """Write the sharded policy as a Hugging Face checkpoint; every rank must call it, the first one writes."""
    full = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in policy.state_dict().items()
    }
    if torch.distributed.get_rank() == 0:
        policy.save_pretrained(directory, state_dict=full)
    torch.distributed.barrier()
