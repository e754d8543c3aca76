"""What a runtime does to a model's tensors between loading and serving: counted before and after, by name."""

from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from dcr.data_plane.bits import bit_view, dtype_name
from dcr.data_plane.content_digest import digest_elements
from dcr.data_plane.item import TensorSpec
from dcr.data_plane.placement.conversion import Form
from dcr.data_plane.resident import Residents, stored_bytes
from dcr.protocol.errors import RefusedError


@dataclass(frozen=True, eq=False)
class Change:
    """What became of one tensor.

    Attributes:
        name: its qualified name.
        kind: ``created``; ``removed``; ``reshaped``: another shape or dtype; ``rewritten``: other bits in the same
            shape, be it at the same address or not.  A tensor that moved with its bits has not changed.
        form: how it was before; None if it was created.
        found: what happened, for people.
    """

    name: str
    kind: str
    form: Form | None
    found: str


@dataclass(frozen=True, eq=False)
class _Counted:
    form: Form
    address: int
    digest: str


class Census:
    """Every resident tensor of a model at one time: parameters, buffers, tensor attributes, those in containers.

    Keeps a digest of each, and no bits: all memory is read once, on an accelerator there.
    """

    def __init__(self, model: nn.Module) -> None:
        known: dict[tuple[object, ...], str] = {}
        self._counted = {
            name: _Counted(Form.of(tensor), tensor.data_ptr(), _digest(tensor, known))
            for name, tensor in Residents(model).by_name.items()
            if not tensor.is_meta
        }

    def changes(self, before: "Census") -> tuple[Change, ...]:
        """What is other than it was before."""
        found = []
        for name in sorted(before._counted.keys() | self._counted.keys()):  # noqa: SLF001 - another of this class
            old, new = before._counted.get(name), self._counted.get(name)  # noqa: SLF001 - the same
            if new is None or (old is not None and new.form.numel == 0 and old.form.numel):
                assert old is not None
                found.append(Change(name, "removed", old.form, f"removed after loading, it was {_shown(old.form)}"))
            elif old is None:
                found.append(Change(name, "created", None, f"made after loading, {_shown(new.form)}"))
            elif (old.form.shape, old.form.dtype) != (new.form.shape, new.form.dtype):
                why = f"made {_shown(new.form)} after loading, it was {_shown(old.form)}"
                found.append(Change(name, "reshaped", old.form, why))
            elif old.digest != new.digest:
                where = "at the same address" if old.address == new.address else "elsewhere"
                found.append(Change(name, "rewritten", old.form, f"rewritten after loading, {where}"))
        return tuple(found)


def _shown(form: Form) -> str:
    return f"{form.dtype} {form.shape}"


def _digest(tensor: torch.Tensor, known: dict[tuple[object, ...], str]) -> str:
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    if place not in known:
        known[place] = _digest_of(tensor)
    return known[place]


def _digest_of(tensor: torch.Tensor) -> str:
    if tensor.device.type == "cpu":
        return f"{xxhash.xxh3_128_hexdigest(stored_bytes(tensor).numpy().data)}"
    try:
        dtype_name(tensor.dtype)
    except RefusedError:
        return "not a dtype that travels"
    spec = TensorSpec("", tuple(tensor.shape), tensor.dtype)
    return digest_elements(spec, None, bit_view(tensor.contiguous()).flatten()).hex()
