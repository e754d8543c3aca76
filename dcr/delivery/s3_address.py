"""The address of payloads in an object store: ``s3://bucket/prefix?endpoint=http://127.0.0.1:8333&region=us-east-1``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dcr.protocol.errors import RefusedError
from dcr.s3.place import S3Place

PARTS_MAX = 10_000
"""Parts of one object, by S3's rules."""


@dataclass(frozen=True, kw_only=True)
class S3Address(S3Place):
    """Where a delivery store is, and its bounds; fields after ``prefix`` are those of the address's query.

    Raises:
        RefusedError: a field is not what it may be.
    """

    STORE: ClassVar[str] = "delivery store"
    ADDRESS: ClassVar[str] = "delivery address"
    BOUNDS: ClassVar[Mapping[str, tuple[float, float]]] = {
        **S3Place.BOUNDS,
        "part_bytes": (5 << 20, 1 << 30),
        "parallel_parts": (1, 64),
        "tries_max": (1, 1000),
        "retry_timeout_s": (0.1, 3600),
        "look_pause_s": (0, 60),
        "look_pause_max_s": (0, 60),
        "upload_age_max_s": (1, 1e9),
    }

    part_bytes: int = 8 << 20
    """Larger objects are stored and read in parts of this size."""
    parallel_parts: int = 4
    """Parts of one object that are on their way at once."""
    tries_max: int = 20
    """Tries of one request."""
    retry_timeout_s: float = 45.0
    """How long one request may take, all its tries together; less than the setting ``delivery_timeout_s``."""
    look_pause_s: float = 0.05
    """How long a reader waits before it looks again for an object that was not there; then half as long again each
    time, up to ``look_pause_max_s``."""
    look_pause_max_s: float = 1.0
    """Longest pause between two looks."""
    upload_age_max_s: float = 86_400.0
    """Uploads in parts that were begun so long ago, and not completed, are aborted by the sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.look_pause_max_s < self.look_pause_s:
            raise RefusedError(f"{self.ADDRESS}: look_pause_max_s must not be less than look_pause_s")
