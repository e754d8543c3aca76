"""One thread reads and another writes, and neither OpenSSL nor the network is asked for what it cannot do."""

import select
import socket
import threading
import time

import pytest
from raw_peer import WAIT_S, eventually

from dcr.runtime.tls_stream import TlsStream

BYTES = 4 << 20
PIECE = 8 << 10


@pytest.fixture
def ends(shared):
    """Both ends of one connection, their handshake done."""
    socks = socket.socketpair()
    hub = TlsStream(socks[0], shared.of("trainer").server, None)
    spoke = TlsStream(socks[1], shared.of("node-a").client, "trainer")
    deadline = time.monotonic() + WAIT_S
    bindings = []
    thread = threading.Thread(target=lambda: bindings.append(hub.handshake(deadline)))
    thread.start()
    bindings.append(spoke.handshake(deadline))
    thread.join(WAIT_S)
    assert bindings[0] == bindings[1] != b""
    for end in (hub, spoke):
        end.settimeout(WAIT_S)
    yield hub, spoke
    for end in (hub, spoke):
        end.close()


def receive(stream, size):
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = stream.recv_into(view)
        assert got
        view = view[got:]
    return bytes(data)


class Watched:
    """OpenSSL's object, and how often two threads were in it at once."""

    def __init__(self, tls):
        self._tls = tls
        self._inside = threading.Lock()
        self.calls = self.overlaps = 0

    def _watched(self, act):
        self.calls += 1
        alone = self._inside.acquire(blocking=False)
        self.overlaps += not alone
        time.sleep(0.0001)  # another thread comes in the meantime
        try:
            return act()
        finally:
            if alone:
                self._inside.release()

    def read(self, *args):
        return self._watched(lambda: self._tls.read(*args))

    def write(self, data):
        return self._watched(lambda: self._tls.write(data))


def test_openssl_is_never_asked_by_two_threads_at_once(ends):
    watched = []
    for end in ends:
        end._tls = Watched(end._tls)
        watched.append(end._tls)
    up, down = b"\x55" * BYTES, b"\xaa" * BYTES
    got = {}

    def write(end, data):
        for at in range(0, BYTES, PIECE):
            end.sendall(data[at : at + PIECE])

    def read(end):
        got[end] = receive(end, BYTES)

    hub, spoke = ends
    threads = [
        *(threading.Thread(target=write, args=a) for a in ((hub, down), (spoke, up))),
        *(threading.Thread(target=read, args=(end,)) for end in ends),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert got == {hub: up, spoke: down}
    assert all(one.calls > 2 * BYTES // (PIECE * 2) for one in watched)
    assert [one.overlaps for one in watched] == [0, 0]


def test_a_writer_that_waits_for_the_network_keeps_no_reader_waiting_and_no_end(ends):
    hub, spoke = ends
    ended = []

    def write():
        try:
            while True:
                hub.sendall(bytes(1 << 20))
        except OSError as error:
            ended.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    # Nobody reads: the network takes no more.
    eventually(lambda: hub._torn and not select.select([], [hub._sock], [], 0)[1])
    spoke.sendall(b"through")
    got = []
    reader = threading.Thread(target=lambda: got.append(receive(hub, 7)), daemon=True)
    reader.start()
    reader.join(WAIT_S / 2)  # of the time that the writer waits
    assert got == [b"through"]
    assert writer.is_alive()
    hub.shutdown(socket.SHUT_RDWR)  # from yet another thread
    writer.join(WAIT_S)
    assert not writer.is_alive()
    assert len(ended) == 1


def test_a_reader_that_waits_keeps_no_writer_waiting(ends):
    hub, spoke = ends
    got = []
    reader = threading.Thread(target=lambda: got.append(receive(hub, 3)))
    reader.start()
    time.sleep(0.2)
    hub.sendall(b"down")
    assert receive(spoke, 4) == b"down"
    spoke.sendall(b"end")
    reader.join(WAIT_S)
    assert got == [b"end"]


def test_a_record_has_as_long_as_the_time_out_says(ends):
    hub, _ = ends
    hub.settimeout(0.2)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(hub, 1)
    assert time.monotonic() - started >= 0.19
