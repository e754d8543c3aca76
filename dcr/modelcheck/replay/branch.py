"""Copies of a deployment, to try one way on and then another."""

from copy import copy
from enum import Enum
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_WHOLE = (str, int, tuple, frozenset, bytes, type(None), msgspec.Struct, Enum, type)
"""Values that never change are shared."""


def branch(of: T) -> T:
    """A copy that shares nothing which changes: what happens to one does not happen to the other."""
    made: T = _Branch().copied(of)
    return made


class _Branch:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def copied(self, of: Any) -> Any:
        if isinstance(of, _WHOLE):
            return of
        found = self._made.get(id(of))
        if found is not None:
            return found
        match of:
            case dict():
                made: Any = {}
                self._made[id(of)] = made
                made.update((k, self.copied(v)) for k, v in of.items())
            case list():
                made = [self.copied(v) for v in of]
            case set():
                made = set(of)
            case _ if not hasattr(of, "__dict__") or getattr(type(of), "__hash__", None) not in (None, object.__hash__):
                return of  # a value: frozen dataclasses and the like
            case _:
                made = copy(of)
                self._made[id(of)] = made
                made.__dict__.update({k: self.copied(v) for k, v in of.__dict__.items()})
                return made
        self._made[id(of)] = made
        return made
