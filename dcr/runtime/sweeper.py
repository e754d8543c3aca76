"""Keeps the delivery store: leaves there what later engines need to know of commits, and deletes what is too old.

In a thread of its own, where a store that does not answer holds up nobody.
"""

import logging
import threading
from collections import deque

from dcr.delivery.interface import Delivery, committed_key, sweep
from dcr.delivery.meeting import RELAY
from dcr.delivery.sealed import UnsealedError
from dcr.protocol.errors import DcrError, RefusedError
from dcr.runtime.committed_attempt import BYTES_MAX, CommittedAttempt

_log = logging.getLogger("dcr.coordinator")

_CLOSE_S = 2.0
_LEAVES_MAX = 16
"""Commits that wait for a store that does not answer; the oldest go first."""


class Sweeper:
    """One thread that sweeps when it is told to; if it is told again meanwhile, once more with the latest epoch.

    Args:
        delivery: the store.
        record_id: the record whose epochs are swept.
        retain: how many commits keep their payloads, however old they are (DESIGN D15).
    """

    def __init__(self, delivery: Delivery, record_id: str, retain: int) -> None:
        self._delivery = delivery
        self._record_id = record_id
        self._retain = retain
        self._before: dict[int, int] = {}
        """By committed epoch the one that was committed before it; 0 if none was."""
        self._changed = threading.Condition()
        self._leaves: deque[CommittedAttempt] = deque(maxlen=_LEAVES_MAX)
        self._due: tuple[int, int] | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="dcr-sweeper", daemon=True)
        self._thread.start()

    def leave(self, attempt: CommittedAttempt) -> None:
        """Put soon, beside its payloads, what engines need to know of a commit that is about to happen."""
        if self._delivery.kind == RELAY:  # which keeps nothing
            return
        with self._changed:
            self._leaves.append(attempt)
            self._changed.notify_all()

    def sweep(self, epoch_min: int, committed: int) -> None:
        """Delete soon what was emitted in epochs below this, which is not above K's.

        Args:
            epoch_min: the oldest epoch that stays in any case.
            committed: the epoch that was committed last; 0 if none was.
        """
        with self._changed:
            self._due = epoch_min, committed
            self._changed.notify_all()

    def close(self) -> None:
        """Begin nothing more; a sweep that takes longer than two seconds is left to itself, and ends with the store."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._leaves or self._due is not None)
                if self._stop and not self._leaves:
                    return
                attempt, due = None, self._due
                if self._leaves:  # what is swept next must know of it
                    attempt = self._leaves.popleft()
                else:
                    self._due = None
            try:
                if attempt is not None:
                    self._leave(attempt)
                elif due is not None:
                    epoch_min, committed = due
                    sweep(self._delivery, self._record_id, epoch_min, self._retained(committed))
            except DcrError as e:
                _log.warning("%s: %s", _what(attempt), e)
            except Exception:  # noqa: BLE001 - the next sweep may find a better day
                _log.exception("%s", _what(attempt))

    def _leave(self, attempt: CommittedAttempt) -> None:
        self._delivery.put(committed_key(self._record_id, attempt.epoch), attempt.encode())
        self._before[attempt.epoch] = attempt.before

    def _retained(self, epoch: int) -> set[int]:
        """The epochs of the last commits, as far back as the store tells."""
        found: dict[int, int] = {}
        while epoch and len(found) < self._retain and self._delivery.kind != RELAY:
            found[epoch] = self._before[epoch] if epoch in self._before else self._read_before(epoch)
            epoch = found[epoch]
        self._before = found
        return set(found)

    def _read_before(self, epoch: int) -> int:
        """Which epoch was committed before this one; 0 if nothing tells: what is older is of no use then."""
        try:
            data = self._delivery.get(committed_key(self._record_id, epoch), BYTES_MAX)
            return 0 if data is None else CommittedAttempt.decode(data).before
        except (UnsealedError, RefusedError) as e:
            _log.warning("engines that start from before epoch %d are restored: %s", epoch, e)
            return 0


def _what(attempt: CommittedAttempt | None) -> str:
    if attempt is None:
        return "old payloads could not be swept"
    return f"epoch {attempt.epoch} could not be kept for engines that start later, which are restored instead"
