"""How long a process of a scenario lives at most: as long as the one that started it.  Linux only."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Have this process, even while it is stopped, end by SIGKILL as soon as its parent has ended, by SIGKILL too.

    A fork does not inherit it; it takes no lock, so it may be called between fork and exec.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
