"""What every object store offers to owners and nodes, and under which keys they look (DESIGN section 6).

A key follows from the identity of what it holds, so that a node asks for sequence 0, 1, 2, ... of each owner, and for
the manifest that ends them, without ever listing::

    RECORD/EPOCH/TARGET/OWNER/INCARNATION/SEQUENCE.payload
    RECORD/EPOCH/TARGET/OWNER/INCARNATION/manifest
    RECORD/EPOCH/contents/OWNER/INCARNATION/CONTENT-DIGEST

Numbers have 20 decimal digits.  In names every byte outside ``[A-Za-z0-9_-]`` is written ``=XX`` (hexadecimal); a name
longer than 120 characters after that is cut to 80 and ends in ``=.`` and the SHA-256 of the whole.
"""

import hashlib
import re
from typing import Protocol

from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import PayloadIdentity

KEY_CHARS_MAX = 512
"""Longest key, in characters."""

_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,199}")
_NAME_CHARS_MAX = 120
_NAME_CHARS_KEPT = 80
_NUMBER_MAX = 2**64 - 1


class DeliveryError(DcrError):
    """The store could not be used; an object is either whole or absent."""


class DeliveryConflictError(DeliveryError):
    """The key holds other bytes already; they were left alone."""


class Delivery(Protocol):
    """A write-once object store.  Usable from several threads and processes at once.

    Every method may raise DeliveryError, and RefusedError for a key or prefix that ``check_key`` or ``check_prefix``
    refuses.
    """

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

    def close(self) -> None:
        """Let go of files and connections; safe to repeat."""
        ...


def check_key(key: str) -> None:
    """Raise RefusedError unless the key is 1 to 512 characters of non-empty segments that do not begin with a dot."""
    if len(key) > KEY_CHARS_MAX or not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise RefusedError(
            f"object key {key[:KEY_CHARS_MAX]!r}: must be segments of 1 to 200 characters [A-Za-z0-9._=-], none "
            f"beginning with a dot, joined by '/', at most {KEY_CHARS_MAX} characters in all"
        )


def check_prefix(prefix: str) -> None:
    """Raise RefusedError unless the prefix is whole segments of a key with their closing slash."""
    if not prefix.endswith("/"):
        raise RefusedError(
            f"key prefix {prefix[:KEY_CHARS_MAX]!r}: must end with '/', or it would match in mid-segment"
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


def epoch_prefix(record_id: str, epoch: int) -> str:
    """The prefix of everything that was emitted in an epoch; RefusedError as for ``payload_key``."""
    return f"{_record_prefix(record_id)}{_number('epoch', epoch)}/"


def sweep(delivery: Delivery, record_id: str, epoch_min: int) -> list[int]:
    """Delete what was emitted for a record in epochs below ``epoch_min``; returns those epochs, in order."""
    prefix = _record_prefix(record_id)
    segments = {key[len(prefix) :].split("/", 1)[0] for key in delivery.keys(prefix)}
    swept = sorted(int(segment) for segment in segments if segment.isdecimal() and int(segment) < epoch_min)
    for epoch in swept:
        delivery.delete_prefix(epoch_prefix(record_id, epoch))
    return swept


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
    raw = name.encode("utf-8", "surrogatepass")
    encoded = re.sub(rb"[^A-Za-z0-9_-]", lambda match: b"=%02X" % match[0][0], raw).decode("ascii")
    if len(encoded) > _NAME_CHARS_MAX:
        return f"{encoded[:_NAME_CHARS_KEPT]}=.{hashlib.sha256(raw).hexdigest()}"
    return encoded
