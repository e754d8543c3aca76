"""The relay over real sockets and TLS: what arrives, what is refused, and who is named when a peer dies."""

import os
import random
import signal
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relay_fleet import PATIENT, QUICK, WAIT_S, RelayFleet

from dcr.credentials.authority import issue
from dcr.credentials.folder import Credentials
from dcr.delivery.interface import DeliveryError
from dcr.delivery.relay.wire import RelayError
from dcr.protocol.errors import RefusedError

EPOCH = "r/00000000000000000001"


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    fleet = RelayFleet(tmp_path_factory.mktemp("relay"))
    for name in ("a", "b", "c"):
        fleet.node(name)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(tmp_path):
    made = RelayFleet(tmp_path)
    yield made
    made.close()


def data_of(seed, size):
    return random.Random(seed).randbytes(size)


serial = iter(range(10**9))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_every_node_holds_every_object_bit_for_bit(three, sizes, fan_out, connections, at_once):
    prefix = f"{EPOCH}/{next(serial)}"
    owner = three.owner(f"{PATIENT}&fan_out={fan_out}&connections={connections}")
    objects = {f"{prefix}/{i}": data_of(i, size) for i, size in enumerate(sizes)}
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda item: owner.put(*item), objects.items()))
    for node in three.nodes.values():
        for key, data in objects.items():
            assert node.ask("get", key, 1 << 20) == data
        assert node.ask("keys", f"{prefix}/") == sorted(objects)
        assert node.ask("get", f"{prefix}/none", 10) is None
    assert (owner.traffic.requests, owner.traffic.bytes_up) == (len(sizes), sum(sizes))
    crossed = sum(peer.bytes for peer in owner._peers.values())
    assert crossed == sum(sizes), "each object crosses the boundary once"
    owner.close()


def test_objects_of_different_roots_do_not_wait_for_each_other_in_a_circle(fleet):
    """One connection from each node to each other one, and every node passes on to the next at the same time."""
    fields = f"{PATIENT}&connections=1&fan_out=1&object_timeout_s=40"
    for name in ("a", "b", "c", "d"):
        fleet.node(name, fields)
    owners = [fleet.owner(fields) for _ in range(3)]
    data = data_of(0, 100_000)
    with ThreadPoolExecutor(18) as pool:
        list(pool.map(lambda i: owners[i % 3].put(f"{EPOCH}/{i}", data), range(90)))
    for node in fleet.nodes.values():
        assert len(node.ask("keys", f"{EPOCH}/")) == 90


def test_roots_take_turns(three):
    owner = three.owner()
    for i in range(9):
        owner.put(f"{EPOCH}/turns/{i}", bytes(1000))
    assert {peer.node.name: peer.bytes for peer in owner._peers.values()} == {"a": 3000, "b": 3000, "c": 3000}


def test_the_same_again_is_fine_and_other_bytes_are_a_conflict(three):
    owner = three.owner()
    owner.put(f"{EPOCH}/again", b"one")
    before = sum(peer.bytes for peer in owner._peers.values())
    owner.put(f"{EPOCH}/again", b"one")
    assert sum(peer.bytes for peer in owner._peers.values()) == before, "who holds it is not sent it again"
    with pytest.raises(RelayError, match=r"did not get to 3 nodes: .*is held with other bytes"):
        owner.put(f"{EPOCH}/again", b"two")
    for node in three.nodes.values():
        assert node.ask("get", f"{EPOCH}/again", 10) == b"one"


def test_bounds_and_roles(three, fleet):
    owner, node = three.owner(), three.nodes["a"]
    owner.put(f"{EPOCH}/size", b"12345")
    assert "5 bytes, more than the 4 allowed" in node.ask("get", f"{EPOCH}/size", 4)
    assert "only reads" in node.ask("put", f"{EPOCH}/x", b"")
    with pytest.raises(DeliveryError, match="only sends"):
        owner.get(f"{EPOCH}/size", 10)
    assert owner.keys("r/") == []
    node.ask("delete_prefix", f"{EPOCH}/")
    assert node.ask("keys", "r/") == []
    with pytest.raises(DeliveryError, match="no rollout node is registered"):
        fleet.owner().put(f"{EPOCH}/x", b"")


