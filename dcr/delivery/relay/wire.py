"""What peers of the relay say to each other (docs/relay.md): frames over TLS, one object at a time on a connection."""

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
CUT = 1 << 18
"""Bytes handed to a socket at once, so that a time-out is about a silence and not about a whole object."""

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


def receive_frame(sock: socket.socket) -> tuple[int, bytes] | None:
    """Kind and head of the next frame; None if the peer closed the connection between two frames.

    Raises:
        RelayError: the peer closed the connection in a frame, or announced too long a head.
    """
    first = sock.recv(1)
    if not first:
        return None
    kind, size = _PREFIX.unpack(first + receive_bytes(sock, _PREFIX.size - 1))
    if size > HEAD_BYTES_MAX:
        raise RelayError(f"a frame of {size} bytes, more than the {HEAD_BYTES_MAX} allowed")
    return kind, bytes(receive_bytes(sock, size))


def receive_bytes(sock: socket.socket, size: int, deadline: float = math.inf) -> bytearray:
    """Exactly so many bytes.

    Raises:
        RelayError: the peer closed the connection before, or the deadline, on the monotonic clock, has passed.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view:
        _check(deadline, f"{len(view)} of {size} bytes have not come")
        got = sock.recv_into(view, min(len(view), CUT))
        if not got:
            raise RelayError(f"the peer closed the connection {len(view)} bytes before the end")
        view = view[got:]
    return data


def _check(deadline: float, left: str) -> None:
    if time.monotonic() > deadline:
        raise RelayError(f"object_timeout_s is over, and {left}")


def parse(head: bytes, kind: type[_T]) -> _T:
    """A frame's head; RelayError if it is none of this kind."""
    try:
        return msgspec.msgpack.decode(head, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RelayError(f"not the head of a frame: {e}") from e


def greet(sock: socket.socket) -> None:
    """Say and hear the greeting; RelayError if the peer speaks something else."""
    sock.sendall(GREETING)
    heard = bytes(receive_bytes(sock, len(GREETING)))
    if heard != GREETING:
        what = f"version {heard[4]} of the relay protocol" if heard[:4] == GREETING[:4] else "another protocol"
        raise RelayError(f"the peer speaks {what}, not version {GREETING[4]}; run one dcr everywhere")
