import logging
import os
import socket
import time

import pytest
from raw_peer import (
    SECRET,
    WAIT_S,
    Events,
    closed_by_peer,
    connect,
    eventually,
    hello_of,
    join,
    pack,
    proof,
    receive_map,
    send_map,
    unpack,
)

from dcr.protocol.errors import RefusedError
from dcr.runtime.channel import (
    ChannelTimeoutError,
    Connected,
    Disconnected,
    Peer,
    Received,
)

A = Peer("node", "a", 1)
OTHER = bytes(32)
MESSAGE, PING = 1, 2


def test_messages_both_ways_in_order(nothing_left, start):
    events, got = Events(), Events()
    hub = start.hub(events)
    spoke = start.spoke(A, hub, got.put)
    assert events.take(Connected).peer == A
    spoke.wait_connected(WAIT_S)
    assert hub.peers() == [A]
    assert spoke.connected
    messages = [b"", os.urandom(4 * 1024 * 1024), *(b"%d" % i for i in range(500))]
    for message in messages:
        assert hub.send(A, message)
        assert spoke.send(message)
    assert [got.take(bytes) for _ in messages] == messages
    assert [events.take(Received) for _ in messages] == [Received(A, message) for message in messages]
    assert not hub.send(Peer("node", "a", 2), b"another incarnation")
    assert not hub.send(Peer("node", "b", 1), b"nobody")
    for send in (spoke.send, lambda message: hub.send(A, message)):
        with pytest.raises(RefusedError, match="frame_bytes_max"):
            send(bytes(4 * 1024 * 1024 + 1))
    assert spoke.connected


def test_the_handshake_is_what_the_page_says(nothing_left, start):
    """Each end against one written from docs/control-channel.md."""
    events = Events()
    hub = start.hub(events)
    sock, refused = join(hub.address, SECRET, name="raw", incarnation=9)
    assert refused == ""
    assert events.take(Connected).peer == Peer("node", "raw", 9)
    sock.sendall(pack(PING, b"") + pack(MESSAGE, b"up"))
    assert events.take(Received).message == b"up"
    hub.send(Peer("node", "raw", 9), b"down")
    while (frame := unpack(sock)) == (PING, b""):
        pass
    assert frame == (MESSAGE, b"down")
    sock.close()
    assert events.take(Disconnected).peer.name == "raw"

    got = Events()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spoke = start.spoke(Peer("owner", "b", 2), lambda: f"127.0.0.1:{listener.getsockname()[1]}", got.put)
        sock, _ = listener.accept()
        hello = receive_map(sock)
        assert {k: v for k, v in hello.items() if k != "nonce"} == {
            "version": 1,
            "role": "owner",
            "name": "b",
            "incarnation": 2,
        }
        nonce = os.urandom(32)
        send_map(sock, version=1, nonce=nonce, proof=proof(SECRET, b"hub", hello, nonce))
        assert receive_map(sock) == {"proof": proof(SECRET, b"spoke", hello, nonce)}
        assert not spoke.connected
        send_map(sock, refused="")
        spoke.wait_connected(WAIT_S)
        sock.sendall(pack(MESSAGE, b"hello"))
        assert got.take(bytes) == b"hello"
        spoke.close()
        sock.close()


def test_a_spoke_with_another_secret_is_refused(nothing_left, start, caplog):
    events = Events()
    hub = start.hub(events)
    spoke = start.spoke(A, hub, secret=OTHER)
    eventually(lambda: "authenticating" in spoke._trouble)
    with pytest.raises(ChannelTimeoutError, match=r"node a \(incarnation 1\).*the hub does not hold the secret"):
        spoke.wait_connected(0.1)
    eventually(lambda: "127.0.0.1: 'node a' left at the proof of the secret: has it another one?" in str(hub.refused))
    # A spoke that goes on although it does not trust the hub is refused by the hub.
    sock = connect(hub.address)
    hello = hello_of()
    send_map(sock, **hello)
    challenge = receive_map(sock)
    send_map(sock, proof=proof(OTHER, b"spoke", hello, challenge["nonce"]))
    assert closed_by_peer(sock)
    sock.close()
    eventually(lambda: "node raw does not hold the secret" in caplog.text)
    assert events.empty()
    assert hub.peers() == []
    assert SECRET.hex() not in caplog.text
    assert repr(SECRET)[2:-1] not in caplog.text


def test_a_spoke_gives_an_impostor_no_proof(nothing_left, start):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start.spoke(A, lambda: f"127.0.0.1:{listener.getsockname()[1]}")
        sock, _ = listener.accept()
        hello = receive_map(sock)
        nonce = os.urandom(32)
        send_map(sock, version=1, nonce=nonce, proof=proof(OTHER, b"hub", hello, nonce))
        assert sock.recv(1) == b""
        sock.close()


def forge_role(hello, challenge):
    return proof(SECRET, b"spoke", hello | {"role": "owner"}, challenge["nonce"])


def forge_name(hello, challenge):
    return proof(SECRET, b"spoke", hello | {"name": "other"}, challenge["nonce"])


def forge_incarnation(hello, challenge):
    return proof(SECRET, b"spoke", hello | {"incarnation": 2}, challenge["nonce"])


def replay_nonce(hello, challenge):
    return proof(SECRET, b"spoke", hello, bytes(32))


def reflect(hello, challenge):
    return challenge["proof"]


def nothing(hello, challenge):
    return b""


