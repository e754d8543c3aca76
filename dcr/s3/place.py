"""A place in an object store, as an address names it: ``s3://bucket/prefix?endpoint=http://127.0.0.1:8333``."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from dcr.protocol.errors import RefusedError

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


@dataclass(frozen=True, kw_only=True)
class S3Place:
    """Where a store is, and the bounds of its connections; fields after ``prefix`` are those of the address's query.

    What is kept there adds fields of its own by deriving from this.

    Raises:
        RefusedError: a field is not what it may be.
    """

    STORE: ClassVar[str] = "object store"
    """What it is, for errors."""
    ADDRESS: ClassVar[str] = "address"
    """What its address is, for errors."""
    PAGE: ClassVar[str] = "docs/delivery.md"
    """Says what the store must support, and which rights are needed."""
    BOUNDS: ClassVar[Mapping[str, tuple[float, float]]] = {
        "connections_max": (1, 1024),
        "connect_timeout_s": (0.1, 300),
        "answer_timeout_s": (0.1, 300),
    }
    """Least and most of every number: whole ones, but for those whose name ends in ``_s``."""

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
    connections_max: int = 16
    """Connections of this process to the store."""
    connect_timeout_s: float = 5.0
    """How long a connection may take to come about."""
    answer_timeout_s: float = 15.0
    """How long the store may be silent in the middle of a request."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise RefusedError(f"{self.ADDRESS}: the bucket's name must be 3 to 63 characters [a-z0-9.-]")
        if len(self.prefix) > _PREFIX_CHARS_MAX or not all(_SEGMENT.fullmatch(s) for s in self.prefix.split("/")[:-1]):
            raise RefusedError(
                f"{self.ADDRESS}: the prefix must be segments of [A-Za-z0-9._=-], none beginning with a dot, joined "
                f"by '/', at most {_PREFIX_CHARS_MAX} characters in all"
            )
        if self.addressing not in _ADDRESSING:
            raise RefusedError(f"{self.ADDRESS}: addressing must be one of {', '.join(_ADDRESSING)}")
        if self.region and not _REGION.fullmatch(self.region):
            raise RefusedError(f"{self.ADDRESS}: region must be a name like us-east-1")
        if self.endpoint:
            self._check_endpoint()
        for name, (least, most) in self.BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise RefusedError(f"{self.ADDRESS}: {name} must be from {least:g} to {most:g}")

    @classmethod
    def parse(cls, address: str) -> Self:
        """Read an address; what it refuses is named without showing the address, which might hold a secret.

        Raises:
            RefusedError: a credential in it, an unknown field, or a value that is not allowed.
        """
        if len(address) > _ADDRESS_CHARS_MAX:
            raise RefusedError(f"{cls.ADDRESS}: more than {_ADDRESS_CHARS_MAX} characters")
        try:
            parts = urlsplit(address)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme != "s3" or parts.fragment:
            raise RefusedError(f"{cls.ADDRESS}: must be of the form s3://bucket/prefix?endpoint=...&region=...")
        if "@" in parts.netloc:
            raise RefusedError(f"{cls.ADDRESS}: there is a user or a key before the bucket: {_CHAIN}")
        known = {f.name for f in dataclasses.fields(cls)} - {"bucket", "prefix"}
        values: dict[str, object] = {}
        for name, text in parse_qsl(parts.query, keep_blank_values=True):
            cls._check_field(name, known, values)
            values[name] = cls._value(name, text)
        path = parts.path.strip("/")
        return cls(bucket=parts.netloc, prefix=f"{path}/" if path else "", **values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")

    @classmethod
    def _check_field(cls, name: str, known: set[str], values: Mapping[str, object]) -> None:
        if name not in known:
            if any(word in name.lower() for word in _SECRETS):
                raise RefusedError(f"{cls.ADDRESS}: a field of its query looks like a credential: {_CHAIN}")
            shown = name if _FIELD.fullmatch(name) else "(not shown)"
            raise RefusedError(f"{cls.ADDRESS}: unknown field {shown}; known are {', '.join(sorted(known))}")
        if name in values:
            raise RefusedError(f"{cls.ADDRESS}: field {name} is there twice")

    @classmethod
    def _value(cls, name: str, text: str) -> object:
        if name not in cls.BOUNDS:
            return text
        whole = not name.endswith("_s")
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise RefusedError(f"{cls.ADDRESS}: {name} must be {'a whole number' if whole else 'a number'}")
        return value

    def _check_endpoint(self) -> None:
        try:
            parts = urlsplit(self.endpoint)
            port_is_fine = parts.port is None or parts.port > 0
        except ValueError:
            port_is_fine = False
        else:
            if "@" in parts.netloc:
                raise RefusedError(f"{self.ADDRESS}: there is a user or a key in its endpoint: {_CHAIN}")
        if (
            not port_is_fine
            or parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
        ):
            raise RefusedError(f"{self.ADDRESS}: endpoint must be of the form http://host:port or https://host:port")
