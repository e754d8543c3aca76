"""Connections that a hub refused lately, and why: nobody who waits for such a peer looks into its log first."""

import threading
import time
from dataclasses import dataclass

LATELY_S = 120.0
"""What was refused so long ago is told of no more; a peer that is refused tries again every few seconds."""
_TELL_AGAIN_S = 60.0
_KEPT_MAX = 64


@dataclass
class _Refusal:
    last_s: float
    told_s: float
    count: int = 1


class Refusals:
    """Refusals by their words, the newest last; usable from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Refusal] = {}

    def add(self, problem: str) -> bool:
        """Take one down; True if the log should hear of it now: not if it has just heard the same, for peers try on."""
        now_s = time.monotonic()
        with self._lock:
            self._forget(now_s)
            old = self._kept.pop(problem, None)
            if old is None:
                self._kept[problem] = _Refusal(now_s, now_s)
                for text in list(self._kept)[:-_KEPT_MAX]:
                    del self._kept[text]
                return True
            tell = now_s - old.told_s >= _TELL_AGAIN_S
            self._kept[problem] = _Refusal(now_s, now_s if tell else old.told_s, old.count + 1)
            return tell

    @property
    def lately(self) -> tuple[str, ...]:
        """Who was refused lately, and why, the newest first."""
        with self._lock:
            self._forget(time.monotonic())
            kept = reversed(self._kept.items())
            return tuple(text if r.count == 1 else f"{text} ({r.count} times)" for text, r in kept)

    def _forget(self, now_s: float) -> None:
        self._kept = {text: r for text, r in self._kept.items() if now_s - r.last_s < LATELY_S}
