"""The control channel over TLS: what stalls, what is torn on the way, and load from both sides."""

import itertools
import random
import re
import socket
import struct
import threading
import time
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_peer import SECRET, WAIT_S, Events, closed_by_peer, pack, prove
from tls_peer import Between, Memory, place

from dcr.runtime.channel import Connected, Disconnected, Peer, Received

A = Peer("node", "a", 1)
MESSAGE = 1

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("how", ["silent", "half a greeting", "dribbling", "dribbling after TLS"])
def test_a_handshake_that_stalls_is_bounded_and_holds_nobody_up(tls, how):
    events = Events()
    hub = tls.hub(events, handshake_timeout_s=1.0)
    _, host, port = place(hub.address)
    greeting = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)
    if how == "dribbling after TLS":
        raw = Memory(hub.address, tls.certificates.folder("raw"))
        sock, greeting = raw.wire, raw.sealed(bytes(64))
    else:
        sock = socket.create_connection((host, port), WAIT_S)
    if how != "silent":
        sock.sendall(greeting[:7])
    dribbled = []
    dribble = threading.Thread(target=_dribble, args=(sock, greeting[7:], dribbled))
    if how.startswith("dribbling"):
        dribble.start()
    spoke = tls.spoke(hub)
    spoke.wait_connected(WAIT_S)
    assert events.take(Connected).peer == A
    assert closed_by_peer(sock)
    assert spoke.connected
    if how.startswith("dribbling"):
        dribble.join(WAIT_S)
        assert len(dribbled) < len(greeting) - 7, "it was not listened to until it had said all"
    sock.close()


def _dribble(sock, data, dribbled):
    try:
        for byte in data:
            sock.sendall(bytes([byte]))
            dribbled.append(byte)
            time.sleep(0.2)
    except OSError:
        pass


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("half of a record", r"silent for 2 s"),
        ("a record that was changed", "TLS: .*bad record mac"),
        ("a record twice", "TLS: .*bad record mac"),
        ("a record left out", "TLS: .*bad record mac"),
        ("a reset", "[Rr]eset"),
        ("an end without a word", "without a word of the peer's"),
        ("an end in half of a record", "without a word of the peer's"),
    ],
)
def test_what_is_torn_on_the_way_is_not_delivered(tls, what, said):
    events = Events()
    silence = {"heartbeat_s": 0.2, "peer_timeout_s": 2.0} if what == "half of a record" else {}
    hub = tls.hub(events, **silence)
    raw = Memory(hub.address, tls.certificates.folder("raw"))
    _, refused = prove(raw, SECRET, raw.binding)
    assert refused == ""
    raw.sendall(pack(MESSAGE, b"before"))
    events.take(Connected)
    assert events.take(Received).message == b"before"
    record = raw.sealed(pack(MESSAGE, b"torn" * 100))
    if what == "half of a record":
        raw.wire.sendall(record[: len(record) // 2])
    elif what == "a record that was changed":
        raw.wire.sendall(record[:-20] + bytes([record[-20] ^ 1]) + record[-19:])
    elif what == "a record twice":
        raw.wire.sendall(record + record)
        assert events.take(Received).message == b"torn" * 100
    elif what == "a record left out":
        raw.wire.sendall(raw.sealed(pack(MESSAGE, b"after")))
    elif what == "a reset":
        raw.wire.sendall(record[: len(record) // 2])
        raw.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.wire.close()
    else:
        raw.wire.sendall(record[: len(record) // 2 if "half" in what else 0])
        raw.wire.shutdown(socket.SHUT_WR)
    assert re.search(said, events.take(Disconnected).reason)
    assert events.empty()
    raw.wire.close()


class Load:
    """Messages of several threads to one peer, each of which says what it must be."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.trouble = []
        self.next = dict.fromkeys(range(len(sizes)), 0)
        self.all = threading.Event()

    def send(self, send):
        threads = [threading.Thread(target=self._send, args=(send, i)) for i in range(len(self.sizes))]
        for thread in threads:
            thread.start()
        return threads

    def _send(self, send, sender):
        for number, size in enumerate(self.sizes[sender]):
            body = random.Random(f"{sender} {number}").randbytes(size)
            if not send(struct.pack("<III", sender, number, zlib.crc32(body)) + body):
                self.trouble.append(f"{sender} could not send its {number}")

    def take(self, message):
        sender, number, crc = struct.unpack("<III", message[:12])
        body = message[12:]
        if (number, len(body), crc) != (self.next[sender], self.sizes[sender][number], zlib.crc32(body)):
            self.trouble.append(f"{sender}: {number} of {len(body)} bytes instead of {self.next[sender]}")
        self.next[sender] = number + 1
        if all(self.next[i] == len(sizes) for i, sizes in enumerate(self.sizes)):
            self.all.set()


_SIZES = st.lists(
    st.lists(
        st.one_of(st.integers(0, 64), st.integers(16_000, 17_000), st.integers(0, 2 << 20)), min_size=1, max_size=8
    ),
    min_size=1,
    max_size=3,
)
_serial = itertools.count(1)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(up=_SIZES, down=_SIZES, piece=st.sampled_from([7, 1000, 16_384, 1 << 20]))
def test_under_load_from_both_sides_each_message_comes_once_whole_and_in_order(tls, up, down, piece):
    """Through somebody who cuts the stream into pieces, so that records and frames come in parts."""
    to_hub, to_spoke = Load(up), Load(down)
    connected = threading.Event()

    def on_event(event):
        if isinstance(event, Received):
            to_hub.take(event.message)
        elif isinstance(event, Connected):
            connected.set()

    hub = tls.hub(None, on_event=on_event)
    _, host, port = place(hub.address)

    class Pieces(Between):
        def read(self, source):
            return source.recv(random.randint(1, piece) if random.random() < 0.2 else 1 << 16)

    between = Pieces(lambda sock: (sock, socket.create_connection((host, port), WAIT_S)))
    peer = Peer("node", "a", next(_serial))
    spoke = tls.spoke(lambda: f"tls://trainer@{between.at}", to_spoke.take, peer)
    spoke.wait_connected(WAIT_S)
    assert connected.wait(WAIT_S)
    threads = [*to_hub.send(spoke.send), *to_spoke.send(lambda message: hub.send(peer, message))]
    for thread in threads:
        thread.join(WAIT_S)
    assert to_hub.all.wait(WAIT_S)
    assert to_spoke.all.wait(WAIT_S)
    assert (to_hub.trouble, to_spoke.trouble) == ([], [])
    spoke.close()
    hub.close()
    between.close()
