"""Points that no protocol step marks: wrapped around the control plane, the delivery and the storage of a child."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcr.chaos.disk import check_not_full
from dcr.chaos.trigger import Trigger
from dcr.control_plane.interface import ControlPlane, Stored, UnknownOutcomeError
from dcr.data_plane.item import Item
from dcr.data_plane.placement.prewarm import Prewarm
from dcr.data_plane.placement.readback import Readback
from dcr.data_plane.placement.storage import Storage
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import Delivery, DeliveryError
from dcr.protocol.record import decode_record
from dcr.protocol.step import Step
from dcr.runtime.rank_messages import Payload, decode_request


class InjectedError(OSError):
    """What a scenario's ``do: error`` raises where nothing more fitting is known."""


class WatchedControlPlane:
    """A control plane, but for the moments before a compare-and-set is sent, and before its answer is read."""

    def __init__(self, plane: ControlPlane, trigger: Trigger) -> None:
        self._plane = plane
        self._trigger = trigger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def compare_and_set(
        self, record_id: str, expected_revision: int | None, body: bytes, *, operation_id: str, reason: str, **rest: Any
    ) -> Stored:
        """See ``ControlPlane``.  An error before it was sent is one whose outcome is unknown, as is one after it."""
        epoch = decode_record(body).epoch
        self._at("cas_sent", reason, epoch, operation_id)
        stored = self._plane.compare_and_set(
            record_id, expected_revision, body, operation_id=operation_id, reason=reason, **rest
        )
        self._at("cas_done", reason, epoch, operation_id)
        return stored

    def _at(self, kind: str, reason: str, epoch: int, operation_id: str) -> None:
        if self._trigger.reached("coordinator", 0, kind, action=reason, epoch=epoch) == "error":
            raise UnknownOutcomeError(f"an injected error: the answer to {reason} is lost", operation_id)


class WatchedDelivery:
    """An owner's delivery, but for the moments before a payload and in the middle of the manifest.

    Args:
        delivery: where objects go.
        trigger: of the process.
        index: which owner.
        folder: of the run, whose disk may be said to be full.
    """

    def __init__(self, delivery: Delivery, trigger: Trigger, index: int, folder: Path) -> None:
        self._delivery = delivery
        self._trigger = trigger
        self._index = index
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delivery, name)

    def put(self, key: str, data: bytes) -> None:
        """See ``Delivery``."""
        parts = key.split("/")
        epoch = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else 0
        if key.endswith(".payload"):
            self._at("payload", epoch, int(parts[-1].removesuffix(".payload")))
        elif key.endswith("/manifest"):
            if isinstance(self._delivery, FolderDelivery):
                with _InTheMiddle(lambda: self._at("manifest", epoch)):
                    self._put(key, data)
                return
            self._at("manifest", epoch)
        self._put(key, data)

    def _put(self, key: str, data: bytes) -> None:
        try:
            check_not_full(self._folder)
        except OSError as e:
            raise DeliveryError(f"storing {key} ({len(data)} bytes): {e.strerror}; free some space") from e
        self._delivery.put(key, data)

    def _at(self, kind: str, epoch: int, payload: int = 0) -> None:
        if self._trigger.reached("owner", self._index, kind, epoch=epoch, payload=payload) == "error":
            raise DeliveryError("an injected error of the store")


class _InTheMiddle:
    """Acts when this thread synchronises a file for the first time: it is written then, and not yet in its place."""

    def __init__(self, act: Any) -> None:
        self._act = act

    def __enter__(self) -> None:
        self._fsync = fsync = os.fsync
        thread, act = threading.get_ident(), self._act

        def first(descriptor: int) -> None:
            if threading.get_ident() == thread:
                os.fsync = fsync
                act()
            fsync(descriptor)

        os.fsync = first  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        os.fsync = self._fsync


class ReceiverWatch:
    """Watches one receiver: its steps, the moments between two items that it writes, and what it is handed.

    Args:
        trigger: of the process.
        index: which receiver.
    """

    def __init__(self, trigger: Trigger, index: int) -> None:
        self._trigger = trigger
        self._index = index
        self._observe = trigger.observer("receiver", index)
        self._watched: list[WatchedStorage] = []

    def observe(self, step: Step) -> None:
        """A step of the receiver's role."""
        if step.action == "BeginWrite" and step.payload is not None:
            for storage in self._watched:
                storage.writing = (step.epoch, step.payload.sequence)
        self._observe(step)

    def storage(self, made: Storage) -> "WatchedStorage":
        """What the receiver writes to."""
        self._watched.append(WatchedStorage(made, self._trigger, self._index))
        return self._watched[-1]

    def handed(self, call: Callable[[bytes], list[bytes]], request: bytes) -> list[bytes]:
        """Hand it a request; a payload comes twice where a scenario says so."""
        answers = call(request)
        decoded = decode_request(request)
        if isinstance(decoded, Payload):
            epoch = decoded.identity.epoch
            if self._trigger.reached("receiver", self._index, "again", action="EndWrite", epoch=epoch) == "duplicate":
                call(request)
        return answers


class WatchedStorage:
    """A receiver's storage, but for the moments between two items of a payload.

    Args:
        storage: what applies.
        trigger: of the process.
        index: which receiver.

    Attributes:
        writing: epoch and number of the payload that is being written, as the receiver's last step said.
    """

    def __init__(self, storage: Storage, trigger: Trigger, index: int) -> None:
        self._storage = storage
        self._trigger = trigger
        self._index = index
        self.writing = (0, 0)

    def prewarm(self) -> Prewarm:
        """See ``Storage``."""
        return self._storage.prewarm()

    def fingerprint(self) -> str:
        """See ``Storage``."""
        return self._storage.fingerprint()

    def synchronise(self) -> None:
        """See ``Storage``."""
        self._storage.synchronise()

    def readback(self, tied: Mapping[str, str] | None = None) -> Readback:
        """See ``Storage``."""
        return self._storage.readback(tied)

    def apply(self, items: Sequence[Item]) -> int:
        """See ``Storage``; cut in two where a fault strikes in between."""
        epoch, payload = self.writing
        armed = self._trigger.items(self._index, payload, epoch, len(items))
        if armed is None:
            return self._storage.apply(items)
        done = self._storage.apply(items[: armed.items])
        if self._trigger.strike(armed, epoch) == "error":
            raise InjectedError(f"an injected error after {armed.items} of {len(items)} items")
        return done + self._storage.apply(items[armed.items :])