def test_a_node_without_room_says_so_and_old_epochs_and_taken_objects_make_room(fleet):
    node = fleet.node("a", PATIENT + "&relay_bytes_max=1000&room_timeout_s=2")
    owner = fleet.owner()
    owner.put(f"{EPOCH}/0", bytes(600))
    with pytest.raises(RelayError, match=r"no room for 600 bytes in room_timeout_s = 2\.0 s"):
        owner.put(f"{EPOCH}/1", bytes(600))
    assert node.ask("get", f"{EPOCH}/0", 1000) == bytes(600)
    owner.put(f"{EPOCH}/2", bytes(600))  # the one that was taken goes
    owner.put("r/00000000000000000002/0", bytes(700))  # so does one of an epoch that is over
    assert node.ask("keys", "r/") == ["r/00000000000000000002/0"]
    with pytest.raises(RelayError, match="more than relay_bytes_max = 1000"):
        owner.put("r/00000000000000000002/1", bytes(1001))
    waiting = threading.Thread(target=owner.put, args=("r/00000000000000000002/2", bytes(900)))
    waiting.start()
    time.sleep(0.2)
    node.ask("get", "r/00000000000000000002/0", 1000)
    waiting.join(WAIT_S)
    assert node.ask("keys", "r/") == ["r/00000000000000000002/2"]


@pytest.mark.parametrize("victim", ["root", "leaf"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_node_is_named_in_time_and_the_next_attempt_goes_around_it(fleet, victim, how):
    for name in ("a", "b", "c", "d"):
        fleet.node(name, QUICK)
    owner = fleet.owner(f"{QUICK}&fan_out=2")
    owner.put(f"{EPOCH}/before", bytes(1000))
    # The next root is the second after the first's: turns go around in order of names.
    order = sorted(fleet.nodes)
    root = order[(owner._turn + 1) % 4]
    lost = root if victim == "root" else order[(order.index(root) + 3) % 4]
    fleet.nodes[lost].signal(how)
    started = time.monotonic()
    with pytest.raises(RelayError, match=rf"{lost}: ({lost}|.*) at 127"):
        owner.put(f"{EPOCH}/lost", data_of(1, 200_000))
    assert time.monotonic() - started < 40
    others = [name for name in order if name != lost]
    for i in range(6):
        owner.put(f"r/00000000000000000002/{i}", data_of(i, 50_000))
        for name in others:
            assert fleet.nodes[name].ask("get", f"r/00000000000000000002/{i}", 1 << 20) == data_of(i, 50_000)
    if how == signal.SIGKILL:
        again = fleet.node(lost, QUICK)
    else:
        fleet.nodes[lost].signal(signal.SIGCONT)
        again = fleet.nodes[lost]
    deadline = time.monotonic() + 60
    for epoch in range(3, 1000):
        owner.put(f"r/{epoch:020d}/x", b"x")
        if again.ask("get", f"r/{epoch:020d}/x", 10) == b"x" and not owner._suspects:
            break
        assert time.monotonic() < deadline, "it takes objects again, and nobody believes it"
        time.sleep(0.05)


def test_killed_in_the_middle_of_an_object(fleet):
    for name in ("a", "b"):
        fleet.node(name, QUICK)
    owner = fleet.owner(QUICK)
    stop = threading.Event()

    def kill():
        time.sleep(0.05)
        fleet.nodes["b"].kill()
        stop.set()

    threading.Thread(target=kill).start()
    errors = []
    for i in range(400):
        try:
            owner.put(f"{EPOCH}/{i}", data_of(i, 2_000_000))
        except RelayError as e:
            errors.append(str(e))
        if stop.is_set() and i % 4 == 3:
            break
    assert len(errors) <= 2, errors
    for e in errors:
        assert "b: b at 127.0.0.1" in e or "a: behind b" in e
    owner.put("r/00000000000000000002/x", b"x")
    assert fleet.nodes["a"].ask("get", "r/00000000000000000002/x", 10) == b"x"


# ---------------------------------------------------------------- strangers


def test_whoever_has_no_certificate_of_the_authority_is_refused(fleet, tmp_path):
    node = fleet.node("a")
    host, port = "127.0.0.1", next(iter(_nodes(fleet)))[2]
    for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(3000), b""):
        with socket.create_connection((host, port), WAIT_S) as s:
            s.sendall(noise)
    (tmp_path / "elsewhere").mkdir()
    other = RelayFleet(tmp_path / "elsewhere")
    other.directory = fleet.directory
    said = r"certificate is not good here, by our ca.pem: .*certificates of one authority"
    with pytest.raises(RelayError, match=said):
        other.owner().put(f"{EPOCH}/x", b"x")
    # A client that does not check whom it speaks to, and has no certificate, is not listened to.
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError, match=r"certificate required|closed|reset|EOF"):  # noqa: PT012, SIM117
        with careless.wrap_socket(socket.create_connection((host, port), WAIT_S)) as s:
            s.sendall(b"dcrR\x01")
            while s.recv(100):
                pass
            raise ConnectionResetError("closed")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match=r"version|alert"):
        old.wrap_socket(socket.create_connection((host, port), WAIT_S))
    fleet.owner().put(f"{EPOCH}/y", b"y")
    assert node.ask("keys", "r/") == [f"{EPOCH}/y"]
    other.close()


