"""From an address in the configuration to a delivery."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import Delivery
from dcr.protocol.errors import RefusedError


def open_delivery(address: str) -> Delivery:
    """Open the delivery at an address.

    Args:
        address: ``file:///absolute/folder``; the folder is created where it is missing.

    Raises:
        RefusedError: an address of another form.
        DeliveryError: the folder cannot be used.
    """
    refused = RefusedError(f"delivery address {address!r}: must be of the form file:///absolute/folder")
    try:
        parts = urlsplit(address)
        path = Path(unquote(parts.path))
        named = os.fsencode(path)
    except ValueError as error:  # a bracket without its pair, or what is no text
        raise refused from error
    if (
        parts.scheme != "file"
        or parts.netloc
        or parts.query
        or parts.fragment
        or b"\0" in named
        or not path.name
        or not path.is_absolute()
    ):
        raise refused
    return FolderDelivery(path)
