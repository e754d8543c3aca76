"""How far one side of a refit is, stage by stage, at this moment: what users ask, and the log tells of long ones."""

import threading
import time
from collections.abc import Hashable
from datetime import UTC, datetime

import msgspec


class Told(msgspec.Struct, frozen=True):
    """A status that shows itself in words also where it is one of several, in a list or at a prompt."""

    def __repr__(self) -> str:
        return f"<{self}>"


class StageStatus(Told, frozen=True):
    """One stage; nothing that is not known is made up."""

    stage: str
    done: int
    """How much went through it, in units."""
    unit: str
    """``elements`` or ``payloads``."""
    total: int | None = None
    """Units in all; None while nobody knows, as long as owners still find changes."""
    bytes: int = 0
    """Payload bytes that went through it; 0 where a stage has none."""
    waiting: int = 0
    """Units that have come to it and are not begun."""
    seconds: float = 0.0
    """Of work, added up over its threads."""

    @property
    def share(self) -> float | None:
        """Done of the whole, 0 to 1; None while the whole is not known."""
        return None if self.total is None else self.done / self.total if self.total else 1.0

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total}"
        share = "" if not self.total else f" ({100 * self.done / self.total:.0f} %)"
        more = [in_bytes(self.bytes)] if self.bytes else []
        more += [f"{self.waiting} waiting"] if self.waiting else []
        more += [f"{self.seconds:.1f} s"] if self.seconds >= 0.05 else []  # noqa: PLR2004 - else it would say 0.0
        return ", ".join([f"{self.stage} {self.done}{of} {self.unit}{share}", *more])


class RefitStatus(Told, frozen=True):
    """One side of one attempt or restore, as of now; nothing in it is secret."""

    epoch: int
    what: str
    """What it is for: versions and kind."""
    stages: tuple[StageStatus, ...]
    """In the order in which payloads pass them; they run at the same time."""
    held_up_by: str
    """What the others wait for: a stage by its name, and what that waits for; empty if it is over."""
    since: str
    """When it began: UTC, ISO 8601."""
    moved: str
    """When anything moved last, within a second: UTC, ISO 8601."""
    idle_s: float
    """How long nothing has moved."""

    def __str__(self) -> str:
        held = f"; held up by {self.held_up_by}" if self.held_up_by else ""
        idle = f"; nothing has moved for {self.idle_s:.0f} s" if self.idle_s >= 1 else ""
        return f"epoch {self.epoch}, {self.what}: {'; '.join(map(str, self.stages))}{held}{idle}"


class LastMove:
    """When counters were seen to change last: as exact as it is asked often.  Usable from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: Hashable = None
        self.began = self._at = time.time()

    def at(self, counters: Hashable) -> float:
        """The wall clock's time, in seconds, at which these counters were seen first."""
        with self._lock:
            if counters != self._counters:
                self._counters, self._at = counters, time.time()
            return self._at

    def status(self, epoch: int, what: str, stages: tuple[StageStatus, ...], held_up_by: str) -> RefitStatus:
        """A status whose times are these."""
        counters = tuple((s.stage, s.done, s.bytes, s.waiting) for s in stages), held_up_by
        at = self.at(counters)
        return RefitStatus(epoch, what, stages, held_up_by, utc(self.began), utc(at), max(0.0, time.time() - at))


def utc(seconds: float) -> str:
    """A time of the wall clock as UTC, ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def in_bytes(size: int) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
