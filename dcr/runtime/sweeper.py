"""Deletes what old epochs left in the delivery store, where a store that does not answer holds up nobody."""

import logging
import threading

from dcr.delivery.interface import Delivery, sweep
from dcr.protocol.errors import DcrError

_log = logging.getLogger("dcr.coordinator")

_CLOSE_S = 2.0


class Sweeper:
    """One thread that sweeps when it is told to; if it is told again meanwhile, once more with the latest epoch.

    Args:
        delivery: the store.
        record_id: the record whose epochs are swept.
    """

    def __init__(self, delivery: Delivery, record_id: str) -> None:
        self._delivery = delivery
        self._record_id = record_id
        self._changed = threading.Condition()
        self._epoch_min: int | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="dcr-sweeper", daemon=True)
        self._thread.start()

    def sweep(self, epoch_min: int) -> None:
        """Delete soon what was emitted in epochs below this, which is not above K's."""
        with self._changed:
            self._epoch_min = epoch_min
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
                self._changed.wait_for(lambda: self._stop or self._epoch_min is not None)
                epoch_min, self._epoch_min = self._epoch_min, None
                if self._stop or epoch_min is None:
                    return
            try:
                sweep(self._delivery, self._record_id, epoch_min)
            except DcrError as e:
                _log.warning("old payloads could not be swept: %s", e)
            except Exception:  # noqa: BLE001 - the next sweep may find a better day
                _log.exception("old payloads could not be swept")
