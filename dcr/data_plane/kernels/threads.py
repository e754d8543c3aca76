"""Threads of a backend, on which work is spread and never waits for what nobody has begun."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


class Threads:
    """Threads that start when they are first needed, and again in a process that was forked off.

    Args:
        name: what the threads are called.
        count: how many work at a time, the caller's included; 0 for as many as the process may use cores.
    """

    def __init__(self, name: str, count: int = 0) -> None:
        self.count = count or len(os.sched_getaffinity(0))
        self._name = name
        self._pool = self._begin()

    def map(self, work: Callable[[A], B], things: Sequence[A]) -> list[B]:
        """What ``work`` gives for each thing, in order.

        The calling thread takes from the end what no other has begun, so work may itself call this: nobody waits for
        what has not begun.
        """
        if len(things) <= 1 or self.count == 1:
            return [work(thing) for thing in things]
        if self._process != os.getpid():
            self._pool = self._begin()  # a fork takes no thread along, and an executor does not notice
        futures = [self._pool.submit(work, thing) for thing in things]
        try:
            results = [
                work(thing) if future.cancel() else future.result()
                for thing, future in zip(reversed(things), reversed(futures), strict=True)
            ]
        finally:
            for future in futures:
                future.cancel()
        return results[::-1]

    def _begin(self) -> ThreadPoolExecutor:
        self._process = os.getpid()
        return ThreadPoolExecutor(max(self.count - 1, 1), thread_name_prefix=self._name)
