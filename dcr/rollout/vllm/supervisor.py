"""Stands before a server of many processes: ends it within a bound at a signal, and leaves none of them behind.

    operator --SIGTERM--> supervisor --SIGTERM--> server --> engine core --> workers
                              |                      (whatever is left after its bound: SIGKILL, all at once)

A server that loads a model cannot be trusted with its own end: it may be deep in a library, wait for an engine core
that died, or be about to start one.  The supervisor imports nothing, so it always hears; orphans become its children
(``PR_SET_CHILD_SUBREAPER``), so it misses none; and each process is killed by the kernel when its parent ends
(``PR_SET_PDEATHSIG``), so that none outlives a supervisor that was killed itself.  Linux only.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

STARTING_S = 5.0
"""How long a server that does not serve yet may take to end: it has nothing to finish."""
KILL_S = 10.0
"""How long killed processes may take to be gone; longer only in the hands of a driver."""
_TRACKERS_S = 2.0
"""How long those that remove the shared memory of killed processes may take for it."""
_POLL_S = 0.05
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


class Leash:
    """What the server tells its supervisor."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8)  # shared with whom this process forks
        self.allow(STARTING_S)

    def allow(self, seconds: float) -> None:
        """From now on the server may take so many seconds to end by itself."""
        self._memory[:8] = struct.pack("d", seconds)

    @property
    def seconds(self) -> float:
        """What was allowed last."""
        return float(struct.unpack("d", self._memory[:8])[0])


def supervise() -> Leash:
    """Fork; return in the child, which is the server, and wait in the parent, which exits as the server does.

    Call it first of all: with one thread, and little imported.  SIGTERM and SIGINT end a server that does not handle
    them at once; after ``allow`` it should.  The parent exits with the server's status; with 128 and the number of the
    signal if a signal ended the server.
    """
    leash = Leash()
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    server = os.fork()
    if server:
        sys.exit(_watch(server, leash, signals))
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the supervisor alone, which passes it on once
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return leash


def end_with_parent() -> None:
    """In a process below the server: be killed when the thread that started it ends."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    # The server and all below it are one process group: a parent outside it is whoever takes orphans.
    if os.getpgid(os.getppid()) != os.getpgrp():
        os._exit(1)


def _watch(server: int, leash: Leash, signals: set[signal.Signals]) -> int:
    """Wait for the server's end, or bring it about; then end what it left.  Returns the exit status."""
    first: signal.Signals | None = None
    deadline = float("inf")
    while (status := _ended(server)) is None:
        got = signal.sigtimedwait(signals, min(1.0, max(0.0, deadline - time.monotonic())))
        if got is not None and got.si_signo != signal.SIGCHLD:
            if first is not None:
                _say(f"{signal.Signals(got.si_signo).name} again: killing the server now")
                break
            first = signal.Signals(got.si_signo)
            deadline = time.monotonic() + leash.seconds
            _say(f"{first.name}: ending the server, within {leash.seconds:g} s; a second signal kills it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGTERM)
        if time.monotonic() >= deadline:
            _say(f"the server has not ended within {leash.seconds:g} s: killing it")
            break
    left = _kill_descendants(server)
    if left:
        _say(f"processes {', '.join(map(str, left))} are still there {KILL_S:g} s after they were killed")
    if status is None:
        return 128 + (first or signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _ended(server: int) -> int | None:
    """The server's exit status, negative for a signal; None while it runs.  Reaps whoever else has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1  # cannot be: the server is waited for here alone
        if pid == 0:
            return None
        if pid == server:
            return os.waitstatus_to_exitcode(status)


def _kill_descendants(server: int) -> list[int]:
    """Kill every descendant of this process until none is left; those that are after ``KILL_S``.

    What removes the shared memory of the killed ends by itself when they are gone, and is given a moment for that.
    """
    started = time.monotonic()
    while left := _descendants():
        waited = time.monotonic() - started
        if waited > KILL_S:
            return left
        victims = [pid for pid in left if pid == server or waited > _TRACKERS_S or not _is_tracker(pid)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)
    return []


def _descendants() -> list[int]:
    """All processes below this one, dead ones that nobody has reaped among them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                # After the name, which is in parentheses and may hold anything: state, parent.
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _is_tracker(pid: int) -> bool:
    """Whether this is ``multiprocessing``'s process that unlinks what others leave in shared memory."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _say(text: str) -> None:
    print(f"dcr serve: {text}", file=sys.stderr, flush=True)  # noqa: T201  no logging is configured in this process
