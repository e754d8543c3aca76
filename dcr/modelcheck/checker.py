"""A model checker as a child process: bounded in time and output, and gone when the call is over, whatever happens."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dcr.protocol.errors import DcrError

OUTPUT_BYTES_MAX = 1 << 28
TAIL_CHARS = 2000
_REAP_TIMEOUT_S = 10


class CheckerError(DcrError):
    """A checker could not be started, or ended without a verdict."""


class CheckerMissingError(CheckerError):
    """A checker, or the Java that it runs on, is not installed.  Nothing was checked."""


class CheckerTimeoutError(CheckerError):
    """A checker did not finish in time.  Its process was ended; nothing was proved."""


class Finished(msgspec.Struct, frozen=True):
    """How a child ended."""

    returncode: int
    output: str
    """Standard output and error, as they came."""
    seconds: float

    @property
    def tail(self) -> str:
        """The end of the output, for a message."""
        return self.output[-TAIL_CHARS:]


def run_child(
    name: str, command: Sequence[str], *, folder: Path, log: Path, environment: Mapping[str, str], timeout_s: float
) -> Finished:
    """Run a checker to its end.

    Args:
        name: Who runs and what it does, for messages.
        command: Program and arguments.
        folder: Working directory: the specification's.
        log: File that takes the output, outside of `folder`.
        environment: Variables beside those of this process.
        timeout_s: Seconds until the child and all that it started are killed.

    Raises:
        CheckerError: The program cannot be started, or said more than `OUTPUT_BYTES_MAX`.
        CheckerTimeoutError: It did not end within `timeout_s`.
    """
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            child = subprocess.Popen(  # noqa: S603 -- the command is made by the drivers of this package
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CheckerError(f"{name}: {command[0]} cannot be started: {error.strerror}") from None
        try:
            returncode = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise CheckerTimeoutError(
                f"{name}: did not finish within {timeout_s:g} s and was killed; "
                "give it more time (timeout_s in the manifest) or a smaller model"
            ) from None
        finally:
            _end(child)
    if log.stat().st_size > OUTPUT_BYTES_MAX:
        raise CheckerError(f"{name}: said {log.stat().st_size} bytes, at most {OUTPUT_BYTES_MAX} are read")
    return Finished(returncode, log.read_text(errors="replace"), time.monotonic() - start)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kill a child's process group (a launcher script has the checker as its own child) and reap the child."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(_REAP_TIMEOUT_S)
