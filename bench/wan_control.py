"""The control channel between namespaces: it is bound to loopback, so its bytes are carried from one to another here.

What it carries takes the WAN's delay, without a limit of its rate.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Mapping

from wan_network import Network

from dcr.control_plane.address import open_control_plane
from dcr.runtime.registry import leader_address

_POLL_S = 0.05
_CONNECT_S = 5.0
_BLOCK_BYTES = 1 << 16
_RECORD = "default"


class ControlBridge:
    """Listens on the loopback of every node but the leader's, at the leader's port, and passes on what comes.

    Args:
        network: where the nodes are.
        control: address of the control plane, in whose registry the leader enters itself.
        leader: its node.
        delays: one-way delay in seconds to the leader, by node.
    """

    def __init__(self, network: Network, control: str, leader: str, delays: Mapping[str, float]) -> None:
        self._network = network
        self._control = control
        self._leader = leader
        self._delays = delays
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._open, name="control bridge", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and end what stands."""
        self._closed.set()
        for one in self._sockets:
            _shut(one)

    def _open(self) -> None:
        plane = open_control_plane(self._control)
        try:
            while (address := leader_address(plane, _RECORD)) is None:
                if self._closed.wait(_POLL_S):
                    return
        finally:
            plane.close()
        host, _, port = address.rpartition(":")
        for name, delay_s in self._delays.items():
            listener = self._network.inside(name, lambda: socket.create_server((host, int(port))))
            self._sockets.append(listener)
            threading.Thread(target=self._accept, args=(listener, (host, int(port)), delay_s), daemon=True).start()

    def _accept(self, listener: socket.socket, leader: tuple[str, int], delay_s: float) -> None:
        while not self._closed.is_set():
            try:
                near, _ = listener.accept()
            except OSError:  # closed
                return
            try:
                far = self._network.inside(self._leader, lambda: socket.create_connection(leader, _CONNECT_S))
            except OSError:
                near.close()  # its peer tries again
                continue
            for one in (near, far):
                one.settimeout(None)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                _carry(source, target, delay_s)


def _carry(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    """Pass on what one socket says to another, after a delay."""
    under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def read() -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_BLOCK_BYTES)
            except OSError:
                data = b""
            under_way.put((time.monotonic() + delay_s, data))

    def write() -> None:
        while True:
            due, data = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                _shut(target)
                return
            with contextlib.suppress(OSError):
                target.sendall(data)

    for work in (read, write):
        threading.Thread(target=work, name="control bridge", daemon=True).start()


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
