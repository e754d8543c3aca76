"""A TCP proxy before whatever a scenario may cut off: while it is cut, nothing passes and nobody gets in."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

CONNECTIONS_MAX = 256
_CONNECT_TIMEOUT_S = 5.0
_PIECE = 1 << 16
_LOOK_S = 0.2


class Proxy:
    """Listens on a free port of loopback, from its making until it is closed.

    Args:
        target: where connections go, asked for each of them; None while nobody is there.
    """

    def __init__(self, target: Callable[[], tuple[str, int] | None]) -> None:
        self.held = 0
        """How many pieces and new connections have come to the cut since it was made."""
        self._target = target
        self._cut = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_LOOK_S)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="chaos-proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Partition: connections hang with whatever is under way, and new ones get no answer."""
        self.held = 0
        self._cut.set()

    def heal(self) -> None:
        """End the partition; what hung is broken off, as a network's time-outs would."""
        self._cut.clear()
        self._break()

    def close(self) -> None:
        """End everything; safe to repeat."""
        self._closed.set()
        self._thread.join()
        self._listener.close()
        self._break()

    def _break(self) -> None:
        with self._lock:
            for s in self._open:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():  # it looks every _LOOK_S
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with self._lock:
                full = len(self._open) >= 2 * CONNECTIONS_MAX
            if full:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name="chaos-proxied", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._kept(client):
            if not self._wait_healed():
                return
            target = self._target()
            if target is None:
                return
            try:
                server = socket.create_connection(target, _CONNECT_TIMEOUT_S)
            except OSError:
                return
            with self._kept(server):
                server.settimeout(None)
                back = threading.Thread(target=self._pass, args=(server, client), name="chaos-proxied", daemon=True)
                back.start()
                self._pass(client, server)
                back.join()

    @contextlib.contextmanager
    def _kept(self, s: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(s)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(s)
            s.close()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(_PIECE):
                if not self._wait_healed():
                    break
                sink.sendall(piece)
        except OSError:
            pass
        for s in (source, sink):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def _wait_healed(self) -> bool:
        if self._cut.is_set():
            with self._lock:
                self.held += 1
        while self._cut.is_set():
            if self._closed.wait(_LOOK_S):
                return False
        return not self._closed.is_set()
