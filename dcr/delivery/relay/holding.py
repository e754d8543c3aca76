"""What a node of the relay holds until its engines have taken it: in memory, within a bound."""

import threading
from dataclasses import dataclass, field

from dcr.protocol.errors import RefusedError


@dataclass
class _Held:
    data: bytes | bytearray
    digest: bytes
    pins: int = 0
    """How many connections pass it on at this moment."""
    taken: bool = False


@dataclass
class Holding:
    """Objects by key.  Usable from several threads.

    When there is no room, objects go that were taken from here, and then those of epochs that a later one has
    replaced; never one that is being passed on.

    Attributes:
        bytes_max: most bytes of objects, those that are arriving included.
    """

    bytes_max: int
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _held: dict[str, _Held] = field(default_factory=dict)
    _bytes: int = 0
    _newest: dict[str, str] = field(default_factory=dict)
    """The newest epoch by record, both as keys have them."""

    def room(self, key: str, size: int, timeout_s: float) -> bool:
        """Set room aside for an object that arrives; False if there was none in time.

        Raises:
            RefusedError: the object is larger than all the room there is.
        """
        if size > self.bytes_max:
            raise RefusedError(f"object {key} has {size} bytes, more than relay_bytes_max = {self.bytes_max}: raise it")
        with self._changed:
            record, _, rest = key.partition("/")
            epoch = rest.partition("/")[0]
            self._newest[record] = max(epoch, self._newest.get(record, ""))
            if not self._changed.wait_for(lambda: self._make_room(size), timeout_s):
                return False
            self._bytes += size
            return True

    def give_back(self, size: int) -> None:
        """The object for which room was set aside did not come."""
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()

    def keep(self, key: str, data: bytes | bytearray, digest: bytes) -> bool:
        """Keep an object in the room set aside for it, pinned; False if other bytes are held under its key."""
        with self._changed:
            there = self._held.get(key)
            if there is not None:
                self._bytes -= len(data)
                if there.digest != digest:
                    self._changed.notify_all()
                    return False
                there.pins += 1
            else:
                self._held[key] = _Held(data, digest, pins=1)
            self._changed.notify_all()
            return True

    def pin(self, key: str, digest: bytes) -> bytes | bytearray | None:
        """The object, if just this one is held: it stays until ``unpin``."""
        with self._changed:
            there = self._held.get(key)
            if there is None or there.digest != digest:
                return None
            there.pins += 1
            return there.data

    def unpin(self, key: str) -> None:
        """It has been passed on."""
        with self._changed:
            there = self._held.get(key)
            if there is not None:
                there.pins -= 1
                self._changed.notify_all()

    def take(self, key: str, size_max: int) -> bytes | None:
        """An object for an engine of this node; None while there is none.

        Raises:
            RefusedError: it is larger than ``size_max``.
        """
        with self._changed:
            there = self._held.get(key)
            if there is None:
                return None
            if len(there.data) > size_max:
                raise RefusedError(f"object {key}: {len(there.data)} bytes, more than the {size_max} allowed")
            there.taken = True
            self._changed.notify_all()
            return bytes(there.data)

    def drop(self, prefix: str) -> None:
        """Drop every object whose key starts with the prefix and that is not being passed on."""
        with self._changed:
            for key in [k for k, held in self._held.items() if k.startswith(prefix) and not held.pins]:
                self._remove(key)

    def keys(self, prefix: str) -> list[str]:
        """The keys that start with the prefix, sorted."""
        with self._changed:
            return sorted(key for key in self._held if key.startswith(prefix))

    def _make_room(self, size: int) -> bool:
        for taken in (True, False):
            for key, held in list(self._held.items()):
                if self._bytes + size <= self.bytes_max:
                    return True
                record, _, rest = key.partition("/")
                if not held.pins and (held.taken if taken else rest.partition("/")[0] < self._newest.get(record, "")):
                    self._remove(key)
        return self._bytes + size <= self.bytes_max

    def _remove(self, key: str) -> None:
        self._bytes -= len(self._held.pop(key).data)
        self._changed.notify_all()
