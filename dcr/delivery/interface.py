"""What every object store offers to owners and nodes, and under which keys they look (DESIGN section 6).

A key follows from the identity of what it holds, so that a node asks for sequence 0, 1, 2, ... of each owner, and for
the manifest that ends them, without ever listing::

    RECORD/EPOCH/TARGET/OWNER/INCARNATION/SEQUENCE.payload
    RECORD/EPOCH/TARGET/OWNER/INCARNATION/manifest
    RECORD/EPOCH/contents/OWNER/INCARNATION/CONTENT-DIGEST
    RECORD/EPOCH/committed
    RECORD/meeting/NAME

Numbers have 20 decimal digits.  Names are written as ``dcr.s3.segment`` says.

A payload's key has no digest in it: whoever looks for it cannot know the digest before the manifest, which comes last,
and would have to list, or wait for an announcement.  What a digest in the key would be good for, that the objects of
two writers cannot be mixed up, holds without: a key is written once, on the condition that it is free; who finds it
taken compares the digest that the store keeps with the object; who reads compares it with what came, and the receiver
compares the payload with the manifest (DESIGN D7).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from dcr.delivery.traffic import Traffic
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import PayloadIdentity
from dcr.protocol.messages import cut
from dcr.s3.segment import segment_of

KEY_CHARS_MAX = 512
"""Longest key, in characters."""
QUOTED_CHARS_MAX = 300
"""Most of a refused key that errors quote: it may come from another machine."""

_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,199}")
_NUMBER_MAX = 2**64 - 1
_EPOCH = re.compile(r"[0-9]{20}")
_PAUSE_GROWTH = 1.5
_GROWTHS_MAX = 64


class DeliveryError(DcrError):
    """The store could not be used; an object is either whole or absent."""


class DeliveryConflictError(DeliveryError):
    """The key holds other bytes already; they were left alone."""


@dataclass(frozen=True)
class LookPause:
    """How long a reader should wait before it looks again for an object that was not there.

    Where a look is a request to a server, each is work and money; so the pause grows by half with every look, and
    nobody waits more than half as long again as the object took to come.

    Attributes:
        first_s: after the first look, in seconds.
        longest_s: never longer than this, in seconds.
    """

    first_s: float = 0.0
    longest_s: float = 0.0

    def after(self, misses: int) -> float:
        """The pause in seconds after so many looks in vain, at least 1."""
        return min(self.longest_s, self.first_s * _PAUSE_GROWTH ** min(misses - 1, _GROWTHS_MAX))


class Delivery(Protocol):
    """A write-once object store.  Usable from several threads and processes at once.

    Every method may raise DeliveryError, and RefusedError for a key or prefix that ``check_key`` or ``check_prefix``
    refuses.

    Attributes:
        look_pause: how long a reader should wait between two looks for the same object.
        kind: ``file``, ``s3`` or ``relay``: one that reads and one that writes must be of the same.
        place: where objects are, for people.
    """

    look_pause: LookPause
    kind: str
    place: str

    @property
    def traffic(self) -> Traffic:
        """What was asked of the store through this object so far."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store an object, durably before returning; nobody ever sees a part of it.

        Storing the same bytes again is fine.

        Raises:
            DeliveryConflictError: the key holds other bytes.
        """
        ...

    def get(self, key: str, size_max: int) -> bytes | None:
        """Read an object; None while there is none.

        Args:
            key: which object.
            size_max: bytes; a larger object is a RefusedError, before any of it is read.
        """
        ...

    def delete_prefix(self, prefix: str) -> None:
        """Delete every object whose key starts with the prefix; none is fine."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The keys that start with the prefix, sorted."""
        ...

    def segments(self, prefix: str) -> list[str]:
        """The next segments of the keys that start with the prefix and go on after another slash, sorted.

        Cheaper than ``keys``: below the prefix of a record it names the epochs, whatever was emitted in them.  Some
        stores name a segment for a while after the last key below it was deleted.
        """
        ...

    def tidy(self, prefix: str) -> None:
        """Remove what writers that died left unfinished, and nobody sees, below the prefix; none is fine."""
        ...

    def close(self) -> None:
        """Let go of files and connections; safe to repeat."""
        ...


def check_key(key: str) -> None:
    """Raise RefusedError unless the key is 1 to 512 characters of non-empty segments that do not begin with a dot."""
    if len(key) > KEY_CHARS_MAX or not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise RefusedError(
            f"object key {cut(repr(key), QUOTED_CHARS_MAX)}: must be segments of 1 to 200 characters "
            f"[A-Za-z0-9._=-], none beginning with a dot, joined by '/', at most {KEY_CHARS_MAX} characters in all"
        )


