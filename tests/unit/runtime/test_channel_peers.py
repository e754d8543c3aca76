import logging
import signal
import subprocess
import sys
import threading

import pytest
from raw_peer import (
    SECRET,
    WAIT_S,
    Events,
    closed_by_peer,
    connect,
    eventually,
    join,
    pack,
)

from dcr.protocol.errors import RefusedError
from dcr.runtime.channel import (
    ChannelError,
    ChannelSettings,
    ChannelTimeoutError,
    Connected,
    Disconnected,
    Hub,
    Peer,
    Received,
    Spoke,
)
from dcr.runtime.channel_address import HostPort

A = Peer("node", "a", 1)
OTHER = bytes(32)
MESSAGE, PING = 1, 2


def test_a_silent_peer_is_lost_and_a_pinging_one_is_not(nothing_left, start):
    events = Events()
    hub = start.hub(events, heartbeat_s=0.2, peer_timeout_s=4.0)
    spoke = start.spoke(A, hub, heartbeat_s=0.2, peer_timeout_s=4.0)
    assert events.take(Connected).peer == A
    quiet, _ = join(hub.address, SECRET, name="quiet")
    assert events.take(Connected).peer.name == "quiet"
    lost = events.take(Disconnected)
    assert (lost.peer.name, lost.reason) == ("quiet", "silent for 4 s")
    assert closed_by_peer(quiet)
    quiet.close()
    assert events.empty()  # though the other has said nothing for longer, but that it is there
    assert spoke.connected


CHILD = """
import sys, time
from dcr.runtime.channel import *
spoke = Spoke(bytes.fromhex(sys.argv[2]), Peer("node", "child", int(sys.argv[3])), lambda m: spoke.send(m),
              resolve=lambda: sys.argv[1], settings=ChannelSettings(heartbeat_s=0.1, peer_timeout_s=60.0))
time.sleep(300)
"""


def child_of(hub, incarnation=1):
    return subprocess.Popen([sys.executable, "-c", CHILD, hub.address, SECRET.hex(), str(incarnation)])


def test_a_killed_process_is_noticed(start):
    events = Events()
    hub = start.hub(events)  # peer_timeout_s is long: the kernel's word comes first
    child = child_of(hub)
    peer = events.take(Connected).peer
    child.send_signal(signal.SIGKILL)
    lost = events.take(Disconnected)
    assert lost.peer == peer
    assert "silent" not in lost.reason
    assert not hub.send(peer, b"x")
    child.wait(WAIT_S)


def test_a_stopped_process_is_noticed_replaced_and_refused_when_it_comes_back(start):
    events = Events()
    hub = start.hub(events, heartbeat_s=0.1, peer_timeout_s=3.0)
    child = child_of(hub)
    peer = events.take(Connected).peer
    hub.send(peer, b"echo")
    assert events.take(Received).message == b"echo"
    child.send_signal(signal.SIGSTOP)
    lost = events.take(Disconnected)
    assert (lost.peer, lost.reason) == (peer, "silent for 3 s")
    successor = child_of(hub, incarnation=2)
    assert events.take(Connected).peer.incarnation == 2
    child.send_signal(signal.SIGCONT)
    # Its connection is dead, it tries again, and is refused.
    eventually(lambda: any("a newer process is connected under this name" in why for why in hub.refused))
    assert events.empty()
    successor.kill()
    assert events.take(Disconnected).peer.incarnation == 2
    assert events.take(Connected).peer.incarnation == 1
    for process in (child, successor):
        process.kill()
        process.wait(WAIT_S)


def test_a_stopped_reader_that_is_sent_much_does_not_hold_the_sender(start):
    events = Events()
    hub = start.hub(events, heartbeat_s=0.1, peer_timeout_s=2.0)
    child = child_of(hub)
    peer = events.take(Connected).peer
    child.send_signal(signal.SIGSTOP)
    sent = 0
    while hub.send(peer, bytes(1 << 20)):
        sent += 1
        assert sent < 1000
    assert events.take(Disconnected).reason.split(" ")[0] in ("send", "silent", "took")
    child.kill()
    child.wait(WAIT_S)


@pytest.mark.parametrize(
    ("bounds", "message", "accepted"),
    [
        ({"queue_messages_max": 5}, 1 << 20, 5),
        ({"queue_bytes_max": 5 << 20}, 1 << 20, 5),
    ],
)
def test_a_full_queue_drops_the_peer_by_name(nothing_left, start, bounds, message, accepted):
    events = Events()
    hub = start.hub(events, peer_timeout_s=WAIT_S, **bounds)
    sock, _ = join(hub.address, SECRET)
    peer = events.take(Connected).peer
    sent = 0
    while hub.send(peer, bytes(message)):
        sent += 1
        assert sent < 100  # what the kernel's buffers and the queue take together
    assert sent >= accepted
    assert events.take(Disconnected).reason.startswith(
        f"send queue full ({accepted} messages, {accepted * message} bytes)"
    )
    assert hub.peers() == []
    sock.close()


