"""What reaches a node agent's thread, beside what it does by itself."""

from concurrent.futures import Future
from dataclasses import dataclass

from dcr.data_plane.content_digest import ContentDigest
from dcr.protocol.errors import DcrError
from dcr.protocol.messages import CompareContents
from dcr.runtime.contents import ReadbackReport


@dataclass(frozen=True)
class Arrived:
    """A message of the leader."""

    data: bytes


@dataclass(frozen=True)
class Connected:
    """The leader is reached, perhaps anew."""


@dataclass(frozen=True)
class Looked:
    """The delivery was looked at for what the leader left there."""

    problem: str
    """Why it is not to be seen; empty if it is, or if that cannot be told."""


@dataclass(frozen=True)
class Asked:
    """Somebody wants to know what storage holds."""

    answer: Future[ReadbackReport]


@dataclass(frozen=True)
class Tables:
    """What the owners' tensors digest to, for a comparison that the leader ordered; or why that cannot be read."""

    order: CompareContents
    found: dict[str, ContentDigest] | DcrError
