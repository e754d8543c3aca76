"""The address of a control plane in etcd: ``etcd://host:port[,host:port]/prefix?ca=/etc/dcr/etcd/ca.pem&user=dcr``."""

import os
import re
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, unquote

from dcr.protocol.errors import RefusedError

PASSWORD_VARIABLE = "DCR_ETCD_PASSWORD"  # noqa: S105 - the name of a variable
SYSTEM = "system"
"""Value of ``ca`` for the authorities that the system trusts."""

_SCHEME = "etcd://"
_FORM = "etcd://host:port[,host:port]/prefix?ca=/path/ca.pem&secret=/path/run.secret"
_FIELDS = ("ca", "cert", "key", "user", "password_file", "secret")
_PATHS = ("cert", "key", "password_file", "secret")
_ENDPOINTS_MAX = 16
_ADDRESS_CHARS_MAX = 4096
_PASSWORD_BYTES_MAX = 4096
_PORT_MAX = 65535
_PREFIX = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_BY_FILE = (
    f"a password comes from the file of password_file= or the variable {PASSWORD_VARIABLE}; take it out of the "
    f"address, and change it, for it may have been logged"
)


@dataclass(frozen=True)
class Endpoint:
    """Where a member of the cluster takes requests: a host's name or address (IPv6 without brackets), and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether it is this machine itself."""
        return self.host in {"localhost", "::1"} or re.fullmatch(r"127\.\d+\.\d+\.\d+", self.host) is not None


@dataclass(frozen=True)
class EtcdAddress:
    """Where a control plane is, and how to be let in.

    Attributes:
        endpoints: of members of one cluster, tried in this order.
        prefix: what every key begins with, without slashes around it.
        ca: file of the authority that signed the members' certificates, or SYSTEM; empty for no TLS.
        cert: file of this process's certificate, where the cluster wants one; empty for none.
        key: file of its key.
        user: user of etcd; empty where it has no authentication.
        password_file: file of the user's password; empty for the variable PASSWORD_VARIABLE.
        secret: file of the run's secret, which the operator brings to every machine; empty for none.

    Raises:
        RefusedError: the fields do not fit together.
    """

    endpoints: tuple[Endpoint, ...]
    prefix: str
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = field(default="", repr=False)
    secret: str = ""

    def __post_init__(self) -> None:
        for name in _PATHS:
            _check_path(name, getattr(self, name))
        if self.ca != SYSTEM:
            _check_path("ca", self.ca)
        if bool(self.cert) != bool(self.key):
            raise RefusedError(f"control plane {self}: cert= and key= come together")
        if self.cert and not self.ca:
            raise RefusedError(f"control plane {self}: cert= wants ca=, without which there is no TLS")
        if self.password_file and not self.user:
            raise RefusedError(f"control plane {self}: password_file= wants user=")
        away = [str(e) for e in self.endpoints if not e.loopback]
        if away and not self.ca:
            raise RefusedError(
                f"control plane {self}: {', '.join(away)} is not this machine, and who is in between could write the "
                f"record; name the authority of the cluster's certificates with ca=/path/ca.pem (or ca={SYSTEM})"
            )

    @classmethod
    def parse(cls, address: str) -> Self:
        """Read an address; what it refuses is named without showing the address, which might hold a password.

        Raises:
            RefusedError: a password in it, an unknown field, or a value that is not allowed.
        """
        if not address.startswith(_SCHEME) or len(address) > _ADDRESS_CHARS_MAX or "#" in address:
            raise RefusedError(f"control plane address: must be of the form {_FORM}")
        place, _, query = address.removeprefix(_SCHEME).partition("?")
        hosts, _, prefix = place.partition("/")
        if "@" in hosts:
            raise RefusedError(f"control plane address: there is a user or a password before the host: {_BY_FILE}")
        found: dict[str, str] = {}
        for name, text in parse_qsl(query, keep_blank_values=True):
            if name not in _FIELDS:
                if any(word in name.lower() for word in ("pass", "token", "pwd")):
                    raise RefusedError(f"control plane address: a field of it looks like a password: {_BY_FILE}")
                shown = name if re.fullmatch(r"[a-z_]{1,40}", name) else "(not shown)"
                raise RefusedError(f"control plane address: unknown field {shown}; known are {', '.join(_FIELDS)}")
            if name in found or not text:
                raise RefusedError(f"control plane address: field {name} is empty or there twice")
            found[name] = text
        prefix = unquote(prefix.rstrip("/"))
        if not _PREFIX.fullmatch(prefix):
            raise RefusedError(
                f"control plane address: after the hosts comes the prefix of its keys, segments of [A-Za-z0-9._=-] "
                f"joined by '/', as in {_FORM}"
            )
        endpoints = tuple(map(_endpoint, hosts.split(",")))
        if len(endpoints) > _ENDPOINTS_MAX:
            raise RefusedError(f"control plane address: more than {_ENDPOINTS_MAX} hosts")
        return cls(endpoints, prefix, **found)

    def __str__(self) -> str:
        return f"{_SCHEME}{','.join(map(str, self.endpoints))}/{self.prefix}"

    def context(self) -> ssl.SSLContext | None:
        """For the connections to the members; None without TLS.

        Raises:
            RefusedError: a file cannot be read or is no good, or others can read the key.
        """
        if not self.ca:
            return None
        try:
            context = ssl.create_default_context(cafile=None if self.ca == SYSTEM else self.ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert:
                _check_private(Path(self.key))
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise RefusedError(
                f"control plane {self}: ca={self.ca}, cert={self.cert or 'none'}, key={self.key or 'none'}: {e}; each "
                f"must be a readable PEM file, and the key the certificate's"
            ) from e
        return context

    def password(self) -> str:
        """Of the user.

        Raises:
            RefusedError: there is none, or others can read its file.
        """
        if not self.password_file:
            if found := os.environ.get(PASSWORD_VARIABLE):
                return found
            raise RefusedError(
                f"control plane {self}: user {self.user} has no password: set {PASSWORD_VARIABLE}, or name a file with "
                f"password_file="
            )
        path = Path(self.password_file)
        try:
            _check_private(path)
            with path.open("rb") as file:
                text = file.read(_PASSWORD_BYTES_MAX + 1).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is no text"
            raise RefusedError(f"control plane {self}: password_file {path}: {why}") from None
        if not 0 < len(text) <= _PASSWORD_BYTES_MAX:
            raise RefusedError(f"control plane {self}: password_file {path}: must hold the password and nothing else")
        return text


def _endpoint(text: str) -> Endpoint:
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host, fine = host[1:-1], re.fullmatch(r"\[[0-9A-Fa-f:.]+\]", host) is not None
    else:
        fine = _NAME.fullmatch(host) is not None
    if not fine or not port.isdecimal() or not port.isascii() or not 0 < int(port) <= _PORT_MAX:
        raise RefusedError(f"control plane address: {text[:80]!r} is not host:port; it must be of the form {_FORM}")
    return Endpoint(host, int(port))


def _check_path(name: str, text: str) -> None:
    if text and (not Path(text).is_absolute() or "\0" in text):
        raise RefusedError(f"control plane address: {name} must be an absolute path")


def _check_private(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & 0o077:
        raise RefusedError(f"{path}: mode {stat.S_IMODE(mode):04o} lets others use it; chmod 600")
