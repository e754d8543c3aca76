"""What learned placement rests on, and whether it is still so: asked before every transition."""

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
import xxhash
from torch import nn

from dcr.data_plane.region import Region
from dcr.data_plane.resident import Residents, stored_bytes

CONTAINER_MAX = 1 << 12
"""Entries of a list, dict or set that are looked at; of a larger one only whether it is the same object."""
_DEPTH = 3
"""How far into containers and dataclasses: a module's attribute, its entries, and theirs."""
_PLAIN = (bool, int, str, float, enum.Enum, torch.dtype, torch.device)
_HIDDEN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training")
"""Attributes of every module that are looked at otherwise, or that loaders do not ask."""


class Ground:
    """A model as it was when its loader was learned.

    Counted are: of every resident tensor name, address, shape, strides, dtype, device, class, and the attributes that
    loaders hang on parameters (``output_dim``, ``weight_loader`` and the like); plain attributes of every module, also
    those inside its containers and dataclasses (expert maps, ranks and sizes, flags), as far as they were set; the bits
    of resident memory that the loader consults; settings.

    Looking twice at thousands of modules has to cost little, so ``same`` compares identities first: a Python object
    that is still the same, and cannot change, needs no second look.  Only where that fails names and values are
    compared, which costs milliseconds and says what is different.

    Args:
        model: the model.
        residents: its storage.
        consulted: resident memory that the loader reads, such as expert maps.
        settings: library versions and loader settings, in words.
    """

    def __init__(
        self, model: nn.Module, residents: Residents, consulted: Iterable[Region], settings: Mapping[str, str]
    ) -> None:
        self._model = model
        self._residents = residents
        self._settings = settings
        self._consulted = sorted(consulted, key=lambda r: (r.address, r.size, r.stride, str(r.dtype)))
        self._tensors = describe_tensors(residents)
        self._attributes = describe_attributes(model)
        self._bits = self._consulted_bits()
        self._identities = _Identities(model, residents)

    def same(self) -> bool:
        """Whether nothing has changed; true in the same sense as ``moved`` is empty, and cheaper."""
        if self._identities.same():
            return self._bits == self._consulted_bits()
        if self.moved():
            return False
        self._identities = _Identities(self._model, Residents(self._model))  # other objects, as good as the old ones
        return True

    def moved(self) -> list[str]:
        """What is not as it was: names of tensors, then of attributes as ``module.attribute``."""
        now, attributes = Residents(self._model), describe_attributes(self._model)
        tensors = set(_changed(self._tensors, describe_tensors(now))) | set(self._residents.rebound())
        asked = {name for name, value in self._attributes.items() if attributes.get(name) != value}
        if tensors or asked:
            return [*sorted(tensors), *sorted(asked - tensors)]
        return [] if self._bits == self._consulted_bits() else ["resident memory that the loader consults"]

    def moved_tensors(self) -> list[str]:
        """Names of resident tensors that do not lie where and how they did; attributes do not count."""
        if self._identities.same():
            return []
        moved = _changed(self._residents.layout, Residents(self._model).layout)
        return sorted({*moved, *self._residents.rebound()})

    def digest(self) -> str:
        """All of it as the model is now: 64 hexadecimal digits."""
        tensors = describe_tensors(Residents(self._model))
        attributes = describe_attributes(self._model)
        known = {name: attributes.get(name, "gone") for name in self._attributes}
        h = hashlib.sha256()
        for kind, lines in (("tensor", tensors), ("attribute", known), ("setting", self._settings)):
            for name, line in sorted(lines.items()):
                h.update(f"{kind} {name}|{line}\n".encode())
        if tensors == self._tensors:
            h.update(repr(self._consulted_bits()).encode())
        return h.hexdigest()

    def _consulted_bits(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(stored_bytes(self._residents.at(r)).numpy().data) for r in self._consulted]


def describe_tensors(residents: Residents) -> dict[str, str]:
    """Where every resident tensor lies and what a loader may ask it: name -> one line."""
    return {
        name: f"{place} {type(residents.by_name[name]).__name__} {_hung_on(residents.by_name[name])}"
        for name, place in residents.layout.items()
    }


