"""Tells the log how far things are that take long; in a thread of its own, for who is at work may hang in a call."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from dcr.runtime.leader_wait import FIRST_S, LAST_S

EVERY_S = 10.0
"""What takes so long is told, and then as often again."""
_LOOK_S = 1.0
_CLOSE_S = 2.0


@dataclass(frozen=True)
class Stuck:
    """What does not go on by itself: told as a warning after three seconds, and then less and less often."""

    text: Callable[[], str]
    """What it is, in words; called only when it is told."""


class ProgressLog:
    """Looks every second, and tells of what has gone on for ten seconds, every ten seconds.

    Args:
        log: where lines go, at level INFO; of what is ``Stuck``, at level WARNING.
        name: of the thread.
        look: what is under way, in words, by anything that tells them apart; an empty mapping if nothing is.
        every_s: how long something may go on untold.
    """

    def __init__(
        self,
        log: logging.Logger,
        name: str,
        look: Callable[[], Mapping[str, str | Stuck]],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._log = log
        self._look = look
        self._every_s = every_s
        self._due: dict[tuple[str, bool], tuple[float, float]] = {}  # when to tell, and the pause before it
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nothing more; safe to repeat."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stop.wait(min(_LOOK_S, self._every_s)):
            try:
                self._tell(self._look())
            except Exception:  # noqa: BLE001 - who tells must not disturb what is told of
                self._log.exception("progress could not be told")

    def _tell(self, found: Mapping[str, str | Stuck]) -> None:
        now, due = time.monotonic(), self._due
        self._due = {}
        for name, what in found.items():
            stuck = isinstance(what, Stuck)
            first = FIRST_S if stuck else self._every_s
            at, pause = due.get((name, stuck), (now + first, first))
            if now >= at:
                pause = min(2 * pause, LAST_S) if stuck else pause
                at = now + pause
                level = logging.WARNING if stuck else logging.INFO
                self._log.log(level, "%s", what.text() if isinstance(what, Stuck) else what)
            self._due[name, stuck] = at, pause


class Steps:
    """The steps of something that is made once: each is told when it begins, and again while it takes long.

    ::

        with Steps(log, "refit of record 'default'") as step:
            step("learns how weights lie in the checkpoint")

    Args:
        log: where lines go, at level INFO.
        what: is made.
        every_s: how long a step may go on untold.
    """

    def __init__(self, log: logging.Logger, what: str, *, every_s: float = EVERY_S) -> None:
        self._log = log
        self._what = what
        self._every_s = every_s
        self._began = time.monotonic()
        self._step = ("", self._began)
        self._progress: ProgressLog | None = None

    def __enter__(self) -> Self:
        self._progress = ProgressLog(self._log, "dcr-steps", self._look, every_s=self._every_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._progress is not None:
            self._progress.close()
        if kind is None:
            self._log.info("%s is ready, after %.1f s", self._what, time.monotonic() - self._began)

    def __call__(self, text: str) -> None:
        """The next step begins."""
        self._step = (text, time.monotonic())
        self._log.info("%s: %s", self._what, text)

    def _look(self) -> Mapping[str, str]:
        text, began = self._step
        return {text: f"{self._what}: {text}, for {time.monotonic() - began:.0f} s now"} if text else {}


def untold(_text: str) -> None:
    """For who does not want to hear of steps."""
