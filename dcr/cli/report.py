"""What commands print, and what they end with when they have something to report and prove nothing by it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dcr.protocol.errors import DcrError

FIRST_S, AGAIN_S = 3.0, 10.0
"""A wait is told of after so many seconds, and then as often again."""


class UndecidedError(DcrError):
    """A command could not find out what it was asked; what it found is reported all the same (exit status 3).

    Attributes:
        report: the rest of the object that ``--json`` prints.
    """

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


def say(text: str) -> None:
    """One piece of a report, at once: a run takes minutes."""
    print(text, flush=True)  # noqa: T201 -- what a command says


@contextmanager
def waiting(command: str, what: Callable[[], str]) -> Iterator[None]:
    """Say on standard error, now and then, what a command waits for in this block.

    Args:
        command: its name.
        what: is waited for, and how long at most; called from a thread of its own, when it is told.
    """
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        pause = FIRST_S
        while not over.wait(pause):
            waited = time.monotonic() - began
            print(f"dcr {command} has waited {waited:.0f} s, now for {what()}", file=sys.stderr, flush=True)  # noqa: T201
            pause = AGAIN_S

    thread = threading.Thread(target=tell, name=f"dcr-waits-{command}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
