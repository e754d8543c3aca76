"""How the candidate is kept from changing until every owner has folded: it is held, or copied (DESIGN D10)."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.owner import Effect
from dcr.runtime.settings import Settings
from dcr.runtime.source import Source

_log = logging.getLogger("dcr.owner")
_LOOK_S = 0.02


class Pin:
    """One owner's.

    Under ``hold`` the trainer changes no weight while its push waits, and nothing is to be done here.  A snapshot holds
    the candidate of the last push, whatever the trainer does, until the next one begins; whoever reads the candidate
    has ``reading`` meanwhile.

    Args:
        source: the owner's share.
        needed: why the candidate of the last push is still needed although that has ended; empty if it is not.  Runs
            where the role does.
        post: has something run there.
        settings: ``fold_timeout_s`` bounds how long the next push waits for the candidate of the last one.

    Attributes:
        reading: held by whoever reads the candidate, and while another one is taken.
    """

    def __init__(
        self,
        source: Source,
        needed: Callable[[], str],
        post: Callable[[Callable[[], Sequence[Effect]]], None],
        settings: Settings,
    ) -> None:
        self.reading = threading.Lock()
        self._source = source
        self._needed = needed
        self._post = post
        self._timeout_s = settings.fold_timeout_s
        self._answer_s = settings.connect_timeout_s
        self._copied = False
        self._closed = False

    def close(self) -> None:
        """Give the memory of a snapshot back, and of one that is being taken when it is; who reads one keeps it."""
        self._closed = True  # first: a copy that ends from here on is let go by whoever has made it
        self._source.hold()

    def release(self) -> None:
        """Wait until the candidate that is pinned by a copy is needed no more.

        A push that has timed out may have been committed all the same, and its fold be on its way: with other weights
        the baseline would be lost.  It is, and the next push dense, if that takes longer than ``fold_timeout_s``.
        """
        deadline, told = time.monotonic() + self._timeout_s, ""
        while self._copied and (why := self._why_needed()):
            if why != told:
                told = why
                _log.info("%s waits before its next push, at most %g s: %s", self._source.owner, self._timeout_s, why)
            if time.monotonic() >= deadline:
                _log.warning(
                    "%s goes on to the next push after %g s although %s", self._source.owner, self._timeout_s, why
                )
                return
            time.sleep(_LOOK_S)

    def snapshot(self) -> None:
        """Pin the weights as they are by a copy.

        Raises:
            RefusedError: the candidate before it is still read; or the weights are not what the source was made for.
        """
        with self._taken():
            self._copied = True
            self._source.snapshot()

    def hold(self) -> None:
        """Have the weights themselves read, which the trainer keeps as they are.

        Raises:
            RefusedError: the candidate before them is still read.
        """
        with self._taken():
            self._source.hold()
            self._copied = False

    def _why_needed(self) -> str:
        answer: Future[str] = Future()

        def ask() -> Sequence[Effect]:
            try:
                answer.set_result(self._needed())
            except DcrError as e:
                answer.set_result(f"whether its candidate is needed is not known: {e}")
            return ()

        self._post(ask)
        try:
            return answer.result(self._answer_s)
        except TimeoutError:
            return "its owner's thread does not answer"

    @contextmanager
    def _taken(self) -> Iterator[None]:
        if not self.reading.acquire(timeout=self._timeout_s):
            raise RefusedError(
                f"{self._source.owner}: after {self._timeout_s:g} s the candidate of the push before is still read, by "
                "its roll-back or its fold (refit.status says how far that is): push again when it is over"
            )
        try:
            yield
        finally:
            if self._closed:
                self._source.hold()
            self.reading.release()
