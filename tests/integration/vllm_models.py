"""Tiny checkpoints with random weights, of every kind of model that vLLM lays out in its own way."""

import torch
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _qwen3(**other):
    return Qwen3ForCausalLM(Qwen3Config(**{**_SIZES, "num_hidden_layers": 2, **other}))


def _qwen3_moe(**other):
    config = {**_SIZES, **_EXPERTS, "num_hidden_layers": 2, "num_experts": 8, "decoder_sparse_step": 1, **other}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**config, norm_topk_prob=True, mlp_only_layers=[], tie_word_embeddings=False)
    )


def _nemotron_h(blocks, groups):
    config = NemotronHConfig(
        **_SIZES,
        **_EXPERTS,
        layers_block_type=[_BLOCKS[block] for block in blocks],
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=groups,
        conv_kernel=4,
        chunk_size=32,
        n_routed_experts=8,
        moe_shared_expert_intermediate_size=64,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
    )
    return NemotronHForCausalLM(config)


MODELS = {
    "qwen3-moe": _qwen3_moe,
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3-untied": lambda: _qwen3(tie_word_embeddings=False),
    "qwen3-padded": lambda: _qwen3(tie_word_embeddings=False, vocab_size=250),
    "nemotron-h": lambda: _nemotron_h("M-*M", 2),
    "nemotron-h-1-group": lambda: _nemotron_h("M-*M", 1),
    "nemotron-h-moe": lambda: _nemotron_h("ME*-", 2),
}


def write_checkpoint(directory, seed, model="qwen3-moe", dtype=torch.bfloat16):
    """A checkpoint of ``MODELS[model]``: fused QKV, gated experts, norms and so on, all random."""
    made = MODELS[model]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted([*made.named_parameters(), *made.named_buffers()]):
            fill = _fill_of(name)
            if fill is not None and tensor.is_floating_point():
                tensor.copy_(fill(torch.randn(tensor.shape, generator=generator)))
    made.to(dtype).save_pretrained(directory)
    return directory


def _fill_of(name):
    """How a tensor is made from normal noise; None for what is computed from the configuration."""
    if name.endswith("inv_freq"):
        return None
    if name.endswith("A_log"):
        return lambda noise: (1 + noise.abs() * 5).log()
    if name.endswith("dt_bias"):
        return lambda noise: noise * 0.5 - 2
    if "norm" in name or name.endswith(".D"):
        return lambda noise: 1 + 0.1 * noise
    return lambda noise: 0.15 * noise
