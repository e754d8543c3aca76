"""Memory that a node shares with the ranks of its engines: files of one folder in tmpfs, written once, then only read.

The folder is locked while its node lives.  Whoever makes a folder of their own first removes those that nobody locks:
what a killed process left does not stay.  A folder that somebody else takes away, as systemd does with what a user has
in /dev/shm when the last session ends (RemoveIPC), is made anew: ranks that miss a file have it read from the store
again.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
from itertools import count
from pathlib import Path

from dcr.data_plane.payload import payload_digest
from dcr.protocol.errors import CorruptPayloadError, DcrError
from dcr.runtime.rank_messages import Shared

ROOT = Path("/dev/shm")  # noqa: S108 - a folder with an unguessable name and the owner's permissions is made there
_log = logging.getLogger("dcr.node")
_PREFIX = "dcr-"
_NAME = re.compile(r"dcr-[0-9a-f]{16}-[0-9]+-[a-z0-9_]{8}")
"""What ``SharedMemory`` calls its folders: digest of the record, incarnation, and what ``mkdtemp`` appends."""
_TRIES_MAX = 16


class SharedMemoryError(DcrError):
    """Memory cannot be shared with the ranks."""


class SharedMemory:
    """A node's folder: only its user may read it, it ends with ``close``, and a killed node's is swept by the next.

    Args:
        record_id: the record that the node obeys; with the incarnation it names the folder.
        incarnation: of the node: new with every start.
        root: a folder in memory.

    Raises:
        SharedMemoryError: no folder can be made there.
    """

    def __init__(self, record_id: str, incarnation: int, root: Path = ROOT) -> None:
        _sweep(root)
        self._root = root
        self._prefix = f"{_PREFIX}{hashlib.sha256(record_id.encode()).hexdigest()[:16]}-{incarnation}-"
        self._names = count()
        self._turn = threading.Lock()  # several threads may find at once that the folder is gone
        self.folder, self._lock = self._make()

    def _make(self) -> tuple[Path, int]:
        """A new folder, and the descriptor that locks it."""
        for _ in range(_TRIES_MAX):
            try:
                folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._root))
            except OSError as e:
                raise SharedMemoryError(f"shared memory: no folder can be made in {self._root}: {e}") from e
            lock = _lock(folder)
            if lock is not None and folder.exists():
                return folder, lock
            if lock is not None:  # a sweep came between creation and lock, and removed it
                os.close(lock)
        raise SharedMemoryError(f"shared memory: {_TRIES_MAX} folders in {self._root} were swept; who sweeps so fast?")

    def _make_again(self) -> None:
        """If the folder was taken away, go on in another; not once this is closed."""
        with self._turn:
            if self._lock < 0 or self.folder.exists():
                return
            _log.warning("shared memory %s was taken away; its node goes on in another folder", self.folder)
            folder, lock = self._make()
            os.close(self._lock)
            self.folder, self._lock = folder, lock

    def write(self, data: bytes) -> Shared:
        """Put bytes into a new file, readable by this user only.

        Raises:
            SharedMemoryError: there is not so much memory, or this is closed; nothing stays of it.
        """
        self._make_again()
        folder = self.folder
        path = folder / str(next(self._names))
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
        except OSError as e:
            path.unlink(missing_ok=True)
            raise SharedMemoryError(
                f"shared memory: {len(data)} bytes could not be written to {folder}: {e}; give the host more "
                "(a container: --shm-size), or lower receive_bytes_max"
            ) from e
        return Shared(str(path), len(data), payload_digest(data))

    def remove(self, shared: Shared) -> None:
        """Remove a file; a rank that has mapped it keeps what it mapped."""
        Path(shared.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything; safe to repeat."""
        with self._turn:
            if self._lock >= 0:
                shutil.rmtree(self.folder, ignore_errors=True)
                os.close(self._lock)
                self._lock = -1


def read_shared(shared: Shared, size_max: int) -> memoryview:
    """In a rank: map what the node shared, read-only; its memory stays until the view is let go of.

    What it holds is the caller's to check: the digest, then all that is checked of a payload.

    Args:
        shared: where it is said to be.
        size_max: bytes; a larger file is refused unread.

    Raises:
        CorruptPayloadError: it is not there, or of another size.
    """
    try:
        descriptor = os.open(shared.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise CorruptPayloadError(
            f"shared memory {shared.path} cannot be opened: {e}; a rank must run on its node's host, as its user, and "
            "see its /dev/shm"
        ) from e
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != shared.size or not 0 < shared.size <= size_max:
            raise CorruptPayloadError(
                f"shared memory {shared.path} has {status.st_size} bytes, its node wrote {shared.size}, at most "
                f"{size_max} are allowed"
            )
        return memoryview(mmap.mmap(descriptor, shared.size, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """A descriptor that locks a folder for as long as it is open; None if another process holds it, or it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None  # gone, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep(root: Path) -> None:
    """Remove the folders of nodes that are no more, and nothing else: a run may keep its own files beside them."""
    for folder in root.glob(f"{_PREFIX}*"):
        lock = _lock(folder) if _NAME.fullmatch(folder.name) else None
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
