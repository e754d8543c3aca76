"""A proxy in front of an S3 server that does what networks and busy servers do, and counts what passed."""

import random
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_ANSWERS = {
    "503": b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>please reduce your rate</Message></Error>",
    "429": b"",
    "500": b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>try again</Message></Error>",
}


@dataclass
class Request:
    method: str
    path: str
    """With the query."""
    head: bytes
    body: bytes
    fault: str = ""
    status: int = 0
    """What the server answered; 0 if it was not asked, or did not answer."""
    sent: int = 0
    """Bytes of the answer's body that the client was sent."""

    @property
    def key(self) -> str:
        return self.path.split("?")[0]


@dataclass
class _Rule:
    fault: str
    match: Callable[[Request], bool]
    left: int


@dataclass
class BadNetwork:
    """Listens on a port of its own, and passes on to ``port``.

    Faults: ``503``, ``429`` and ``500`` (the server is not asked), ``slow`` (the answer comes ``slow_s`` late),
    ``truncated`` (half of the answer's body), ``cut`` (half of it, with a length to match), ``flipped`` (another bit in
    the answer's body), ``damaged`` (another bit in the request's body), ``lost`` (the server acts, its answer is
    swallowed), ``twice`` (the server is asked twice, as some gateways do, and its second answer is passed on),
    ``reset`` (the server is not asked, the connection breaks).
    """

    port: int
    slow_s: float = 0.3
    requests: list[Request] = field(default_factory=list[Request])
    answers: dict[str, tuple[int, str, bytes]] = field(default_factory=dict[str, tuple[int, str, bytes]])
    """Further faults by name: status, type and body that are answered in the server's place."""
    _rules: list[_Rule] = field(default_factory=list[_Rule])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _chance: float = 0.0
    _kinds: tuple[str, ...] = ()
    _random: random.Random = field(default_factory=random.Random)
    _at_once: int = 0
    at_once_max: int = 0
    """Most requests that were under way at the same time."""

    def __post_init__(self) -> None:
        network = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                network._serve(self)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Clients that break off are part of it."""

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def once(self, fault: str, match: Callable[[Request], bool] = lambda _: True, times: int = 1) -> None:
        """Do this to the next requests that match."""
        with self._lock:
            self._rules.append(_Rule(fault, match, times))

    def answer(self, fault: str, status: int, body: bytes, kind: str = "application/xml") -> None:
        """Name a fault: an answer in the server's place.  ``kind`` is its type, and further headers if they follow."""
        self.answers[fault] = status, kind, body

    def at_random(self, chance: float, kinds: tuple[str, ...], seed: int) -> None:
        """Do one of these to requests by chance, from a seed."""
        with self._lock:
            self._chance, self._kinds, self._random = chance, kinds, random.Random(seed)

    def quiet(self) -> None:
        with self._lock:
            self._rules, self._chance = [], 0.0

    def seen(self, method: str, part: str = "") -> list[Request]:
        with self._lock:
            return [r for r in self.requests if r.method == method and part in r.path]

    def faults(self) -> Counter[str]:
        with self._lock:
            return Counter(r.fault for r in self.requests if r.fault)

    def _fault(self, request: Request) -> str:
        with self._lock:
            self.requests.append(request)
            for rule in self._rules:
                if rule.left and rule.match(request):
                    rule.left -= 1
                    return rule.fault
            return self._random.choice(self._kinds) if self._random.random() < self._chance else ""

    def _serve(self, client: socketserver.StreamRequestHandler) -> None:
        while (request := _read_request(client)) is not None:
            with self._lock:
                self._at_once += 1
                self.at_once_max = max(self.at_once_max, self._at_once)
            try:
                if not self._pass(client, request):
                    return
            finally:
                with self._lock:
                    self._at_once -= 1

    def _pass(self, client: socketserver.StreamRequestHandler, request: Request) -> bool:
        """Answer one request; whether the connection lives on."""
        request.fault = self._fault(request)
        if request.fault == "reset":
            _reset(client.connection)
            return False
        if request.fault in _ANSWERS:
            body = b"" if request.method == "HEAD" else _ANSWERS[request.fault]
            client.wfile.write(_head(int(request.fault), len(body)) + body)
            return True
        if request.fault in self.answers:
            status, kind, body = self.answers[request.fault]
            body = b"" if request.method == "HEAD" else body
            client.wfile.write(_head(status, len(body), kind) + body)
            return True
        if request.fault == "damaged" and request.body:
            request.body = _flip(request.body)
        if request.fault == "twice":
            self._ask(request)
        answer = self._ask(request)
        if answer is None or request.fault == "lost":
            _reset(client.connection)
            return False
        if request.fault == "slow":
            time.sleep(self.slow_s)
        head, body = answer
        if request.fault == "flipped" and body:
            body = _flip(body)
        if request.fault == "cut" and body:
            body = body[: len(body) // 2]
            head = re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % len(body), head)
        if request.fault == "truncated" and body:
            client.wfile.write(head + body[: len(body) // 2])
            return False
        client.wfile.write(head + body)
        request.sent = len(body)
        return True

    def _ask(self, request: Request) -> tuple[bytes, bytes] | None:
        """Head and body of the server's answer; None if it gave none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=60) as server:
                server.sendall(request.head + request.body)
                answer = b"".join(iter(lambda: server.recv(1 << 20), b""))
        except OSError:
            return None
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        head, end, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        if not end or (request.method != "HEAD" and length and len(body) != int(length[1])):
            return None
        request.status = int(head.split(b" ", 2)[1])
        head = re.sub(rb"(?i)\r\n(connection|transfer-encoding):[^\r]*", b"", head)
        if b"chunked" in answer[: len(answer) - len(body)].lower():
            body = _unchunked(body)
        if not length and request.method != "HEAD":
            head += b"\r\nContent-Length: %d" % len(body)
        return head + end, body


def _read_request(client: socketserver.StreamRequestHandler) -> Request | None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = client.rfile.readline()
        if not line:
            return None
        if line.lower().startswith(b"expect:"):
            client.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # and the server is not asked to
        else:
            head += line
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    body = client.rfile.read(int(length[1])) if length else b""
    if length and len(body) < int(length[1]):
        return None
    method, path, _ = head.split(b" ", 2)
    return Request(method.decode(), path.decode(), head[:-2] + b"Connection: close\r\n\r\n", body)


def error_body(code: str) -> bytes:
    """What S3 says of an error."""
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>said by a test</Message></Error>".encode()


def _head(status: int, length: int, kind: str = "application/xml") -> bytes:
    head = f"HTTP/1.1 {status} Fault\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def _unchunked(body: bytes) -> bytes:
    whole, left = b"", body
    while left:
        size, _, left = left.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        whole, left = whole + left[:length], left[length + 2 :]
        if not length:
            break
    return whole
