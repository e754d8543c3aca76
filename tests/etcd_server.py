"""A real etcd on loopback, which tests may kill and start again; Debian's package ``etcd-server`` has it."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from dcr.chaos.servers import free_ports

_READY_S = 180.0
_TRIES = 3
HINT = (
    "no etcd server: run scripts/install.py where apt-get is, or apt-get install etcd-server, or put etcd on the PATH"
)


def etcd_binary() -> str | None:
    """The server, beside this Python or on the PATH; None if there is none."""
    beside = Path(sys.executable).with_name("etcd")
    return str(beside) if beside.exists() else shutil.which("etcd")


class EtcdServer:
    """One member and its data; ``start`` after ``kill`` is the same member again, on the same port.

    Args:
        folder: for its data and its log.
        tls: folder of the server's credentials; clients then need certificates of the same authority.
    """

    def __init__(self, folder: Path, tls: Path | None = None) -> None:
        self.folder = folder
        self.tls = tls
        self.name = "default"
        self.members: dict[str, str] = {}
        """Peers by name, where it is one of several."""
        self._process: subprocess.Popen[bytes] | None = None
        self.port, self._peer_port = free_ports(2)

    @classmethod
    def started(cls, folder: Path, tls: Path | None = None) -> "EtcdServer":
        """One that answers."""
        for left in reversed(range(_TRIES)):
            server = cls(folder, tls)
            try:
                server.start()
            except RuntimeError:  # somebody took a port meanwhile
                if not left:
                    raise
            else:
                break
        return server

    @classmethod
    def cluster(cls, folder: Path, count: int) -> "list[EtcdServer]":
        """Members of one cluster that answer."""
        servers = []
        for number in range(count):
            (folder / f"m{number}").mkdir()
            servers.append(cls(folder / f"m{number}"))
            servers[-1].name = f"m{number}"
        members = {server.name: f"http://127.0.0.1:{server._peer_port}" for server in servers}
        for server in servers:
            server.members = members
            server.launch()
        for server in servers:
            server.wait_ready()
        return servers

    @property
    def address(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the server, unless it runs."""
        if self.alive:
            return
        client = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [etcd_binary() or "etcd", f"--data-dir={self.folder / 'data'}", "--logger=zap", "--log-level=warn"]
        command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        others = ",".join(f"{name}={url}" for name, url in self.members.items())
        command += [f"--name={self.name}", f"--initial-cluster={others or f'{self.name}={peer}'}"]
        command += ["--heartbeat-interval=100", "--election-timeout=1000"]
        if self.tls:
            command += [f"--cert-file={self.tls / 'cert.pem'}", f"--key-file={self.tls / 'key.pem'}"]
            command += [f"--trusted-ca-file={self.tls / 'ca.pem'}", "--client-cert-auth"]
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> None:
        """Wait until it answers, for which a majority must run."""
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                self.kill()
                text = (self.folder / "etcd.log").read_text(errors="replace")
                raise RuntimeError(f"etcd did not come up:\n{text[-2000:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            if self.tls:  # a client certificate is asked for: whoever needs more looks itself
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return True
            return self.post("kv/range", {"key": "YQ=="})[0] < 500  # with authentication it refuses
        except (OSError, http.client.HTTPException):
            return False

    def post(self, path: str, body: dict, token: str = "") -> tuple[int, dict]:
        """Ask the gateway, beside what is tested."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), {"Authorization": token} if token else {})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)

    def stop(self) -> None:
        """Hold it still, as a machine that is cut off; ``go_on`` ends that."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # on a busy machine it answers on for a while

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
