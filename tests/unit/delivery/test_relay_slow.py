"""Peers of the relay that go on byte by byte: how long they are heard, and that ``close`` leaves nothing of them."""

import socket
import threading
import time

import msgspec
import pytest
import xxhash
from relay_fleet import Directory

from dcr.credentials.authority import create_authority, issue
from dcr.credentials.folder import Credentials
from dcr.delivery.relay import wire
from dcr.delivery.relay.address import open_relay
from dcr.delivery.relay.peer import Peer
from dcr.delivery.relay.sender import encode_node
from dcr.delivery.relay.tree import Branch, Node
from dcr.delivery.relay.wire import RelayError

EPOCH = "r/00000000000000000001"
LONG_S = 30.0
HEAD = b"\x01" + wire.HEAD_BYTES_MAX.to_bytes(4, "little")
"""The beginning of a frame that is announced to be as long as one may be."""


def left(name):
    return [t.name for t in threading.enumerate() if t.name.startswith(name)]


class Ends:
    """Nodes and owners of a directory, in threads of this process."""

    def __init__(self, folder):
        self.folder, self.directory, self.opened = folder, Directory(), []
        create_authority(folder / "authority")
        for name in ("node", "owner"):
            issue(folder / "authority", folder / name, name)

    def open(self, name, fields):
        fields = f"heartbeat_s=0.3&{fields}"
        self.opened.append(
            open_relay(f"relay://{self.folder}/{name}?{fields}", self.directory, receives=name == "node")
        )
        return self.opened[-1]

    def connect(self, node):
        plain = socket.create_connection(("127.0.0.1", node.address.port), LONG_S)
        connection = Credentials(self.folder / "owner").client.wrap_socket(plain, server_hostname="node")
        wire.greet(connection)
        return connection


@pytest.fixture
def ends(tmp_path):
    made = Ends(tmp_path)
    yield made
    for end in made.opened:
        end.close()


