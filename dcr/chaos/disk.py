"""A delivery folder on a disk that can be filled: a small tmpfs where this may be mounted, or else errors."""

import contextlib
import errno
import os
import subprocess
from pathlib import Path

SIZE_BYTES = 4 << 20
_DISK = "disk"
_BALLAST = ".ballast"
_FLAG = "full"


class Disk:
    """Where payloads lie.

    Args:
        folder: of the run.
        size_bytes: of a tmpfs.

    Attributes:
        payloads: the delivery folder's place.
        mounted: whether it is a tmpfs; otherwise children raise ENOSPC while it is ``full``.
        how: which of the two it was, for the report.
    """

    def __init__(self, folder: Path, size_bytes: int = SIZE_BYTES) -> None:
        self._root = folder / _DISK
        self._root.mkdir()
        self._flag = folder / _FLAG
        self.mounted = os.geteuid() == 0 and _run(
            "mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "dcr-chaos", str(self._root)
        )
        self.payloads = self._root / "payloads"
        self.how = f"a tmpfs of {size_bytes >> 20} MiB" if self.mounted else "injected: no tmpfs can be mounted here"

    def fill(self) -> None:
        """Leave no byte free."""
        if not self.mounted:
            self._flag.touch()
            return
        with (self._root / _BALLAST).open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(b"\0" * 65536)

    def free(self) -> None:
        """Make room again."""
        self._flag.unlink(missing_ok=True)
        if self.mounted:
            (self._root / _BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount; safe to repeat."""
        if self.mounted:
            self.mounted = not _unmount(self._root)

    @staticmethod
    def clear(folder: Path) -> None:
        """Unmount what a harness that was killed left in a run's folder."""
        if (folder / _DISK).is_mount():
            _unmount(folder / _DISK)


def _unmount(root: Path) -> bool:
    return _run("umount", "-l", str(root))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_not_full(folder: Path) -> None:
    """Raise ENOSPC where a disk of this run is said to be full, in a child that stands for the file system."""
    if (folder / _FLAG).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
