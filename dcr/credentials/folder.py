"""Who a process is to its peers: its certificate, and the authority that all peers of a run trust."""

import datetime as dt
import logging
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from dcr.protocol.errors import RefusedError

AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"

_log = logging.getLogger("dcr.credentials")

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _Loaded:
    stamp: _Stamp
    name: str
    server: ssl.SSLContext
    client: ssl.SSLContext


class Credentials:
    """What one process needs to speak to its peers, from a folder: ``ca.pem``, ``cert.pem``, ``key.pem``.

    Any authority will do that signs certificates with the peer's name as a DNS name, for servers and clients; ``dcr
    certs`` makes one for a start.  Files that are replaced are used for the connections that follow; while the new ones
    are no good (half of them replaced, say) the old ones stay in use, and the log says so.

    Args:
        folder: where the three files are.

    Raises:
        RefusedError: a file is missing or no good, the key can be read by others, or the certificate has expired.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._trouble = ""
        self._loaded = _load(folder)
        self.name = self._loaded.name
        """Of this process, from its certificate."""

    @property
    def server(self) -> ssl.SSLContext:
        """For the next connection that is accepted: TLS 1.3, and the peer has a certificate."""
        return self._latest().server

    @property
    def client(self) -> ssl.SSLContext:
        """The same for the next connection that is made, to a peer by its name."""
        return self._latest().client

    def _latest(self) -> _Loaded:
        with self._lock:
            try:
                if _stamp(self._folder) != self._loaded.stamp:
                    self._replace(_load(self._folder))
            except (OSError, RefusedError) as e:
                if str(e) != self._trouble:
                    self._trouble = str(e)
                    _log.warning("%s; what was read before stays in use", e)
            return self._loaded

    def _replace(self, new: _Loaded) -> None:
        if new.name != self.name:
            raise RefusedError(
                f"credentials {self._folder}: they name {new.name} now, and this process is {self.name} to its peers "
                f"until it is started anew"
            )
        _log.info("credentials %s: new ones are in use", self._folder)
        self._trouble = ""
        self._loaded = new


def _load(folder: Path) -> _Loaded:
    try:
        stamp = _stamp(folder)  # first: what is replaced while it is read is read again
        mode = (folder / KEY).stat().st_mode
        loaded = _Loaded(
            stamp,
            _name_in(folder),
            _context(ssl.PROTOCOL_TLS_SERVER, folder),
            _context(ssl.PROTOCOL_TLS_CLIENT, folder),
        )
    except (OSError, ValueError) as e:
        raise RefusedError(
            f"credentials {folder}: {e}; it must hold {AUTHORITY}, {CERTIFICATE} and {KEY}: see dcr certs --help"
        ) from e
    if mode & 0o077:
        raise RefusedError(f"credentials {folder / KEY}: mode {stat.S_IMODE(mode):04o} lets others use it; chmod 600")
    return loaded


def _stamp(folder: Path) -> _Stamp:
    found = [(folder / name).stat() for name in (AUTHORITY, CERTIFICATE, KEY)]
    return tuple((status.st_ino, status.st_mtime_ns, status.st_mode) for status in found)


def _name_in(folder: Path) -> str:
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    if certificate.not_valid_after_utc < dt.datetime.now(dt.UTC):
        raise ValueError(f"the certificate expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("the certificate names nobody (no subject alternative name)") from None
    found = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if not found:
        raise ValueError("the certificate has no DNS name")
    return found[0]


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection shows certificates anew; none resumes an older one
    return context
