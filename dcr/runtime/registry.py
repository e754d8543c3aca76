"""What is said beside the record, in the control plane's registry: who listens where, who catches up (DESIGN 6)."""

import logging
from collections.abc import Mapping
from functools import lru_cache

from dcr.control_plane.interface import ControlPlane

_KIND, _NAME = "leader", "address"
_DELIVERY, _MEETING = "delivery", "meeting"
_RELAY = "relay"
_CATCHING_UP = "catching-up"
_log = logging.getLogger("dcr")


def register_leader(control: ControlPlane, record_id: str, address: str) -> None:
    """Say where the leader of this record listens; see ``channel_address.HubAddress``."""
    control.register(record_id, _KIND, _NAME, address.encode())


def leader_address(control: ControlPlane, record_id: str) -> str | None:
    """Where the leader of this record listens; None if nobody has said so, or the entry is damaged.

    A leader that finds another address than its own there enters its own again, so a damaged entry mends itself.
    """
    value = control.lookup(record_id, _KIND, _NAME)
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        _tell_damaged(record_id, value)
        return None


@lru_cache(maxsize=16)  # it is looked up again and again: the log hears of it once
def _tell_damaged(record_id: str, value: bytes) -> None:
    _log.warning(
        "record %r: the registry's entry %s/%s is no text and passed over, as if no coordinator had said where it "
        "listens; the one that leads enters its address again: %r",
        record_id,
        _KIND,
        _NAME,
        value[:64],
    )


def register_meeting(control: ControlPlane, record_id: str, entry: bytes) -> None:
    """Say where the owners of this record deliver; see ``dcr.delivery.meeting``.  Comes before ``register_leader``."""
    control.register(record_id, _DELIVERY, _MEETING, entry)


def meeting(control: ControlPlane, record_id: str) -> bytes | None:
    """Where the owners of this record deliver; None if nobody has said so."""
    return control.lookup(record_id, _DELIVERY, _MEETING)


def register_catch_up(control: ControlPlane, record_id: str, engine: str, how_far: str) -> None:
    """Say, for people, that an engine catches up before it joins; an empty text says that it does not any more."""
    if how_far:
        control.register(record_id, _CATCHING_UP, engine, how_far.encode())
    else:
        control.unregister(record_id, _CATCHING_UP, engine)


def catching_up(control: ControlPlane, record_id: str) -> dict[str, str]:
    """How far engines are that catch up; one whose node was killed meanwhile is among them until it starts again.

    It is for people: of a damaged entry they see what is there.
    """
    entries = control.registered(record_id, _CATCHING_UP)
    return {engine: value.decode(errors="backslashreplace") for engine, value in entries.items()}


class RelayDirectory:
    """The nodes of a record's relay; see ``delivery.relay.address.Directory``.

    Args:
        control: the control plane.
        record_id: the record.
    """

    def __init__(self, control: ControlPlane, record_id: str) -> None:
        self._control = control
        self._record_id = record_id

    def nodes(self) -> Mapping[str, bytes]:
        """Every node that listens, by name."""
        return self._control.registered(self._record_id, _RELAY)

    def enter(self, name: str, value: bytes) -> None:
        """This node listens; one of this name that did before does no more."""
        self._control.register(self._record_id, _RELAY, name, value)

    def leave(self, name: str) -> None:
        """This node listens no more."""
        self._control.unregister(self._record_id, _RELAY, name)
