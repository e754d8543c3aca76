"""The secret of a run: what its processes know and nobody else on the machine does."""

import contextlib
import hmac
import os
import stat
import tempfile
from pathlib import Path

from dcr.protocol.errors import RefusedError

SECRET_BYTES = 32


class Secret(bytes):
    """Bytes that do not show themselves in logs and tracebacks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<secret of {len(self)} bytes>"

    __str__ = __repr__


def load_or_create_secret(path: Path | str) -> bytes:
    """The 32 random bytes in a file, which is made where it is missing.

    The file appears whole: processes that start together all get the same secret.

    Args:
        path: the file; its folder must exist.

    Raises:
        RefusedError: the file can be read by others, belongs to another user, is a link, is not 32 bytes long, or
            cannot be made or read.
    """
    path = Path(path)
    try:
        if not os.path.lexists(path):
            _create(path)
    except OSError as error:
        raise RefusedError(f"secret file {path}: {error.strerror}; check it and its folder") from error
    return load_secret(path)


def load_secret(path: Path) -> bytes:
    """The 32 random bytes in a file.

    Raises:
        RefusedError: as ``load_or_create_secret``, or the file is missing.
    """
    try:
        return Secret(_load(path))
    except FileNotFoundError:
        raise RefusedError(
            f"secret file {path}: is missing; bring it here from where `dcr certs secret` made it, mode 0600"
        ) from None
    except OSError as error:
        raise RefusedError(f"secret file {path}: {error.strerror}; check it and its folder") from error


def create_secret(path: Path) -> None:
    """Make a file with a new secret, for a run whose machines share no disk.

    Raises:
        RefusedError: there is one already, or its folder cannot be written.
    """
    if os.path.lexists(path):
        raise RefusedError(f"{path} is there already; nothing was changed")
    try:
        _create(path)
    except OSError as error:
        raise RefusedError(f"secret file {path}: {error.strerror}; its folder must exist and be writable") from error


def _create(path: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # O_EXCL, mode 0600
    try:
        os.write(descriptor, os.urandom(SECRET_BYTES))
        os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(name)
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _load(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(f"secret file {path}: not a regular file; give the path of a file")
        if status.st_uid != os.geteuid():
            raise RefusedError(f"secret file {path}: belongs to user {status.st_uid}; make one of your own")
        if status.st_mode & 0o077:
            raise RefusedError(
                f"secret file {path}: mode {stat.S_IMODE(status.st_mode):04o} lets others use it; delete it, so that a "
                f"new secret is made, and restart every process of the run"
            )
        secret = file.read(SECRET_BYTES + 1)
    if len(secret) != SECRET_BYTES:
        raise RefusedError(f"secret file {path}: must hold exactly {SECRET_BYTES} bytes; delete it to get a new one")
    return secret


def record_secret(secret: bytes, record_id: str) -> Secret:
    """The secret that the peers of one record prove to each other: those of another record beside it cannot."""
    return Secret(hmac.digest(secret, b"dcr record " + record_id.encode(), "sha256"))
