"""Waiting for an engine to serve a version."""

import threading

from dcr.protocol.errors import DcrError
from dcr.runtime.progress import Progress


class NodeError(DcrError):
    """The engine cannot go on: the leader refused it, or its gate or rank failed."""


class ServingWait:
    """Where users wait for an engine, from any thread.

    Args:
        engine: its name.
        stop: set when the engine's node closes.
    """

    def __init__(self, engine: str, stop: threading.Event) -> None:
        self._engine = engine
        self._stop = stop
        self._changed = threading.Condition()

    def look(self) -> None:
        """What is waited for may have come: the gate, an end."""
        with self._changed:
            self._changed.notify_all()

    def for_version(self, progress: Progress, version: int, timeout_s: float) -> int:
        """Wait until this version or a later one is served, and return it.

        Raises:
            NodeError: the engine was refused or failed, its node was closed, or the time ran out.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: (
                    progress.failure
                    or self._stop.is_set()
                    or ((serving := progress.serving) is not None and serving >= version)
                ),
                timeout_s,
            )
            if self._stop.is_set():
                raise NodeError(f"engine {self._engine}: its node is closed")
            if progress.failure:
                raise NodeError(f"engine {self._engine}: {progress.failure}")
            if not done:
                raise NodeError(
                    f"engine {self._engine}: version {version} is not served after {timeout_s:.3g} s: {progress.why()}"
                )
            return version if (serving := progress.serving) is None else serving  # it may have closed since
