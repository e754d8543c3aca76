"""Compiled code that later processes find, in files that nothing depends on.

Numba's own cache lets through what happens to its files: on a full disk, or with a file that a crash has cut, the call
of a kernel raises, in every process from then on.  Two processes that save at once may also give two signatures one
file.  Here code that cannot be loaded is compiled again, and code that cannot be saved is not.
"""

import fcntl
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba as nb
from numba.core.caching import FunctionCache

_LOCK = "dcr.lock"
_log = logging.getLogger("dcr.kernels")


def compiled(function: Callable[..., Any]) -> Any:
    """Compile at the first call, or take what an earlier process compiled from this very file for this processor."""
    dispatcher = nb.njit(nogil=True, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder to keep it in
        dispatcher._cache = _Kept(function)  # noqa: SLF001 - where ``cache=True`` puts numba's own
    return dispatcher


class _Kept(FunctionCache):  # type: ignore[misc] # numba has no types
    """Numba's cache of one function."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a signature; None if there is none that can be read, which is compiled then."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # noqa: BLE001 - bytes that are no pickle may raise anything
            self._tell("loaded", error)
            with suppress(OSError), self._alone() as alone:
                if alone:
                    self.flush()
            return None
        return found if found is not None and tuple(found.signature.args) == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code for a signature, unless another process saves something just now."""
        try:
            with self._alone() as alone:
                if alone:
                    super().save_overload(sig, data)
        except (OSError, EOFError, ValueError, pickle.PickleError) as error:
            self._tell("saved", error)

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other process writes to the folder until this ends."""
        self._impl.locator.ensure_cache_path()
        descriptor = os.open(Path(self.cache_path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def _tell(self, what: str, error: Exception) -> None:
        _log.warning(
            "compiled code of %s could not be %s in %s (%r): every process that needs it compiles it, which takes "
            "seconds; free some space, or name another folder as NUMBA_CACHE_DIR",
            self._py_func.__name__,
            what,
            self.cache_path,
            error,
        )
