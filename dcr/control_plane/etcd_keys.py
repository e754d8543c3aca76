"""What a control plane keeps in etcd under its prefix, and how it is written down (docs/control-plane.md)."""

from urllib.parse import quote, unquote

import msgspec

from dcr.control_plane.interface import HistoryEntry, Stored
from dcr.protocol.errors import RefusedError

LAYOUT_VERSION = 1


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layout: int
    revision: int
    operation_id: str
    body: bytes


class _Leader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    holder: str
    lease_s: float


class Keys:
    """The keys of one record; ids, kinds and names are percent-encoded, so that none contains a slash.

    Args:
        prefix: of the control plane, without slashes around it.
        record_id: the record.
    """

    def __init__(self, prefix: str, record_id: str) -> None:
        self.record_id = record_id
        self.base = f"/{prefix}/{quote(record_id, safe='')}"
        self.record = f"{self.base}/record"
        self.leader = f"{self.base}/leader"
        self.history = f"{self.base}/history/"

    def revision(self, revision: int) -> str:
        """Of a history entry; their order is that of revisions."""
        return f"{self.history}{revision:020d}"

    def operation(self, operation_id: str) -> str:
        """Of the revision that an operation made."""
        return f"{self.base}/operation/{quote(operation_id, safe='')}"

    def registry(self, kind: str, name: str | None = None) -> str:
        """Of a registry entry; without a name, what all of that kind begin with."""
        return f"{self.base}/registry/{quote(kind, safe='')}/" + ("" if name is None else quote(name, safe=""))


def after(prefix: str) -> bytes:
    """The end of the range of all keys that begin so."""
    data = prefix.encode()
    return data[:-1] + bytes([data[-1] + 1])


def name_of(key: bytes) -> str:
    """The last part of a key."""
    return unquote(key.decode().rpartition("/")[2])


def encode_stored(stored: Stored) -> bytes:
    """The value of the record's key."""
    return msgspec.msgpack.encode(_Record(LAYOUT_VERSION, stored.revision, stored.operation_id, stored.body))


def decode_stored(data: bytes, key: str) -> Stored:
    """The record; RefusedError if the key holds something else, or what a newer dcr wrote."""
    try:
        found = msgspec.msgpack.decode(data, type=_Record)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"etcd key {key}: holds no record that this dcr can read: {e}; check the prefix") from e
    if found.layout != LAYOUT_VERSION:
        raise RefusedError(
            f"etcd key {key}: layout {found.layout}, while this dcr knows {LAYOUT_VERSION}; use the dcr that wrote it, "
            f"or a newer one"
        )
    return Stored(found.revision, found.body, found.operation_id)


def encode_entry(entry: HistoryEntry) -> bytes:
    """The value of a history entry's key."""
    return msgspec.msgpack.encode(entry)


def decode_entry(data: bytes, key: str) -> HistoryEntry:
    """A history entry; RefusedError if the key holds something else."""
    try:
        return msgspec.msgpack.decode(data, type=HistoryEntry)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"etcd key {key}: holds no history entry: {e}; check the prefix") from e


def encode_leader(holder: str, lease_s: float) -> bytes:
    """The value of the leader's key."""
    return msgspec.msgpack.encode(_Leader(holder, lease_s))


def decode_leader(data: bytes, key: str) -> tuple[str, float]:
    """Who leads, and the length of the lease in seconds; RefusedError if the key holds something else."""
    try:
        found = msgspec.msgpack.decode(data, type=_Leader)
    except msgspec.MsgspecError as e:
        raise RefusedError(f"etcd key {key}: holds no leader: {e}; check the prefix") from e
    return found.holder, found.lease_s
