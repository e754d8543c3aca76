"""Objects that only holders of the run's secret can have written (DESIGN section 6).

Every object ends in a seal of 40 bytes: ``dcrSEAL1``, and HMAC-SHA-256 over the key and the object.  It is checked
before anybody looks at the object, so nothing from elsewhere is ever parsed or decompressed; and because the key names
record, epoch, owner, incarnation and sequence, an object of the run itself is refused wherever it does not belong.
"""

import hmac

from dcr.delivery.interface import Delivery, DeliveryError
from dcr.delivery.traffic import Traffic

MAGIC = b"dcrSEAL1"
SEAL_BYTES = len(MAGIC) + 32
_READS_MAX = 3
"""An object whose seal is wrong is read so often: what is stored may be good, and only what came of it bad."""


class UnsealedError(DeliveryError):
    """An object was not written by a process of this run, or is not the object that was written under its key."""


class SealedDelivery:
    """A delivery whose objects carry a seal, over any other one.

    Args:
        inner: where objects are kept; closed with this.
        secret: of the record; whoever holds it is trusted to write.

    Attributes:
        look_pause: of the inner one, as kind and place are.
    """

    def __init__(self, inner: Delivery, secret: bytes) -> None:
        self.look_pause = inner.look_pause
        self.kind, self.place = inner.kind, inner.place
        self._inner = inner
        self._secret = hmac.digest(secret, b"dcr delivered objects", "sha256")

    @property
    def traffic(self) -> Traffic:
        """See Delivery; with the seals."""
        return self._inner.traffic

    def put(self, key: str, data: bytes) -> None:
        """See Delivery."""
        self._inner.put(key, b"".join((data, self._seal(key, data))))

    def get(self, key: str, size_max: int) -> bytes | None:
        """See Delivery.

        Raises:
            UnsealedError: what is stored under the key has no seal, or a wrong one.
        """
        for _ in range(_READS_MAX):
            sealed = self._inner.get(key, size_max + SEAL_BYTES)
            if sealed is None:
                return None
            size = len(sealed) - SEAL_BYTES
            if size >= 0 and hmac.compare_digest(sealed[size:], self._seal(key, memoryview(sealed)[:size])):
                return sealed[:size]
        raise UnsealedError(
            f"object {key}: its seal is missing or wrong: it was changed since it was written, or written by a process "
            f"that does not hold this run's secret; check the store, and who can write to it"
        )

    def delete_prefix(self, prefix: str) -> None:
        """See Delivery."""
        self._inner.delete_prefix(prefix)

    def keys(self, prefix: str) -> list[str]:
        """See Delivery; seals are not looked at."""
        return self._inner.keys(prefix)

    def segments(self, prefix: str) -> list[str]:
        """See Delivery."""
        return self._inner.segments(prefix)

    def tidy(self, prefix: str) -> None:
        """See Delivery."""
        self._inner.tidy(prefix)

    def close(self) -> None:
        """See Delivery."""
        self._inner.close()

    def _seal(self, key: str, data: bytes | memoryview) -> bytes:
        made = hmac.new(self._secret, key.encode() + b"\0", "sha256")
        made.update(data)
        return MAGIC + made.digest()
