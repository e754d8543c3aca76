"""Namespaces and links of the WAN bench: nodes of two clusters, a store, and the switch that is the WAN between them.

::

    t0, t1, ...  --wan-- [ wan_link: rate, delay, loss ] --wan--  r0, r1, ...
        `---- lan, a bridge ----'         | wan             `---- lan, a bridge ----'
                                        store

Every node has a link of its own to the WAN, and an unlimited one to the nodes of its cluster.  A rollout node finds its
neighbours' WAN addresses over the LAN, so that one address of a relay serves owners and neighbours.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from wan_child import enter

PREFIX = "dcrwan-"
"""Of namespaces and folders; then the process that made them."""
STORE = "store"
_SOURCE = Path(__file__).with_name("wan_link.c")
_FOLDER = Path("/var/run/netns")
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x15, 0x1F, 0x24, 0x2C)
"""Of ethtool: set transmit and receive checksums, TCP segmentation, and generic segmentation and reception."""
_QUEUE_KIB_MIN = 256
_T = TypeVar("_T")


class MissingError(Exception):
    """This machine lacks what the bench needs; the message says what to install or do."""


@dataclass(frozen=True)
class Counters:
    """What an interface has received since it was made."""

    bytes: int
    frames: int


def check_machine() -> None:
    """MissingError unless namespaces and the switch can be made here."""
    if os.geteuid() != 0:
        raise MissingError("the WAN bench makes network namespaces, which only root may: run it as root")
    for program, package in (("gcc", "gcc"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            raise MissingError(f"the WAN bench needs {program}, which is not here: install the package {package}")


def sweep() -> list[str]:
    """End and remove what a run that was killed has left; the names of what was found."""
    found = [name for name in _namespaces() if name.startswith(PREFIX) and not _alive(name)]
    for name in found:
        _remove_namespace(name)
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if not _alive(folder.name):
            found.append(str(folder))
            shutil.rmtree(folder, ignore_errors=True)
    return found


def build_switch(folder: Path) -> Path:
    """The switch's program."""
    made = folder / "wan_link"
    subprocess.run(["gcc", "-O2", "-o", str(made), str(_SOURCE)], check=True)
    return made


