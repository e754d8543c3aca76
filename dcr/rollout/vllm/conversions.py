"""Which of vLLM's post-load conversions only move elements: its own functions, run on ids."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dcr.data_plane.placement.conversion import Conversion, Convert, Form, learn_conversions
from dcr.protocol.errors import RefusedError
from dcr.rollout.vllm.census import Change

_WEIGHTS = ("w13_weight", "w2_weight")
"""The parameters of a layer of experts."""


def find_conversions(
    model: torch.nn.Module, changes: Sequence[Change]
) -> tuple[tuple[Conversion, ...], dict[str, str]]:
    """Learn what became of expert weights for the kernels of their backend, such as FlashInfer's swapped halves.

    The answer is proven later, by reading the checkpoint back through it.

    Args:
        model: as it serves.
        changes: what post-load processing did to it.

    Returns:
        Conversions of tensors that changed; and, by name, why there is none for others of these layers.
    """
    changed = {change.name: change.form for change in changes if change.form is not None}
    found: list[Conversion] = []
    reasons: dict[str, str] = {}
    known: dict[tuple[Any, ...], list[Conversion]] = {}  # layers of one shape and configuration are converted alike
    for prefix, module in model.named_modules():
        names = [f"{prefix}.{weight}".removeprefix(".") for weight in _WEIGHTS]
        convert = _conversion_of(module, names)
        if convert is None or not any(name in changed for name in names):
            continue
        forms = {n: changed.get(n) or Form.of(getattr(module, w)) for n, w in zip(names, _WEIGHTS, strict=True)}
        like = (module.quant_method.unquantized_backend, repr(getattr(module, "moe_config", None)))
        like = (*like, *((form.shape, form.dtype) for form in forms.values()))
        try:
            if like not in known:
                known[like] = list(learn_conversions(convert, forms).values())
        except RefusedError as e:
            reasons |= dict.fromkeys((n for n in names if n in changed), str(e))
        else:
            for learned, (name, form) in zip(known[like], forms.items(), strict=True):
                if name in changed and learned.moves:
                    found.append(dataclasses.replace(learned, name=name, form=form))
                elif name in changed:
                    reasons[name] = "its backend's conversion leaves it as it is, so that something else changed it"
    return tuple(found), reasons


def _conversion_of(module: torch.nn.Module, names: Sequence[str]) -> Convert | None:
    """The conversion that vLLM gives a layer's weights, as a function; None for a layer of which none is known."""
    backend: Any = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    if backend is None or not all(isinstance(getattr(module, w, None), torch.Tensor) for w in _WEIGHTS):
        return None
    from vllm.model_executor.layers.fused_moe.oracle import unquantized  # noqa: PLC0415  slow to import elsewhere

    device, config = getattr(module, _WEIGHTS[0]).device, getattr(module, "moe_config", None)

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        w13, w2 = (tensors[name].to(device) for name in names)
        converted = unquantized.convert_to_unquantized_kernel_format(backend, copy.copy(config), w13, w2)
        return dict(zip(names, converted, strict=True))

    return convert
