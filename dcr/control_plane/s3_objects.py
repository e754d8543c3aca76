"""What a control plane keeps in a bucket below its prefix, and how it is written down (docs/control-plane.md).

The object ``record`` holds K and the history entry of the write that made it; the entries before it are objects of
their own.
"""

from typing import TypeVar

import msgspec

from dcr.control_plane.interface import HistoryEntry, Stored
from dcr.protocol.errors import RefusedError
from dcr.s3.segment import segment_of

LAYOUT_VERSION = 1


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record, and who wrote it.

    Attributes:
        layout: LAYOUT_VERSION.
        entry: of the write that made it.
        body: what the protocol encoded.
    """

    layout: int
    entry: HistoryEntry
    body: bytes

    @property
    def stored(self) -> Stored:
        """The record as its readers know it."""
        return Stored(self.entry.revision, self.body, self.entry.operation_id)


class Past(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A write that was followed by another one; under its revision, and again under its operation id."""

    layout: int
    entry: HistoryEntry


class Registered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registry entry, with its name, of which the key may hold a digest alone."""

    layout: int
    name: str
    value: bytes


_T = TypeVar("_T", Kept, Past, Registered)


class Keys:
    """The keys of one record, beside the payloads that a delivery at the same place has of it.

    Args:
        record_id: the record.
    """

    def __init__(self, record_id: str) -> None:
        self.record_id = record_id
        self.base = f"{segment_of(record_id)}/control/"
        self.record = f"{self.base}record"
        self.probe = f"{self.base}probe"

    def revision(self, revision: int) -> str:
        """Of the write that made this revision."""
        return f"{self.base}history/{revision:020d}"

    def operation(self, operation_id: str) -> str:
        """Of the same write, by its id."""
        return f"{self.base}operation/{segment_of(operation_id)}"

    def registry(self, kind: str, name: str | None = None) -> str:
        """Of a registry entry; without a name, what all of that kind begin with."""
        return f"{self.base}registry/{segment_of(kind)}/" + ("" if name is None else segment_of(name))


def encode(value: Kept | Past | Registered) -> bytes:
    """The bytes of an object."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[_T], key: str) -> _T:
    """What an object holds; RefusedError if that is something else, or what a newer dcr wrote."""
    try:
        layout = msgspec.msgpack.decode(data, type=_AnyLayout).layout
        if layout == LAYOUT_VERSION:
            return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"object {key}: holds nothing that this dcr can read: {e}; check the address") from e
    raise RefusedError(
        f"object {key}: layout {layout}, this dcr knows {LAYOUT_VERSION}; use the dcr that wrote it, or a newer one"
    )


class _AnyLayout(msgspec.Struct, frozen=True):
    layout: int