def test_a_newer_incarnation_replaces_and_an_older_is_refused(nothing_left, start, caplog):
    events = Events()
    hub = start.hub(events)
    first, _ = join(hub.address, SECRET, name="a", incarnation=4)
    assert events.take(Connected).peer.incarnation == 4
    older, refused = join(hub.address, SECRET, name="a", incarnation=3)
    assert "a newer process is connected under this name (incarnation 4)" in refused
    assert closed_by_peer(older)
    for _ in range(2):  # it tries again, and the log says it once
        older, refused = join(hub.address, SECRET, name="a", incarnation=3)
        assert refused
        assert closed_by_peer(older)
    logged = [r for r in caplog.records if r.name == "dcr.runtime.hub"]
    warned = [r.getMessage() for r in logged if r.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "give it a name of its own" in warned[0]
    again, refused = join(hub.address, SECRET, name="a", incarnation=4)  # its own half-open connection
    assert refused == ""
    assert closed_by_peer(first)
    newer, refused = join(hub.address, SECRET, name="a", incarnation=5)
    assert refused == ""
    assert closed_by_peer(again)
    namesake, refused = join(hub.address, SECRET, name="a", incarnation=1, role="owner")
    assert refused == ""
    told = [(type(e), e.peer.role, e.peer.incarnation) for e in (events.get(timeout=WAIT_S) for _ in range(5))]
    # In order for one role and name; the owner's may come at any time between.
    assert [(kind, incarnation) for kind, role, incarnation in told if role == "node"] == [
        (Disconnected, 4),
        (Connected, 4),
        (Disconnected, 4),
        (Connected, 5),
    ]
    assert [(kind, incarnation) for kind, role, incarnation in told if role == "owner"] == [(Connected, 1)]
    assert sorted(p.incarnation for p in hub.peers()) == [1, 5]
    for sock in (first, older, again, newer, namesake):
        sock.close()


def test_the_replaced_connections_events_end_before_the_new_ones_begin(nothing_left, start):
    """The old connection's handler is held in the middle of a message while the new connection arrives."""
    order, holding, release = [], threading.Event(), threading.Event()

    def on_event(event):
        if isinstance(event, Received) and event.message == b"hold":
            holding.set()
            assert release.wait(WAIT_S)
        order.append((type(event).__name__, event.peer.incarnation))

    hub = start.hub(None, on_event=on_event)
    old, _ = join(hub.address, SECRET, incarnation=1)
    old.sendall(pack(1, b"hold") + pack(1, b"never handled: the connection is lost by then"))
    assert holding.wait(WAIT_S)
    results = []
    joiner = threading.Thread(target=lambda: results.append(join(hub.address, SECRET, incarnation=2)))
    joiner.start()
    assert closed_by_peer(old)  # the hub has given it up
    assert order == [("Connected", 1)]
    assert hub.peers() == []
    release.set()
    joiner.join(WAIT_S)
    eventually(lambda: len(order) == 4)
    assert order == [("Connected", 1), ("Received", 1), ("Disconnected", 1), ("Connected", 2)]
    for sock in (old, results[0][0]):
        sock.close()


def test_peers_max(start):
    events = Events()
    hub = start.hub(events, peers_max=1)
    first, _ = join(hub.address, SECRET, name="a")
    second, refused = join(hub.address, SECRET, name="b")
    assert "peers_max" in refused
    third, refused = join(hub.address, SECRET, name="a")
    assert refused == ""
    for sock in (first, second, third):
        sock.close()


def test_a_spoke_finds_the_next_hub(nothing_left, start):
    told, first_events, second_events = Events(), Events(), Events()
    first = start.hub(first_events)
    where = [first.address]
    spoke = start.spoke(A, lambda: where[0], callbacks=(lambda: told.put("up"), told.put))
    first_events.take(Connected)
    second = start.hub(second_events)
    where[0] = second.address
    first.close()
    assert second_events.take(Connected).peer == A
    spoke.wait_connected(WAIT_S)
    assert spoke.send(b"to the second")
    assert second_events.take(Received).message == b"to the second"
    assert first_events.take(Disconnected).reason == "the hub was closed"
    assert [told.take(str) for _ in range(3)] == ["up", "the peer closed the connection", "up"]


def test_fifty_spokes(nothing_left, start):
    events = Events()
    hub = start.hub(events)
    peers = [Peer("node", f"n{i}", i) for i in range(50)]
    spokes = {}
    for peer in peers:
        spokes[peer] = start.spoke(peer, hub, lambda message, peer=peer: spokes[peer].send(message[::-1]))
    assert {events.take(Connected).peer for _ in peers} == set(peers)
    for i, peer in enumerate(peers):
        for j in range(10):
            assert hub.send(peer, b"%d %d." % (i, j))
    got = {peer: [] for peer in peers}
    for _ in range(500):
        event = events.take(Received)
        got[event.peer].append(event.message)
    assert got == {peer: [(b"%d %d." % (i, j))[::-1] for j in range(10)] for i, peer in enumerate(peers)}


def test_close_sends_what_is_queued(nothing_left, start):
    events, got = Events(), Events()
    hub = start.hub(events)
    spoke = start.spoke(A, hub, got.put)
    peer = events.take(Connected).peer
    messages = [bytes([i]) * 200_000 for i in range(40)]
    assert all(hub.send(peer, message) for message in messages)
    hub.close()
    assert [got.take(bytes) for _ in messages] == messages
    assert events.take(Disconnected).reason == "the hub was closed"
    assert not hub.send(peer, b"late")
    hub.close()
    spoke.close()
    spoke.close()
    assert not spoke.send(b"late")
    with pytest.raises(ChannelError, match="closed"):
        spoke.wait_connected(WAIT_S)


def test_close_from_a_callback_and_while_connecting(nothing_left, start):
    done = threading.Event()

    def on_event(event):
        if isinstance(event, Received):
            hub.close()
            done.set()

    hub = start.hub(None, on_event=on_event)
    spoke = start.spoke(A, hub)
    spoke.wait_connected(WAIT_S)
    stranger = connect(hub.address)
    spoke.send(b"stop")
    assert done.wait(WAIT_S)
    assert closed_by_peer(stranger)
    stranger.close()


def test_a_callback_that_never_returns_is_named_by_close(start, monkeypatch):
    release, events = threading.Event(), Events()

    def on_event(event):
        events.put(event)
        if isinstance(event, Received):
            release.wait(WAIT_S)

    hub = start.hub(None, on_event=on_event)
    sock, _ = join(hub.address, SECRET)
    sock.sendall(pack(1, b"x"))
    events.take(Connected)
    events.take(Received)
    with monkeypatch.context() as hurried:
        hurried.setattr(hub, "_settings", ChannelSettings(heartbeat_s=0.1, peer_timeout_s=0.3))
        with pytest.raises(ChannelTimeoutError, match=r"closing: on_event.*node raw \(incarnation 1\)"):
            hub.close()
    release.set()
    sock.close()


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("no"), ConnectionError("no"), ChannelError("no")])
def test_a_callback_that_raises_drops_its_peer_by_name(nothing_left, start, error):
    events = Events()

    def on_event(event):
        events.put(event)
        if isinstance(event, Received) and event.message == b"bad":
            raise error

    hub = start.hub(None, on_event=on_event)
    spoke = start.spoke(A, hub)
    spoke.wait_connected(WAIT_S)
    spoke.send(b"bad")
    events.take(Connected)
    events.take(Received)
    assert events.take(Disconnected).reason == f"its message could not be handled: {error!r}"
    assert events.take(Connected).peer == A  # it connects again


