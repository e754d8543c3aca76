"""From an address in the configuration to a delivery."""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import Delivery
from dcr.protocol.errors import RefusedError

if TYPE_CHECKING:
    from dcr.delivery.relay.address import Directory

_FORMS = "file:///absolute/folder, s3://bucket/prefix?endpoint=URL or relay:///folder/of/credentials?listen=host:port"


def open_delivery(address: str, directory: "Directory | None" = None, *, receives: bool = False) -> Delivery:
    """Open the delivery at an address.

    Args:
        address: ``file:///absolute/folder``, which is created where it is missing;
            ``s3://bucket/prefix?endpoint=URL&region=NAME``, whose other fields are those of ``s3_address.S3Address``;
            or ``relay:///folder/of/credentials?listen=host:port``, see ``relay.address``.
        directory: where nodes of a relay are found; None only where no relay may be opened.
        receives: True on a rollout node, False for an owner; a relay has two ends.

    Raises:
        RefusedError: an address of another form, with an unknown field or credentials in it; or a package that it
            needs is missing.
        DeliveryError: the folder, bucket or port cannot be used.
    """
    try:
        parts = urlsplit(address)
        path = Path(unquote(parts.path))
        named = os.fsencode(path)
    except ValueError:  # a bracket without its pair, or what is no text
        parts, path, named = urlsplit("?"), Path(), b""
    if parts.scheme == "s3":
        return _open_s3(address)
    if parts.scheme == "relay":
        if directory is None:
            raise RefusedError(
                "delivery address of a relay: its nodes are found beside a commit record, and here is none"
            )
        return _open_relay(address, directory, receives=receives)
    if (
        parts.scheme != "file"
        or b"\0" in named
        or parts.netloc
        or parts.query
        or parts.fragment
        or not path.name
        or not path.is_absolute()
    ):
        unknown = "" if parts.scheme in {"", "file"} else f"there is no delivery of scheme {parts.scheme!r}; it "
        raise RefusedError(f"delivery address {_shown(address)}: {unknown}must be of the form {_FORMS}")
    return FolderDelivery(path)


def _shown(address: str) -> str:
    """An address of unknown form without what may be a password: no log should show one."""
    bare, query, _ = address.partition("?")
    scheme, slashes, rest = bare.partition("://") if "://" in bare else ("", "", bare)
    user, at, place = rest.rpartition("@")
    return repr(f"{scheme}{slashes}{'...' if user else ''}{at}{place}{'?...' if query else ''}")


def _open_s3(address: str) -> Delivery:
    from dcr.delivery.s3_address import S3Address  # noqa: PLC0415 - beside boto3

    place = S3Address.parse(address)
    try:
        from dcr.delivery.s3 import S3Delivery  # noqa: PLC0415 - optional dependency, and slow to import
    except ModuleNotFoundError as e:
        raise RefusedError(f"delivery address of S3: {e}; pip install 'dcr[s3]'") from e
    return S3Delivery(place)


def _open_relay(address: str, directory: "Directory", *, receives: bool) -> Delivery:
    try:
        from dcr.delivery.relay.address import open_relay  # noqa: PLC0415 - optional dependency
    except ModuleNotFoundError as e:
        raise RefusedError(f"delivery address of a relay: {e}; pip install 'dcr[relay]'") from e
    return open_relay(address, directory, receives=receives)
