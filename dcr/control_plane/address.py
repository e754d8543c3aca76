"""From an address in the configuration to a control plane."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dcr.control_plane.etcd import EtcdControlPlane
from dcr.control_plane.etcd_address import EtcdAddress
from dcr.control_plane.interface import ControlPlane, ControlPlaneSettings
from dcr.control_plane.s3_address import S3RecordAddress
from dcr.control_plane.sqlite import SqliteControlPlane
from dcr.protocol.errors import RefusedError

_DEFAULT = ControlPlaneSettings()
_ETCD = "etcd://"
_S3 = "s3://"
_SHARED = (_ETCD, _S3)
"""Machines that share no disk have it in common: no file lies beside it."""


def open_control_plane(address: str, settings: ControlPlaneSettings = _DEFAULT) -> ControlPlane:
    """Open the control plane at an address.

    Args:
        address: ``sqlite:///absolute/path.db``; the file is created where it is missing, and so is its folder.
            ``etcd://host:port[,host:port]/prefix?...``, see ``EtcdAddress``.
            ``s3://bucket/prefix?...``, see ``S3RecordAddress``; it keeps no leases.
        settings: bounds.

    Raises:
        RefusedError: an address of another form, a file that is not this version's record, an etcd or a bucket that
            does not let us in, or a package that is missing.
        ControlPlaneUnavailableError: the file cannot be used, or no member of the cluster, or the store, can be asked.
    """
    if address.startswith(_ETCD):
        return EtcdControlPlane(EtcdAddress.parse(address), settings)
    if address.startswith(_S3):
        return _open_s3(S3RecordAddress.parse(address), settings)
    return SqliteControlPlane(control_file(address), settings)


def open_existing(address: str) -> ControlPlane:
    """Open a control plane to look at it: a file that is missing is refused, and not made as for a trainer.

    Raises:
        RefusedError: as ``open_control_plane``, or there is no such file.
        ControlPlaneUnavailableError: as ``open_control_plane``.
    """
    if not address.startswith(_SHARED) and not control_file(address).is_file():
        raise RefusedError(
            f"control plane {address!r}: there is no {control_file(address)}; give the address that trainer and nodes "
            f"have"
        )
    return open_control_plane(address)


def _open_s3(address: S3RecordAddress, settings: ControlPlaneSettings) -> ControlPlane:
    try:
        from dcr.control_plane.s3 import S3ControlPlane  # noqa: PLC0415 - optional dependency, and slow to import
    except ModuleNotFoundError as e:
        raise RefusedError(f"control plane address of S3: {e}; pip install 'dcr[s3]'") from e
    return S3ControlPlane(address, settings)


def secret_file(address: str) -> tuple[Path, bool]:
    """Where the secret of a run is kept, and whether the processes that share it may make it there.

    Beside a record in a file it is another file: whoever may use the one finds the other.  Machines that share no disk
    have it from their operator, in a file that the address names: what one of them made, the others would not have.

    Raises:
        RefusedError: the address has another form, or names no file.
    """
    path = beside(address, ".secret")
    if path is not None:
        return path, True
    parsed = EtcdAddress.parse(address) if address.startswith(_ETCD) else S3RecordAddress.parse(address)
    if not parsed.secret:
        raise RefusedError(
            f"control plane {parsed}: the machines of a run that share no disk have its secret from you: make one with "
            f"`dcr certs secret /etc/dcr/run.secret`, bring it to every machine, and add secret=/etc/dcr/run.secret to "
            f"the address"
        )
    return Path(parsed.secret), False


def beside(address: str, suffix: str) -> Path | None:
    """The path of the record's file with a suffix; None where the record is in no file. RefusedError as below."""
    if address.startswith(_SHARED):
        return None
    path = control_file(address)
    return path.with_name(path.name + suffix)


def control_file(address: str) -> Path:
    """The file that an address names, whether or not it is there; RefusedError for an address of another form."""
    shown = repr(address) if "@" not in address else "(not shown)"
    refused = RefusedError(
        f"control plane address {shown}: must be of the form sqlite:///absolute/path.db, etcd://host:port/prefix or "
        f"s3://bucket/prefix"
    )
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
