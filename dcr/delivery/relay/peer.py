"""The sending end of the relay: one peer, a queue of objects for it, and connections that take them from there."""

import contextlib
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dcr.credentials.folder import Credentials
from dcr.delivery.relay import wire
from dcr.delivery.relay.bounds import Bounds
from dcr.delivery.relay.tree import Branch, Node
from dcr.delivery.relay.wire import SAID_CHARS_MAX, Failure, RelayError
from dcr.protocol.messages import cut

_CLOSING = "this process is closing"


@dataclass(frozen=True)
class Shipment:
    """An object on its way to a peer and what is behind it.

    Attributes:
        key: in the delivery.
        data: its bytes.
        digest: XXH3-128 of them.
        branches: whom the peer is to pass it on to.
        then: called once, from any thread, with the nodes that it did not get to.
    """

    key: str
    data: bytes | bytearray
    digest: bytes
    branches: tuple[Branch, ...]
    then: Callable[[tuple[Failure, ...]], None]

    def lost(self, node: Node, reason: str) -> tuple[Failure, ...]:
        """The peer was not reached, and so neither were those behind it, which is not their fault."""
        behind = (n for branch in self.branches for n in branch.nodes())
        return (
            Failure(node.name, cut(reason, SAID_CHARS_MAX), lost=True),
            *(Failure(n.name, f"behind {node.name}, which was not reached", lost=False) for n in behind),
        )


class Peer:
    """Sends objects to one node: each over the next free connection, of which there are as many as bounds allow.

    An object is offered, sent when the peer has room for it, and done when the peer says that it and all behind it hold
    it.  A connection that was lost is made again once; what was under way is offered again, and a peer that holds it
    already does not take it a second time.

    Args:
        node: the peer.
        credentials: of this process; the peer's certificate must have its name.
        bounds: of the relay.

    Attributes:
        bytes: of objects that were sent to it.
    """

    def __init__(self, node: Node, credentials: Credentials, bounds: Bounds) -> None:
        self.node = node
        self.bytes = 0
        self._credentials = credentials
        self._bounds = bounds
        self._changed = threading.Condition()
        self._waiting: deque[Shipment] = deque()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._cut = False

    @property
    def busy(self) -> bool:
        """Whether anything is waiting for it or on its way."""
        with self._changed:
            return bool(self._waiting) or self._idle < len(self._threads)

    def send(self, shipment: Shipment) -> None:
        """Queue an object; whoever queues them bounds how many."""
        with self._changed:
            if not self._closed:
                self._waiting.append(shipment)
                if self._idle < len(self._waiting) and len(self._threads) < self._bounds.connections:
                    thread = threading.Thread(target=self._work, name=f"dcr-relay to {self.node.name}", daemon=True)
                    self._threads.add(thread)
                    thread.start()
                self._changed.notify()
                return
        shipment.then(shipment.lost(self.node, _CLOSING))

    def close(self) -> None:
        """Send nothing more; what waits is given up, what is on its way comes to its end."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for shipment in left:
            shipment.then(shipment.lost(self.node, _CLOSING))

    def join(self, timeout_s: float) -> None:
        """Wait for the connections to end, after ``close``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def cut(self) -> None:
        """End the connections, whatever is on its way: it is given up."""
        with self._changed:
            self._closed = self._cut = True
            connections = list(self._connections)
        for connection in connections:
            wire.shut(connection)

    def _work(self) -> None:
        connection: ssl.SSLSocket | None = None
        try:
            while (shipment := self._next()) is not None:
                connection, failures = self._ship(connection, shipment)
                shipment.then(failures)
                del shipment
        finally:
            if connection is not None:
                self._end(connection)
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _next(self) -> Shipment | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed, self._bounds.idle_timeout_s)
            self._idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            # Gone at once for whoever counts threads: an object that comes now needs another one.
            self._threads.discard(threading.current_thread())
            return None

    def _ship(
        self, connection: ssl.SSLSocket | None, shipment: Shipment
    ) -> tuple[ssl.SSLSocket | None, tuple[Failure, ...]]:
        """Send one object, over a new connection if the old one turns out to be lost."""
        deadline = time.monotonic() + self._bounds.object_timeout_s
        while True:
            fresh, stage = connection is None, "connecting"
            try:
                if connection is None:
                    connection = self._connect()
                stage = f"sending {shipment.key}"
                return connection, self._exchange(connection, shipment, deadline)
            except Exception as e:  # noqa: BLE001 - whatever it is, whoever waits for this object hears of it
                if connection is not None:
                    self._end(connection)
                connection = None
                over = fresh or self._cut or time.monotonic() >= deadline
                if over or not isinstance(e, (OSError, RelayError)):
                    said = _CLOSING if self._cut else _said(e, self._bounds)
                    return None, shipment.lost(self.node, f"{self.node}: {stage}: {said}")

    def _connect(self) -> ssl.SSLSocket:
        bounds = self._bounds
        deadline = time.monotonic() + bounds.connect_timeout_s
        connection: socket.socket = socket.create_connection((self.node.host, self.node.port), bounds.connect_timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * bounds.peer_timeout_s))
            # The handshake comes when ``cut`` knows the connection.
            connection = secured = self._credentials.client.wrap_socket(
                connection, server_hostname=self.node.name, do_handshake_on_connect=False
            )
            self._begin(secured)
            secured.do_handshake()
            wire.greet(secured, deadline)
            secured.settimeout(bounds.peer_timeout_s)
        except BaseException:
            self._end(connection)
            raise
        return secured

    def _begin(self, connection: socket.socket) -> None:
        with self._changed:
            if self._cut:
                raise RelayError(_CLOSING)
            self._connections.add(connection)

    def _end(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.discard(connection)
        with contextlib.suppress(OSError):
            connection.close()

    def _exchange(self, connection: ssl.SSLSocket, shipment: Shipment, deadline: float) -> tuple[Failure, ...]:
        offered = wire.Object(shipment.key, len(shipment.data), shipment.digest, shipment.branches)
        wire.send_frame(connection, wire.OBJECT, offered)
        while time.monotonic() < deadline:
            frame = wire.receive_frame(connection, deadline)
            if frame is None:
                raise RelayError("it closed the connection")
            kind, head = frame
            if kind == wire.GO:
                wire.send_bytes(connection, shipment.data, deadline)
                with self._changed:
                    self.bytes += len(shipment.data)
            elif kind == wire.RECEIPT:
                return wire.parse(head, wire.Receipt).failures
            elif kind != wire.BUSY:
                raise RelayError(f"it answered with a frame of kind {kind}")
        raise RelayError(f"no receipt within object_timeout_s = {self._bounds.object_timeout_s} s")


def _said(error: Exception, bounds: Bounds) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing was taken or said for peer_timeout_s = {bounds.peer_timeout_s} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not good here, by our ca.pem: {error.verify_message}; give both sides certificates of "
            f"one authority (dcr certs)"
        )
    return str(error) or repr(error)


def end(peers: Iterable[Peer], deadline: float, cut_timeout_s: float) -> None:
    """Wait for what is on its way to peers that are closed; what has not come to its end by the deadline is cut."""
    peers = list(peers)
    for peer in peers:
        peer.join(max(0.0, deadline - time.monotonic()))
    for peer in peers:
        peer.cut()
    deadline = time.monotonic() + cut_timeout_s
    for peer in peers:
        peer.join(max(0.0, deadline - time.monotonic()))
