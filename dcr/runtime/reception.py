"""What a host has received: each object of the delivery store once, for the ranks of all its engines (DESIGN 6)."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from dcr.data_plane.content_digest import ContentDigest
from dcr.delivery.interface import Delivery, DeliveryError, manifest_key, payload_key
from dcr.delivery.meeting import RELAY, missed
from dcr.delivery.traffic import Traffic
from dcr.protocol.errors import DcrError, RefusedError
from dcr.protocol.identity import PayloadIdentity
from dcr.protocol.messages import Prepare, TableRef
from dcr.protocol.record import OwnerRef
from dcr.runtime.contents_table import read_tables
from dcr.runtime.rank_messages import Shared
from dcr.runtime.settings import Settings
from dcr.runtime.shared_memory import SharedMemory, SharedMemoryError
from dcr.runtime.store_readers import StoreReaders

_log = logging.getLogger("dcr.node")
T = TypeVar("T")

MANIFEST_BYTES_MAX = 64 << 20
READERS_MAX = 8
"""Objects that are read from the store at once; each may be in host memory once more while it is."""
AHEAD_MAX = READERS_MAX // 2
"""Of these, those that nobody has asked for yet, so that what is asked for finds a reader."""
_AT_ONCE_S = 0.05
"""How long a reader is waited for where it began: most objects are there by then, and nobody's orders are late."""


@dataclass
class _Object:
    """One object of the store, here."""

    epoch: int
    data: Shared | bytes
    size: int
    """Bytes of shared memory."""
    readers: set[str] = field(default_factory=set)
    """Engines whose ranks may be reading it now."""
    takers: set[str] = field(default_factory=set)
    """Engines that are done with it."""


@dataclass(frozen=True)
class _Miss:
    """An object that was not there yet."""

    engine: str
    epoch: int
    at_s: float
    looks: int
    """How often it was looked for in vain."""


@dataclass
class _Read:
    """An object that a reader is to fetch from the store."""

    engine: str
    epoch: int
    shared: bool
    began_s: float
    ahead: bool = False
    """Nobody has asked for it yet: it takes no room that anything else wants."""
    there: bool = False
    """The store has answered."""
    over: bool = False
    error: Exception | None = None


