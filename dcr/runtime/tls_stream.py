"""TLS 1.3 on a connection of the control channel: one thread may read while another one writes."""

import contextlib
import math
import os
import select
import socket
import ssl
import threading
import time

from dcr.runtime.frame import ChannelError, time_left

_CHUNK_BYTES = 1 << 16
_REFUSAL_S = 1.0
"""How long a peer that was refused may take to read why."""


class TlsStream:
    """A ``frame.Stream`` over TLS.

    OpenSSL's object must not be used by two threads at once, and a thread that waits for the network must not keep
    another one from it.  So it reads and writes memory, each step under a lock, and the socket is waited on outside.
    Only ``sendall`` sends: what reading makes OpenSSL want to say (it answers a key update) goes out with the next
    frame, at the latest a ping.  A reader that sent would wait for a writer that waits for a peer that does the same.

    Memory: what one record lacks on the way in, one frame on the way out.

    Args:
        sock: connected; stays the caller's until the handshake is done, then this closes it.
        context: of TLS.
        hub_name: whom the certificate of the other end must name, for a spoke; None for a hub, where any certificate of
            the authority will do.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, hub_name: str | None) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=hub_name is None, server_hostname=hub_name
        )
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._torn = False
        self._timeout_s = 0.0
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def handshake(self, deadline: float) -> bytes:
        """Prove to each other who both are.

        Args:
            deadline: on the monotonic clock.

        Returns:
            What only the two ends of this very TLS session have in common, for the proof of the secret: the first
            Finished message, the spoke's, a MAC over the whole handshake with keys of this session.

        Raises:
            ChannelError: the other end does not speak TLS 1.3, or one end does not trust the other's certificate.
            TimeoutError: the deadline has passed.
            OSError: the connection was lost.
        """
        while not self._shook_hands():
            self._send(deadline)
            self._receive(deadline)
        self._send(deadline)
        # Python's name for it is that of TLS 1.2, where it is weaker; here no session is ever resumed.
        binding = self._tls.get_channel_binding("tls-unique")
        if binding is None or self._tls.session_reused or self._tls.version() != "TLSv1.3":
            raise ChannelError("this build of Python and OpenSSL does not bind the proof to the TLS session")
        return binding

    def settimeout(self, value: float | None, /) -> None:
        """Bound what is called next: a record that is read, a frame that is sent."""
        self._sock.settimeout(value)
        self._timeout_s = math.inf if value is None else value

    def setsockopt(self, level: int, optname: int, value: int, /) -> None:
        """See socket."""
        self._sock.setsockopt(level, optname, value)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Wait for bytes, at most as many as there is room for; 0 if the peer has closed its end.

        Raises:
            TimeoutError: not even one record came whole within the time-out.
            ChannelError: bytes that are not the peer's, or the connection ended without a word.
            OSError: the connection was lost.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                with self._lock:
                    got: int = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]  # typeshed: bytes
                    return got
            except ssl.SSLWantReadError:
                self._receive(deadline)
            except ssl.SSLError as error:
                raise ChannelError(_said(error)) from error

    def sendall(self, data: bytes, /) -> None:
        """Send, one thread at a time; see socket."""
        with self._writing:
            left = memoryview(data)
            try:
                while left:
                    with self._lock:
                        left = left[self._tls.write(left[:_CHUNK_BYTES]) :]
            except ssl.SSLError as error:
                raise ChannelError(_said(error)) from error
            self._flush()

    def shutdown(self, how: int, /) -> None:
        """Say that this is the end, where that needs no waiting, and end the connection under whoever waits on it."""
        if self._writing.acquire(blocking=False):
            try:
                self._say_goodbye()
            finally:
                self._writing.release()
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _shook_hands(self) -> bool:
        try:
            with self._lock:
                self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            self._refuse()
            raise ChannelError(_said(error)) from error
        return True

    def _refuse(self) -> None:
        """Send the alert that says why, and let the peer read it: closing over what it has sent would cut that off."""
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + _REFUSAL_S
            self._sock.settimeout(_REFUSAL_S)
            self._flush()
            self._sock.shutdown(socket.SHUT_WR)
            while self._bytes(deadline):
                pass

    def _send(self, deadline: float) -> None:
        self._sock.settimeout(time_left(deadline))
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            data = self._outgoing.read()
        if data:
            self._torn = True
            self._sock.sendall(data)
            self._torn = False

    def _receive(self, deadline: float) -> None:
        data = self._bytes(deadline)
        if not data:
            raise ChannelError("the connection ended without a word of the peer's (no TLS close_notify)")
        with self._lock:
            self._incoming.write(data)

    def _bytes(self, deadline: float) -> bytes:
        # The socket's own time-out will not do: it begins anew with every byte, and the writer's is the same.
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not self._readable.poll(None if left_s == math.inf else math.ceil(1000 * left_s)):
            raise TimeoutError("timed out")
        return self._sock.recv(_CHUNK_BYTES)

    def _say_goodbye(self) -> None:
        if self._torn or self._sock.gettimeout() is None:
            return
        with self._lock:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()  # wants to read the peer's goodbye, for which nobody waits
            data = self._outgoing.read()
        # A socket with a time-out does not block; its send would wait until it takes something.
        with contextlib.suppress(OSError):
            os.write(self._sock.fileno(), data)


def _said(error: ssl.SSLError) -> str:
    """What went wrong, and who should look at what."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: the peer's certificate is not good here, by our ca.pem: {error.verify_message}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if reason.startswith(("tlsv1", "tlsv13", "sslv3")) and "alert" in reason:
        return f"TLS: the peer refused this end, most likely its certificate: {reason}"
    return f"TLS: {reason}: does the other end have the same setting channel?"
