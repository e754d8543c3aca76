"""The gate of one engine, and the lease on which it is open: it closes in time, whatever its node agent waits for."""

import logging
import threading
import time
from collections.abc import Callable

from dcr.protocol.errors import DcrError
from dcr.runtime.ranks import Engine

_log = logging.getLogger("dcr.node")
_TICK_S = 0.001
"""Beyond the end of the lease: the clock must have passed it."""


class GateKeeper:
    """Opens and closes an engine's gate for its node agent; alone, it closes it when the lease runs out (DESIGN D16).

    The agent does everything in one thread, and may wait there for a rank or for the control plane, longer than the
    lease.  So a thread of its own watches the clock.  What it closes is *withheld*: requests that are inside go on, and
    the protocol's gate stays as it is, but nobody new is let in until the record has been read again.

    Calls to the engine's gate come one at a time.

    Args:
        engine: the serving runtime's adapter.
        name: the engine's name, for the log.
        drain_timeout_s: how long running requests may take to leave a closing gate.
        lease_s: how long the gate may be open after the record was read.
        changed: called, from any thread, when ``withheld`` has changed.
    """

    def __init__(
        self, engine: Engine, name: str, *, drain_timeout_s: float, lease_s: float, changed: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._name = name
        self._drain_timeout_s = drain_timeout_s
        self._lease_s = lease_s
        self._changed = changed
        self._gate = threading.Lock()  # held while the engine's gate is opened or closed
        self._clock = threading.Condition()
        self._read_at = time.monotonic()
        self._open = False
        self._withheld = False
        self._stopped = False
        self.opening_since: float | None = None
        """Since when the engine's ``open_gate`` has been running, on the wall clock; None if it is not."""
        self._thread = threading.Thread(target=self._watch, name=f"dcr-lease-{name}", daemon=True)

    def start(self) -> None:
        """Begin to watch the clock."""
        self._thread.start()

    @property
    def withheld(self) -> bool:
        """Whether nobody new is let in though the protocol's gate is open."""
        return self._withheld

    @property
    def stale(self) -> bool:
        """Whether the record has not been read for so long that what is served may be stale (DESIGN D16)."""
        return self.age_s > self._lease_s

    @property
    def age_s(self) -> float:
        """How long ago the record that was read last was asked for; since the start, if none was."""
        return time.monotonic() - self._read_at

    def renew(self, asked_at: float) -> None:
        """The record was read; ``asked_at`` says when it was asked for, on the monotonic clock."""
        with self._clock:
            self._read_at = asked_at
            self._clock.notify_all()

    def close(self, serving: int | None = None) -> None:
        """Let nobody in, and return when nobody is inside.

        Args:
            serving: what the gate is open for.  If those inside do not leave in time, it goes on as it was: nothing
                was written.  Unless what it serves may be stale: then it is withheld.

        Raises:
            DcrError: they did not leave in time, or the engine failed.
        """
        with self._gate:
            try:
                self._engine.close_gate(self._drain_timeout_s)
            except DcrError:
                if self.stale:
                    self._withhold(withheld=True)
                elif serving is not None:
                    self._let_in(serving)
                    self._withhold(withheld=False)
                raise
            self._open = False
            self._withhold(withheld=False)

    def open(self, version: int) -> None:
        """Let requests in, served by this version; if the lease has run out meanwhile, they are withheld.

        After ``stop`` nobody is let in: an agent whose node was closed may come here late, from a rank that hung.
        """
        with self._gate:
            if self._stopped:
                return
            self._open = True
            if self.stale:  # it may have taken long to come here
                self._withhold(withheld=True)
                return
            self._let_in(version)
            self._withhold(withheld=False)

    def _let_in(self, version: int) -> None:
        self.opening_since = time.time()
        try:
            self._engine.open_gate(version)
        finally:
            self.opening_since = None

    @property
    def ended(self) -> bool:
        """Whether the thread is not there, or not any more."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """After ``stop``: wait for the thread, which may be closing the gate."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def stop(self) -> None:
        """End the thread; the gate stays as it is, or is closed if the thread is at that."""
        with self._clock:
            self._stopped = True
            self._clock.notify_all()

    def _withhold(self, *, withheld: bool) -> None:
        with self._clock:
            self._withheld = withheld
            self._clock.notify_all()
        self._changed()

    def _watch(self) -> None:
        while True:
            with self._clock:
                if not self._due:
                    left = self._read_at + self._lease_s - time.monotonic()
                    self._clock.wait(max(left, 0.0) + _TICK_S if self._open and not self._withheld else None)
                if self._stopped:
                    return
            if self._due:
                self._keep_out()

    @property
    def _due(self) -> bool:
        return self._open and not self._withheld and self.stale

    def _keep_out(self) -> None:
        with self._gate:
            if not self._due:
                return  # it was closed, or the record was read, meanwhile
            _log.warning("engine %s lets nobody in: the record was not read for %s s", self._name, self._lease_s)
            self._withhold(withheld=True)
            try:
                self._engine.close_gate(self._drain_timeout_s)
            except BaseException as e:  # noqa: BLE001 - whatever it is, the gate is closed to new requests
                _log.warning("engine %s, closing its gate: %s: %s", self._name, type(e).__name__, e)