class Reception:
    """Objects received and not yet taken by every engine of the host.

    An object is read from the store when the first engine asks for it, and goes when the last one is done with it, or
    when no engine will come back to its epoch.  Payloads lie in shared memory, manifests in this process.  When the
    bound is reached, the oldest objects that no rank is reading go first: an engine that is behind reads them from the
    store again, so that it never holds up the others.

    Usable from several threads, none of which waits for the store or for room: readers of its own do.

    Args:
        delivery: the store.
        memory: where payloads are put.
        engines: names of the host's engines.
        settings: ``receive_bytes_max``, ``delivery_timeout_s``, ``fetch_poll_s`` (a store may ask for longer pauses).
        payload_bytes_max: larger payloads are refused before they are read.

    Attributes:
        objects: how many objects were read from the store.
        bytes: how many bytes those were.
    """

    def __init__(
        self,
        delivery: Delivery,
        memory: SharedMemory,
        engines: Iterable[str],
        settings: Settings,
        *,
        payload_bytes_max: int,
    ) -> None:
        self._delivery = delivery
        self._memory = memory
        self._settings = settings
        self._payload_bytes_max = payload_bytes_max
        self._passed = dict.fromkeys(engines, -1)
        self._changed = threading.Condition()
        self._held: dict[str, _Object] = {}
        self._held_bytes = 0
        self._reads: dict[str, _Read] = {}
        self._readers = StoreReaders(READERS_MAX)
        self._missed: dict[str, _Miss] = {}
        self.objects = 0
        self.bytes = 0

    @property
    def traffic(self) -> Traffic:
        """What the host asked of the store so far."""
        return self._delivery.traffic

    @property
    def keeps(self) -> bool:
        """Whether the store keeps what was delivered, until it is swept."""
        return self._delivery.kind != RELAY

    def inbox(self, engine: str) -> "Inbox":
        """The reception as one engine sees it."""
        return Inbox(self, engine)

    def get(self, engine: str, key: str, epoch: int, *, shared: bool) -> Shared | bytes | None:
        """An object, which an engine's ranks may read until it calls ``taken`` or ``again``.

        Args:
            engine: who asks.
            key: of the object in the store.
            epoch: that it belongs to.
            shared: whether to put it into shared memory.

        Returns:
            None if the object is not in sight, or is being read from the store at this moment.

        Raises:
            DeliveryError: the store could not be used, or has not answered for ``delivery_timeout_s``, or there was no
                room for so long.
            RefusedError: the object is larger than the bounds allow.
        """
        with self._changed:
            read = self._reads.get(key)
            if read is None:
                if (held := self._hold(engine, key)) is not None or self._just_missed(engine, key):
                    return held
                read = self._reads[key] = _Read(engine, epoch, shared, time.monotonic())
                self._readers.submit(lambda: self._read(key, read))
                self._changed.wait_for(lambda: read.over, _AT_ONCE_S)
            if read.ahead:  # the store is waited for from here on
                read.ahead, read.began_s = False, time.monotonic()
            if not read.over:
                waited = time.monotonic() - read.began_s
                if waited > self._settings.delivery_timeout_s and not read.there:
                    raise DeliveryError(f"object {key}: the store has not answered for {waited:.1f} s")
                return None
            if read.error is not None:
                del self._reads[key]
                raise read.error
            return self._hold(engine, key)

    def ahead(self, engine: str, key: str, epoch: int) -> None:
        """Begin to read a payload that the engine will ask for soon, if there is room that nothing else wants.

        If it is not in sight yet, or finds no room, it is looked for again when it is asked for.
        """
        with self._changed:
            full = sum(read.ahead and not read.over for read in self._reads.values()) >= AHEAD_MAX
            if not full and key not in self._held and key not in self._reads and not self._just_missed(engine, key):
                read = self._reads[key] = _Read(engine, epoch, shared=True, began_s=time.monotonic(), ahead=True)
                self._readers.submit(lambda: self._read(key, read))

    def tables(self, refs: Sequence[TableRef], then: Callable[[dict[str, ContentDigest] | DcrError], None]) -> None:
        """See ``Inbox.tables``."""

        def job() -> None:
            try:
                found: dict[str, ContentDigest] | DcrError = read_tables(self._delivery, refs)
            except DcrError as e:
                found = e
            except Exception as e:  # noqa: BLE001 - told to whoever asked, who would else wait for an answer in vain
                found = DeliveryError(f"{type(e).__name__}: {e}")
            try:
                then(found)
            except queue.Full:
                _log.warning("owners' content digests were read, but their engine has no time for them")

        self._readers.submit(job)

    def meet(self, entry: bytes, then: Callable[[str], None]) -> None:
        """See ``Inbox.meet``."""

        def job() -> None:
            try:
                problem = missed(self._delivery, entry)
            except Exception:  # noqa: BLE001 - an engine that cannot be told goes on as if it had not asked
                _log.exception("it could not be told whether this node looks where owners deliver")
                problem = ""
            with contextlib.suppress(queue.Full):
                then(problem)

        self._readers.submit(job)

    def ask(self, question: Callable[[Delivery], T]) -> Future[T]:
        """See ``Inbox.ask``."""
        answer: Future[T] = Future()

        def job() -> None:
            try:
                answer.set_result(question(self._delivery))
            except Exception as e:  # noqa: BLE001 - raised where it was asked
                answer.set_exception(e)

        self._readers.submit(job)
        return answer

    def close(self) -> None:
        """Begin to read nothing more; what is held goes with the memory that it lies in."""
        self._readers.close()

    def _hold(self, engine: str, key: str) -> Shared | bytes | None:
        held = self._held.get(key)
        if held is None:
            return None
        held.readers.add(engine)
        return held.data

    def _read(self, key: str, read: _Read) -> None:
        """In a reader's thread: get an object for the engine that asked, if it still wants it by then."""
        try:
            if not self._wanted(read):
                return
            data = self._delivery.get(key, self._payload_bytes_max if read.shared else MANIFEST_BYTES_MAX)
            read.there = True
            if data is not None:
                self._keep(key, read, data)
                return
            with self._changed:
                looks = self._missed[key].looks + 1 if key in self._missed else 1
                self._missed[key] = _Miss(read.engine, read.epoch, time.monotonic(), looks)
        except Exception as e:  # noqa: BLE001 - raised where the object was asked for
            read.error = e
        finally:
            with self._changed:
                read.over = True
                if read.error is None or not self._wanted(read):
                    self._reads.pop(key, None)
                self._changed.notify_all()

    def _wanted(self, read: _Read) -> bool:
        passed = self._passed.get(read.engine)
        return passed is not None and read.epoch > passed

    def _keep(self, key: str, read: _Read, data: bytes) -> None:
        size = len(data) if read.shared else 0
        with self._changed:
            self._missed.pop(key, None)
            self.objects += 1
            self.bytes += len(data)
            if read.ahead and self._held_bytes + size > self._settings.receive_bytes_max:
                return
            self._reserve(key, size)
        try:
            kept: Shared | bytes = self._write(data) if read.shared and data else data
        except SharedMemoryError as e:
            with self._changed:
                self._held_bytes -= size
            raise DeliveryError(str(e)) from e
        with self._changed:
            # Held for the engine that asked until it comes for it, or will not come any more.  What nobody asked for
            # yet may go: an engine must not wait for room that is taken by what it comes to later.
            asked = {read.engine} if self._wanted(read) and not read.ahead else set()
            self._held[key] = _Object(read.epoch, kept, size, readers=asked)
            self._let_go()

    def _write(self, data: bytes) -> Shared:
        """Put bytes into shared memory, of which a host may have less than the bound allows: then too the oldest go."""
        while True:
            try:
                return self._memory.write(data)
            except SharedMemoryError:
                with self._changed:
                    idle = next((k for k, held in self._held.items() if held.size and not held.readers), None)
                    if idle is None:
                        raise
                    self._drop(idle)

    def taken(self, engine: str, key: str) -> None:
        """The engine's ranks are done with an object."""
        with self._changed:
            held = self._held.get(key)
            if held is not None:
                held.readers.discard(engine)
                held.takers.add(engine)
                self._let_go()

    def again(self, key: str) -> None:
        """A copy turned out to be bad: it is read from the store again, by whoever asks for it next."""
        with self._changed:
            if key in self._held:
                self._drop(key)

    def passed(self, engine: str, epoch: int) -> None:
        """The engine will not ask for anything of this epoch or an older one again."""
        with self._changed:
            if engine in self._passed:
                self._passed[engine] = max(self._passed[engine], epoch)
            for held in self._held.values():
                if held.epoch <= epoch:
                    held.readers.discard(engine)
            self._let_go()

    def leave(self, engine: str) -> None:
        """The engine will not ask for anything again."""
        with self._changed:
            self._passed.pop(engine, None)
            for held in self._held.values():
                held.readers.discard(engine)
            self._let_go()

    def _just_missed(self, engine: str, key: str) -> bool:
        """Whether it is too early to look again.

        Another engine looked a moment ago: several ask the store no more often than one would.  Or the store is one
        where each look costs, and asks its readers to pause.
        """
        miss = self._missed.get(key)
        if miss is None:
            return False
        pause = self._delivery.look_pause.after(miss.looks)
        if miss.engine != engine:
            pause = max(pause, self._settings.fetch_poll_s)
        return time.monotonic() - miss.at_s < pause

    def _reserve(self, key: str, size: int) -> None:
        bound = self._settings.receive_bytes_max
        if size > bound:
            raise RefusedError(f"object {key} has {size} bytes, more than receive_bytes_max = {bound}: raise it")

        def room() -> bool:
            for old in [k for k, held in self._held.items() if not held.readers]:
                if self._held_bytes + size <= bound:
                    break
                self._drop(old)
            return self._held_bytes + size <= bound

        if not self._changed.wait_for(room, self._settings.delivery_timeout_s):
            raise DeliveryError(
                f"object {key}: its {size} bytes found no room in {self._settings.delivery_timeout_s} s beside "
                f"{self._held_bytes} that ranks are reading; raise receive_bytes_max = {bound}"
            )
        self._held_bytes += size

    def _let_go(self) -> None:
        """Drop what every engine is done with."""
        passed = min(self._passed.values(), default=None)
        for key, held in list(self._held.items()):
            over = passed is None or held.epoch <= passed or self._passed.keys() <= held.takers
            if over and not held.readers:
                self._drop(key)
        self._missed = {k: m for k, m in self._missed.items() if passed is not None and m.epoch > passed}
        self._reads = {k: r for k, r in self._reads.items() if not r.over or self._wanted(r)}
        self._changed.notify_all()

    def _drop(self, key: str) -> None:
        held = self._held.pop(key)
        self._held_bytes -= held.size
        if isinstance(held.data, Shared):
            self._memory.remove(held.data)
        self._changed.notify_all()


