"""Addresses of the relay: ``relay:///folder/of/credentials?listen=10.0.0.5:7000``."""

import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from dcr.credentials.folder import Credentials
from dcr.delivery.interface import Delivery
from dcr.delivery.relay.bounds import Bounds
from dcr.delivery.relay.node import RelayNode
from dcr.delivery.relay.sender import RelaySender, encode_node
from dcr.protocol.errors import RefusedError

_PORT_MAX = 65535


class Directory(Protocol):
    """Where nodes of the relay say that they listen, and owners find them."""

    def nodes(self) -> Mapping[str, bytes]: ...  # noqa: D102
    def enter(self, name: str, value: bytes) -> None: ...  # noqa: D102
    def leave(self, name: str) -> None: ...  # noqa: D102


class EnteredNode(RelayNode):
    """A node of the relay that owners find in a directory, from its start until it is closed."""

    def __init__(self, credentials: Credentials, host: str, port: int, bounds: Bounds, directory: Directory) -> None:
        super().__init__(credentials, host, port, bounds)
        self._directory = directory
        try:
            directory.enter(self.address.name, encode_node(self.address))
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """See RelayNode."""
        try:
            if not self._closed:
                self._directory.leave(self.address.name)
        finally:
            super().close()


def open_relay(address: str, directory: Directory, *, receives: bool) -> Delivery:
    """Open this process's end of the relay.

    Args:
        address: ``relay:///absolute/folder``, with the credentials of this process (``dcr certs --help``), and fields
            of ``Bounds`` by name; a node also ``listen=host:port``, loopback and any free port if it does not say.
        directory: of the record.
        receives: True on a rollout node, False for an owner.

    Raises:
        RefusedError: an address of another form, an unknown field, or credentials that are no good.
        DeliveryError: the node cannot listen there.
    """
    parts = urlsplit(address)
    folder = Path(unquote(parts.path))
    if parts.netloc or parts.fragment or not folder.name:
        raise RefusedError(
            f"delivery address {address!r}: must be of the form relay:///absolute/folder?listen=host:port"
        )
    fields = dict(parse_qsl(parts.query, keep_blank_values=True))
    host, port = _listen(address, fields.pop("listen", "127.0.0.1:0"))
    bounds = _bounds(address, fields)
    credentials = Credentials(folder)
    if receives:
        return EnteredNode(credentials, host, port, bounds, directory)
    return RelaySender(directory.nodes, credentials, bounds)


def _listen(address: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX:
        raise RefusedError(f"delivery address {address!r}: listen={text} must be host:port")
    if _is_any(host):
        raise RefusedError(f"delivery address {address!r}: listen at an address that owners can connect to, not {host}")
    return host, int(port)


def _is_any(host: str) -> bool:
    """Whether it is every address of a machine, in whatever form resolvers take it: ``0``, ``0x0``, ``[::]``."""
    bare = host.removeprefix("[").removesuffix("]")
    with contextlib.suppress(OSError, ValueError):  # not of the old forms of IPv4
        return not any(socket.inet_aton(bare))
    try:
        found = ipaddress.IPv6Address(bare)
    except ValueError:
        return False  # a name
    mapped = found.ipv4_mapped
    return found.is_unspecified if mapped is None else mapped.is_unspecified


def _bounds(address: str, fields: Mapping[str, str]) -> Bounds:
    known = [f.name for f in dataclasses.fields(Bounds)]
    for name in fields:
        if name not in known:
            raise RefusedError(f"delivery address {address!r}: {name} is none of listen, {', '.join(known)}")
    try:
        return msgspec.convert(fields, Bounds, strict=False)
    except msgspec.ValidationError as e:
        raise RefusedError(f"delivery address {address!r}: {e}") from e
