"""What a delivery asked of its store, and what that cost in bytes."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """Requests to a store since some moment.

    Attributes:
        requests: how many were sent, repeated ones too.
        retries: how many of them repeated one that failed, by the reason it failed for.
        bytes_up: bytes of objects sent, repeated ones too; no headers.
        bytes_down: bytes of objects received, repeated ones too; no headers, no lists.
    """

    requests: int = 0
    retries: Mapping[str, int] = field(default_factory=dict[str, int])
    bytes_up: int = 0
    bytes_down: int = 0

    def since(self, before: "Traffic") -> "Traffic":
        """What came after an earlier reading of the same counters."""
        more = {reason: n - before.retries.get(reason, 0) for reason, n in self.retries.items()}
        return Traffic(
            self.requests - before.requests,
            {reason: n for reason, n in more.items() if n},
            self.bytes_up - before.bytes_up,
            self.bytes_down - before.bytes_down,
        )

    def __str__(self) -> str:
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(self.retries.items()))
        again = f" ({sum(self.retries.values())} of them again: {why})" if why else ""
        return f"{self.requests} requests{again}, {self.bytes_up} bytes up, {self.bytes_down} bytes down"


class TrafficCounter:
    """Counts what several threads ask of one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._retries: dict[str, int] = {}
        self._bytes_up = 0
        self._bytes_down = 0

    def asked(self, bytes_up: int = 0) -> None:
        """A request is sent, with so many bytes of an object."""
        with self._lock:
            self._requests += 1
            self._bytes_up += bytes_up

    def received(self, size: int) -> None:
        """So many bytes of an object came in."""
        with self._lock:
            self._bytes_down += size

    def again(self, reason: str) -> None:
        """A request failed for a reason, and is repeated."""
        with self._lock:
            self._retries[reason] = self._retries.get(reason, 0) + 1

    @property
    def traffic(self) -> Traffic:
        """Everything so far."""
        with self._lock:
            return Traffic(self._requests, dict(self._retries), self._bytes_up, self._bytes_down)
