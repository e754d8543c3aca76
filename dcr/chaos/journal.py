"""What a child process says of itself, as it happens: one JSON line an event, which a kill cannot take back."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

SUFFIX = ".journal"
REQUESTS = ".requests"


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event."""

    t: float
    """Seconds on the machine's monotonic clock, which all processes share."""
    what: str
    """``start``, ``ready``, ``step``, ``serving``, ``fault``, ``push``, ``pushed`` or ``error``."""
    who: str = ""
    """The role, as scenarios name it."""
    action: str = ""
    epoch: int = 0
    detail: str = ""


class Journal:
    """Appends entries to a file; from any thread.  Nothing is kept back, so SIGKILL loses nothing that was said."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()

    def say(self, what: str, **fields: Any) -> None:
        """Write an entry, as of now."""
        line = msgspec.json.encode(Entry(time.monotonic(), what, **fields)) + b"\n"
        with self._lock:
            os.write(self._file, line)


def entries(path: Path) -> Iterator[Entry]:
    """The entries of a file; a half-written last line is left out."""
    decode = msgspec.json.Decoder(Entry).decode
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield decode(line)


class Answer(msgspec.Struct, frozen=True):
    """One request that an engine answered."""

    t: float
    version: int
    digest: str


def answers(path: Path) -> Iterator[Answer]:
    """The requests of a file; a half-written last line is left out."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                t, version, digest = line.split()
                yield Answer(float(t), int(version), digest)
