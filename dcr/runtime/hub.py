"""The coordinator's end of the control channel: listens, and keeps one connection for each spoke."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcr.runtime.channel_address import HostPort, HubAddress, check_reachable
from dcr.runtime.frame import ChannelError, ChannelTimeoutError, Stream, check_loopback, join_threads, shut_down
from dcr.runtime.handshake import Peer, check_secret, prove_to_spoke, send_verdict
from dcr.runtime.link import ChannelSettings, Link
from dcr.runtime.refusals import Refusals
from dcr.runtime.tls_stream import TlsStream

if TYPE_CHECKING:
    from dcr.credentials.folder import Credentials

_logger = logging.getLogger(__name__)
_DEFAULT = ChannelSettings()
_ANY_PORT = HostPort("127.0.0.1", 0)
_ACCEPT_PAUSE_S = 0.1


@dataclass(frozen=True)
class Connected:
    """A spoke proved the secret and can be sent to."""

    peer: Peer


@dataclass(frozen=True)
class Received:
    """A message of a connected spoke."""

    peer: Peer
    message: bytes


@dataclass(frozen=True)
class Disconnected:
    """A spoke was lost, and why; the last event of its connection."""

    peer: Peer
    reason: str


HubEvent = Connected | Received | Disconnected


class Hub:
    """Listens for spokes, and keeps one connection for each (role, name).

    A spoke that connects again, with the same or a newer incarnation, replaces the connection it had: the old one's
    Disconnected is reported first.  An older incarnation is refused.

    Args:
        secret: the secret of the run.
        on_event: called with every event: in order for a (role, name), from one thread at a time, and from several
            threads for several peers.  It must not block for long: meanwhile nothing is read from the peer.  If it
            raises, the peer is dropped.
        listen: where; without credentials an IPv4 loopback address.
        advertise: where spokes reach it, if that is another place; port 0 is the one that it listens at.
        credentials: of this process; every connection is TLS 1.3 then, and both ends show certificates.
        settings: bounds.
        refuse: why a peer that has proved the secret is not let in all the same; empty if it is.  Called from several
            threads.

    Attributes:
        address: for spokes; see ``HubAddress``.

    Raises:
        RefusedError: the secret is too short, nobody could connect there, or it is not loopback and there are no
            credentials.
        OSError: the port is taken.
    """

    def __init__(
        self,
        secret: bytes,
        on_event: Callable[[HubEvent], None],
        *,
        listen: HostPort = _ANY_PORT,
        advertise: HostPort | None = None,
        credentials: "Credentials | None" = None,
        settings: ChannelSettings = _DEFAULT,
        refuse: Callable[[Peer], str] = lambda _: "",
    ) -> None:
        check_secret(secret)
        if credentials is None:
            check_loopback(listen.host)
        check_reachable(listen, advertise)
        self._credentials = credentials
        self._secret = secret
        self._on_event = on_event
        self._settings = settings
        self._refuse = refuse
        self._changed = threading.Condition()
        self._closed = False
        self._seats: dict[tuple[str, str], tuple[Peer, Link]] = {}
        self._strangers: set[socket.socket] = set()
        self._refusals = Refusals()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((listen.host, listen.port), backlog=settings.handshakes_max)
        self.address = self._address(listen, advertise)
        self._acceptor = threading.Thread(target=self._accept, name=f"dcr-hub {self.address}", daemon=True)
        self._acceptor.start()

    def _address(self, listen: HostPort, advertise: HostPort | None) -> str:
        at = advertise or listen
        reached = HostPort(at.host, at.port or int(self._listener.getsockname()[1]))
        return str(HubAddress(reached, None if self._credentials is None else self._credentials.name))

    def send(self, peer: Peer, message: bytes) -> bool:
        """Queue a message to this incarnation of a peer without waiting; False if it is not connected.

        A peer whose queue is full is dropped, and False returned.

        Raises:
            RefusedError: the message is larger than ``frame_bytes_max``.
        """
        with self._changed:
            seated, link = self._seats.get((peer.role, peer.name), (None, None))
        return link is not None and seated == peer and link.send(message)

    def drop(self, peer: Peer, reason: str) -> None:
        """End this incarnation's connection; it asks where the hub is before it connects again."""
        with self._changed:
            seated, link = self._seats.get((peer.role, peer.name), (None, None))
        if link is not None and seated == peer:
            link.drop(reason)

    def peers(self) -> list[Peer]:
        """The spokes that are connected now."""
        with self._changed:
            return [peer for peer, link in self._seats.values() if not link.lost]

    @property
    def refused(self) -> tuple[str, ...]:
        """Who was refused lately, and why: its TLS, its secret, its incarnation; the newest first."""
        return self._refusals.lately

    def close(self) -> None:
        """Send what is queued, end every connection, report it, and stop listening; safe to repeat.

        Raises:
            ChannelTimeoutError: ``on_event`` did not return within twice ``peer_timeout_s``.
        """
        with self._changed:
            self._closed = True
            links = [link for _, link in self._seats.values()]
            for stranger in self._strangers:
                shut_down(stranger)
            self._changed.notify_all()
        shut_down(self._listener)
        self._acceptor.join()
        self._listener.close()
        for link in links:
            link.finish("the hub was closed")
        left = join_threads(self._threads, self._settings.peer_timeout_s)
        for link in links:
            link.drop("the hub was closed before everything was sent")
        left = join_threads(left, self._settings.peer_timeout_s)
        if left:
            raise ChannelTimeoutError(
                f"hub {self.address}: closing: on_event has not returned for {', '.join(t.name for t in left)}"
            )

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, (host, _) = self._listener.accept()
            except OSError as error:
                if not self._closed:  # no file descriptors left, most likely
                    _logger.warning("hub %s: cannot accept connections: %s", self.address, error)
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            with self._changed:
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                if self._closed or len(self._strangers) >= self._settings.handshakes_max:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(sock, host), name="dcr-hub-peer", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    _logger.warning("hub %s: cannot serve a connection: %s", self.address, error)
                    sock.close()
                    continue
                self._strangers.add(sock)
                self._threads.append(thread)

    def _serve(self, sock: socket.socket, host: str) -> None:
        """One connection, from its first byte to its last event."""
        with sock:
            try:
                stream, peer, link = self._admit(sock)
            except (OSError, ChannelError) as error:
                self._tell_refusal(f"{host}: {error or repr(error)}")
            else:
                self._converse(stream, peer, link)
            finally:
                with self._changed:
                    self._strangers.discard(sock)

    def _tell_refusal(self, problem: str) -> None:
        if self._closed:  # it was cut off by us
            return
        level = logging.WARNING if self._refusals.add(problem) else logging.DEBUG
        _logger.log(level, "hub %s: a connection was refused: %s", self.address, problem)

    def _admit(self, sock: socket.socket) -> tuple[Stream, Peer, Link]:
        deadline = time.monotonic() + self._settings.handshake_timeout_s
        stream, binding = self._secured(sock, deadline)
        peer = prove_to_spoke(stream, self._secret, deadline, binding)
        threading.current_thread().name = f"dcr-hub {peer}"
        link = Link(stream, str(peer), self._settings)
        refused = self._refuse(peer) or self._seat(peer, link)
        if refused:
            send_verdict(stream, refused, self._settings.handshake_timeout_s)
            raise ChannelError(f"{peer}: {refused}")
        with self._changed:
            self._strangers.discard(sock)
        return stream, peer, link

    def _secured(self, sock: socket.socket, deadline: float) -> tuple[Stream, bytes]:
        if self._credentials is None:
            return sock, b""
        # Else a small record waits for the acknowledgement of the one before it, which comes 40 ms later.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = TlsStream(sock, self._credentials.server, None)
        return stream, stream.handshake(deadline)

    def _seat(self, peer: Peer, link: Link) -> str:
        """Give a proven peer its place, once the connection it replaces has reported its end; or say why not."""
        key = (peer.role, peer.name)
        deadline = time.monotonic() + self._settings.peer_timeout_s
        with self._changed:
            while key in self._seats and not self._closed:
                seated, old = self._seats[key]
                if seated.incarnation > peer.incarnation:
                    return (
                        f"a newer process is connected under this name (incarnation {seated.incarnation}); "
                        "end the older one, or give it a name of its own"
                    )
                old.drop(f"replaced by a new connection of incarnation {peer.incarnation}")
                if not self._changed.wait(deadline - time.monotonic()):
                    return "an event of its older connection is still being handled"
            if self._closed:
                return "the hub is closing"
            if len(self._seats) >= self._settings.peers_max:
                return f"peers_max = {self._settings.peers_max} peers are connected"
            self._seats[key] = (peer, link)
        return ""

    def _converse(self, stream: Stream, peer: Peer, link: Link) -> None:
        try:
            send_verdict(stream, "", self._settings.handshake_timeout_s)
        except OSError as error:
            link.drop(str(error))
        else:
            self._report(link, Connected(peer))
            reason = link.run(lambda message: self._on_event(Received(peer, message)))
            self._report(link, Disconnected(peer, reason))
        with self._changed:
            del self._seats[peer.role, peer.name]
            self._changed.notify_all()

    def _report(self, link: Link, event: HubEvent) -> None:
        try:
            self._on_event(event)
        except Exception as error:
            _logger.exception("hub %s: an event could not be handled: %s", self.address, event)
            link.drop(f"its event could not be handled: {error!r}")
