"""What peers of the relay say to each other (docs/relay.md): frames over TLS, one object at a time on a connection."""

import contextlib
import math
import socket
import struct
import time
from typing import TypeVar

import msgspec

from dcr.delivery.interface import DeliveryError
from dcr.delivery.relay.tree import Branch

GREETING = b"dcrR\x01"
"""What both ends say first: the protocol, and its version."""
HEAD_BYTES_MAX = 1 << 20
SAID_CHARS_MAX = 600
"""Most of a reason in errors and logs: a peer's word may be as long as a head."""
CUT = 1 << 18
"""Bytes handed to a socket at once, so that a time-out is about a silence and not about a whole object."""

_LEAST_S = 0.001
_PREFIX = struct.Struct("<BI")
OBJECT, GO, BUSY, RECEIPT = range(1, 5)
"""Kinds of frames."""

_T = TypeVar("_T")


class RelayError(DeliveryError):
    """A peer of the relay could not be reached, went silent, or does not speak the protocol."""


class Object(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An object that is offered: the sender waits for GO, or for the RECEIPT if the peer has it already.

    Attributes:
        key: in the delivery.
        size: bytes that follow GO.
        digest: XXH3-128 of them.
        branches: whom the peer is to pass it on to.
    """

    key: str
    size: int
    digest: bytes
    branches: tuple[Branch, ...]


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node that an object did not get to.

    Attributes:
        node: its name.
        reason: what went wrong, and where.
        lost: True if the node could not be reached; False if it is there and would not take the object.
    """

    node: str
    reason: str
    lost: bool


class Receipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of an object: the peer and its branches hold it, but for these."""

    failures: tuple[Failure, ...]


def send_frame(sock: socket.socket, kind: int, head: msgspec.Struct | None = None) -> None:
    """Send a frame; TimeoutError and OSError as sockets raise them."""
    body = b"" if head is None else msgspec.msgpack.encode(head)
    sock.sendall(_PREFIX.pack(kind, len(body)) + body)


def send_bytes(sock: socket.socket, data: bytes | bytearray, deadline: float) -> None:
    """Send an object's bytes; each cut has the socket's time-out for itself, and all of them the deadline.

    Raises:
        RelayError: the deadline, on the monotonic clock, has passed.
    """
    view = memoryview(data)
    for start in range(0, len(view), CUT):
        _check(deadline, f"{len(view) - start} of {len(view)} bytes are left to send")
        sock.sendall(view[start : start + CUT])


def receive_frame(
    sock: socket.socket, deadline: float = math.inf, head_timeout_s: float = math.inf
) -> tuple[int, bytes] | None:
    """Kind and head of the next frame; None if the peer closed the connection between two frames.

    Args:
        sock: its time-out is how long the peer may be silent.
        deadline: of the whole frame, on the monotonic clock: that of its object.
        head_timeout_s: how long the frame may take once its first byte is here, by ``peer_timeout_s``.

    Raises:
        RelayError: the peer closed the connection in a frame, was too slow, or announced too long a head.
    """
    first = bytes(receive_bytes(sock, 1, deadline, may_end=True))
    if not first:
        return None
    bound = "object_timeout_s"
    if (head_deadline := time.monotonic() + head_timeout_s) < deadline:
        deadline, bound = head_deadline, "peer_timeout_s"
    kind, size = _PREFIX.unpack(first + receive_bytes(sock, _PREFIX.size - 1, deadline, bound))
    if size > HEAD_BYTES_MAX:
        raise RelayError(f"a frame of {size} bytes, more than the {HEAD_BYTES_MAX} allowed")
    return kind, bytes(receive_bytes(sock, size, deadline, bound))


def receive_bytes(
    sock: socket.socket,
    size: int,
    deadline: float = math.inf,
    bound: str = "object_timeout_s",
    *,
    may_end: bool = False,
) -> bytearray:
    """Exactly so many bytes; none, if the peer closed the connection before the first one and ``may_end``.

    Raises:
        RelayError: the peer closed the connection before, or the deadline, on the monotonic clock, has passed; it is
            that of ``bound``.
    """
    data = bytearray(size)
    view = memoryview(data)
    silence_s = sock.gettimeout()
    try:
        while view:
            _check(deadline, f"{len(view)} of {size} bytes have not come", bound)
            left_s = deadline - time.monotonic()
            short = silence_s is None or left_s < silence_s
            if short and left_s < math.inf:
                sock.settimeout(max(left_s, _LEAST_S))  # 0 would be not to wait at all
            try:
                got = sock.recv_into(view, min(len(view), CUT))
            except TimeoutError:
                if short:
                    continue  # to the deadline
                raise
            if not got:
                if may_end and len(view) == size:
                    return bytearray()
                raise RelayError(f"the peer closed the connection {len(view)} bytes before the end")
            view = view[got:]
    finally:
        sock.settimeout(silence_s)
    return data


def _check(deadline: float, left: str, bound: str = "object_timeout_s") -> None:
    if time.monotonic() >= deadline:
        raise RelayError(f"{bound} is over, and {left}")


def shut(sock: socket.socket) -> None:
    """End a connection on which another thread may be at work; that thread finds it ended."""
    with contextlib.suppress(OSError):
        # Not the method of TLS sockets, which first lets go of the TLS: the other thread would go on in plain text.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def parse(head: bytes, kind: type[_T]) -> _T:
    """A frame's head; RelayError if it is none of this kind."""
    try:
        return msgspec.msgpack.decode(head, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RelayError(f"not the head of a frame: {e}") from e


def greet(sock: socket.socket, deadline: float = math.inf) -> None:
    """Say and hear the greeting; RelayError if the peer speaks something else, or has not by the deadline."""
    sock.sendall(GREETING)
    heard = bytes(receive_bytes(sock, len(GREETING), deadline, "connect_timeout_s"))
    if heard != GREETING:
        what = f"version {heard[4]} of the relay protocol" if heard[:4] == GREETING[:4] else "another protocol"
        raise RelayError(f"the peer speaks {what}, not version {GREETING[4]}; run one dcr everywhere")
