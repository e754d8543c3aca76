"""The gate of an engine whose requests live on one asyncio loop."""

import asyncio

from dcr.protocol.errors import DcrError, RefusedError
from dcr.rollout.gate import GateTimeoutError
from dcr.runtime.seconds import seconds


class GateFullError(DcrError):
    """As many requests as may wait at the closed gate wait there already."""


class AsyncGate:
    """Closed at the start; requests that come to the closed gate are held within two bounds (DESIGN D12, D18).

    It says who may enter.  What becomes of those inside when it closes is the engine's matter.  Everything but
    ``version`` and ``held`` must be used on the one loop that the requests are on.

    Args:
        engine: the engine's name, for errors.
        wait_s: how long a request is held, seconds.
        held_requests_max: how many are held at once.
    """

    def __init__(self, engine: str, wait_s: float, held_requests_max: int) -> None:
        self._engine = engine
        self._wait_s = seconds(wait_s, f"engine {engine}: gate_wait_s")
        self._held_max = held_requests_max
        self._held = 0
        self._version: int | None = None
        self._opened = asyncio.Event()

    @property
    def version(self) -> int | None:
        """The version being served, None while closed."""
        return self._version

    @property
    def held(self) -> int:
        """How many requests wait for the gate to open."""
        return self._held

    async def enter(self) -> None:
        """Return once the gate is open.

        Raises:
            GateFullError: ``held_requests_max`` requests wait already.
            GateTimeoutError: the gate stayed closed for ``wait_s``.
        """
        if self._version is not None:
            return
        if self._held >= self._held_max:
            raise GateFullError(
                f"engine {self._engine}: its gate is closed and holds {self._held} requests, as many as "
                f"held_requests_max = {self._held_max} allows; send it elsewhere, or later"
            )
        self._held += 1
        try:
            async with asyncio.timeout(self._wait_s):
                while self._version is None:
                    await self._opened.wait()
        except TimeoutError:
            raise GateTimeoutError(
                f"engine {self._engine}: a request waited {self._wait_s} s at the closed gate; send it elsewhere, or "
                "later"
            ) from None
        finally:
            self._held -= 1

    def close(self) -> None:
        """Let nobody in; a closed gate is closed again without harm."""
        self._version = None
        self._opened.clear()

    def check(self, version: int) -> None:
        """Raise RefusedError if the gate is open at another version."""
        if self._version not in {None, version}:
            raise RefusedError(
                f"engine {self._engine}: open at version {self._version}, cannot be opened at {version}: close it first"
            )

    def open(self, version: int) -> None:
        """Let requests in, served by this version; RefusedError if the gate is open at another."""
        self.check(version)
        self._version = version
        self._opened.set()
