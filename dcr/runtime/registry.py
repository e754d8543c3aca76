"""What is said beside the record, in the control plane's registry: who listens where, who catches up (DESIGN 6)."""

from collections.abc import Mapping

from dcr.control_plane.interface import ControlPlane

_KIND, _NAME = "leader", "address"
_DELIVERY, _MEETING = "delivery", "meeting"
_RELAY = "relay"
_CATCHING_UP = "catching-up"


def register_leader(control: ControlPlane, record_id: str, address: str) -> None:
    """Say where the leader of this record listens; see ``channel_address.HubAddress``."""
    control.register(record_id, _KIND, _NAME, address.encode())


def leader_address(control: ControlPlane, record_id: str) -> str | None:
    """Where the leader of this record listens; None if nobody has said so."""
    value = control.lookup(record_id, _KIND, _NAME)
    return None if value is None else value.decode()


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
    """How far engines are that catch up; one whose node was killed meanwhile is among them until it starts again."""
    return {engine: value.decode() for engine, value in control.registered(record_id, _CATCHING_UP).items()}


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
