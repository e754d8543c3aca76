"""The one thread that calls a runtime which may be called from one thread only."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class Caller:
    """Takes jobs in order.  A job that never returns, as a call to a rank that hangs, does not keep the process alive.

    An executor's threads do: the interpreter joins them when it ends.  Jobs that wait are as many as threads that wait
    for their answers.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], _T]) -> Future[_T]:
        """Do this after all that was submitted before; RuntimeError after ``shutdown``."""
        future: Future[_T] = Future()
        with self._turn:
            if self._ended:
                raise RuntimeError("it was shut down")
            self._jobs.put((future, job))
        return future

    def shutdown(self, timeout_s: float) -> bool:
        """Begin no job any more, and wait for the one under way; whether the thread has ended."""
        with self._turn:
            self._ended = True
            self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            future, job = work
            if self._ended:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001 - raised where the job was submitted
                    future.set_exception(error)
