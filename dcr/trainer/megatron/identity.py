"""What decides how a conversion goes, apart from values, as plain data that is the same in every process."""

import enum
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_DEPTH_MAX = 8
_CACHE = "_cache"


def fingerprint(value: object) -> str:
    """A digest of settings, objects and functions, by what they say and not by where they are."""
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()


def plain(value: Any, depth: int = 0) -> Any:
    """Numbers, texts, lists and mappings; objects by class and attributes, functions by name and code.

    What ends in "_cache" is left out, and so is what lies deeper than any settings do.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > _DEPTH_MAX or isinstance(value, nn.Module):
        return _name(type(value))
    if isinstance(value, dist.ProcessGroup):
        return ["ranks", *dist.get_process_group_ranks(value)]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *value.shape]
    if isinstance(value, torch.dtype | enum.Enum | type):
        return str(value)
    if isinstance(value, Mapping):
        return sorted((str(key), plain(item, depth + 1)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if callable(value):
        return _function(value, depth)
    return [_name(type(value)), plain(_attributes(value), depth + 1)]


def _function(value: Callable[..., object], depth: int) -> Any:
    if isinstance(value, functools.partial):
        return [_function(value.func, depth), plain(value.args, depth + 1), plain(value.keywords, depth + 1)]
    inner = getattr(value, "__func__", value)  # of a bound method
    code = getattr(inner, "__code__", None)
    if code is None:
        return [_name(type(value)), plain(_attributes(value), depth + 1)]
    held = [_held(cell) for cell in inner.__closure__ or ()] if depth < _DEPTH_MAX else []
    bound = getattr(value, "__self__", None)
    return [
        _name(inner),
        hashlib.sha256(code.co_code).hexdigest(),
        [repr(constant) for constant in code.co_consts if isinstance(constant, bool | int | float | str)],
        [plain(one, depth + 1) for one in held],
        None if bound is None else _name(type(bound)),
    ]


def _held(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that its function has not bound yet
        return "nothing yet"


def _attributes(value: object) -> dict[str, object]:
    return {name: held for name, held in getattr(value, "__dict__", {}).items() if not name.endswith(_CACHE)}


def _name(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"