def test_a_peer_under_another_name_is_refused(fleet):
    fleet.node("a")
    (value,) = fleet.directory.entries.values()
    _, host, port = msgspec.msgpack.decode(value)
    fleet.directory.entries = {"b": msgspec.msgpack.encode(["b", host, port])}
    with pytest.raises(RelayError, match="Hostname mismatch"):
        fleet.owner().put(f"{EPOCH}/x", b"x")


def _nodes(fleet):
    return [msgspec.msgpack.decode(v) for v in fleet.directory.entries.values()]


class Raw:
    """A peer with credentials that says what it likes, written from docs/relay.md."""

    def __init__(self, fleet):
        fleet.issue("raw")
        context = Credentials(fleet.folder / "raw").client
        (name, host, port), *_ = _nodes(fleet)
        self.sock = context.wrap_socket(socket.create_connection((host, port), WAIT_S), server_hostname=name)
        self.sock.sendall(b"dcrR\x01")
        assert self.exactly(5) == b"dcrR\x01"

    def exactly(self, size):
        data = b""
        while len(data) < size:
            got = self.sock.recv(size - len(data))
            if not got:
                raise ConnectionResetError("closed")
            data += got
        return data

    def offer(self, *fields):
        head = msgspec.msgpack.encode(fields)
        self.sock.sendall(b"\x01" + len(head).to_bytes(4, "little") + head)

    def answer(self):
        """Kind and head of the next frame that says more than that the peer is alive."""
        while True:
            kind, size = self.exactly(1)[0], int.from_bytes(self.exactly(4), "little")
            head = self.exactly(size)
            if kind != 3:
                return kind, msgspec.msgpack.decode(head) if head else None


def test_frames_are_as_the_page_says(fleet):
    node = fleet.node("a")
    raw = Raw(fleet)
    data = data_of(3, 10_000)
    digest = xxhash.xxh3_128(data).digest()
    raw.offer(f"{EPOCH}/raw", len(data), digest, [])
    assert raw.answer() == (2, None)
    raw.sock.sendall(data)
    assert raw.answer() == (4, [[]])
    assert node.ask("get", f"{EPOCH}/raw", 1 << 20) == data
    raw.offer(f"{EPOCH}/raw", len(data), digest, [])
    assert raw.answer() == (4, [[]]), "held already: not asked for again"
    raw.offer(f"{EPOCH}/bad", len(data), bytes(16), [])
    assert raw.answer() == (2, None)
    raw.sock.sendall(data)
    kind, [[[name, reason, lost]]] = raw.answer()
    assert (kind, name, lost) == (4, "a", False)
    assert "does not match its digest" in reason
    assert node.ask("keys", "r/") == [f"{EPOCH}/raw"]
    raw.offer(f"{EPOCH}/on", 2, xxhash.xxh3_128(b"on").digest(), [[["ghost", "127.0.0.1", 1], []]])
    assert raw.answer() == (2, None)
    raw.sock.sendall(b"on")
    kind, [[[name, reason, lost]]] = raw.answer()
    assert (name, lost) == ("ghost", True)
    assert "ghost at 127.0.0.1:1: connecting: " in reason


_LEVEL = b"\x91\x92" + msgspec.msgpack.encode(["x", "h", 1])
_DEEP = b"\x94" + b"".join(map(msgspec.msgpack.encode, (f"{EPOCH}/x", 1, bytes(16)))) + _LEVEL * 100_000 + b"\x90"
DEEP = b"\x01" + len(_DEEP).to_bytes(4, "little") + _DEEP


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x01\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\x00",
        b"\x02\x00\x00\x00\x00",
        b"\x09\x01\x00\x00\x00\xc0",
        b"\x01\x04\x00\x00\x00\xdd\xff\xff\xff",
        ("/../../etc/passwd", 1, bytes(16), []),
        (f"{EPOCH}/x", -1, bytes(16), []),
        (f"{EPOCH}/x", 1 << 62, bytes(16), []),
        DEEP,
        (f"{EPOCH}/x", 1, bytes(16), [], "more"),
    ],
    ids=range(10),
)
def test_what_is_no_frame_ends_the_connection_and_nothing_else(three, hostile):
    raw = Raw(three)
    if isinstance(hostile, bytes):
        raw.sock.sendall(hostile)
    else:
        raw.offer(*hostile)
    try:
        kind, head = raw.answer()
    except OSError:
        pass
    else:
        assert kind == 4
        assert "more than object_bytes_max" in head[0][0][1]
    three.owner().put(f"{EPOCH}/after/{next(serial)}", b"x")


