"""What lets real Megatron-Core and Megatron Bridge run on a CPU, in one place.

A GPU deployment never imports it, and ``install`` refuses where CUDA is available.

Megatron-Core 0.19 and Bridge 0.6 are written for GPUs with Transformer Engine and ask for Python 3.12.  On a CPU:

1. ``typing.override`` is put in place on Python 3.11;
2. Transformer Engine, which the Bridge's LoRA layers import without asking, is an empty stand-in while that one module
   runs, so that everything else still finds it missing;
3. ``torch.cuda.current_device`` is None and ``Tensor.cuda`` the tensor itself, for paths that are otherwise neutral;
4. the tracker of CUDA random streams forks nothing;
5. ``mamba_ssm`` is a stand-in that gives a Mamba layer its weights but no forward pass;
6. norms are torch's, under sequence parallelism too;
7. functions that Megatron-Core has compiled at their first call run as they are written;
8. inside ``on_cpu`` factories that name the device "cuda" make host tensors, and the optimizers find the type names and
   the stream that they look for.
"""

import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode

from dcr.protocol.errors import RefusedError

SUPPORTED_VERSIONS = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2"}
"""The patch targets were read in these versions; any other is refused."""

_LORA_LAYERS = "megatron.bridge.peft.lora_layers"
_installed = False


def install() -> None:
    """Put the stand-ins in place; call it before anything of ``megatron`` is imported.  Calling it again does nothing.

    Raises:
        RefusedError: CUDA is available, or another version of Megatron is installed.
    """
    global _installed  # noqa: PLW0603 - a process is patched once
    if _installed:
        return
    if torch.cuda.is_available():
        raise RefusedError("dcr.trainer.cpu_megatron is for machines without CUDA, where Megatron runs as it is")
    for package, supported in SUPPORTED_VERSIONS.items():
        if version(package) != supported:
            raise RefusedError(f"{package} {version(package)}: its CPU patches are for {supported}; install that one")
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.12 has it
    sys.meta_path.insert(0, _LoraLayersFinder())
    torch.cuda.current_device = _no_device  # type: ignore[assignment]  # None is torch's default device
    torch.Tensor.cuda = _stay  # type: ignore[assignment, method-assign]
    if importlib.util.find_spec("mamba_ssm") is None:
        sys.modules.update(_mamba_stand_in())
    _calm_random_streams()
    _allow_sequence_parallel_norms()
    torch.compiler.set_stance("force_eager")
    _installed = True


def provider_of(bridge: Any, **settings: Any) -> Any:
    """The Bridge's model provider, set up for layers that run without CUDA, in BF16 and finalized.

    Args:
        bridge: an ``AutoBridge``.
        settings: fields of the provider, as ``tensor_model_parallel_size``.
    """
    from megatron.bridge.models.gpt_provider import local_layer_spec  # noqa: PLC0415 - after install()
    from megatron.core.transformer.enums import AttnBackend  # noqa: PLC0415

    provider = bridge.to_megatron_provider(load_weights=False)
    neutral: dict[str, Any] = {
        "use_cpu_initialization": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "attention_backend": AttnBackend.unfused,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_token_dispatcher_type": "allgather",  # the default makes CUDA streams
        "moe_shared_expert_overlap": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if hasattr(provider, "transformer_layer_spec"):
        neutral["transformer_layer_spec"] = local_layer_spec
    if hasattr(provider, "hybrid_stack_spec"):
        neutral["hybrid_stack_spec"] = _hybrid_stack_spec()
    for name, value in {**neutral, **settings}.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Inside it, Megatron's schedules and optimizers run on the host.

    Factories that are asked for a CUDA device make host tensors, host tensors call their type by its CUDA name, the
    current stream is None, and synchronising does nothing.  Matrix products of BF16 are made in FP32 and rounded, which
    is four times as fast on processors without BF16 arithmetic.
    """
    replaced = {name: getattr(torch.cuda, name) for name in ("synchronize", "current_stream")}
    try:
        for name in replaced:
            setattr(torch.cuda, name, _no_device)
        with _HostDevice():
            yield
    finally:
        for name, original in replaced.items():
            setattr(torch.cuda, name, original)


def _no_device(*_arguments: object, **_options: object) -> None:
    return None


def _stay(tensor: torch.Tensor, *_arguments: object, **_options: object) -> torch.Tensor:
    return tensor


_PRODUCTS = (torch.matmul, torch.Tensor.matmul)


class _HostDevice(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(*args).replace("torch.", "torch.cuda.")  # optimizers take no other
        if func in _PRODUCTS and not named and all(factor.dtype is torch.bfloat16 for factor in args):
            return func(*(factor.float() for factor in args)).bfloat16()
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return func(*args, **named)


class _LoraLayersFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LORA_LAYERS or importlib.util.find_spec("transformer_engine") is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoraLayersLoader(spec.loader)
        return spec


class _LoraLayersLoader(importlib.abc.Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # What it imports itself must not see the stand-in.
        for name in ("core.transformer.moe.moe_utils", "bridge.peft.adapter_wrapper", "bridge.peft.lora_merge"):
            importlib.import_module(f"megatron.{name}")
        # It finds Megatron-Core's names of the engine's layers and takes it to be there, but they are None.
        importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = False  # type: ignore[attr-defined]
        engine, pytorch = (types.ModuleType(f"transformer_engine{end}") for end in ("", ".pytorch"))
        engine.__path__ = []
        for name in ("Linear", "LayerNormLinear", "GroupedLinear"):
            setattr(pytorch, name, type(name, (), {}))
        pytorch.ops = types.SimpleNamespace(Sequential=type("Sequential", (), {}))  # type: ignore[attr-defined]
        engine.pytorch = pytorch  # type: ignore[attr-defined]
        stand_in = {"transformer_engine": engine, "transformer_engine.pytorch": pytorch}
        sys.modules.update(stand_in)
        try:
            self._real.exec_module(module)
        finally:
            for name in stand_in:
                sys.modules.pop(name, None)


class _GatedNorm(torch.nn.Module):
    """The weights of mamba_ssm's gated RMSNorm."""

    def __init__(self, width: int, *, device: Any = None, dtype: Any = None, **_options: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))


