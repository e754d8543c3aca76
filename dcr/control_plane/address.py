"""From an address in the configuration to a control plane."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from dcr.control_plane.interface import ControlPlane, ControlPlaneSettings
from dcr.control_plane.sqlite import SqliteControlPlane
from dcr.protocol.errors import RefusedError

_DEFAULT = ControlPlaneSettings()


def open_control_plane(address: str, settings: ControlPlaneSettings = _DEFAULT) -> ControlPlane:
    """Open the control plane at an address.

    Args:
        address: ``sqlite:///absolute/path.db``; the file is created where it is missing, and so is its folder.
        settings: bounds.

    Raises:
        RefusedError: an address of another form, or a file that is not this version's record.
        ControlPlaneUnavailableError: the file cannot be used.
    """
    parts = urlsplit(address)
    path = Path(unquote(parts.path))
    if (
        parts.scheme != "sqlite"
        or parts.netloc
        or parts.query
        or parts.fragment
        or not path.name
        or not path.is_absolute()
    ):
        raise RefusedError(f"control plane address {address!r}: must be of the form sqlite:///absolute/path.db")
    return SqliteControlPlane(path, settings)
