"""The folder of one run: marked as the harness's own, and held by one run at a time."""

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from dcr.chaos.disk import Disk
from dcr.protocol.errors import DcrError, RefusedError

MARK = ".dcr-chaos"
"""The file that says that a folder is the harness's, and so may be emptied; whoever runs in it holds a lock on it."""
_PID_BYTES_MAX = 20
_PROBE, _PROBE_BYTES = ".probe", 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderError(DcrError):
    """What a run needs in its folder cannot be written there."""


class FullError(DcrError):
    """The disk of a run's folder is full, so that the run was broken off and shows nothing."""

    def __init__(self, folder: Path, found: str) -> None:
        super().__init__(
            f"{folder}: its disk is full: the run was broken off, and shows nothing; make room there, or name another "
            f"--folder. Found first: {found}"
        )


def is_full(error: OSError) -> bool:
    """Whether an error says that a disk, or a share of it, is full."""
    return error.errno in _FULL


def no_room(folder: Path) -> bool:
    """Whether nothing more can be written into a run's folder, as its disk is full."""
    probe = folder / _PROBE
    try:
        probe.write_bytes(b"\0" * _PROBE_BYTES)
    except OSError as e:
        return is_full(e)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


class RunFolder:
    """Takes a folder for a run: it is absent, empty, or was made here before; nothing in it is touched yet.

    The lock is the open file's, so it ends with the process, however that ends.

    Args:
        path: of the folder.

    Raises:
        RefusedError: the folder holds what is not the harness's, another run is in it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = _take(path)
        except OSError as e:
            raise RefusedError(f"{path}: no folder for a run: {e.strerror}; name another --folder") from e

    def empty(self) -> None:
        """Remove what an earlier run left.

        Raises:
            FolderError: something cannot be removed.
        """
        Disk.clear(self.path)
        try:
            for entry in self.path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != MARK:
                    entry.unlink()
        except OSError as e:
            raise FolderError(f"{self.path}: what an earlier run left there cannot be removed: {e}") from e

    def close(self) -> None:
        """Let another run have it."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _take(path: Path) -> int:
    """The descriptor of the mark, locked."""
    if path.is_symlink():
        raise RefusedError(f"{path}: a symbolic link; a run empties its folder, so name the folder itself")
    path.mkdir(parents=True, exist_ok=True)
    there = {entry.name for entry in path.iterdir()}
    if there and MARK not in there:
        raise RefusedError(
            f"{path}: not empty, and without the mark {MARK} of a folder that dcr chaos made; a run empties its "
            "folder, so move that one away, or name another --folder"
        )
    descriptor = os.open(path / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, _PID_BYTES_MAX, 0).decode(errors="replace").strip()
            raise RefusedError(
                f"{path}: process {pid or 'unknown'} runs there now; wait for its end, or name another --folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        undo.pop_all()
    return descriptor
