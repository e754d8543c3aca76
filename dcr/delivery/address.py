"""From an address in the configuration to a delivery."""

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
    parts = urlsplit(address)
    path = Path(unquote(parts.path))
    if (
        parts.scheme != "file"
        or parts.netloc
        or parts.query
        or parts.fragment
        or not path.name
        or not path.is_absolute()
    ):
        raise RefusedError(f"delivery address {address!r}: must be of the form file:///absolute/folder")
    return FolderDelivery(path)