def _mamba_stand_in() -> dict[str, types.ModuleType]:
    # Megatron-Core looks for this argument before it builds a layer.
    def no_forward(*_arguments: object, state_dtype: object = None, **_options: object) -> None:  # noqa: ARG001
        raise RefusedError("a Mamba layer has no forward pass without mamba_ssm and CUDA")

    names = ("", ".ops", ".ops.triton", ".ops.triton.layernorm_gated", ".ops.triton.ssd_combined")
    modules = {f"mamba_ssm{name}": types.ModuleType(f"mamba_ssm{name}") for name in names}
    for name in names[:3]:
        modules[f"mamba_ssm{name}"].__path__ = []
    modules["mamba_ssm"].__version__ = "2.2.4"  # type: ignore[attr-defined]
    modules["mamba_ssm.ops.triton.layernorm_gated"].RMSNorm = _GatedNorm  # type: ignore[attr-defined]
    for function in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"):
        setattr(modules["mamba_ssm.ops.triton.ssd_combined"], function, no_forward)
    return modules


def _calm_random_streams() -> None:
    from megatron.core.tensor_parallel import random  # noqa: PLC0415 - after typing.override is there

    class Calm(random.CudaRNGStatesTracker):  # type: ignore[misc]  # megatron is untyped here
        def fork(self, name: str | None = None) -> contextlib.AbstractContextManager[None]:
            del name
            return contextlib.nullcontext()

        def add(self, name: str, seed: int) -> None:
            pass

        def is_initialized(self) -> bool:
            return True

    random._CUDA_RNG_STATE_TRACKER = Calm()  # noqa: SLF001 - no public way to set it
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True  # noqa: SLF001


def _allow_sequence_parallel_norms() -> None:
    """Megatron-Core refuses torch's norms there for the mark alone that has their gradients summed over ranks."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: PLC0415 - after typing.override is there

    plain = WrappedTorchNorm.__new__

    def made(cls: type, config: Any, *arguments: Any, **options: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, *arguments, **options)
        unmarked = copy.copy(config)
        unmarked.sequence_parallel = False
        norm = plain(cls, unmarked, *arguments, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    WrappedTorchNorm.__new__ = made


def _hybrid_stack_spec() -> Any:
    from megatron.core.models.hybrid import hybrid_block  # noqa: PLC0415 - after install()
    from megatron.core.post_training.modelopt.hybrid import model_specs  # noqa: PLC0415
    from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: PLC0415

    model_specs.Norm = model_specs.TENorm = hybrid_block.TENorm = WrappedTorchNorm
    return model_specs.get_hybrid_stack_modelopt_spec(local_core_attention=True)
