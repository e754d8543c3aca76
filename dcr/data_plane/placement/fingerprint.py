"""What learned placement rests on, as one digest: cheap enough to be compared before every transition."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcr.data_plane.region import Region
from dcr.data_plane.resident import Residents, stored_bytes

_PLAIN = (bool, int, str, float, type(None), torch.dtype, torch.device)


def describe(residents: Residents) -> dict[str, str]:
    """Where every resident tensor lies and what a loader may ask it: name -> one line.

    The line holds address, shape, strides, dtype and device, the tensor's class, and the attributes that loaders hang
    on parameters (``output_dim``, ``weight_loader`` and the like): plain values as they are, functions by name.
    """
    return {
        name: f"{place} {type(residents.by_name[name]).__name__} {_attributes(residents.by_name[name])}"
        for name, place in residents.layout.items()
    }


def fingerprint(
    described: Mapping[str, str], residents: Residents, consulted: Iterable[Region], settings: Mapping[str, str]
) -> str:
    """The digest.

    Args:
        described: see :func:`describe`.
        residents: the storage; must hold every region of ``consulted``.
        consulted: resident memory that the loader reads, such as expert maps; its bits count.
        settings: library versions and loader settings, in words.

    Returns:
        64 hexadecimal digits.
    """
    h = hashlib.sha256()
    for kind, lines in (("tensor", described), ("setting", settings)):
        for name, line in sorted(lines.items()):
            h.update(f"{kind} {name}|{line}\n".encode())
    for region in sorted(consulted, key=lambda r: (r.address, r.size, r.stride, str(r.dtype))):
        h.update(stored_bytes(residents.at(region)).numpy().data)
    return h.hexdigest()


def _attributes(tensor: torch.Tensor) -> str:
    return " ".join(f"{key}={_shown(value)}" for key, value in sorted(vars(tensor).items()))


def _shown(value: Any) -> str:
    if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__name__))
