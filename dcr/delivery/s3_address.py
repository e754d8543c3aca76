"""The address of a place in an object store: ``s3://bucket/prefix?endpoint=http://127.0.0.1:8333&region=us-east-1``."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from dcr.protocol.errors import RefusedError

PARTS_MAX = 10_000
"""Parts of one object, by S3's rules."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*")
_FIELD = re.compile(r"[a-z][a-z_]{0,39}")
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_PREFIX_CHARS_MAX = 400
_ADDRESS_CHARS_MAX = 4096
_ADDRESSING = ("path", "virtual", "auto")
_SECRETS = ("key", "secret", "token", "password", "credential")
_CHAIN = (
    "credentials come only from where boto3 looks for them (environment, shared files, the machine's role); take them "
    "out of the address, and change them, for it may have been logged"
)

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "part_bytes": (5 << 20, 1 << 30),
    "parallel_parts": (1, 64),
    "connections_max": (1, 1024),
    "connect_timeout_s": (0.1, 300),
    "answer_timeout_s": (0.1, 300),
    "tries_max": (1, 1000),
    "retry_timeout_s": (0.1, 3600),
    "look_pause_s": (0, 60),
    "look_pause_max_s": (0, 60),
    "upload_age_max_s": (1, 1e9),
}


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """Where a delivery store is, and its bounds; fields after ``prefix`` are those of the address's query.

    Raises:
        RefusedError: a field is not what it may be.
    """

    bucket: str
    prefix: str = ""
    """What every key begins with: empty, or whole segments with their closing slash."""
    endpoint: str = ""
    """``http://host:port`` or ``https://...`` of the server; empty for Amazon's own."""
    region: str = ""
    """Region of the bucket; empty for what boto3's configuration says."""
    addressing: str = "auto"
    """Where the bucket's name stands: ``path``, ``virtual`` (in the host's name), or ``auto``: in the path where an
    endpoint is given."""
    part_bytes: int = 8 << 20
    """Larger objects are stored and read in parts of this size."""
    parallel_parts: int = 4
    """Parts of one object that are on their way at once."""
    connections_max: int = 16
    """Connections of this process to the store."""
    connect_timeout_s: float = 5.0
    """How long a connection may take to come about."""
    answer_timeout_s: float = 15.0
    """How long the store may be silent in the middle of a request."""
    tries_max: int = 20
    """Tries of one request."""
    retry_timeout_s: float = 45.0
    """How long one request may take, all its tries together; less than the setting ``delivery_timeout_s``."""
    look_pause_s: float = 0.05
    """How long a reader waits before it looks again for an object that was not there; then half as long again each
    time, up to ``look_pause_max_s``."""
    look_pause_max_s: float = 1.0
    """Longest pause between two looks."""
    upload_age_max_s: float = 86_400.0
    """Uploads in parts that were begun so long ago, and not completed, are aborted by the sweep."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise RefusedError("delivery address: the bucket's name must be 3 to 63 characters [a-z0-9.-]")
        if len(self.prefix) > _PREFIX_CHARS_MAX or not all(_SEGMENT.fullmatch(s) for s in self.prefix.split("/")[:-1]):
            raise RefusedError(
                "delivery address: the prefix must be segments of [A-Za-z0-9._=-], none beginning with a dot, joined "
                f"by '/', at most {_PREFIX_CHARS_MAX} characters in all"
            )
        if self.addressing not in _ADDRESSING:
            raise RefusedError(f"delivery address: addressing must be one of {', '.join(_ADDRESSING)}")
        if self.region and not _REGION.fullmatch(self.region):
            raise RefusedError("delivery address: region must be a name like us-east-1")
        if self.endpoint:
            _check_endpoint(self.endpoint)
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise RefusedError(f"delivery address: {name} must be from {least:g} to {most:g}")
        if self.look_pause_max_s < self.look_pause_s:
            raise RefusedError("delivery address: look_pause_max_s must not be less than look_pause_s")

    @classmethod
    def parse(cls, address: str) -> Self:
        """Read an address; what it refuses is named without showing the address, which might hold a secret.

        Raises:
            RefusedError: a credential in it, an unknown field, or a value that is not allowed.
        """
        if len(address) > _ADDRESS_CHARS_MAX:
            raise RefusedError(f"delivery address: more than {_ADDRESS_CHARS_MAX} characters")
        try:
            parts = urlsplit(address)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme != "s3" or parts.fragment:
            raise RefusedError("delivery address: must be of the form s3://bucket/prefix?endpoint=...&region=...")
        if "@" in parts.netloc:
            raise RefusedError(f"delivery address: there is a user or a key before the bucket: {_CHAIN}")
        values: dict[str, object] = {}
        for name, text in parse_qsl(parts.query, keep_blank_values=True):
            _check_field(name, {f.name for f in dataclasses.fields(cls)[2:]}, values)
            values[name] = _value(name, text)
        path = parts.path.strip("/")
        return cls(bucket=parts.netloc, prefix=f"{path}/" if path else "", **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")


def _check_field(name: str, known: set[str], values: Mapping[str, object]) -> None:
    if any(word in name.lower() for word in _SECRETS):
        raise RefusedError(f"delivery address: a field of its query looks like a credential: {_CHAIN}")
    shown = name if _FIELD.fullmatch(name) else "(not shown)"
    if name not in known:
        raise RefusedError(f"delivery address: unknown field {shown}; known are {', '.join(sorted(known))}")
    if name in values:
        raise RefusedError(f"delivery address: field {shown} is there twice")


def _value(name: str, text: str) -> object:
    if name not in _BOUNDS:
        return text
    whole = not name.endswith("_s")
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise RefusedError(f"delivery address: {name} must be {'a whole number' if whole else 'a number'}")
    return value


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        port_is_fine = False
    else:
        if "@" in parts.netloc:
            raise RefusedError(f"delivery address: there is a user or a key in its endpoint: {_CHAIN}")
    if (
        not port_is_fine
        or parts.scheme not in {"http", "https"}
        or not parts.hostname
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
    ):
        raise RefusedError("delivery address: endpoint must be of the form http://host:port or https://host:port")
