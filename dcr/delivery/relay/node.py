"""The receiving end of the relay, on a rollout node: holds what its engines will ask for, and passes it on."""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

import xxhash

from dcr.credentials.folder import Credentials
from dcr.data_plane.nvtx import stage
from dcr.delivery.interface import DeliveryError, LookPause, check_key, check_prefix
from dcr.delivery.relay import wire
from dcr.delivery.relay.bounds import Bounds
from dcr.delivery.relay.holding import Holding
from dcr.delivery.relay.peer import Peer, Shipment, end
from dcr.delivery.relay.tree import Branch, Node
from dcr.delivery.relay.wire import SAID_CHARS_MAX, Failure, RelayError
from dcr.delivery.traffic import Traffic, TrafficCounter
from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import cut

_log = logging.getLogger("dcr.relay")
_ACCEPT_PAUSE_S = 0.1


class RelayNode:
    """A Delivery whose objects are sent to this node; it only reads (see ``interface.Delivery``).

    Args:
        credentials: of this process; peers find it by the name in them.
        host: address to listen at.
        port: 0 for any free one.
        bounds: of the relay.

    Attributes:
        address: where it listens, for its peers.

    Raises:
        DeliveryError: the port is taken, or the address is not this machine's.
    """

    look_pause = LookPause()  # a look is a look into this process's memory
    kind = place = "relay"

    def __init__(self, credentials: Credentials, host: str, port: int, bounds: Bounds) -> None:
        self._credentials = credentials
        self._bounds = bounds
        self._holding = Holding(bounds.relay_bytes_max)
        self._counter = TrafficCounter()
        self._changed = threading.Condition()
        self._peers: dict[tuple[Node, int], Peer] = {}
        """By the node, and by how many hops an object has to go from there.

        A connection is taken until all behind it hold the object, and for one root or another every node passes on to
        every other one: with connections in common, several objects would wait for each other's in a circle.
        """
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as e:
            raise DeliveryError(f"relay: listening at {host}:{port}: {e.strerror}; choose another address") from e
        self.address = Node(credentials.name, host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name=f"dcr-relay at {host}", daemon=True)
        self._acceptor.start()

    # ------------------------------------------------------------ for the node's engines

    @property
    def traffic(self) -> Traffic:
        """See Delivery: objects that came in count as received, and those that were passed on as sent."""
        return self._counter.traffic

    def put(self, key: str, data: bytes) -> None:
        """Refused: nodes write nothing."""
        raise DeliveryError(f"object {key} ({len(data)} bytes): a node of the relay only reads")

    def get(self, key: str, size_max: int) -> bytes | None:
        """See Delivery; an object that was taken may go when there is no room."""
        check_key(key)
        return self._holding.take(key, size_max)

    def delete_prefix(self, prefix: str) -> None:
        """See Delivery: what this node holds."""
        check_prefix(prefix)
        self._holding.drop(prefix)

    def keys(self, prefix: str) -> list[str]:
        """See Delivery: what this node holds."""
        check_prefix(prefix)
        return self._holding.keys(prefix)

    def segments(self, prefix: str) -> list[str]:
        """See Delivery: what this node holds."""
        return sorted({key[len(prefix) :].split("/", 1)[0] for key in self.keys(prefix)})

    def tidy(self, prefix: str) -> None:
        """See Delivery: what is held goes when there is no room."""
        check_prefix(prefix)

    def close(self) -> None:
        """Stop listening, and give up what is on its way; safe to repeat."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            connections, peers = list(self._connections), list(self._peers.values())
        wire.shut(self._listener)
        self._acceptor.join()
        self._listener.close()
        for peer in peers:
            peer.close()
        for connection in connections:
            wire.shut(connection)
        deadline = time.monotonic() + self._bounds.peer_timeout_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        end(peers, deadline, self._bounds.connect_timeout_s)

    # ------------------------------------------------------------ for its peers

    def _accept(self) -> None:
        while not self._closed:
            try:
                plain, _ = self._listener.accept()
            except OSError as e:
                if not self._closed:  # no file descriptors left, most likely
                    _log.warning("relay %s: cannot accept connections: %s", self.address, e)
                    time.sleep(_ACCEPT_PAUSE_S)
                continue
            with self._changed:
                full = len(self._connections) >= self._bounds.accepted_max
                if self._closed or full:
                    if full:
                        _log.warning("relay %s: accepted_max connections are open; one more was closed", self.address)
                    plain.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(plain,), name="dcr-relay-in", daemon=True)
                try:
                    thread.start()
                except RuntimeError as e:
                    _log.warning("relay %s: cannot serve a connection: %s", self.address, e)
                    plain.close()
                    continue
                self._threads.add(thread)
                self._connections.add(plain)

    def _serve(self, plain: socket.socket) -> None:
        """One connection, from its first byte to its last."""
        bounds, connection = self._bounds, plain
        try:
            deadline = time.monotonic() + bounds.connect_timeout_s
            plain.settimeout(bounds.connect_timeout_s)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * bounds.peer_timeout_s))
            # The handshake comes later: the plain socket is not one any more, and ``close`` could not end it.
            secured = self._credentials.server.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            with self._changed:
                self._connections.discard(plain)
                self._connections.add(secured)
                connection = secured
            if self._closed:
                return
            secured.do_handshake()
            wire.greet(secured, deadline)
            self._converse(secured)
        except (OSError, DeliveryError, RefusedError) as e:
            if not self._closed:
                _log.warning("relay %s: a connection ended: %s", self.address, cut(str(e) or repr(e), SAID_CHARS_MAX))
        except Exception:  # noqa: BLE001 - one connection's trouble is not another's
            _log.exception("relay %s: a connection ended", self.address)
        finally:
            with self._changed:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())
            with contextlib.suppress(OSError):
                connection.close()

    def _converse(self, connection: ssl.SSLSocket) -> None:
        while True:
            # The sender closes an idle connection first, so that it never finds one closed.
            connection.settimeout(2 * self._bounds.idle_timeout_s)
            frame = wire.receive_frame(connection, head_timeout_s=self._bounds.peer_timeout_s)
            if frame is None:
                return
            kind, head = frame
            if kind != wire.OBJECT:
                raise RelayError(f"a frame of kind {kind} where an object was to begin")
            offered = wire.parse(head, wire.Object)
            check_key(offered.key)
            connection.settimeout(self._bounds.peer_timeout_s)
            wire.send_frame(connection, wire.RECEIPT, wire.Receipt(self._take(connection, offered)))

    def _take(self, connection: ssl.SSLSocket, offered: wire.Object) -> tuple[Failure, ...]:
        """Receive one object, if it is not here yet, and pass it on; whom it did not get to."""
        data = self._holding.pin(offered.key, offered.digest)
        if data is None:
            refused = self._receive(connection, offered)
            if refused:
                behind = (n.name for branch in offered.branches for n in branch.nodes())
                return tuple(
                    Failure(name, f"{self.address}: {refused}", lost=False) for name in (self.address.name, *behind)
                )
            data = self._holding.pin(offered.key, offered.digest)
            assert data is not None, "it was kept pinned"
            self._holding.unpin(offered.key)
        try:
            return self._pass_on(connection, offered, data)
        finally:
            self._holding.unpin(offered.key)

    def _receive(self, connection: ssl.SSLSocket, offered: wire.Object) -> str:
        """Receive an object into the holding, pinned; why not, if it was refused."""
        size = offered.size
        if not 0 <= size <= self._bounds.object_bytes_max:
            return f"an object of {size} bytes, more than object_bytes_max = {self._bounds.object_bytes_max}"
        try:
            room = self._waiting(connection, lambda wait_s: self._holding.room(offered.key, size, wait_s))
        except RefusedError as e:
            return str(e)
        if not room:
            return (
                f"no room for {size} bytes in room_timeout_s = {self._bounds.room_timeout_s} s: its engines have not "
                f"taken what it holds; raise relay_bytes_max = {self._bounds.relay_bytes_max}"
            )
        kept = False
        try:
            wire.send_frame(connection, wire.GO)
            with stage("receive"):
                data = wire.receive_bytes(connection, size, time.monotonic() + self._bounds.object_timeout_s)
            self._counter.received(size)
            if xxhash.xxh3_128_digest(data) != offered.digest:
                return f"object {offered.key} does not match its digest"
            kept = True
            if not self._holding.keep(offered.key, data, offered.digest):
                return f"object {offered.key} is held with other bytes; an owner emits once per epoch, open a new one"
        finally:
            if not kept:
                self._holding.give_back(size)
        return ""

    def _pass_on(self, connection: ssl.SSLSocket, offered: wire.Object, data: bytes | bytearray) -> tuple[Failure, ...]:
        """Send an object to the nodes behind this one; whom it did not get to."""
        arrived = threading.Condition()
        failures: list[Failure] = []
        left = [len(offered.branches)]

        def then(missed: tuple[Failure, ...]) -> None:
            with arrived:
                failures.extend(missed)
                left[0] -= 1
                arrived.notify_all()

        for branch in offered.branches:
            self._counter.asked(len(data))
            self._peer(branch).send(Shipment(offered.key, data, offered.digest, branch.branches, then))

        def over(wait_s: float) -> bool:
            with arrived:
                return arrived.wait_for(lambda: left[0] == 0, wait_s)

        if not self._waiting(connection, over, self._bounds.object_timeout_s):
            raise RelayError(f"object {offered.key} was not passed on in {self._bounds.object_timeout_s} s")
        return tuple(failures)

    def _waiting(
        self, connection: ssl.SSLSocket, done: Callable[[float], bool], timeout_s: float | None = None
    ) -> bool:
        """Wait for something, and tell the sender meanwhile that this node is alive."""
        deadline = time.monotonic() + (self._bounds.room_timeout_s if timeout_s is None else timeout_s)
        while not done(max(0.0, min(self._bounds.heartbeat_s, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or self._closed:
                return False
            wire.send_frame(connection, wire.BUSY)
        return True

    def _peer(self, branch: Branch) -> Peer:
        node, of = branch.node, (branch.node, branch.height)
        with self._changed:
            peer = self._peers.get(of)
            if peer is None:
                moved = [
                    key for key, p in self._peers.items() if key[0].name == node.name and key[0] != node and not p.busy
                ]
                for old in moved:
                    del self._peers[old]  # its connections end when they are idle
                peer = self._peers[of] = Peer(node, self._credentials, self._bounds)
            return peer
