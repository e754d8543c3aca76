"""Nodes of a relay in processes of their own, which are really killed, and owners in this one."""

import multiprocessing
import os
import signal
from pathlib import Path

from dcr.credentials.authority import create_authority, issue
from dcr.delivery.relay.address import open_relay

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60.0
QUICK = "heartbeat_s=0.5&peer_timeout_s=5&connect_timeout_s=5&idle_timeout_s=10"
PATIENT = "heartbeat_s=0.5&peer_timeout_s=60&connect_timeout_s=60&idle_timeout_s=10"
"""Where nobody is to be lost: a machine may stand still for seconds."""


class Directory:
    """Nodes by name, in this process."""

    def __init__(self):
        self.entries = {}

    def nodes(self):
        return dict(self.entries)

    def enter(self, name, value):
        self.entries[name] = value

    def leave(self, name):
        self.entries.pop(name, None)


def _serve(address, pipe):
    directory = Directory()
    node = open_relay(address, directory, receives=True)
    pipe.send(directory.entries)
    while True:
        what, *args = pipe.recv()
        if what == "close":
            node.close()
            pipe.send(None)
            return
        try:
            pipe.send(getattr(node, what)(*args))
        except Exception as e:  # noqa: BLE001 - shown by the test
            pipe.send(f"{type(e).__name__}: {e}")


class NodeProcess:
    def __init__(self, address):
        self._pipe, there = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(address, there), daemon=True)
        self.process.start()
        self.entries = self._answer()

    def _answer(self):
        assert self._pipe.poll(WAIT_S), "a node did not answer"
        return self._pipe.recv()

    def ask(self, *what):
        self._pipe.send(what)
        return self._answer()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(WAIT_S)


class RelayFleet:
    """An authority, and nodes and owners with credentials of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.directory = Directory()
        self.nodes = {}
        self._open = []
        create_authority(folder / "authority")
        self.issue("owner")

    def issue(self, name):
        if not (self.folder / name).exists():
            issue(self.folder / "authority", self.folder / name, name)

    def node(self, name, fields=PATIENT):
        self.issue(name)
        node = NodeProcess(f"relay://{self.folder}/{name}?{fields}")
        self.directory.entries.update(node.entries)
        self.nodes[name] = node
        return node

    def owner(self, fields=PATIENT):
        owner = open_relay(f"relay://{self.folder}/owner?{fields}", self.directory, receives=False)
        self._open.append(owner)
        return owner

    def close(self):
        for owner in self._open:
            owner.close()
        for node in self.nodes.values():
            node.kill()