def test_a_sender_that_stops_in_the_middle_gives_its_room_back(fleet):
    node = fleet.node("a", "heartbeat_s=0.5&peer_timeout_s=3&relay_bytes_max=1000&room_timeout_s=40")
    raw = Raw(fleet)
    raw.offer(f"{EPOCH}/x", 800, bytes(16), [])
    assert raw.answer() == (2, None)
    raw.sock.sendall(bytes(100))  # and no more: the node waits peer_timeout_s
    fleet.owner().put(f"{EPOCH}/y", bytes(800))
    assert node.ask("keys", "r/") == [f"{EPOCH}/y"]


def test_a_sender_that_dribbles_gives_its_room_back_too(fleet):
    node = fleet.node("a", QUICK + "&relay_bytes_max=1000&room_timeout_s=40&object_timeout_s=1")
    raw = Raw(fleet)
    raw.offer(f"{EPOCH}/x", 800, bytes(16), [])
    assert raw.answer() == (2, None)
    with pytest.raises(OSError, match=r"closed|reset|EOF|[Bb]roken"):  # noqa: PT012 - whichever call finds out
        for _ in range(40):
            raw.sock.sendall(b"x")
            time.sleep(0.2)
        raw.answer()
    fleet.owner().put(f"{EPOCH}/y", bytes(800))
    assert node.ask("keys", "r/") == [f"{EPOCH}/y"]


# ---------------------------------------------------------------- addresses and credentials


ANYWHERE = ["0.0.0.0", "::", "[::]", "0", "0x0", "0.0", "0:0:0:0:0:0:0:0", "[::ffff:0.0.0.0]"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("listen=nowhere", "listen=nowhere must be host:port"),
        *((f"listen={any_}:1", "listen at an address that owners can connect to") for any_ in ANYWHERE),
        ("fan=3", "fan is none of listen, connections, fan_out"),
        ("fan_out=many", "fan_out"),
        ("fan_out=0", "fan_out is 0, it must be positive and at most 64"),
        ("fan_out=65", "fan_out is 65, it must be positive and at most 64"),
        ("connections=65", "connections is 65, it must be positive and at most 64"),
        ("accepted_max=65537", "accepted_max is 65537, it must be positive and at most 65536"),
        (
            "object_bytes_max=99999999999999999",
            "object_bytes_max is 99999999999999999, it must be positive and at most",
        ),
        ("peer_timeout_s=nan", "peer_timeout_s is nan, it must be positive and at most 1000000"),
        ("heartbeat_s=nan", "heartbeat_s is nan, it must be"),
        ("connect_timeout_s=inf", "connect_timeout_s is inf, it must be"),
        ("peer_timeout_s=1e12", "peer_timeout_s is 1000000000000.0, it must be"),
        ("peer_timeout_s=1&heartbeat_s=1", "at least twice heartbeat_s"),
    ],
)
def test_addresses_that_are_none(fleet, fields, said):
    with pytest.raises(RefusedError, match=said):
        fleet.owner(fields)


def test_the_longest_times_and_the_most_of_everything_are_taken(fleet):
    times = "&".join(f"{what}_timeout_s=1e6" for what in ("connect", "peer", "room", "object", "idle"))
    fields = f"{times}&fan_out=64&connections=64&accepted_max=65536&listen=localhost:0"
    node = fleet.node("a", fields)
    fleet.owner(fields).put(f"{EPOCH}/x", b"x")
    assert node.ask("get", f"{EPOCH}/x", 10) == b"x"
    node.ask("close")


def test_credentials_that_are_no_good(fleet):
    folder = fleet.folder / "owner"
    with pytest.raises(RefusedError, match="there already; nothing was changed"):
        issue(fleet.folder / "authority", folder, "owner")
    (fleet.folder / "half").mkdir()
    (fleet.folder / "half" / "cert.pem").mkdir()
    with pytest.raises(RefusedError, match="there already; nothing was changed"):
        issue(fleet.folder / "authority", fleet.folder / "half", "half")
    assert [p.name for p in (fleet.folder / "half").iterdir()] == ["cert.pem"]
    (folder / "key.pem").chmod(0o640)
    with pytest.raises(RefusedError, match=r"key.pem: mode 0640 lets others use it"):
        fleet.owner()
    (folder / "key.pem").chmod(0o600)
    (folder / "cert.pem").write_text("no certificate")
    with pytest.raises(RefusedError, match=r"it must hold ca.pem, cert.pem and key.pem"):
        fleet.owner()
    (folder / "cert.pem").unlink()
    with pytest.raises(RefusedError, match="No such file"):
        fleet.owner()
