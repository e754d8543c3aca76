"""How the processes of a run talk: what the setting ``channel`` says, and where a hub listens in the registry."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from dcr.protocol.errors import RefusedError

if TYPE_CHECKING:
    from dcr.credentials.folder import Credentials

LOOPBACK = "loopback"
_FORM = "loopback, or tls:///folder/of/credentials?listen=host:port&advertise=host:port"
_SCHEME = "tls://"
_PORT_MAX = 65535


@dataclass(frozen=True)
class HostPort:
    """Where something listens: an IPv4 address or a host's name, and a port; 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``host:port``; RefusedError for anything else."""
        host, _, port = text.rpartition(":")
        if not host or ":" in host or not host.isascii() or not port.isdecimal() or int(port) > _PORT_MAX:
            raise RefusedError(f"{text[:200]!r} is not host:port, with an IPv4 address or a host's name")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class HubAddress:
    """Where a hub can be connected to: ``127.0.0.1:port``, or ``tls://name@host:port``.

    Attributes:
        at: where.
        name: whom its certificate names; None without TLS.
    """

    at: HostPort
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the registry; RefusedError for anything else."""
        name, _, at = text.removeprefix(_SCHEME).rpartition("@")
        if text.startswith(_SCHEME) != bool(name):
            raise RefusedError(f"the address of a hub {text[:200]!r}: must be host:port or tls://name@host:port")
        return cls(HostPort.parse(at), name or None)

    def __str__(self) -> str:
        return str(self.at) if self.name is None else f"{_SCHEME}{self.name}@{self.at}"


@dataclass(frozen=True)
class ChannelAddress:
    """What the setting ``channel`` says.

    Attributes:
        folder: of this process's credentials; None for plain loopback.
        listen: where the hub listens; spokes do not look at it.
        advertise: where spokes reach it, if that is another place; port 0 is the one that it listens at.
    """

    folder: Path | None = None
    listen: HostPort = HostPort("127.0.0.1", 0)
    advertise: HostPort | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``loopback`` or ``tls:///absolute/folder?listen=host:port&advertise=host:port``.

        Raises:
            RefusedError: another form, an unknown field, or no address that others can connect to.
        """
        if text == LOOPBACK:
            return cls()
        try:
            parts = urlsplit(text)
            fields = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as error:
            raise RefusedError(f"{text!r} is not {_FORM}") from error
        folder = Path(unquote(parts.path))
        unknown = fields.keys() - {"listen", "advertise"}
        if parts.scheme != "tls" or parts.netloc or parts.fragment or not folder.name or unknown or "\0" in str(folder):
            raise RefusedError(f"{text!r} is not {_FORM}")
        listen = HostPort.parse(fields["listen"]) if "listen" in fields else cls.listen
        advertise = HostPort.parse(fields["advertise"]) if "advertise" in fields else None
        check_reachable(listen, advertise)
        return cls(folder, listen, advertise)

    def credentials(self) -> "Credentials | None":
        """Those of this process; None for plain loopback.

        Raises:
            RefusedError: they are no good, or a package that reads them is missing.
        """
        if self.folder is None:
            return None
        try:
            from dcr.credentials.folder import Credentials  # noqa: PLC0415 - optional dependency
        except ModuleNotFoundError as error:
            raise RefusedError(f"a control channel over TLS: {error}; pip install 'dcr[tls]'") from error
        return Credentials(self.folder)


def check_reachable(listen: HostPort, advertise: HostPort | None) -> None:
    """Raise RefusedError if nobody else could tell from these where to connect to."""
    if advertise is None and _everywhere(listen.host):
        raise RefusedError(
            f"listen={listen}: that is every address of this machine; say with advertise=host:port which "
            f"one others can connect to"
        )
    if advertise is not None and _everywhere(advertise.host):
        raise RefusedError(f"advertise={advertise}: must be an address that others can connect to")


def _everywhere(host: str) -> bool:
    """Whether it is 0.0.0.0, in any of the ways to write that."""
    try:
        return not any(socket.inet_aton(host))
    except OSError:  # a name
        return not host