def check_prefix(prefix: str) -> None:
    """Raise RefusedError unless the prefix is whole segments of a key with their closing slash."""
    if not prefix.endswith("/"):
        raise RefusedError(
            f"key prefix {cut(repr(prefix), QUOTED_CHARS_MAX)}: must end with '/', or it would match in mid-segment"
        )
    check_key(prefix[:-1])


def payload_key(identity: PayloadIdentity) -> str:
    """The key of a payload; RefusedError for an empty name or a number outside 0 to 2**64 - 1."""
    prefix = _owner_prefix(
        identity.record_id, identity.target, identity.epoch, identity.owner, identity.owner_incarnation
    )
    return f"{prefix}{_number('sequence', identity.sequence)}.payload"


def manifest_key(record_id: str, target: int, epoch: int, owner: str, owner_incarnation: int) -> str:
    """The key of an owner's manifest of an attempt; RefusedError as for ``payload_key``."""
    return f"{_owner_prefix(record_id, target, epoch, owner, owner_incarnation)}manifest"


def contents_key(record_id: str, epoch: int, owner: str, owner_incarnation: int, content_digest: str) -> str:
    """The key of an owner's table of content digests; RefusedError as for ``payload_key``."""
    return (
        f"{epoch_prefix(record_id, epoch)}contents/{_name('owner', owner)}/"
        f"{_number('owner incarnation', owner_incarnation)}/{_name('content digest', content_digest)}"
    )


def committed_key(record_id: str, epoch: int) -> str:
    """The key of what a leader leaves of an epoch that it commits; RefusedError as for ``payload_key``."""
    return f"{epoch_prefix(record_id, epoch)}committed"


def meeting_key(record_id: str, name: str) -> str:
    """The key of what a trainer leaves for others to find; RefusedError as for ``payload_key``."""
    return f"{meeting_prefix(record_id)}{_name('name', name)}"


def meeting_prefix(record_id: str) -> str:
    """The prefix of what trainers of a record leave; RefusedError as for ``payload_key``."""
    return f"{_record_prefix(record_id)}meeting/"


def epoch_prefix(record_id: str, epoch: int) -> str:
    """The prefix of everything that was emitted in an epoch; RefusedError as for ``payload_key``."""
    return f"{_record_prefix(record_id)}{_number('epoch', epoch)}/"


def sweep(delivery: Delivery, record_id: str, epoch_min: int, keep: Collection[int] = ()) -> None:
    """Delete what was emitted for a record in epochs below ``epoch_min``, and what dead writers left unfinished.

    Whoever calls it takes an ``epoch_min`` that is not above K's epoch.

    Args:
        delivery: the store.
        record_id: the record.
        epoch_min: the oldest epoch that stays in any case.
        keep: epochs below it that stay too.

    Raises:
        DeliveryError: something could not be deleted: the first of it; all else was.
    """
    prefix = _record_prefix(record_id)
    failed: list[DeliveryError] = []
    for segment in delivery.segments(prefix):
        if _EPOCH.fullmatch(segment) and int(segment) < epoch_min and int(segment) not in keep:
            try:
                delivery.delete_prefix(epoch_prefix(record_id, int(segment)))
            except DeliveryError as e:  # one epoch that stays, for whatever reason, must not keep all later ones
                failed.append(e)
    try:
        delivery.tidy(prefix)
    except DeliveryError as e:
        failed.append(e)
    if failed:
        more = f" (and {len(failed) - 1} more failures)" if len(failed) > 1 else ""
        raise DeliveryError(f"{failed[0]}{more}") from failed[0]


def _record_prefix(record_id: str) -> str:
    return f"{_name('record id', record_id)}/"


def _owner_prefix(record_id: str, target: int, epoch: int, owner: str, owner_incarnation: int) -> str:
    return (
        f"{epoch_prefix(record_id, epoch)}{_number('target', target)}/{_name('owner', owner)}/"
        f"{_number('owner incarnation', owner_incarnation)}/"
    )


def _number(what: str, value: int) -> str:
    if not 0 <= value <= _NUMBER_MAX:
        raise RefusedError(f"object key: {what} {value} is outside 0 to 2**64 - 1")
    return f"{value:020d}"


def _name(what: str, name: str) -> str:
    if not name:
        raise RefusedError(f"object key: the {what} is empty")
    return segment_of(name)
