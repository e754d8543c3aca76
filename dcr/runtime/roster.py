"""Which training ranks a coordinator that runs elsewhere drives: their roster, in the control plane's registry.

Entries of kind ``trainer``: ``current`` names the parts that make up the roster, with the trainer's terms; ``closed``
names the start of the trainer that was closed last.  Entries of kind ``roster``: the parts.
"""

import secrets
from collections.abc import Collection, Iterable

import msgspec

from dcr.control_plane.interface import ControlPlane
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import OwnerRef
from dcr.runtime.terms import Terms

_KIND, _CURRENT, _CLOSED = "trainer", "current", "closed"
_PARTS = "roster"
_PART_BYTES_MAX = 3072
"""Of the references in one registry entry, which holds 4 KiB; K's own bound is reached long before their number is."""

_READS_MAX = 3


class _Current(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which parts make up the roster."""

    start: str
    """New with every trainer that starts; the parts' names begin with it."""
    parts: int
    terms: Terms


class Roster(msgspec.Struct, frozen=True):
    """The ranks of one start of a trainer: owners are taken for this trainer's by their incarnations."""

    owners: tuple[OwnerRef, ...]
    terms: Terms
    start: str
    """New with every trainer that starts."""
    closed: bool = False
    """The trainer was closed: it asks for no coordinator any more."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every owner's name."""
        return tuple(o.owner for o in self.owners)


def why_stranger(owners: Collection[OwnerRef], name: str, incarnation: int) -> str:
    """Why a process is no owner of the trainer that has these; empty if it is one."""
    if OwnerRef(name, incarnation) in owners:
        return ""
    return f"this coordinator leads another trainer, of which owner {name} ({incarnation}) is none"


def register_roster(control: ControlPlane, record_id: str, owners: Iterable[OwnerRef], asks: Terms) -> Roster:
    """Ask for a coordinator for these ranks; a trainer that asked before does no more.

    Whoever reads sees the old roster or the new one, whole: the entry that names the parts comes last.

    Args:
        control: where the registry is.
        record_id: the record.
        owners: all of the trainer.
        asks: what a coordinator must have in common with it.

    Raises:
        RefusedError: another trainer did the same in this moment.
        ControlPlaneUnavailableError: it could not be written.
    """
    asked = Roster(tuple(sorted(owners)), asks, secrets.token_hex(8))
    parts = _parts(asked.owners)
    for number, part in enumerate(parts):
        control.register(record_id, _PARTS, _part_name(asked.start, number), part)
    control.register(record_id, _KIND, _CURRENT, msgspec.msgpack.encode(_Current(asked.start, len(parts), asks)))
    if roster(control, record_id) != asked:
        raise RefusedError(
            f"another trainer has asked for a coordinator of record {record_id!r} in this moment: give each its own "
            f"record_id, or end one of them and start the other again"
        )
    for name in control.registered(record_id, _PARTS):
        if not name.startswith(asked.start):
            control.unregister(record_id, _PARTS, name)
    return asked


def close_roster(control: ControlPlane, record_id: str, asked: Roster) -> None:
    """The trainer that asked was closed; one that was started since is not touched.

    Raises:
        ControlPlaneUnavailableError: it could not be written.
    """
    control.register(record_id, _KIND, _CLOSED, asked.start.encode())


def withdraw_roster(control: ControlPlane, record_id: str) -> None:
    """Ask for none any more: the trainer that starts now has a coordinator of its own."""
    control.unregister(record_id, _KIND, _CURRENT)


def roster(control: ControlPlane, record_id: str) -> Roster | None:
    """The ranks that ask for a coordinator; None if no trainer does.

    Raises:
        RefusedError: the entry is none of this version of dcr.
        ControlPlaneUnavailableError: it could not be read.
    """
    found = None
    for _ in range(_READS_MAX):  # the parts may be those of the trainer that comes after the one that was named
        said = control.registered(record_id, _KIND)
        entry = said.get(_CURRENT)
        found = None if entry is None else _read(control, record_id, entry, said.get(_CLOSED, b""))
        if entry is None or found is not None:
            break
    return found


def _read(control: ControlPlane, record_id: str, entry: bytes, closed: bytes) -> Roster | None:
    """The roster that an entry names; None if a part is not there."""
    try:
        current = msgspec.msgpack.decode(entry, type=_Current)
        entries = control.registered(record_id, _PARTS)
        parts = [entries.get(_part_name(current.start, number)) for number in range(current.parts)]
        found = [msgspec.msgpack.decode(p, type=tuple[OwnerRef, ...]) for p in parts if p is not None]
    except (msgspec.MsgspecError, RecursionError) as e:
        raise RefusedError(
            f"record {record_id!r}: what the registry says of the trainer's ranks is nothing that this version of dcr "
            f"can read ({e}): run the same version everywhere"
        ) from e
    if len(found) < current.parts:
        return None
    owners = tuple(sorted(o for part in found for o in part))
    return Roster(owners, current.terms, current.start, closed == current.start.encode())


def _parts(owners: tuple[OwnerRef, ...]) -> list[bytes]:
    """The owners in as few entries as hold them."""
    parts: list[list[OwnerRef]] = [[]]
    size = 0
    for owner in owners:
        more = len(msgspec.msgpack.encode(owner))
        if size + more > _PART_BYTES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(owner)
        size += more
    return [msgspec.msgpack.encode(part) for part in parts]


def _part_name(start: str, number: int) -> str:
    return f"{start}-{number}"
