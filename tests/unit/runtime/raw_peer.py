"""A peer written from docs/control-channel.md with the standard library and msgpack alone."""

import hmac
import os
import queue
import socket
import struct
import time

import msgspec

SECRET = bytes(range(32))
WAIT_S = 60


class Events(queue.Queue):
    """What a hub reported, to be taken in order."""

    def take(self, kind):
        event = self.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event


def pack(kind, body):
    return struct.pack("<I", len(body)) + bytes([kind]) + body


def exactly(sock, size):
    data = b""
    while len(data) < size:
        got = sock.recv(size - len(data))
        if not got:
            raise EOFError
        data += got
    return data


def unpack(sock):
    length, kind = struct.unpack("<IB", exactly(sock, 5))
    return kind, exactly(sock, length)


def closed_by_peer(sock):
    """Read until the end; True if there is one."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def proof(secret, side, hello, hub_nonce, binding=b""):
    said = [side, hello["version"], hello["role"], hello["name"], hello["incarnation"], hello["nonce"], hub_nonce]
    said += [binding] if binding else []
    return hmac.new(secret, b"dcr control channel" + msgspec.msgpack.encode(said), "sha256").digest()


def hello_of(name="raw", incarnation=1, role="node", version=1):
    return {"version": version, "role": role, "name": name, "incarnation": incarnation, "nonce": os.urandom(32)}


def connect(address, timeout=30):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout)


def send_map(sock, **fields):
    sock.sendall(pack(0, msgspec.msgpack.encode(fields)))


def receive_map(sock):
    kind, body = unpack(sock)
    assert kind == 0
    return msgspec.msgpack.decode(body)


def join(address, secret, **identity):
    """A proven connection, and what the hub said in step 4."""
    return prove(connect(address), secret, **identity)


def prove(sock, secret, binding=b"", **identity):
    hello = hello_of(**identity)
    send_map(sock, **hello)
    challenge = receive_map(sock)
    assert challenge["version"] == 1
    assert challenge["proof"] == proof(secret, b"hub", hello, challenge["nonce"], binding)
    send_map(sock, proof=proof(secret, b"spoke", hello, challenge["nonce"], binding))
    return sock, receive_map(sock)["refused"]


def eventually(true):
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
