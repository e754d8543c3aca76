"""The proxy that cuts somebody off."""

import socket
import socketserver
import threading
import time

import pytest

from dcr.chaos.proxy import Proxy


class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        while line := self.rfile.readline():
            self.wfile.write(line)


@pytest.fixture
def proxied():
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    proxy = Proxy(lambda: server.server_address)
    yield proxy
    proxy.close()
    server.shutdown()
    server.server_close()


def connect(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def hears_nothing(s):
    s.settimeout(0.3)
    with pytest.raises(TimeoutError):
        s.recv(10)
    s.settimeout(60)


def test_nothing_passes_while_it_is_cut_and_all_does_before_and_after(proxied):
    with connect(proxied) as s:
        s.sendall(b"one\n")
        assert s.recv(10) == b"one\n"
        proxied.cut()
        s.sendall(b"two\n")
        hears_nothing(s)
        with connect(proxied) as other:
            other.sendall(b"three\n")
            hears_nothing(other)
        proxied.heal()
        assert s.recv(10) in (b"", b"two\n")  # what hung is broken off
    with connect(proxied) as s:
        s.sendall(b"four\n")
        assert s.recv(10) == b"four\n"


def test_it_counts_what_a_cut_held_back_and_nothing_else(proxied):
    with connect(proxied) as s:
        s.sendall(b"one\n")
        assert s.recv(10) == b"one\n"
        proxied.cut()
        proxied.heal()
        assert proxied.held == 0
    with connect(proxied) as s:
        s.sendall(b"two\n")
        assert s.recv(10) == b"two\n"
        proxied.cut()
        s.sendall(b"three\n")
        deadline = time.monotonic() + 60
        while not proxied.held and time.monotonic() < deadline:
            time.sleep(0.01)
        proxied.heal()
        assert proxied.held == 1


def test_nobody_there_is_a_connection_that_ends():
    proxy = Proxy(lambda: None)
    with connect(proxy) as s:
        assert s.recv(1) == b""
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