@pytest.fixture
def dribbling(ends):
    """A registered node that answers every offer with a head of which a byte comes now and then."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    ends.directory.enter("node", encode_node(Node("node", "127.0.0.1", listener.getsockname()[1])))

    def answer(plain):
        try:
            with Credentials(ends.folder / "node").server.wrap_socket(plain, server_side=True) as connection:
                wire.greet(connection)
                wire.receive_frame(connection)
                connection.sendall(HEAD)
                while not over.wait(0.1):
                    connection.sendall(b"\0")
        except OSError:
            pass

    def accept():
        while not over.is_set():
            try:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    yield
    over.set()
    wire.shut(listener)
    acceptor.join(LONG_S)
    listener.close()


def test_a_head_that_comes_byte_by_byte_is_heard_for_peer_timeout_s(ends, caplog):
    node = ends.open("node", "peer_timeout_s=1&idle_timeout_s=60")
    began = time.monotonic()
    with ends.connect(node) as connection:
        connection.sendall(HEAD)
        with pytest.raises(OSError, match=r"closed|reset|EOF|[Bb]roken"):  # noqa: PT012 - whichever byte finds out
            while time.monotonic() - began < LONG_S:
                connection.sendall(b"\0")
                time.sleep(0.1)
    assert "peer_timeout_s is over, and 10485" in caplog.text


def test_a_body_that_makes_progress_may_take_longer_than_that(ends):
    node = ends.open("node", "peer_timeout_s=2&idle_timeout_s=1")
    data = bytes(range(30))
    with ends.connect(node) as connection:
        wire.send_frame(connection, wire.OBJECT, wire.Object(f"{EPOCH}/x", 30, xxhash.xxh3_128_digest(data), ()))
        assert wire.receive_frame(connection) == (wire.GO, b"")
        for at in range(30):
            connection.sendall(data[at : at + 1])
            time.sleep(0.1)
        assert wire.receive_frame(connection) == (wire.RECEIPT, msgspec.msgpack.encode([[]]))
    assert node.get(f"{EPOCH}/x", 30) == data


@pytest.mark.usefixtures("dribbling")
def test_an_answer_that_comes_byte_by_byte_is_heard_for_object_timeout_s(ends):
    owner = ends.open("owner", "peer_timeout_s=10&object_timeout_s=1.5")
    began = time.monotonic()
    with pytest.raises(RelayError, match=r"node at 127.*: sending .*/x: object_timeout_s is over, and \d+ of 1048576"):
        owner.put(f"{EPOCH}/x", b"x")
    assert time.monotonic() - began < 10
    assert owner._suspects == {"node"}
    owner.close()
    assert not left("dcr-relay to node")


@pytest.mark.usefixtures("dribbling")
def test_close_ends_what_does_not_come_to_its_end(ends):
    owner = ends.open("owner", "peer_timeout_s=1&object_timeout_s=300")
    said = []

    def put():
        with pytest.raises(RelayError) as e:
            owner.put(f"{EPOCH}/x", b"x")
        said.append(str(e.value))

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    deadline = time.monotonic() + LONG_S
    while not any(peer._connections for peer in owner._peers.values()) and time.monotonic() < deadline:
        time.sleep(0.01)
    began = time.monotonic()
    owner.close()
    assert time.monotonic() - began < LONG_S
    assert not left("dcr-relay to node")
    putting.join(LONG_S)
    assert "this process is closing" in said[0]


def test_a_root_that_does_not_answer_at_all_is_a_suspect(ends, monkeypatch):
    ends.open("node", "peer_timeout_s=1")
    owner = ends.open("owner", "peer_timeout_s=0.6&object_timeout_s=0.1")
    monkeypatch.setattr(Peer, "send", lambda *_: None)
    with pytest.raises(RelayError, match=r"node at 127.* has not answered"):
        owner.put(f"{EPOCH}/x", b"x")
    assert owner._suspects == {"node"}


def test_a_node_closes_while_a_peer_says_nothing_in_the_handshake(ends):
    node = ends.open("node", "connect_timeout_s=600&peer_timeout_s=60")
    with socket.create_connection(("127.0.0.1", node.address.port), LONG_S):
        deadline = time.monotonic() + LONG_S
        while not left("dcr-relay-in") and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)  # it is in the handshake by now
        began = time.monotonic()
        node.close()
        assert time.monotonic() - began < LONG_S
        assert not left("dcr-relay-in")


# ---------------------------------------------------------------- peers that say much


def test_what_a_peer_said_is_logged_in_part(ends, caplog):
    node = ends.open("node", "peer_timeout_s=10")
    with ends.connect(node) as connection:
        wire.send_frame(connection, wire.OBJECT, wire.Object("../" + "a" * 500_000, 1, bytes(16), ()))
        assert wire.receive_frame(connection) is None
    node.close()
    (said,) = [r.getMessage() for r in caplog.records if "a connection ended" in r.getMessage()]
    assert "object key '../aaa" in said
    assert "characters left out" in said
    assert len(said) < 800


def test_reasons_of_a_receipt_are_told_in_part(ends, monkeypatch):
    ends.open("node", "peer_timeout_s=10")
    owner = ends.open("owner", "peer_timeout_s=10")
    missed = tuple(wire.Failure("x" * 1000, "y" * 100_000, lost=False) for _ in range(9))
    monkeypatch.setattr(Peer, "send", lambda _peer, shipment: shipment.then(missed))
    with pytest.raises(RelayError, match=r"did not get to 9 nodes: xxx.* and 4 more") as e:
        owner.put(f"{EPOCH}/x", b"x")
    assert len(str(e.value)) < 5 * 700


def test_a_name_of_another_node_is_told_in_part(ends):
    node = ends.open("node", "peer_timeout_s=10")
    there = Branch(Node("ghost", "h" * 100_000, 1))
    with ends.connect(node) as connection:
        offered = wire.Object(f"{EPOCH}/x", 1, xxhash.xxh3_128_digest(b"x"), (there,))
        wire.send_frame(connection, wire.OBJECT, offered)
        assert wire.receive_frame(connection) == (wire.GO, b"")
        connection.sendall(b"x")
        while (frame := wire.receive_frame(connection)) == (wire.BUSY, b""):
            pass
        assert frame is not None
        (failure,) = wire.parse(frame[1], wire.Receipt).failures
    assert failure.node == "ghost"
    assert len(failure.reason) < 700
