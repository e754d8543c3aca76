"""A delivery store read directly, for a rank that no node agent receives for."""

import time
from collections.abc import Iterable

from dcr.delivery.interface import Delivery, manifest_key, payload_key
from dcr.delivery.traffic import Traffic
from dcr.protocol.identity import PayloadIdentity
from dcr.protocol.messages import Prepare
from dcr.protocol.record import OwnerRef
from dcr.runtime.reception import MANIFEST_BYTES_MAX


class StoreInbox:
    """A delivery store read directly, for a rank that no node agent receives for.

    Args:
        delivery: the store.
        payload_bytes_max: larger payloads are refused before they are read.
    """

    def __init__(self, delivery: Delivery, payload_bytes_max: int) -> None:
        self._delivery = delivery
        self._payload_bytes_max = payload_bytes_max
        self._missed: dict[str, tuple[float, int]] = {}
        """When each object was looked for last, and how often, in vain."""

    @property
    def traffic(self) -> Traffic:
        """What was asked of the store so far."""
        return self._delivery.traffic

    def payload(self, identity: PayloadIdentity) -> bytes | None:
        """A payload; None while it is not in sight.  DeliveryError if the store could not be used."""
        return self._get(payload_key(identity), self._payload_bytes_max)

    def manifest(self, order: Prepare, owner: OwnerRef) -> bytes | None:
        """An owner's manifest of an attempt; None while it is not in sight.  Raises as ``payload``."""
        key = manifest_key(order.record_id, order.target, order.epoch, owner.owner, owner.incarnation)
        return self._get(key, MANIFEST_BYTES_MAX)

    def _get(self, key: str, size_max: int) -> bytes | None:
        at_s, looks = self._missed.get(key, (0.0, 0))
        if looks and time.monotonic() - at_s < self._delivery.look_pause.after(looks):
            return None
        data = self._delivery.get(key, size_max)
        if data is None:
            self._missed[key] = time.monotonic(), looks + 1
        else:
            self._missed.pop(key, None)
        return data

    def ahead(self, identities: Iterable[PayloadIdentity]) -> None:
        """Nothing is read before it is asked for."""

    def payload_taken(self, identity: PayloadIdentity) -> None:
        """Nothing is kept here."""

    def manifest_taken(self, order: Prepare, owner: OwnerRef) -> None:
        """Nothing is kept here."""

    def payload_again(self, identity: PayloadIdentity) -> None:
        """Nothing is kept here: the store is read again."""

    def manifest_again(self, order: Prepare, owner: OwnerRef) -> None:
        """Nothing is kept here: the store is read again."""