def describe_attributes(model: nn.Module) -> dict[str, str]:
    """Plain attributes of every module, and those in its containers and dataclasses, in words; none that is unset."""
    found = {}
    known: dict[int, str] = {}  # the same configuration hangs on many modules
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if _hidden(key):
                continue
            words = known.get(id(value))
            if words is None:
                words = known[id(value)] = _in_words(value, _DEPTH)
            if words:
                found[f"{prefix}.{key}".removeprefix(".")] = words
    return found


def _in_words(value: Any, depth: int) -> str:
    """A plain value, or the plain values in it; empty if there are none."""
    if isinstance(value, _PLAIN):
        return repr(value)
    parts = _parts(value) if depth > 1 else None
    if parts is None:
        return ""
    told = [f"{key}={words}" for key, part in parts if (words := _in_words(part, depth - 1))]
    return f"{type(value).__name__}({', '.join(told)})" if told else ""


def _parts(value: Any) -> Sequence[tuple[Any, Any]] | None:
    """Entries of a container or fields of a dataclass; None for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return list(vars(value).items()) if hasattr(value, "__dict__") else []
    if not isinstance(value, (list, tuple, dict, set, frozenset)) or len(value) > CONTAINER_MAX:
        return None
    if isinstance(value, dict):
        return [(key, part) for key, part in value.items() if isinstance(key, _PLAIN)]
    plain = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    return list(enumerate(plain))


def _hung_on(tensor: torch.Tensor) -> str:
    return " ".join(f"{key}={_shown(value)}" for key, value in sorted(vars(tensor).items()))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value))):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__name__))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _PLAIN)


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]


class _Identities:
    """Which objects everything that counts is made of: equal objects of another identity do not pass.

    The comparisons run over flat sequences inside the interpreter, not in a loop of Python over modules.
    """

    def __init__(self, model: nn.Module, residents: Residents) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._rows: list[list[Any]] = []
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        seen: set[int] = set()
        for module in model.modules():
            held = vars(module)
            self._dicts += [held, held["_parameters"], held["_buffers"], held["_modules"]]
            for key, value in held.items():
                if not _hidden(key):
                    self._note(value, _DEPTH, seen)
        self._tensors = list(residents.by_name.values())
        self._dicts += [vars(tensor) for tensor in self._tensors]
        self._sizes = [*map(len, self._dicts), *map(len, self._rows)]
        self._objects = list(self._walk())
        self._places = self._places_now()

    def same(self) -> bool:
        return (
            self._sizes == [*map(len, self._dicts), *map(len, self._rows)]
            and all(map(is_, self._walk(), self._objects))
            and all(one == values for one, values in self._sets)
            and self._places == self._places_now()
        )

    def _walk(self) -> Iterator[Any]:
        values = chain.from_iterable(map(dict.values, self._dicts))
        return chain(values, chain.from_iterable(self._dicts), chain.from_iterable(self._rows))

    def _places_now(self) -> list[Any]:
        return [
            *map(torch.Tensor.data_ptr, self._tensors),
            *map(attrgetter("shape"), self._tensors),
            *map(torch.Tensor.stride, self._tensors),
            *map(attrgetter("dtype"), self._tensors),
        ]

    def _note(self, value: Any, depth: int, seen: set[int]) -> None:
        """Watch a container or dataclass, and those in it, as deep as they are described."""
        if depth <= 1 or isinstance(value, _PLAIN) or id(value) in seen or (parts := _parts(value)) is None:
            return
        seen.add(id(value))
        if isinstance(value, set):
            self._sets.append((value, frozenset(value)))
        elif isinstance(value, list):
            self._rows.append(value)
        elif isinstance(value, dict):
            self._dicts.append(value)
        elif dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
            self._dicts.append(vars(value))
        for _, part in parts:
            self._note(part, depth - 1, seen)


def _hidden(key: str) -> bool:
    return key in _HIDDEN or "_hooks" in key