class Incoming(Protocol):
    """Where the payloads and manifests of an attempt come from; ``Inbox`` says what each call means."""

    @property
    def traffic(self) -> Traffic: ...  # noqa: D102
    def payload(self, identity: PayloadIdentity) -> Shared | bytes | None: ...  # noqa: D102
    def manifest(self, order: Prepare, owner: OwnerRef) -> bytes | None: ...  # noqa: D102
    def ahead(self, identities: Iterable[PayloadIdentity]) -> None: ...  # noqa: D102
    def payload_taken(self, identity: PayloadIdentity) -> None: ...  # noqa: D102
    def manifest_taken(self, order: Prepare, owner: OwnerRef) -> None: ...  # noqa: D102
    def payload_again(self, identity: PayloadIdentity) -> None: ...  # noqa: D102
    def manifest_again(self, order: Prepare, owner: OwnerRef) -> None: ...  # noqa: D102


class Inbox:
    """One engine's way into the reception of its host."""

    def __init__(self, reception: Reception, engine: str) -> None:
        self._reception = reception
        self._engine = engine

    @property
    def traffic(self) -> Traffic:
        """What the whole host asked of the store so far."""
        return self._reception.traffic

    @property
    def keeps(self) -> bool:
        """Whether the store keeps what was delivered, until it is swept."""
        return self._reception.keeps

    def payload(self, identity: PayloadIdentity) -> Shared | bytes | None:
        """A payload; None while it is not in sight.  Raises as ``Reception.get``."""
        return self._reception.get(self._engine, payload_key(identity), identity.epoch, shared=True)

    def ahead(self, identities: Iterable[PayloadIdentity]) -> None:
        """These payloads of one epoch will be asked for next; they may be read from the store meanwhile."""
        for identity in identities:
            self._reception.ahead(self._engine, payload_key(identity), identity.epoch)

    def manifest(self, order: Prepare, owner: OwnerRef) -> bytes | None:
        """An owner's manifest of an attempt; None while it is not in sight.  Raises as ``Reception.get``."""
        data = self._reception.get(self._engine, _manifest_key(order, owner), order.epoch, shared=False)
        assert not isinstance(data, Shared)
        return data

    def tables(self, refs: Sequence[TableRef], then: Callable[[dict[str, ContentDigest] | DcrError], None]) -> None:
        """Hand over what owners' tensors digest to, or why that cannot be read, from a reader's thread."""
        self._reception.tables(refs, then)

    def meet(self, entry: bytes, then: Callable[[str], None]) -> None:
        """Hand over why what owners deliver cannot be seen here (``delivery.meeting``), from a reader's thread."""
        self._reception.meet(entry, then)

    def ask(self, question: Callable[[Delivery], T]) -> Future[T]:
        """Ask the store something, in a reader's thread; nothing of it is kept here.  No answer after ``close``."""
        return self._reception.ask(question)

    def payload_taken(self, identity: PayloadIdentity) -> None:
        """The ranks are done with it."""
        self._reception.taken(self._engine, payload_key(identity))

    def manifest_taken(self, order: Prepare, owner: OwnerRef) -> None:
        """The ranks are done with it."""
        self._reception.taken(self._engine, _manifest_key(order, owner))

    def payload_again(self, identity: PayloadIdentity) -> None:
        """The copy that was given is bad."""
        self._reception.again(payload_key(identity))

    def manifest_again(self, order: Prepare, owner: OwnerRef) -> None:
        """The copy that was given is bad."""
        self._reception.again(_manifest_key(order, owner))

    def passed(self, epoch: int) -> None:
        """Nothing of this epoch or an older one will be asked for again."""
        self._reception.passed(self._engine, epoch)

    def leave(self) -> None:
        """Nothing will be asked for again."""
        self._reception.leave(self._engine)


def _manifest_key(order: Prepare, owner: OwnerRef) -> str:
    return manifest_key(order.record_id, order.target, order.epoch, owner.owner, owner.incarnation)
