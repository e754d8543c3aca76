"""Stages in threads of their own, with a bound on what is between the first one and the last (paper section 7.2)."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dcr.protocol.errors import DcrError

_LOOK_S = 0.05
"""How long a waiting caller goes without looking whether it was cancelled."""


class PipelineError(DcrError):
    """A stage did not come to its end in time."""


class CancelledError(Exception):
    """Whoever ordered the work wants it no more."""


@dataclass(frozen=True)
class Stage:
    """One kind of work.

    Attributes:
        name: what errors and reports call it.
        work: from what the stage before it gave to what the next one takes; may raise anything.
        threads: how many pieces are worked on at once.
        size: bytes of what ``work`` gave, for the stage's progress.
    """

    name: str
    work: Callable[[Any], Any]
    threads: int
    size: Callable[[Any], int] = lambda _result: 0


@dataclass
class StageProgress:
    """How far a stage is, at this moment.

    Attributes:
        waiting: pieces that no thread of it has begun.
        running: pieces that are worked on.
        done: pieces that went through.
        seconds: that its threads have worked, added up.
        bytes: of what it gave.
    """

    waiting: int = 0
    running: int = 0
    done: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Pipeline:
    """Pieces of work that pass through stages; while one is sent, the next is encoded and the one after it found.

    ::

        put --> [ encode: 1 thread ] --> [ deliver: 4 threads ] --> results, in the order of put
        `------------------ at most ``ahead`` pieces -----------------'

    ``put`` waits while the piece that was put ``ahead`` pieces ago is on its way, so that the slowest stage sets the
    pace of all, memory is bounded by as many pieces, whatever stage they are at, and whoever takes the results in order
    need not keep more than that for one that is late.  The first error, or cancellation, stops everything:
    pieces that no thread has begun are dropped, those that one has begun come to their end, and nothing of the pipeline
    is left when ``close`` returns.

    Args:
        name: of the threads.
        stages: in order; at least one.
        ahead: how many pieces after the oldest that is on its way, itself included, may be anywhere in the pipeline.
        cancelled: set by anybody, at any time, to stop.
        stop_timeout_s: how long ``close`` waits for what has begun.
    """

    def __init__(
        self, name: str, stages: Sequence[Stage], *, ahead: int, cancelled: threading.Event, stop_timeout_s: float
    ) -> None:
        assert stages
        assert ahead > 0
        self._name = name
        self._stages = tuple(stages)
        self._ahead = ahead
        self._cancelled = cancelled
        self._stop_timeout_s = stop_timeout_s
        self._changed = threading.Condition()
        self._waiting: list[deque[tuple[int, Any]]] = [deque() for _ in stages]
        self._progress = [StageProgress() for _ in stages]
        self._results: dict[int, Any] = {}
        self._put = 0
        self._through = 0  # of the pieces put first, how many have a result
        self._error: BaseException | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def progress(self) -> dict[str, StageProgress]:
        """How far each stage is, by name."""
        with self._changed:
            return {
                stage.name: StageProgress(len(waiting), p.running, p.done, p.seconds, p.bytes)
                for stage, waiting, p in zip(self._stages, self._waiting, self._progress, strict=True)
            }

    def put(self, piece: object) -> None:
        """Hand a piece to the first stage, once the one that was put ``ahead`` pieces before it is through.

        Raises:
            CancelledError: ``cancelled`` is set.
            BaseException: the first error of a stage, whichever piece it was.
        """
        with self._changed:
            self._wait_until(lambda: self._put - self._through < self._ahead)
            if not self._threads:
                self._start()
            self._waiting[0].append((self._put, piece))
            self._put += 1
            self._changed.notify_all()

    def join(self) -> list[Any]:
        """Wait until every piece is through; what the last stage gave for each, in the order of ``put``.

        Raises:
            CancelledError: ``cancelled`` is set.
            BaseException: the first error of a stage, whichever piece it was.
        """
        with self._changed:
            self._wait_until(lambda: len(self._results) == self._put)
            return [self._results[index] for index in range(self._put)]

    def close(self) -> None:
        """Begin nothing more, and wait for what has begun.  Safe to repeat.

        Raises:
            PipelineError: a stage is still at work after ``stop_timeout_s``; its thread ends when that does.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + self._stop_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        busy = [name for name, p in self.progress().items() if p.running]
        if busy:
            raise PipelineError(f"{self._name}: {', '.join(busy)} did not end in {self._stop_timeout_s} s")

    def _start(self) -> None:
        for place, stage in enumerate(self._stages):
            for number in range(stage.threads):
                name = f"{self._name}-{stage.name}-{number}"
                thread = threading.Thread(target=self._run, args=(place,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as e:
                    self._error = e  # stages without a thread would let everybody wait; those that have one end
                    self._changed.notify_all()
                    raise
                self._threads.append(thread)  # only those that ``close`` can join

    def _wait_until(self, true: Callable[[], bool]) -> None:
        """Wait, holding the lock whenever anything is looked at."""
        while True:
            if self._error is not None:
                raise self._error
            if self._cancelled.is_set():
                raise CancelledError
            if true():
                return
            self._changed.wait(_LOOK_S)  # ``cancelled`` is set without notifying

    @property
    def _over(self) -> bool:
        return self._closed or self._error is not None or self._cancelled.is_set()

    def _run(self, place: int) -> None:
        while (taken := self._take(place)) is not None:
            index, piece = taken
            started = time.perf_counter()
            result, error = None, None
            try:
                result = self._stages[place].work(piece)
            except BaseException as e:  # noqa: BLE001 - raised where the pieces come from
                error = e
            del piece, taken  # nothing is kept alive while this thread waits
            with self._changed:
                progress = self._progress[place]
                progress.seconds += time.perf_counter() - started
                progress.running -= 1
                if error is not None:
                    self._error = self._error or error
                else:
                    progress.done += 1
                    progress.bytes += self._stages[place].size(result)
                    self._pass_on(place, index, result)
                self._changed.notify_all()
            del result

    def _pass_on(self, place: int, index: int, result: object) -> None:
        if place + 1 < len(self._stages):
            self._waiting[place + 1].append((index, result))
        else:
            self._results[index] = result
            while self._through in self._results:
                self._through += 1

    def _take(self, place: int) -> tuple[int, Any] | None:
        """The next piece of a stage; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._waiting[place])
            if self._over:
                for waiting in self._waiting:
                    waiting.clear()
                return None
            self._progress[place].running += 1
            return self._waiting[place].popleft()