@pytest.mark.parametrize("forge", [forge_role, forge_name, forge_incarnation, replay_nonce, reflect, nothing])
def test_a_proof_is_bound_to_what_was_said(start, forge):
    """Even with the secret: a proof of other words, an older one, or the hub's own sent back, does not do."""
    events = Events()
    hub = start.hub(events)
    sock = connect(hub.address)
    hello = hello_of()
    send_map(sock, **hello)
    challenge = receive_map(sock)
    send_map(sock, proof=forge(hello, challenge))
    assert closed_by_peer(sock)
    sock.close()
    assert events.empty()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(64),
    "long": pack(0, bytes(2049)),
    "endless": b"\xff\xff\xff\xff\x00",
    "not msgpack": pack(0, b"\xc1" * 20),
    "not a map": pack(0, b"\x01"),
    "message first": pack(1, b"hi"),
    "ping first": pack(2, b""),
    "text that is not utf-8": pack(
        0, b"\x85\xa7version\x01\xa4role\xa1\xff\xa4name\xa1a\xabincarnation\x01\xa5nonce\xc4\x00"
    ),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_ends_its_own_connection_alone(nothing_left, start, garbage):
    events = Events()
    hub = start.hub(events)
    sock = connect(hub.address)
    sock.sendall(garbage)
    assert closed_by_peer(sock)
    sock.close()
    start.spoke(A, hub).wait_connected(WAIT_S)
    assert events.take(Connected).peer == A


@pytest.mark.parametrize(
    "hello",
    [
        hello_of(name=""),
        hello_of(role="x" * 201),
        hello_of(name="a\n"),
        hello_of(incarnation=-1),
        hello_of(incarnation=2**63),
        hello_of() | {"nonce": b"short"},
        hello_of() | {"more": 1},
        hello_of(version=2),
    ],
)
def test_a_malformed_hello_is_refused_even_with_the_secret(start, hello):
    events = Events()
    sock = connect(start.hub(events).address)
    send_map(sock, **hello)
    try:
        challenge = receive_map(sock)
        send_map(sock, proof=proof(SECRET, b"spoke", hello, challenge["nonce"]))
    except (EOFError, ConnectionError):
        pass
    assert closed_by_peer(sock)
    sock.close()
    assert events.empty()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\xff\xff\xff\xff\x01", "4294967295 bytes, more than the 1000"),
        (pack(1, bytes(1001)), "1001 bytes"),
        (pack(3, b""), "type 3"),
        (pack(0, b""), "type 0"),
    ],
)
def test_a_proven_peer_that_breaks_the_framing_is_dropped_by_name(nothing_left, start, data, named):
    events = Events()
    hub = start.hub(events, frame_bytes_max=1000)
    sock, _ = join(hub.address, SECRET)
    sock.sendall(pack(1, bytes(1000)) + data)
    events.take(Connected)
    assert events.take(Received).message == bytes(1000)
    assert named in events.take(Disconnected).reason
    assert closed_by_peer(sock)
    sock.close()


def test_slow_and_silent_strangers_are_bounded_in_time_and_number(nothing_left, start, caplog):
    events = Events()
    caplog.set_level(logging.DEBUG, "dcr.runtime.hub")  # where the same is told again
    hub = start.hub(events, handshakes_max=3)
    silent = [connect(hub.address) for _ in range(3)]
    eventually(lambda: len(hub._strangers) == 3)
    assert closed_by_peer(connect(hub.address))  # one too many
    for sock in silent:
        sock.close()
    hub.close()

    hub = start.hub(events, handshake_timeout_s=1.0)
    caplog.clear()
    silent = [connect(hub.address) for _ in range(2)]
    slow = connect(hub.address)
    try:
        for byte in pack(0, bytes(2000)):  # each byte comes well within any time-out of a single read
            slow.sendall(bytes([byte]))
            time.sleep(0.02)
    except ConnectionError:
        pass
    else:
        pytest.fail("the hub listened to 40 s of handshake")
    assert all(closed_by_peer(sock) for sock in silent)
    for sock in [slow, *silent]:
        sock.close()
    start.spoke(A, hub).wait_connected(WAIT_S)
    assert caplog.text.count("handshake_timeout_s") + caplog.text.count("timed out") == 3


def test_a_hub_that_never_answers_is_named(nothing_left, start):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts, nobody reads
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        spoke = start.spoke(A, lambda: address, handshake_timeout_s=0.3)
        eventually(lambda: "authenticating" in spoke._trouble)
        with pytest.raises(ChannelTimeoutError, match=f"node a.*authenticating with the hub at {address}"):
            spoke.wait_connected(0.01)


def test_what_resolve_may_answer(nothing_left, start):
    def broken():
        raise OSError("registry on fire")

    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))  # and nobody listens, here or anywhere else
    port = deaf.getsockname()[1]
    for resolve, named in (
        (lambda: None, "no coordinator leads"),
        (broken, "registry on fire"),
        (lambda: "10.0.0.1:80", "loopback"),
        (lambda: "127.0.0.1:x", "'127.0.0.1:x' is not host:port"),
        (lambda: "nonsense", "'nonsense' is not host:port"),
        (lambda: f"127.0.0.1:{port}", "connecting to the hub.*refused"),
    ):
        spoke = start.spoke(A, resolve)
        eventually(lambda spoke=spoke: spoke._trouble != "nothing went wrong yet")
        with pytest.raises(ChannelTimeoutError, match=named):
            spoke.wait_connected(0.01)
        assert not spoke.send(b"x")
    deaf.close()
