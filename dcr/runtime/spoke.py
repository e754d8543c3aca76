"""An owner's or a node's end of the control channel: finds the hub, and connects again when the connection is lost."""

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dcr.protocol.errors import RefusedError
from dcr.runtime.channel_address import HubAddress
from dcr.runtime.frame import ChannelError, ChannelTimeoutError, Stream, check_loopback, join_threads, shut_down
from dcr.runtime.handshake import Peer, check_secret, prove_to_hub
from dcr.runtime.link import ChannelSettings, Link
from dcr.runtime.tls_stream import TlsStream

if TYPE_CHECKING:
    from dcr.credentials.folder import Credentials

_logger = logging.getLogger(__name__)
_AUTHENTICATING = "authenticating"
_DEFAULT = ChannelSettings()


class Spoke:
    """Keeps one connection to the hub, wherever it is, until closed.

    ``on_connect``, ``on_message`` and ``on_disconnect`` are called in order from one thread.  They must not block for
    long: meanwhile nothing is read.  If one raises, the connection is dropped and made again.

    Args:
        secret: the secret of the run.
        peer: who this process is.
        on_message: called with every message of the hub.
        resolve: the hub's address, see ``HubAddress``, or None while there is none; asked before every connection.
        credentials: of this process; with them it speaks TLS only, and to whom the address names.
        settings: bounds.
        on_disconnect: called with the reason when the connection is lost.
        on_connect: called when the connection stands; ``send`` works from here on.

    Raises:
        RefusedError: the secret is too short.
    """

    def __init__(
        self,
        secret: bytes,
        peer: Peer,
        on_message: Callable[[bytes], None],
        *,
        resolve: Callable[[], str | None],
        credentials: "Credentials | None" = None,
        settings: ChannelSettings = _DEFAULT,
        on_disconnect: Callable[[str], None] | None = None,
        on_connect: Callable[[], None] | None = None,
    ) -> None:
        check_secret(secret)
        self._secret = secret
        self._peer = peer
        self._on_message = on_message
        self._resolve = resolve
        self._credentials = credentials
        self._settings = settings
        self._on_disconnect = on_disconnect
        self._on_connect = on_connect
        self._changed = threading.Condition()
        self._closed = False
        self._stage = "starting"
        self._trouble = "nothing went wrong yet"
        self._refused: tuple[float, str] | None = None
        self._sock: socket.socket | None = None
        self._address = ""
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._run, name=f"dcr-spoke {peer}", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a connection stands now."""
        link = self._link
        return link is not None and not link.lost

    @property
    def trouble(self) -> str:
        """What last stood in the way of a connection."""
        return self._trouble

    @property
    def refused(self) -> tuple[float, str] | None:
        """When (wall clock, seconds) and why one end last refused the other; None if that never happened.

        It stays when the hub is gone, and with it stands in the way only that nobody listens.
        """
        return self._refused

    def send(self, message: bytes) -> bool:
        """Queue a message to the hub without waiting; False if not connected, which a full queue leads to.

        Raises:
            RefusedError: the message is larger than ``frame_bytes_max``.
        """
        link = self._link
        return link is not None and link.send(message)

    def follow(self) -> None:
        """Leave a hub that ``resolve`` no longer names, for the one that it names now."""
        link, at = self._link, self._address
        if link is not None and (address := self._resolve()) is not None and address != at:
            link.drop(f"the hub is now at {address}")

    def wait_connected(self, timeout_s: float) -> None:
        """Wait for a connection.

        Raises:
            ChannelTimeoutError: none within ``timeout_s``; names this peer, the stage, and the last trouble.
            ChannelError: the spoke was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.connected or self._closed, timeout_s)
            if self._closed:
                raise ChannelError(f"{self._peer}: the spoke was closed")
            if not self.connected:
                raise ChannelTimeoutError(
                    f"{self._peer}: not connected to the coordinator within {timeout_s:g} s; stage: {self._stage}; "
                    f"last trouble: {self._trouble}"
                )

    def close(self) -> None:
        """Send what is queued and end the connection; safe to repeat.

        Raises:
            ChannelTimeoutError: a callback did not return within twice ``peer_timeout_s``.
        """
        with self._changed:
            self._closed = True
            link = self._link
            if link is None and self._sock is not None:
                shut_down(self._sock)
            self._changed.notify_all()
        if link is not None:
            link.finish("the spoke was closed")
        left = join_threads([self._thread], self._settings.peer_timeout_s)
        if link is not None:
            link.drop("the spoke was closed before everything was sent")
        if join_threads(left, self._settings.peer_timeout_s):
            raise ChannelTimeoutError(f"{self._peer}: closing: a callback has not returned; stage: {self._stage}")

    def _run(self) -> None:
        settings = self._settings
        pause_s = settings.reconnect_min_s
        while not self._closed:
            started_s = time.monotonic()
            try:
                self._connect()
            except Exception as error:  # noqa: BLE001  (resolve may raise anything; all of it is reported by name)
                self._tell(f"{self._stage}: {error or repr(error)}")
            if time.monotonic() - started_s > settings.reconnect_max_s:
                pause_s = settings.reconnect_min_s
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s * random.uniform(0.5, 1))  # noqa: S311  (jitter)
            pause_s = min(2 * pause_s, settings.reconnect_max_s)

    def _tell(self, trouble: str) -> None:
        """Log what stands in the way, once: the hub would be asked again and again for the same answer."""
        refused = self._stage.startswith(_AUTHENTICATING)
        if refused:
            self._refused = time.time(), trouble
        if trouble != self._trouble:
            level = logging.WARNING if refused else logging.INFO
            _logger.log(level, "%s: %s; it tries again", self._peer, trouble)
        self._trouble = trouble

    def _connect(self) -> None:
        """One connection, from the question where the hub is to the connection's end."""
        self._stage = "resolving the hub's address"
        address = self._resolve()
        if address is None:
            raise ChannelError("no coordinator leads: none is in the registry")
        self._address = address
        hub = HubAddress.parse(address)
        self._stage = authenticating = f"{_AUTHENTICATING} with the hub at {address}"
        self._check(hub)
        self._stage = f"connecting to the hub at {address}"
        with socket.create_connection((hub.at.host, hub.at.port), self._settings.handshake_timeout_s) as sock:
            try:
                with self._changed:
                    if self._closed:
                        return
                    self._sock = sock
                self._stage = authenticating
                deadline = time.monotonic() + self._settings.handshake_timeout_s
                stream, binding = self._secured(sock, hub, deadline)
                prove_to_hub(stream, self._secret, self._peer, deadline, binding)
                self._converse(Link(stream, f"the hub at {address}", self._settings))
            finally:
                with self._changed:
                    self._sock = None

    def _check(self, hub: HubAddress) -> None:
        if self._credentials is None and hub.name is not None:
            raise RefusedError(
                "it asks for a certificate: give this process credentials too (dcr certs --help), and the setting "
                "channel = tls:///folder/of/credentials"
            )
        if self._credentials is not None and hub.name is None:
            raise RefusedError(
                "it does not speak TLS, which the setting channel asks for here: give the trainer the same"
            )
        if hub.name is None:
            check_loopback(hub.at.host)

    def _secured(self, sock: socket.socket, hub: HubAddress, deadline: float) -> tuple[Stream, bytes]:
        if self._credentials is None:
            return sock, b""
        # Else a small record waits for the acknowledgement of the one before it, which comes 40 ms later.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = TlsStream(sock, self._credentials.client, hub.name)
        return stream, stream.handshake(deadline)

    def _converse(self, link: Link) -> None:
        with self._changed:
            if self._closed:
                return
            self._stage = "connected"
            self._link = link
            self._changed.notify_all()
        with self._dropping(link):
            if self._on_connect is not None:
                self._on_connect()
        reason = link.run(self._on_message)
        with self._changed:
            self._link = None
            self._trouble = f"connection lost: {reason}"
        if not self._closed:
            _logger.info("%s: connection to the hub at %s lost: %s", self._peer, self._address, reason)
        with self._dropping(link):
            if self._on_disconnect is not None:
                self._on_disconnect(reason)

    @contextlib.contextmanager
    def _dropping(self, link: Link) -> Iterator[None]:
        """Drop the link if a callback raises."""
        try:
            yield
        except Exception as error:
            _logger.exception("%s: a callback failed", self._peer)
            link.drop(f"a callback failed: {error!r}")
