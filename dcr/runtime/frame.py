"""Frames of the control channel: a length, a type, a body (docs/control-channel.md)."""

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from typing import Protocol

from dcr.protocol.errors import DcrError, RefusedError

HANDSHAKE, MESSAGE, PING = range(3)
"""The types of a frame."""

_HEADER = struct.Struct("<IB")


class Stream(Protocol):
    """What a connection is used for: a socket, or ``tls_stream.TlsStream`` on one.

    One thread may read while another one writes, and any thread may end it under both with ``shutdown``.
    """

    def settimeout(self, value: float | None, /) -> None: ...  # noqa: D102
    def setsockopt(self, level: int, optname: int, value: int, /) -> None: ...  # noqa: D102
    def recv_into(self, buffer: memoryview, /) -> int: ...  # noqa: D102
    def sendall(self, data: bytes, /) -> None: ...  # noqa: D102
    def shutdown(self, how: int, /) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class ChannelError(DcrError):
    """The control channel between two peers could not be made or was lost."""


class ChannelTimeoutError(ChannelError):
    """A wait ended; names the peer and the stage it was in."""


def frame(kind: int, body: bytes) -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(len(body), kind) + body


def receive_frame(sock: Stream, bytes_max: int, deadline: float | None = None) -> tuple[int, bytes]:
    """Read one frame.

    Args:
        sock: where from.
        bytes_max: a longer body is refused before it is read.
        deadline: of the whole frame, on the monotonic clock; without one, the socket's time-out bounds each silence.

    Returns:
        Type and body.

    Raises:
        ChannelError: the peer closed the connection, or announced too long a body.
        TimeoutError: the deadline has passed, or the socket's time-out.
        OSError: the connection was lost.
    """
    length, kind = _HEADER.unpack(_receive(sock, _HEADER.size, deadline))
    if length > bytes_max:
        raise ChannelError(f"a frame of {length} bytes, more than the {bytes_max} allowed here")
    return kind, _receive(sock, length, deadline)


def _receive(sock: Stream, size: int, deadline: float | None) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            sock.settimeout(time_left(deadline))
        got = sock.recv_into(view)
        if got == 0:
            raise ChannelError("the peer closed the connection")
        view = view[got:]
    return bytes(data)


def time_left(deadline: float) -> float:
    """Seconds until a handshake's deadline; TimeoutError once it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took longer than handshake_timeout_s")
    return left


def shut_down(sock: Stream) -> None:
    """End a connection, or a listener, under the threads that wait on it; they close it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def check_loopback(host: str) -> None:
    """Raise RefusedError unless the host is an IPv4 loopback address."""
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise RefusedError(
            f"control channel on {host!r}: without TLS it must be an IPv4 loopback address such as 127.0.0.1; to leave "
            f"the machine, give every process credentials (dcr certs --help) and the setting channel = "
            f"tls:///folder/of/credentials, the trainer's with ?listen=host:port"
        )


def join_threads(threads: list[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    """Wait for threads to end; returns those that did not.  The calling thread does not wait for itself."""
    deadline = time.monotonic() + timeout_s
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in others if thread.is_alive()]
