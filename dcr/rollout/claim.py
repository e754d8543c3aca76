"""One node an engine: the gate that one opens is the gate that another has closed for its writes (DESIGN D9)."""

import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

from dcr.protocol.errors import RefusedError

_turn = threading.Lock()
_claims: WeakKeyDictionary[object, "Claim"] = WeakKeyDictionary()


class Claim:
    """What a node has on the runtime behind an adapter: no other node of this process may have it meanwhile.

    Args:
        runtime: what serves, whichever adapters there are for it.
        engine: the adapter's name, for errors.

    Raises:
        RefusedError: another node has it.

    Attributes:
        engine: as given.
        released: whether the node is closed.
    """

    def __init__(self, runtime: object, engine: str) -> None:
        self.engine = engine
        self.released = False
        self._ended: Callable[[], bool] = lambda: True
        with _turn:
            other = _claims.get(runtime)
            if other is not None and not other.over:
                why = (
                    "its node was closed, but a call of it to the engine has not returned: a rank hangs; restart the "
                    "engine, or try again"
                    if other.released
                    else f"another node of this process keeps it, as engine {other.engine!r}: close that one first"
                )
                raise RefusedError(f"engine {engine}: {why}")
            _claims[runtime] = self

    @property
    def over(self) -> bool:
        """Whether it was released and nothing touches the runtime any more."""
        return self.released and self._ended()

    def until(self, ended: Callable[[], bool]) -> None:
        """From now on it is not over before this says so, though it be released."""
        self._ended = ended

    def release(self) -> None:
        """The node is closed."""
        self.released = True
