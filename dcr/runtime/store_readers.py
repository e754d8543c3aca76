"""Threads that wait for a store, so that whoever asks it need not."""

import queue
import threading
from collections.abc import Callable


class StoreReaders:
    """Runs jobs in threads of its own, made as they are needed; one that never ends keeps its thread.

    Not an executor of the standard library: a process that ends would wait for a read that hangs.

    Args:
        threads_max: how many jobs run at once; the others wait.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._unfinished = 0
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which raises nothing, as soon as a thread is free; nothing after ``close``."""
        with self._lock:
            if self._closed:
                return
            self._unfinished += 1
            self._jobs.put(job)
            if self._threads < min(self._unfinished, self._threads_max):
                self._threads += 1
                threading.Thread(target=self._run, name="dcr-store-reader", daemon=True).start()

    def close(self) -> None:
        """Begin no job any more; threads end with the job that they are at.  Safe to repeat."""
        with self._lock:
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._closed:
                job()
            with self._lock:
                self._unfinished -= 1
