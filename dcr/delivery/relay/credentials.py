"""Who a peer of the relay is: its certificate, and the authority that all peers of a run trust."""

import contextlib
import datetime as dt
import ipaddress
import os
import re
import ssl
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dcr.protocol.errors import RefusedError

AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca.key"
CERTIFICATE, KEY = "cert.pem", "key.pem"
DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


class Credentials:
    """What one process needs to speak to its peers, from a folder: ``ca.pem``, ``cert.pem``, ``key.pem``.

    Any authority will do that signs certificates with the peer's name as a DNS name, for servers and clients; ``dcr
    certs`` makes one for a start.

    Args:
        folder: where the three files are.

    Attributes:
        name: of this process, from its certificate.
        server: context for connections that are accepted: TLS 1.3, and the peer has a certificate.
        client: the same for connections that are made, to a peer by its name.

    Raises:
        RefusedError: a file is missing or no good, the key can be read by others, or the certificate has expired.
    """

    def __init__(self, folder: Path) -> None:
        try:
            status = (folder / KEY).stat()
            self.name = _name_in(folder)
            self.server = _context(ssl.PROTOCOL_TLS_SERVER, folder)
            self.client = _context(ssl.PROTOCOL_TLS_CLIENT, folder)
        except (OSError, ValueError) as e:
            raise RefusedError(
                f"credentials {folder}: {e}; it must hold {AUTHORITY}, {CERTIFICATE} and {KEY}: see dcr certs --help"
            ) from e
        if status.st_mode & 0o077:
            raise RefusedError(
                f"credentials {folder / KEY}: mode {stat.S_IMODE(status.st_mode):04o} lets others use it; chmod 600"
            )


def check_name(name: str) -> None:
    """Raise RefusedError unless the name can stand in a certificate and is one word."""
    if not _NAME.fullmatch(name):
        raise RefusedError(
            f"name {name[:80]!r}: must be 1 to 63 letters, digits, dots and hyphens, as a host's name is"
        )


def create_authority(folder: Path, days: int = DAYS) -> None:
    """Make an authority of one's own: ``ca.pem``, which every peer gets, and ``ca.key``, which stays here.

    Raises:
        RefusedError: there is one already, or the folder cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dcr")])
    made = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, {AUTHORITY_KEY: _private(key), AUTHORITY: made.public_bytes(serialization.Encoding.PEM)})


def issue(authority: Path, folder: Path, name: str, days: int = DAYS) -> None:
    """Make a peer's credentials: its folder, with ``ca.pem``, ``cert.pem`` and ``key.pem``.

    Args:
        authority: folder of ``create_authority``.
        folder: made here, with its parents, if it is missing.
        name: of the peer.
        days: until it expires.

    Raises:
        RefusedError: the name is no good, the authority cannot be read, or there are credentials already.
    """
    check_name(name)
    try:
        ca_pem = (authority / AUTHORITY).read_bytes()
        ca = x509.load_pem_x509_certificate(ca_pem)
        ca_key = serialization.load_pem_private_key((authority / AUTHORITY_KEY).read_bytes(), None)
    except (OSError, ValueError) as e:
        raise RefusedError(f"authority {authority}: {e}; make one with dcr certs authority") from e
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        _builder(subject, ca.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_alternative(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    _write(folder, {KEY: _private(key), CERTIFICATE: pem, AUTHORITY: ca_pem})


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write new files, keys for nobody else: all of them or none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in files:
            if (folder / name).exists():
                raise RefusedError(f"{folder / name} is there already; nothing was changed")
        with contextlib.ExitStack() as half_done:
            for name, data in files.items():
                descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                half_done.callback((folder / name).unlink)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            half_done.pop_all()
    except OSError as e:
        raise RefusedError(f"{folder}: {e.strerror}; it cannot be written: check it and the folders above it") from e


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
    return context
