"""Certificates, good and bad, and peers over TLS written with the standard library alone."""

import contextlib
import datetime as dt
import socket
import ssl
import threading

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from raw_peer import WAIT_S, prove

from dcr.credentials.authority import create_authority, issue
from dcr.credentials.folder import Credentials

HOUR = dt.timedelta(hours=1)


class Certificates:
    """Folders of credentials under one authority, made when they are first asked for."""

    def __init__(self, root):
        self.root = root
        create_authority(root / "authority")

    def folder(self, name):
        if not (self.root / name).exists():
            issue(self.root / "authority", self.root / name, name)
        return self.root / name

    def of(self, name):
        return Credentials(self.folder(name))

    def dated(self, name, begins, ends):
        """A folder whose certificate is valid from and until so long from now."""
        folder = self.root / f"{name}-{begins}-{ends}".replace(" ", "")
        folder.mkdir()
        ca_pem = (self.root / "authority" / "ca.pem").read_bytes()
        ca = x509.load_pem_x509_certificate(ca_pem)
        ca_key = serialization.load_pem_private_key((self.root / "authority" / "ca.key").read_bytes(), None)
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(ca.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        (folder / "ca.pem").write_bytes(ca_pem)
        (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
        (folder / "key.pem").chmod(0o600)
        return folder


def context(folder, protocol=ssl.PROTOCOL_TLS_CLIENT, version=None, *, certificate=True):
    made = ssl.SSLContext(protocol)
    if version is not None:
        made.minimum_version = made.maximum_version = version
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(folder / "ca.pem")
    if certificate:
        made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return made


def place(address):
    """Name, host and port of ``tls://name@host:port``."""
    name, _, at = address.removeprefix("tls://").partition("@")
    host, _, port = at.partition(":")
    return name, host, int(port)


def connect_tls(address, made, name=None):
    """Connected, and TLS done; a hub that refuses this end's certificate is heard of when it is read from."""
    named, host, port = place(address)
    sock = socket.create_connection((host, port), WAIT_S)
    try:
        return made.wrap_socket(sock, server_hostname=name or named, suppress_ragged_eofs=False)
    except BaseException:
        sock.close()
        raise


def join_tls(address, folder, secret, **identity):
    """A proven connection over TLS, and what the hub said in step 4."""
    sock = connect_tls(address, context(folder))
    return prove(sock, secret, sock.get_channel_binding("tls-unique"), **identity)


class Memory:
    """TLS without a socket, so that what goes over the wire can be cut, held back and spoilt."""

    def __init__(self, address, folder):
        name, host, port = place(address)
        self.wire = socket.create_connection((host, port), WAIT_S)
        self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context(folder).wrap_bio(self._came, self._goes, server_hostname=name)
        self._until(self._tls.do_handshake)
        self.binding = self._tls.get_channel_binding("tls-unique")

    def sealed(self, data):
        """The records of what was not sent yet, and of this."""
        self._tls.write(data)
        return self._goes.read()

    def sendall(self, data):
        self.wire.sendall(self.sealed(data))

    def recv(self, size):
        return self._until(lambda: self._tls.read(size))

    def _until(self, act):
        while True:
            try:
                result = act()
            except ssl.SSLWantReadError:
                self._send()
                data = self.wire.recv(1 << 16)
                if not data:
                    return b""
                self._came.write(data)
            else:
                self._send()
                return result

    def _send(self):
        if data := self._goes.read():
            self.wire.sendall(data)


class Between:
    """Stands between spoke and hub: whoever connects to it is passed on, by a function, in threads of its own."""

    def __init__(self, passed_on):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._passed_on = passed_on
        self._socks = []
        self.at = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            try:
                here, there = self._passed_on(sock)
            except OSError:
                sock.close()
                continue
            self._socks += [here, there]
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source, target):
        try:
            while data := self.read(source):
                target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def read(self, source):
        return source.recv(1 << 16)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._socks:
            sock.close()
