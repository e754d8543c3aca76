"""Every bound of the relay."""

from dataclasses import dataclass

from dcr.delivery.relay.tree import FAN_OUT_MAX
from dcr.protocol.errors import RefusedError

SECONDS_MAX = 1e6
"""Longest time: the kernel counts the milliseconds of a connection's time-out in 32 bits."""
BYTES_MAX = 1 << 50

_LARGEST = {
    "connections": 64,  # threads of this process
    "fan_out": FAN_OUT_MAX,
    "accepted_max": 1 << 16,  # threads and file descriptors of this process
    "relay_bytes_max": BYTES_MAX,
    "object_bytes_max": BYTES_MAX,
}
"""By the field; SECONDS_MAX for all others."""


@dataclass(frozen=True)
class Bounds:
    """Sizes in bytes, times in seconds.

    Attributes:
        connections: most connections from one process to one peer for objects that have equally many hops to go from
            there; each carries one object at a time.
        fan_out: how many others a node passes an object on to.
        relay_bytes_max: objects that a node holds until its engines have taken them.
        object_bytes_max: largest object.
        accepted_max: connections that a node accepts at once.
        connect_timeout_s: from the first packet to the end of the greetings.
        heartbeat_s: how often a peer that is still at work says so.
        peer_timeout_s: a peer that neither takes nor says anything for so long is lost.
        room_timeout_s: how long an object waits for room on a node.
        object_timeout_s: an object's whole way through its tree.
        idle_timeout_s: a connection without an object is closed after so long.
    """

    connections: int = 8
    fan_out: int = 4
    relay_bytes_max: int = 4 << 30
    object_bytes_max: int = (256 << 20) + 4096
    accepted_max: int = 512
    connect_timeout_s: float = 5.0
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 10.0
    room_timeout_s: float = 60.0
    object_timeout_s: float = 300.0
    idle_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            largest = _LARGEST.get(name, SECONDS_MAX)
            if not 0 < value <= largest:  # nor is NaN
                raise RefusedError(f"relay: {name} is {value}, it must be positive and at most {largest:.7g}")
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise RefusedError("relay: peer_timeout_s must be at least twice heartbeat_s, or live peers are lost")
