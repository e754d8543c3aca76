"""Counts threads started by a piece of code: their tensor writes pass no dispatch mode."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def count_started_threads() -> Iterator[Callable[[], int]]:
    """Yields a function that tells how many threads the process has started since, through ``threading``."""
    started: list[int] = []
    before = threading.getprofile()

    def first_event(_frame: FrameType, _event: str, _arg: Any) -> None:
        started.append(threading.get_ident())
        sys.setprofile(before)

    threading.setprofile(first_event)
    try:
        yield lambda: len(started)
    finally:
        threading.setprofile(before)  # None takes the hook away
