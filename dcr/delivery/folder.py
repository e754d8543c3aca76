"""A local folder behind the object-store interface.

An object is written to the folder's ``.staging``, synchronised, and linked to its key.  A link fails where the key
exists, so write-once holds between processes too.  Whoever writes holds a lock on the staged file; one without a lock
belongs to a process that died, and is swept when a folder is opened or something is deleted from it.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dcr.delivery.interface import DeliveryConflictError, DeliveryError, LookPause, check_key, check_prefix
from dcr.delivery.traffic import Traffic, TrafficCounter
from dcr.protocol.errors import RefusedError

_STAGE_TRIES_MAX = 16
_DELETE_TRIES_MAX = 16
_OURS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""To open what may be anything: opening a pipe would wait for its writer."""


class FolderDelivery:
    """A Delivery in a local folder (see ``interface.Delivery``); files and folders belong to their user alone.

    Args:
        root: absolute path of the folder, created where it is missing; its own parent must exist.

    Raises:
        RefusedError: the path is relative.
        DeliveryError: the folder cannot be created or written.
    """

    look_pause = LookPause()  # a look costs next to nothing
    kind = "file"

    def __init__(self, root: Path) -> None:
        if not root.is_absolute():
            raise RefusedError(f"delivery folder {root}: the path must be absolute")
        self._root = root
        self.place = f"file://{root}"
        self._staging = root / ".staging"
        self._counter = TrafficCounter()
        with self._errors("opening it"):
            root.mkdir(mode=0o700, exist_ok=True)
            self._staging.mkdir(mode=0o700, exist_ok=True)
            self._sweep_staging()

    @property
    def traffic(self) -> Traffic:
        """See Delivery; every call is a request."""
        return self._counter.traffic

    def put(self, key: str, data: bytes) -> None:
        """See Delivery."""
        check_key(key)
        self._counter.asked(len(data))
        final = self._root / key
        with self._errors(f"storing {key} ({len(data)} bytes)"), self._staged() as (descriptor, staged):
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
            self._make_folders(final.parent)
            try:
                final.hardlink_to(staged)
            except FileExistsError:
                # Its writer may have died before it synchronised the folder: that is done for it below.
                if final.stat().st_size != len(data) or self.get(key, len(data)) != data:
                    raise self._conflict(key) from None
            _sync(final.parent)

    def get(self, key: str, size_max: int) -> bytes | None:
        """See Delivery."""
        check_key(key)
        self._counter.asked()
        with self._errors(f"reading {key}"):
            try:
                descriptor = os.open(self._root / key, _OURS)
            except (FileNotFoundError, NotADirectoryError):
                return None
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                os.close(descriptor)
                raise DeliveryError(f"object {key} in {self._root}: not a regular file; remove it")
            with os.fdopen(descriptor, "rb") as file:
                size = status.st_size
                if size > size_max:
                    raise RefusedError(f"object {key} in {self._root}: {size} bytes, more than the {size_max} allowed")
                data = file.read(size)
        if len(data) != size:
            raise DeliveryError(f"object {key} in {self._root}: {len(data)} of {size} bytes; it was cut from outside")
        self._counter.received(len(data))
        return data

    def delete_prefix(self, prefix: str) -> None:
        """See Delivery."""
        check_prefix(prefix)
        self._counter.asked()
        with self._errors(f"deleting {prefix}"):
            folder = self._root / prefix
            for _ in range(_DELETE_TRIES_MAX):
                if not folder.is_dir():
                    break
                with contextlib.suppress(FileNotFoundError):  # another process deletes there, too
                    shutil.rmtree(folder)
            self._sweep_staging()

    def keys(self, prefix: str) -> list[str]:
        """See Delivery."""
        check_prefix(prefix)
        self._counter.asked()
        found = []
        with self._errors(f"listing {prefix}"):
            for folder, _, files in os.walk(self._root / prefix, onerror=_unless_gone):
                found += [str(Path(folder, file).relative_to(self._root)) for file in files]
        return sorted(found)

    def segments(self, prefix: str) -> list[str]:
        """See Delivery."""
        check_prefix(prefix)
        self._counter.asked()
        with self._errors(f"listing below {prefix}"):
            folder = self._root / prefix
            return sorted(e.name for e in os.scandir(folder) if e.is_dir()) if folder.is_dir() else []

    def tidy(self, prefix: str) -> None:
        """See Delivery; staged files of processes that died have no keys yet, so all of them go."""
        check_prefix(prefix)
        self._counter.asked()
        with self._errors(f"tidying {prefix}"):
            self._sweep_staging()

    def close(self) -> None:
        """See Delivery; a folder holds nothing between calls."""

    @contextlib.contextmanager
    def _staged(self) -> Iterator[tuple[int, Path]]:
        """A new file in the staging folder, locked against the sweep: its descriptor and path; removed at the end."""
        for _ in range(_STAGE_TRIES_MAX):
            descriptor, name = tempfile.mkstemp(dir=self._staging)
            try:
                if _lock(descriptor) and os.fstat(descriptor).st_nlink:
                    try:
                        yield descriptor, Path(name)
                    finally:
                        Path(name).unlink(missing_ok=True)
                    return
                # A sweep came between creation and lock; it removes the file.
            finally:
                os.close(descriptor)
        raise DeliveryError(
            f"delivery folder {self._root}: {_STAGE_TRIES_MAX} staged files were swept; who sweeps so fast?"
        )

    def _sweep_staging(self) -> None:
        for path in self._staging.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue  # none of ours
                descriptor = os.open(path, _OURS)
                try:
                    if _lock(descriptor):
                        path.unlink()
                finally:
                    os.close(descriptor)

    def _make_folders(self, folder: Path) -> None:
        """Create a folder and its missing parents below the root, each durable in its own parent."""
        if folder.is_dir():
            return
        self._make_folders(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)

    def _conflict(self, key: str) -> DeliveryConflictError:
        return DeliveryConflictError(
            f"object {key} in {self._root}: holds other bytes already; an owner emits once per epoch, open a new one"
        )

    @contextlib.contextmanager
    def _errors(self, stage: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            check = "check the folder, which needs a parent, and its permissions"
            advice = "free some space or raise the quota" if full else check
            why = error.strerror or error
            raise DeliveryError(f"delivery folder {self._root}: {stage}: {why}; {advice}") from error


def _unless_gone(error: OSError) -> None:
    """A folder that another process has deleted meanwhile has no keys; one that cannot be read may have some."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _lock(descriptor: int) -> bool:
    """Try to lock an open file; the lock goes when the descriptor is closed, at the latest with its process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
