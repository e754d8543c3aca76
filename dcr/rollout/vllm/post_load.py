"""Watches vLLM's post-load processing: the one patch of vLLM that a GPU deployment uses too.

``process_weights_after_loading`` is where backends repack, swap, pad, quantise and derive.  It is wrapped so that the
model's tensors are counted before and after it; what it does is left alone.  vLLM imports the module of
``worker_extension_cls`` in every worker before it loads the model, and that module calls ``watch`` when imported.
"""

import functools
import weakref
from importlib import import_module
from typing import Any

import torch

from dcr.rollout.vllm.census import Census, Change

SUPPORTED_VERSION = "0.32"
"""The function and its callers were read in this version of vLLM; in any other nothing is wrapped, and an engine cannot
be refitted."""

_FUNCTION = "process_weights_after_loading"
_HOMES = ("vllm.model_executor.model_loader.utils", "vllm.model_executor.model_loader.base_loader")
"""Where it is defined, and where a loader calls it by a name of its own."""

_seen: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[Change, ...]]" = weakref.WeakKeyDictionary()
_state = {"unwatched": ""}


def watch() -> None:
    """Wrap the function in this process; again is harmless.  In another version of vLLM only note why not."""
    version = import_module("vllm").__version__
    homes = [import_module(home) for home in _HOMES]
    if not version.startswith(f"{SUPPORTED_VERSION}.") or not all(callable(vars(h).get(_FUNCTION)) for h in homes):
        _state["unwatched"] = (
            f"this is vLLM {version}, and {__name__} knows where {SUPPORTED_VERSION} processes weights after loading: "
            "install that version"
        )
        return
    original = vars(homes[0])[_FUNCTION]
    if not hasattr(original, "dcr_watched"):
        watched = _watched(original)
        for home in homes:
            if vars(home)[_FUNCTION] is original:
                setattr(home, _FUNCTION, watched)
    _state["unwatched"] = ""


def _watched(original: Any) -> Any:
    @functools.wraps(original)
    def process(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = Census(model)
        result = original(model, *args, **kwargs)
        _seen[model] = Census(model).changes(before)
        return result

    process.dcr_watched = True  # type: ignore[attr-defined]  # a mark on a function
    return process


def changes_of(model: torch.nn.Module) -> tuple[Change, ...] | None:
    """What post-load processing did to a model of this process; None if it was not watched."""
    return _seen.get(model)


def unwatched() -> str:
    """Why nothing can be watched in this process; empty if it can."""
    return _state["unwatched"]
