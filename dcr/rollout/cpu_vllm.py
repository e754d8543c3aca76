"""What lets real vLLM run on a CPU with its weights kept in loader layout, in one place.

A GPU deployment never imports it.

On a CPU vLLM 0.32 repacks weights after loading: linear layers drop their weight for a packed copy, embeddings and
``lm_head`` keep a private packed copy beside it, experts and causal convolutions are packed into the parameter itself.
In-place refit needs storage as the loader left it.  These patches keep it so, and compute with plain torch instead:

1. linear layers, embeddings, ``lm_head`` and causal convolutions: no packing, ``torch.nn.functional.linear``;
2. experts: no packing after loading;
3. experts: a plain torch forward pass that honours the expert map (vLLM's CPU kernel does not);
4. experts without a gate (Nemotron-H): vLLM refuses them on a CPU, since its kernels cannot; the pass of 3 can.

The patches are for proofs and tests; they are slower than vLLM's kernels.  ``dcr.rollout.vllm.cpu_extension`` installs
them in each worker before the model is loaded.
"""

import os
import sys
from collections.abc import Callable, MutableMapping
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from dcr.protocol.errors import RefusedError

SUPPORTED_VERSION = "0.32.0"
"""The patch targets were read in this version of vLLM; any other is refused."""

_EXPERTS = "CPUUnquantizedExperts"
_UNGATED = "is_act_and_mul=False"
"""What vLLM's refusal of experts without a gate says."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for many seconds
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes a large share of the host
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines share the cores with whatever else runs on the host
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables that vLLM on a CPU needs, or is unusably slow or greedy without."""

ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": 32,  # the CPU attention kernels take multiples of 32
    "worker_extension_cls": "dcr.rollout.vllm.cpu_extension.DcrCpuWorkerExtension",
}
"""Keyword arguments of ``vllm.LLM`` for an engine on a CPU that can be refitted."""


def set_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set ``ENVIRONMENT`` where the caller has not set a variable already; call it before vLLM is imported.

    Args:
        environment: what to change; the process's own environment unless a child process is being prepared.

    Raises:
        RefusedError: the process's own environment was meant and vLLM is imported already, so that it would be read
            too late.
    """
    if environment is os.environ and "vllm" in sys.modules:
        raise RefusedError("vLLM is imported already and has read its environment: call set_environment() before that")
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)


def install_loader_layout() -> None:
    """Patch vLLM in this process so that models loaded from now on keep their weights in loader layout.

    Raises:
        RefusedError: another version of vLLM, or one where a patch target is missing; nothing was patched.
    """
    version = import_module("vllm").__version__.partition("+")[0]
    if version != SUPPORTED_VERSION:
        raise RefusedError(
            f"the loader-layout patches are for vLLM {SUPPORTED_VERSION}, not {version}: install that version, or "
            f"check every patch in {__name__} against the new one"
        )
    layers = import_module("vllm.model_executor.layers.utils")
    experts = getattr(import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe"), _EXPERTS, None)
    config = getattr(import_module("vllm.model_executor.layers.fused_moe.config"), "FusedMoEConfig", None)
    patches: list[tuple[Any, str, Any]] = [
        (layers, "dispatch_cpu_unquantized_gemm", _keep_weight),
        (experts, "process_weights_after_loading", _keep_experts),
        (experts, "apply", _apply_experts),
        (experts, "_supports_no_act_and_mul", staticmethod(lambda: True)),
        (experts, "_supports_activation", staticmethod(_supports)),
        (config, "__post_init__", _allow_ungated(getattr(config, "__post_init__", None))),
    ]
    for owner, name, _ in patches:
        if not callable(getattr(owner, name, None)):
            where = getattr(owner, "__name__", _EXPERTS if owner is experts else "FusedMoEConfig")
            raise RefusedError(f"vLLM has no {where}.{name}: the loader-layout patches do not fit this build of vLLM")
    for owner, name, patch in patches:
        setattr(owner, name, patch)


def _keep_weight(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001  vLLM's signature
    """In place of ``dispatch_cpu_unquantized_gemm``: no packing, the weight stays and is read at every call."""
    layer.cpu_linear = functional.linear


def _keep_experts(experts: Any, layer: torch.nn.Module) -> None:  # noqa: ARG001  vLLM's signature
    """In place of ``CPUUnquantizedExperts.process_weights_after_loading``: no packing, no padding."""
    experts._use_zentorch = False  # noqa: SLF001  set by the method that this one replaces


def _apply_experts(  # noqa: PLR0917  vLLM's signature
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,  # noqa: ARG001
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,  # noqa: ARG001
    a2_scale: torch.Tensor | None,  # noqa: ARG001
    workspace13: torch.Tensor,  # noqa: ARG001
    workspace2: torch.Tensor,  # noqa: ARG001
    expert_tokens_meta: Any,  # noqa: ARG001
    apply_router_weight_on_input: bool,
) -> None:
    """In place of ``CPUUnquantizedExperts.apply``: experts in plain torch over weights in loader layout.

    ``w1`` is [experts, 2 * intermediate, hidden], gate rows first, or [experts, intermediate, hidden] where there is no
    gate; ``w2`` is [experts, hidden, intermediate].
    """
    if experts.w1_bias is not None or experts.w2_bias is not None:
        raise RefusedError("experts with biases are not covered by the loader-layout patches")
    inner = _INNER.get(activation.value)
    if inner is None:
        raise RefusedError(
            f"expert activation {activation.value!r} is not covered by the loader-layout patches, only "
            f"{', '.join(_INNER)}"
        )
    ids = topk_ids.long()
    if expert_map is not None:  # global expert -> local expert, -1 where another rank holds it
        ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], ids)
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        part = functional.linear(inner(functional.linear(hidden_states[token], w1[expert])), w2[expert]).float()
        if not apply_router_weight_on_input:
            part *= topk_weights[token, choice].float()[:, None]
        total.index_add_(0, token, part)
    output.copy_(total)


def _silu_and_multiply(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, -1)
    return functional.silu(gate.float()).to(up.dtype) * up


def _squared_relu(hidden: torch.Tensor) -> torch.Tensor:
    return functional.relu(hidden).square()


_INNER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu_and_multiply,
    "relu2_no_mul": _squared_relu,
}
"""What experts compute between their two matrices, by vLLM's name of the activation."""


def _supports(activation: Any) -> bool:
    """In place of ``CPUUnquantizedExperts._supports_activation``."""
    return activation.value in _INNER


def _allow_ungated(post_init: Any) -> Any:
    """``FusedMoEConfig.__post_init__`` without its last check, which refuses experts without a gate on a CPU."""
    if not callable(post_init):
        return None

    def without_the_last_check(config: Any) -> None:
        try:
            post_init(config)
        except NotImplementedError as error:
            if _UNGATED not in str(error):
                raise

    return without_the_last_check