def test_only_loopback_and_real_secrets(start):
    for host in ("0.0.0.0", "10.1.2.3", "::", "localhost", "example.org", ""):
        with pytest.raises(RefusedError, match="loopback"):
            Hub(SECRET, print, listen=HostPort(host, 0))
    with pytest.raises(RefusedError, match="at least 16 bytes"):
        Hub(b"short", print)
    with pytest.raises(RefusedError, match="at least 16 bytes"):
        Spoke(b"short", A, print, resolve=lambda: None)
    hub = Hub(SECRET, print, listen=HostPort("127.0.0.2", 0))
    assert hub.address.startswith("127.0.0.2:")
    assert SECRET.hex() not in repr(hub)
    with pytest.raises(OSError, match="in use"):
        Hub(SECRET, print, listen=HostPort.parse(hub.address))
    hub.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"heartbeat_s": 0},
        {"peer_timeout_s": 1.5},
        {"queue_messages_max": 0},
        {"frame_bytes_max": 2**32},
        {"queue_bytes_max": 1},
        {"reconnect_max_s": 0.01},
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(RefusedError):
        ChannelSettings(**bad)


@pytest.mark.parametrize(
    "bad", [("", "a", 1), ("node", "", 1), ("node", "a\x00", 1), ("node", "a" * 201, 1), ("node", "a", -1)]
)
def test_peers_that_cannot_be_are_refused(bad):
    with pytest.raises(RefusedError):
        Peer(*bad)


def test_a_peer_that_is_refused_by_name_never_is_connected():
    events = Events()
    hub = Hub(SECRET, events.put, refuse=lambda peer: "no owner of this trainer" if peer.role == "owner" else "")
    stranger = Spoke(SECRET, Peer("owner", "rank-0", 1), print, resolve=lambda: hub.address)
    spoke = Spoke(SECRET, A, print, resolve=lambda: hub.address)
    try:
        assert events.take(Connected).peer == A
        eventually(lambda: "the hub refused this peer: no owner of this trainer" in stranger.trouble)
        assert not stranger.connected
        assert hub.peers() == [A]
    finally:
        stranger.close()
        spoke.close()
        hub.close()
