"""The owner's end of the relay: every object over one node's link, by turns, and from there to all nodes."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import xxhash

from dcr.credentials.folder import Credentials
from dcr.delivery.interface import DeliveryError, LookPause, check_key, check_prefix
from dcr.delivery.relay.bounds import Bounds
from dcr.delivery.relay.peer import Peer, Shipment, end
from dcr.delivery.relay.tree import Node, plan
from dcr.delivery.relay.wire import SAID_CHARS_MAX, Failure, RelayError
from dcr.delivery.traffic import Traffic, TrafficCounter
from dcr.protocol.messages import cut

_log = logging.getLogger("dcr.relay")
_NAMED_MAX = 5


def encode_node(node: Node) -> bytes:
    """A node as the registry has it."""
    return msgspec.msgpack.encode(node)


def decode_node(data: bytes, name: str = "") -> Node:
    """RelayError for anything else, with the name of the entry."""
    try:
        return msgspec.msgpack.decode(data, type=Node)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RelayError(
            f"relay: the registry's entry {name!r} is no rollout node: {e}; start the node of that name again, with "
            f"the dcr of the others"
        ) from e


class RelaySender:
    """A Delivery that sends each object to all nodes; it only writes (see ``interface.Delivery``).

    Nodes take turns as the root, so that every node's link to the owners carries its share, and the tree of an object
    is chosen when it is sent.  A node that was not reached is a leaf from then on, and nobody waits for it, until it
    takes an object again: the next attempt goes around it, and whether its engines are missed is the coordinator's
    business.

    Args:
        nodes: the rollout nodes that listen now, by name; asked once for every epoch.
        credentials: of this process.
        bounds: of the relay.
    """

    look_pause = LookPause()
    kind = place = "relay"

    def __init__(self, nodes: Callable[[], Mapping[str, bytes]], credentials: Credentials, bounds: Bounds) -> None:
        self._nodes = nodes
        self._credentials = credentials
        self._bounds = bounds
        self._lock = threading.Lock()
        self._peers: dict[Node, Peer] = {}
        self._gone: list[Peer] = []
        """Nodes that listen no more, while something is on its way to them."""
        self._epoch = ""
        self._known: list[Node] = []
        self._suspects: set[str] = set()
        self._turn = 0
        self._closed = False
        self._counter = TrafficCounter()

    @property
    def traffic(self) -> Traffic:
        """See Delivery: each object counts once, as one request, whether or not it got to everybody."""
        return self._counter.traffic

    def put(self, key: str, data: bytes) -> None:
        """Send an object; returns when every node holds it, but for those that were lost before.

        Raises:
            DeliveryError: no node is known, or some did not get it: they are named.
        """
        check_key(key)
        done = threading.Event()
        failures: list[Failure] = []
        digest = xxhash.xxh3_128_digest(data)

        def then(missed: tuple[Failure, ...]) -> None:
            failures.extend(missed)
            done.set()

        root, shipment, aside = self._planned(key, data, digest, then)
        self._counter.asked(len(data))
        root.send(shipment)
        for suspect in aside:
            name = suspect.node.name
            suspect.send(Shipment(key, data, digest, (), lambda missed, name=name: self._heard(name, missed)))  # type: ignore[misc]
        if not done.wait(self._bounds.object_timeout_s + self._bounds.peer_timeout_s):
            with self._lock:
                self._suspects.add(root.node.name)
            raise RelayError(f"object {key}: {root.node} has not answered in {self._bounds.object_timeout_s} s")
        if failures:
            with self._lock:
                self._suspects |= {f.node for f in failures if f.lost}
            named = "; ".join(cut(f"{f.node}: {f.reason}", SAID_CHARS_MAX) for f in failures[:_NAMED_MAX])
            more = "" if len(failures) <= _NAMED_MAX else f"; and {len(failures) - _NAMED_MAX} more"
            raise RelayError(f"object {key} ({len(data)} bytes) did not get to {len(failures)} nodes: {named}{more}")

    def get(self, key: str, size_max: int) -> bytes | None:
        """Refused: owners read nothing."""
        raise DeliveryError(f"object {key} (at most {size_max} bytes): an owner only sends over the relay")

    def delete_prefix(self, prefix: str) -> None:
        """Nothing is kept here; nodes let go of what their engines have taken."""
        check_prefix(prefix)

    def keys(self, prefix: str) -> list[str]:
        """None: nothing is kept here."""
        check_prefix(prefix)
        return []

    def segments(self, prefix: str) -> list[str]:
        """None: nothing is kept here."""
        check_prefix(prefix)
        return []

    def tidy(self, prefix: str) -> None:
        """Nothing is kept here."""
        check_prefix(prefix)

    def close(self) -> None:
        """Give up what waits, and what has not come to its end in ``peer_timeout_s``; safe to repeat."""
        with self._lock:
            self._closed = True
            peers = [*self._peers.values(), *self._gone]
        for peer in peers:
            peer.close()
        end(peers, time.monotonic() + self._bounds.peer_timeout_s, self._bounds.connect_timeout_s)

    def _planned(
        self, key: str, data: bytes, digest: bytes, then: Callable[[tuple[Failure, ...]], None]
    ) -> tuple[Peer, Shipment, list[Peer]]:
        """The root of an object's tree, what to send it, and the nodes that are only tried."""
        with self._lock:
            if self._closed:
                raise DeliveryError(f"object {key}: this delivery is closed")
            epoch = "/".join(key.split("/")[:2])
            if epoch != self._epoch or not self._known:
                self._known = sorted(decode_node(value, name) for name, value in self._nodes().items())
                self._epoch = epoch
                self._suspects &= {n.name for n in self._known}
                self._gone = [peer for peer in self._gone if peer.busy]
                for node in self._peers.keys() - set(self._known):
                    self._gone.append(self._peers.pop(node))
                    self._gone[-1].close()
            if not self._known:
                raise DeliveryError(f"object {key}: no rollout node is registered with the relay; start one")
            trusted = [n for n in self._known if n.name not in self._suspects] or self._known
            aside = [self._peer(n) for n in self._known if n not in trusted]
            self._turn += 1
            tree = plan(trusted, self._turn % len(trusted), self._bounds.fan_out)
            return (
                self._peer(tree.node),
                Shipment(key, data, digest, tree.branches, then),
                [peer for peer in aside if not peer.busy],
            )

    def _heard(self, name: str, missed: tuple[Failure, ...]) -> None:
        if not missed:
            _log.info("relay: %s takes objects again", name)
            with self._lock:
                self._suspects.discard(name)

    def _peer(self, node: Node) -> Peer:
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = Peer(node, self._credentials, self._bounds)
        return peer