class Network:
    """Two clusters, a store, and the WAN between; removed by ``close``.

    Args:
        switch: program of ``build_switch``.
        trainers: training nodes, named t0, t1, ...
        nodes: rollout nodes, named r0, r1, ...
        delay_ms: one-way delay between two nodes; half of it between a node and the store.
        loss: share of frames that a link loses, percent.
        log: file of the switch's output.
    """

    def __init__(self, switch: Path, trainers: int, nodes: int, *, delay_ms: float, loss: float, log: Path) -> None:
        self.trainers = tuple(f"t{n}" for n in range(trainers))
        self.nodes = tuple(f"r{n}" for n in range(nodes))
        self.delay_s = delay_ms / 1000
        self._switch: subprocess.Popen[bytes] | None = None
        try:
            self._make(switch, delay_ms, loss, log)
        except BaseException:
            self.close()
            raise

    def namespace(self, name: str) -> str:
        """The name under which the system knows a node."""
        return f"{PREFIX}{os.getpid()}-{name}"

    def file(self, name: str) -> Path:
        """The file of a node's namespace."""
        return _FOLDER / self.namespace(name)

    def wan_address(self, name: str) -> str:
        """A node's address on the WAN."""
        return "10.77.3.1" if name == STORE else f"10.77.{1 if name in self.trainers else 2}.{int(name[1:]) + 1}"

    def lan_address(self, name: str) -> str:
        """A node's address in its cluster."""
        return f"10.78.{1 if name in self.trainers else 2}.{int(name[1:]) + 1}"

    def set_rate(self, bytes_s: float) -> None:
        """Give every node's link this rate each way, and a queue of what is on its way in a round trip."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        queue_kib = max(_QUEUE_KIB_MIN, int(bytes_s * 2 * self.delay_s / 1024))
        for name in (*self.trainers, *self.nodes):
            self._switch.stdin.write(f"w-{name} {bytes_s * 8e-6:.6f} {queue_kib}\n".encode())
        self._switch.stdin.flush()

    @property
    def switch_pid(self) -> int:
        """Of the switch."""
        assert self._switch is not None
        return self._switch.pid

    def received(self, name: str) -> Counters:
        """What a node's WAN interface has received."""
        (shown,) = json.loads(_ip("-n", self.namespace(name), "-j", "-s", "link", "show", "dev", "wan"))
        counted = shown["stats64"]["rx"]
        return Counters(counted["bytes"], counted["packets"])

    def inside(self, name: str, make: Callable[[], _T]) -> _T:
        """What a call gives in a node's namespace: sockets that it makes belong there for good."""
        found: list[_T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                enter(self.file(name))
                found.append(make())
            except BaseException as e:  # noqa: BLE001 - raised in the calling thread
                errors.append(e)

        thread = threading.Thread(target=work, name=f"in {name}")  # a thread of its own: it does not come back
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    def close(self) -> None:
        """Remove everything; safe to repeat."""
        if self._switch is not None:
            assert self._switch.stdin is not None
            with contextlib.suppress(OSError):
                self._switch.stdin.close()
            try:
                self._switch.wait(5)
            except subprocess.TimeoutExpired:
                self._switch.kill()
                self._switch.wait(5)
            self._switch = None
        for name in ("wan", STORE, *self.trainers, *self.nodes):
            _remove_namespace(self.namespace(name))

    def _make(self, switch: Path, delay_ms: float, loss: float, log: Path) -> None:
        everyone = (*self.trainers, *self.nodes, STORE)
        for name in ("wan", *everyone):
            _ip("netns", "add", self.namespace(name))
            _ip("-n", self.namespace(name), "link", "set", "lo", "up")
        for bridge in ("t", "r"):
            _ip("-n", self.namespace("wan"), "link", "add", f"lan-{bridge}", "type", "bridge")
            _ip("-n", self.namespace("wan"), "link", "set", f"lan-{bridge}", "up")
        for name in everyone:
            self._link(name, "wan", f"w-{name}", f"{self.wan_address(name)}/16")
            if name != STORE:
                self._link(name, "lan", f"l-{name}", f"{self.lan_address(name)}/24")
                _ip("-n", self.namespace("wan"), "link", "set", f"l-{name}", "master", f"lan-{name[0]}")
        for name in self.nodes:
            for other in self.nodes:
                if other != name:
                    route = (f"{self.wan_address(other)}/32", "via", self.lan_address(other))
                    _ip("-n", self.namespace(name), "route", "add", *route)
        ports = [f"w-{name}:0:{0 if name == STORE else delay_ms / 2}:{loss}:{1 << 20}" for name in everyone]
        with log.open("ab") as output:
            self._switch = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace("wan"), str(switch), *ports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # an interrupt is for the bench, which ends it
            )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the switch did not start; see {log}")

    def _link(self, name: str, inner: str, outer: str, address: str) -> None:
        """A veth pair from a node to where the switch and the bridges are."""
        here, wan = self.namespace(name), self.namespace("wan")
        _ip("-n", wan, "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", here)
        if inner == "wan":
            self.inside(name, lambda: _without_offloads(inner))
            self.inside("wan", lambda: _without_offloads(outer))
        _ip("-n", here, "addr", "add", address, "dev", inner)
        _ip("-n", here, "link", "set", inner, "up")
        _ip("-n", wan, "link", "set", outer, "up")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _without_offloads(interface: str) -> None:
    """Frames go as they would over a wire: each of them one packet, with its checksum."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for what in _OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", what, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value)).ljust(40, b"\0")
            try:
                fcntl.ioctl(s, _SIOCETHTOOL, request)
            except OSError as e:
                raise RuntimeError(f"{interface}: offload {what:#x} cannot be turned off: {e}") from e


def _namespaces() -> list[str]:
    return sorted(p.name for p in _FOLDER.iterdir()) if _FOLDER.is_dir() else []


def _alive(name: str) -> bool:
    """Whether the bench that made this is running."""
    pid = name.removeprefix(PREFIX).split("-")[0]
    try:
        return b"wan.py" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


def _processes(namespace: str) -> Sequence[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _remove_namespace(name: str) -> None:
    """End what still runs there, and remove it; nothing if it is gone."""
    if name not in _namespaces():
        return
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in _processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        for _ in _pauses(5.0):
            if not _processes(name):
                break
    _ip("netns", "del", name)


def _pauses(limit_s: float) -> Iterator[None]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)
