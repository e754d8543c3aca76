"""A proven connection of the control channel: two threads, and a bounded queue, until it is lost."""

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dcr.protocol.errors import RefusedError
from dcr.runtime.frame import MESSAGE, PING, ChannelError, Stream, frame, receive_frame, shut_down

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChannelSettings:
    """Bounds of the control channel; hub and spokes of a run use the same.

    Attributes:
        frame_bytes_max: largest message, bytes.
        queue_bytes_max: messages waiting to be sent to one peer, bytes; a peer beyond it is dropped.
        queue_messages_max: the same, messages.
        heartbeat_s: a ping is sent after this much silence of our own, seconds.
        peer_timeout_s: a peer silent, or not taking what is sent, for this long is lost, seconds.
        handshake_timeout_s: longest time from connecting to proven, seconds.
        handshakes_max: connections that have not proved the secret yet, on a hub.
        peers_max: connected peers, on a hub.
        reconnect_min_s: a spoke's first pause before it connects again, seconds; doubles, and is jittered down to half.
        reconnect_max_s: its longest pause, seconds.
    """

    frame_bytes_max: int = 4 * 1024 * 1024
    queue_bytes_max: int = 64 * 1024 * 1024
    queue_messages_max: int = 4096
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    handshakes_max: int = 128
    peers_max: int = 1024
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 2.0

    def __post_init__(self) -> None:
        if min(vars(self).values()) <= 0:
            raise RefusedError(f"every bound of the control channel must be positive: {self}")
        if self.frame_bytes_max >= 2**32 - 1 or self.queue_bytes_max < self.frame_bytes_max:
            raise RefusedError("control channel: frame_bytes_max must be below 4 GiB and at most queue_bytes_max")
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise RefusedError(
                "control channel: peer_timeout_s must be at least twice heartbeat_s, or live peers are lost"
            )
        if self.reconnect_max_s < self.reconnect_min_s:
            raise RefusedError("control channel: reconnect_max_s must be at least reconnect_min_s")


class Link:
    """A proven connection: the thread that calls ``run`` reads, one more writes, until either loses it.

    Args:
        sock: connected, handshake done; closed by ``run``.
        label: who is at the other end, for errors and thread names.
        settings: bounds.
    """

    def __init__(self, sock: Stream, label: str, settings: ChannelSettings) -> None:
        self._sock = sock
        self._label = label
        self._settings = settings
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._closing: str | None = None
        self._lost: str | None = None

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost is not None

    def send(self, message: bytes) -> bool:
        """Queue a message without waiting; False if the connection is lost, which a full queue makes it.

        Raises:
            RefusedError: the message is larger than ``frame_bytes_max``.
        """
        settings = self._settings
        if len(message) > settings.frame_bytes_max:
            raise RefusedError(
                f"message of {len(message)} bytes to {self._label}: more than frame_bytes_max = "
                f"{settings.frame_bytes_max}; send it through the delivery"
            )
        with self._changed:
            if self._lost is not None or self._closing is not None:
                return False
            queued_bytes = self._queued_bytes + len(message)
            if queued_bytes <= settings.queue_bytes_max and len(self._queue) < settings.queue_messages_max:
                self._queue.append(message)
                self._queued_bytes = queued_bytes
                self._changed.notify_all()
                return True
            waiting = f"{len(self._queue)} messages, {self._queued_bytes} bytes"
        self.drop(f"send queue full ({waiting}): the peer does not take what it is sent")
        return False

    def drop(self, reason: str) -> None:
        """Lose the connection now; the first reason given is the one reported."""
        with self._changed:
            if self._lost is not None:
                return
            self._lost = reason
            self._queue.clear()
            self._changed.notify_all()
            shut_down(self._sock)

    def finish(self, reason: str) -> None:
        """Take no more messages, send what is queued, then drop."""
        with self._changed:
            self._closing = reason
            self._changed.notify_all()

    def run(self, on_message: Callable[[bytes], None]) -> str:
        """Read until the connection is lost and call back with every message; returns why it was lost.

        A callback that raises drops the connection.
        """
        writer = threading.Thread(target=self._write, name=f"dcr-send {self._label}", daemon=True)
        try:
            self._sock.settimeout(self._settings.peer_timeout_s)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._settings.peer_timeout_s * 1000)
            )
            writer.start()
            while not self.lost:
                self._receive(on_message)
        except TimeoutError:
            self.drop(f"silent for {self._settings.peer_timeout_s:g} s")
        except (OSError, RuntimeError, ChannelError) as error:  # RuntimeError: no thread could be started
            self.drop(str(error))
        finally:
            self.drop("stopped")
            if writer.ident is not None:
                writer.join()
            self._sock.close()
        return self._lost or ""

    def _receive(self, on_message: Callable[[bytes], None]) -> None:
        kind, body = receive_frame(self._sock, self._settings.frame_bytes_max)
        if kind == PING:
            return
        if kind != MESSAGE:
            raise ChannelError(f"unexpected frame of type {kind}")
        try:
            on_message(body)
        except Exception as error:
            _logger.exception("control channel: a message of %s could not be handled", self._label)
            self.drop(f"its message could not be handled: {error!r}")

    def _write(self) -> None:
        try:
            while (data := self._next_frame()) is not None:
                self._sock.sendall(data)
            self.drop(self._closing or "")
        except TimeoutError:
            self.drop(f"took nothing for {self._settings.peer_timeout_s:g} s")
        except OSError as error:
            self.drop(str(error))

    def _next_frame(self) -> bytes | None:
        """The next frame to send, a ping after ``heartbeat_s`` without any; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._over(), self._settings.heartbeat_s)
            if self._queue:
                message = self._queue.popleft()
                self._queued_bytes -= len(message)
                return frame(MESSAGE, message)
            return None if self._over() else frame(PING, b"")

    def _over(self) -> bool:
        return self._lost is not None or self._closing is not None
