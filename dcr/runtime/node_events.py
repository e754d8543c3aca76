"""What reaches a node agent's thread, beside what it does by itself."""

from concurrent.futures import Future
from dataclasses import dataclass

from dcr.runtime.contents import ReadbackReport


@dataclass(frozen=True)
class Arrived:
    """A message of the leader."""

    data: bytes


@dataclass(frozen=True)
class Connected:
    """The leader is reached, perhaps anew."""


@dataclass(frozen=True)
class Asked:
    """Somebody wants to know what storage holds."""

    answer: Future[ReadbackReport]
