"""A process of the WAN bench, forked off with everything imported, on a node of its own.

Sixteen processes that import torch keep two cores busy for minutes: a server (``multiprocessing``'s) imports it once.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

Request = dict[str, Any]
Handler = Callable[[Request], Request]
Role = Callable[..., dict[str, Handler]]
_SERVER = multiprocessing.get_context("forkserver")
_END_S = 10.0
_TAIL = 15


class ChildError(Exception):
    """A process failed; the message names it and its log."""


def import_once(modules: Sequence[str]) -> None:
    """Have the server import these, before the first process."""
    _SERVER.set_forkserver_preload(list(modules))


class Child:
    """One process, which answers requests by the handler that ``do`` names until nobody is there to ask any more.

    Args:
        name: for errors, and of its log.
        run: folder of the log.
        namespace: file of the network namespace that it enters before anything else.
        role: called in the process; what it gives are the handlers.  At the end ``close`` is asked, if there is one.
        arguments: of the role.
    """

    def __init__(self, name: str, run: Path, namespace: Path, role: Role, *arguments: Any) -> None:
        self.name = name
        self._log = run / f"{name}.log"
        self._ours, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(
            target=_live, args=(theirs, self._log, namespace, role, arguments), name=name, daemon=False
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, **request: Any) -> None:
        """Send a request; ``answer`` waits for what comes back."""
        try:
            self._ours.send(request)
        except OSError:
            self._fail("has ended")

    def answer(self, what: str, limit_s: float) -> Request:
        """The next answer; ChildError if the process failed, ended, or did not answer in time."""
        try:
            if not self._ours.poll(limit_s):
                self._fail(f"did not answer in {limit_s:.0f} s ({what})")
            answer: Request = self._ours.recv()
        except (EOFError, OSError):
            self._fail(f"ended ({what})")
        if "error" in answer:
            self._fail(f"failed ({what}): {answer['error']}")
        return answer

    def ask(self, limit_s: float, **request: Any) -> Request:
        """Send a request and wait for its answer."""
        self.send(**request)
        return self.answer(str(request["do"]), limit_s)

    def hang_up(self) -> None:
        """Ask nothing any more, which ends it."""
        self._ours.close()

    def end(self, limit_s: float = _END_S) -> None:
        """Wait until it is gone; kill it if it does not go by itself."""
        self.hang_up()
        self._process.join(limit_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)

    def _fail(self, why: str) -> NoReturn:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL:]) if self._log.exists() else ""
        raise ChildError(f"process {self.name} {why}; its log is {self._log} and ends:\n{tail}")


def together(requests: Sequence[tuple[Child, Request]], limit_s: float) -> list[Request]:
    """Ask several processes at once; their answers, in order."""
    for child, request in requests:
        child.send(**request)
    return [child.answer(str(request["do"]), limit_s) for child, request in requests]


def enter(namespace: Path) -> None:
    """Have this thread, and what it makes, live in a network namespace; OSError if that cannot be."""
    import ctypes  # noqa: PLC0415 - os.setns comes with Python 3.12

    with namespace.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"entering {namespace}")


def _live(
    asked: Connection,
    log: Path,
    namespace: Path,
    role: Role,
    arguments: Sequence[Any],
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    handlers: dict[str, Handler] = {}
    try:
        enter(namespace)
        handlers = role(*arguments)
        while True:
            request = asked.recv()
            try:
                answer = handlers[request["do"]](request)
            except Exception as e:  # noqa: BLE001 - told to the bench, which ends with it
                traceback.print_exc()
                answer = {"error": f"{type(e).__name__}: {e}"}
            asked.send(answer)
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    except BaseException:  # noqa: BLE001 - the log is all that is left of it
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            handlers.get("close", lambda _: {})({})
        os._exit(0)  # threads end with the process
