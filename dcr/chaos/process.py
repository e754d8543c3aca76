"""A child process as the harness holds it: started from a process that has torch loaded, and always ended."""

import multiprocessing as mp
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcr.chaos.child import ChildConfig, run
from dcr.chaos.journal import SUFFIX
from dcr.protocol.errors import DcrError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

END_TIMEOUT_S = 30.0
_LOG_TAIL = 2000

_context = mp.get_context("forkserver")
# The last two want packages that may not be there, and are then left out.
_context.set_forkserver_preload(["dcr.chaos.preload", "dcr.delivery.s3", "dcr.delivery.relay.address"])

_without_preload = mp.get_context("spawn")


class ChildError(DcrError):
    """A process of a scenario did what no fault asked for, or did not answer."""


class Child:
    """One process.  What it says is read by the run's pump.

    Args:
        config: what it is told.
    """

    def __init__(self, config: ChildConfig) -> None:
        self.config = config
        self.name = config.name
        self.ready = False
        self.stopped = False
        self.gone = False
        """Whether its end was noticed."""
        self.zombie = False
        """Whether it is held still while another one takes its place."""
        self.answers: dict[str, Any] = {}
        self.failure = ""
        self.pipe, theirs = _context.Pipe()
        start = _without_preload.Process if config.vllm else _context.Process
        self._process: BaseProcess = start(target=run, args=(msgspec.json.encode(config), theirs), daemon=True)
        self._process.start()  # the first one waits for the process that all are forked from
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._ended_with: int | None = None
        self.started_s = time.monotonic()
        theirs.close()

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process ends."""
        return self._process.sentinel

    @property
    def exitcode(self) -> int | None:
        """None while it lives."""
        return self._process.exitcode if self._ended_with is None else self._ended_with

    @property
    def log(self) -> Path:
        """What it said."""
        return Path(self.config.folder) / f"{self.name}-{self.config.start}.log"

    @property
    def journal(self) -> Path:
        """What happened to it."""
        return self.log.with_suffix(SUFFIX)

    @property
    def log_tail(self) -> str:
        """The end of the log, for errors."""
        try:
            return self.log.read_text(errors="replace")[-_LOG_TAIL:]
        except OSError:
            return ""

    def send(self, do: str, **fields: Any) -> None:
        """Give an order; one to a process that died meanwhile is lost."""
        self.answers.pop(do, None)
        try:
            self.pipe.send({"do": do, **fields})
        except OSError:
            return

    def receive(self) -> dict[str, Any] | None:
        """The next message that is there; None at the end of the line."""
        try:
            message: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return message

    def stop(self, *, itself: bool = False) -> None:
        """SIGSTOP, unless it stops itself."""
        self.stopped = True
        if not itself:
            self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self._signal(signal.SIGCONT)

    def keep_going(self) -> None:
        """Go on, should it have stopped itself only after it was told to go on."""
        if not self.stopped and self.exitcode is None and _state(self.pid) == "T":
            if not self.pipe.closed and self.pipe.poll():
                return  # it says there that it stops, and is to: nobody has read that yet
            self.go_on()

    def kill(self) -> list[dict[str, Any]]:
        """SIGKILL, wait for the end, and let go of what the harness holds of it; safe to repeat.

        Returns:
            What it had said that nobody had read.

        Raises:
            ChildError: it did not end.
        """
        if self._ended_with is not None:
            return []
        self._process.kill()
        self._process.join(END_TIMEOUT_S)
        if self._process.exitcode is None:
            raise ChildError(f"{self.name} (process {self.pid}) did not end in {END_TIMEOUT_S:g} s after SIGKILL")
        self._ended_with = self._process.exitcode
        self._process.close()  # a soak has thousands of them, and each would keep two files open
        unread: list[dict[str, Any]] = []
        while self.pipe.poll() and (message := self.receive()) is not None:
            unread.append(message)
        self.pipe.close()
        return unread

    def _signal(self, number: int) -> None:
        if self.exitcode is None:
            os.kill(self.pid, number)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait(connections: list[Connection | int], timeout_s: float) -> set[Connection | int]:
    """Those of the connections and sentinels that can be read, at the latest after the time-out."""
    found: list[Any] = mp.connection.wait(connections, timeout_s)
    return set(found)
