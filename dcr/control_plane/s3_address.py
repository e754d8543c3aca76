"""The address of a control plane in a bucket: ``s3://bucket/prefix?endpoint=http://127.0.0.1:8333&secret=/path``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from dcr.control_plane.etcd_address import Endpoint
from dcr.protocol.errors import RefusedError
from dcr.s3.place import S3Place


@dataclass(frozen=True, kw_only=True)
class S3RecordAddress(S3Place):
    """Where the record is kept; fields after ``prefix`` are those of the address's query.

    Beyond this machine it is spoken to over TLS only, as etcd is.

    Raises:
        RefusedError: a field is not what it may be.
    """

    STORE: ClassVar[str] = "control plane"
    ADDRESS: ClassVar[str] = "control plane address"
    PAGE: ClassVar[str] = "docs/control-plane.md"

    secret: str = ""
    """File of the run's secret, which the operator brings to every machine; empty for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secret and (not Path(self.secret).is_absolute() or "\0" in self.secret):
            raise RefusedError(f"{self.ADDRESS}: secret must be the absolute path of a file")
        endpoint = urlsplit(self.endpoint)
        if endpoint.scheme == "http" and not Endpoint(endpoint.hostname or "", 0).loopback:
            raise RefusedError(
                f"{self.ADDRESS}: {self.endpoint} is not this machine, and who is in between could make up the record; "
                f"give an endpoint of the form https://host:port"
            )
