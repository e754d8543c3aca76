"""An authority of one's own, and the certificates that it signs for the peers of a run."""

import contextlib
import datetime as dt
import ipaddress
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dcr.credentials.folder import AUTHORITY, CERTIFICATE, KEY
from dcr.protocol.errors import RefusedError

AUTHORITY_KEY = "ca.key"
DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")


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
