"""Where the leader listens: one entry in the control plane's registry, beside the record (DESIGN section 6)."""

from dcr.control_plane.interface import ControlPlane

_KIND, _NAME = "leader", "address"


def register_leader(control: ControlPlane, record_id: str, address: str) -> None:
    """Say where the leader of this record listens, ``127.0.0.1:port``."""
    control.register(record_id, _KIND, _NAME, address.encode())


def leader_address(control: ControlPlane, record_id: str) -> str | None:
    """Where the leader of this record listens; None if nobody has said so."""
    value = control.lookup(record_id, _KIND, _NAME)
    return None if value is None else value.decode()
