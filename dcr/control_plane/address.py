"""From an address in the configuration to a control plane."""

import os
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
    return SqliteControlPlane(control_file(address), settings)


def control_file(address: str) -> Path:
    """The file that an address names, whether or not it is there; RefusedError for an address of another form."""
    refused = RefusedError(f"control plane address {address!r}: must be of the form sqlite:///absolute/path.db")
    try:
        parts = urlsplit(address)
        path = Path(unquote(parts.path))
        named = os.fsencode(path)
    except ValueError as error:  # a bracket without its pair, or what is no text
        raise refused from error
    if (
        parts.scheme != "sqlite"
        or parts.netloc
        or parts.query
        or parts.fragment
        or b"\0" in named
        or not path.name
        or not path.is_absolute()
    ):
        raise refused
    return path
