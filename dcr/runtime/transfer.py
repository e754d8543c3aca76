"""What a trainer and a serving runtime's own weight-transfer interface say to each other about one attempt."""

from typing import Any, Self

import msgspec

from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base
from dcr.protocol.record import OwnerRef


class TransferAttempt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the sealed payloads and manifests of one attempt lie: with a delivery store's address, all there is to say.

    Keys follow from these fields (``dcr.delivery.interface``).
    """

    record_id: str
    epoch: int
    """Only grows; whatever is older than the last one seen is refused (DESIGN D6)."""
    target: int
    base: Base
    owners: tuple[OwnerRef, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON values, for ``update_weights``."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        """From JSON values; RefusedError on anything else."""
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as e:
            raise RefusedError(f"update_weights: this is no attempt that this version of dcr can read: {e}") from e
