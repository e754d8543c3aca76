"""The gate of an engine: requests pass while it is open, and storage is written only while it is closed and drained."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcr.protocol.errors import DcrError, RefusedError
from dcr.runtime.seconds import seconds


class GateTimeoutError(DcrError):
    """A wait at the gate ran out: requests did not drain, or a request was not let in."""


class Gate:
    """Closed at the start; opened at a version; closed again, drained, for the next (DESIGN D9, D12, D18).

    Safe to use from any number of threads: requests on theirs, the node agent on its own.

    Args:
        engine: the engine's name, for errors.
        wait_s: how long a request waits at a closed gate.
    """

    def __init__(self, engine: str, wait_s: float) -> None:
        self._engine = engine
        self._wait_s = seconds(wait_s, f"engine {engine}: gate_wait_s")
        self._changed = threading.Condition()
        self._version: int | None = None
        self._running = 0

    @property
    def version(self) -> int | None:
        """The version being served, None while closed."""
        return self._version

    @contextmanager
    def request(self) -> Iterator[int]:
        """Hold the gate for one request; yields the version that serves it from its first token to its last.

        Raises:
            GateTimeoutError: the gate stayed closed for ``wait_s``; the request did not start.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._version is not None, self._wait_s):
                raise GateTimeoutError(
                    f"engine {self._engine}: a request waited {self._wait_s} s at the closed gate; send it elsewhere, "
                    "or later"
                )
            version = self._version
            assert version is not None
            self._running += 1
        try:
            yield version
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def close(self, drain_timeout_s: float) -> None:
        """Let no request in and wait until those inside have left; a closed gate is closed again without harm.

        Raises:
            GateTimeoutError: some are still running after ``drain_timeout_s``.  The gate stays closed to new ones, and
                storage must not be written: close it again with a longer time, or open it at the version it served.
        """
        with self._changed:
            self._version = None
            if not self._changed.wait_for(lambda: self._running == 0, drain_timeout_s):
                raise GateTimeoutError(
                    f"engine {self._engine}: closing the gate, {self._running} requests still running after draining "
                    f"for {drain_timeout_s} s"
                )

    def check_drained(self, stage: str) -> None:
        """Raise RefusedError, naming the stage, unless the gate is closed and nothing runs."""
        with self._changed:
            if self._version is not None or self._running:
                raise RefusedError(
                    f"engine {self._engine}: {stage} needs a closed and drained gate, but version {self._version} is "
                    f"served and {self._running} requests are running: close the gate first"
                )

    def open(self, version: int) -> None:
        """Let requests in, served by this version.

        Raises:
            RefusedError: the gate is open at another version.
        """
        with self._changed:
            if self._version not in {None, version}:
                raise RefusedError(
                    f"engine {self._engine}: open at version {self._version}, cannot be opened at {version}: close it "
                    "first"
                )
            self._version = version
            self._changed.notify_all()
