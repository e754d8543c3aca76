"""The control plane where only a bucket is shared: the record alone, kept by conditional writes; no leadership.

A bucket changes one object at a time.  So the object of the record holds the history entry of the write that made it,
and a writer first puts that entry where history lies, by its revision and by its operation, and only then replaces
the record, on the condition that it is still the one that was read::

    put RECORD/control/history/7, RECORD/control/operation/ID     what made revision 7, as the record says
    put RECORD/control/record, if it is still revision 7          revision 8, with what makes it

What history holds is true whoever put it there, and whether or not the write that it was put there for took effect.
"""

import threading
import time

from dcr.control_plane.interface import (
    ConflictError,
    ControlPlaneSettings,
    ControlPlaneUnavailableError,
    HistoryEntry,
    Stored,
    UnknownOutcomeError,
    check_entry,
    check_text,
    check_write,
)
from dcr.control_plane.lease import Lease, NoLeasesError
from dcr.control_plane.s3_address import S3RecordAddress
from dcr.control_plane.s3_bucket import Bucket
from dcr.control_plane.s3_objects import LAYOUT_VERSION, Kept, Keys, Past, Registered, decode, encode
from dcr.protocol.errors import RefusedError
from dcr.s3.parallel import in_parallel
from dcr.s3.requests import LostAnswerError

_ROUNDS_MAX = 5
"""How often a write is tried that was refused although the record stands still: somebody else's was under way."""
_ROUND_PAUSE_S = 0.05
_READERS_MAX = 8
"""Requests at once where many objects are read."""


class S3ControlPlane:
    """A ControlPlane below a prefix of a bucket (see ``interface.ControlPlane``).

    Args:
        address: where.
        settings: bounds; ``busy_timeout_s`` is that of each request.

    Raises:
        RefusedError: there is no such bucket, or no credentials, or these do not let us in.
        ControlPlaneUnavailableError: the store could not be asked.
    """

    leases = False

    def __init__(self, address: S3RecordAddress, settings: ControlPlaneSettings) -> None:
        self._place = str(address)
        self._settings = settings
        self._lock = threading.Lock()
        self._seen: dict[str, int] = {}
        self._conditions_hold = False
        self._bucket = Bucket(address, settings.busy_timeout_s)

    def read(self, record_id: str) -> Stored | None:
        """See ControlPlane."""
        found = self._record(_keys(record_id), "reading the record")
        return None if found is None else found[0].stored

    def compare_and_set(
        self,
        record_id: str,
        expected_revision: int | None,
        body: bytes,
        *,
        operation_id: str,
        actor: str,
        reason: str,
        lease: Lease | None = None,
        version: int | None = None,
        digest: str = "",
    ) -> Stored:
        """See ControlPlane."""
        check_write(self._settings, record_id, body, (operation_id, actor, reason), digest)
        if lease is not None:
            raise self._no_leases(record_id)
        keys = Keys(record_id)
        self._check_conditions(keys)
        revision = (expected_revision or 0) + 1
        for turn in range(_ROUNDS_MAX + 1):
            time.sleep(_ROUND_PAUSE_S * turn)
            try:
                found = self._record(keys, "reading before a write")
                current = None if found is None else found[0]
                if (again := self._settled(keys, current, expected_revision, operation_id, body)) is not None:
                    return again
            except ControlPlaneUnavailableError as e:
                if turn:  # what was refused may have been the repetition of a write that took effect
                    raise _unknown(e, operation_id) from e
                raise
            if turn == _ROUNDS_MAX:
                break
            if current is not None:
                self._put_into_history(keys, current.entry)
            entry = HistoryEntry(revision, operation_id, actor, reason, time.time(), version, digest)
            kept = Kept(LAYOUT_VERSION, entry, body)
            try:
                done = self._bucket.put_after(
                    "writing the record", keys.record, encode(kept), None if found is None else found[1]
                )
            except LostAnswerError as e:
                raise _unknown(e, operation_id) from e
            if done:
                self._saw(record_id, revision)
                return kept.stored
            # Overtaken; or what lies between sent it twice, and refused is our own write's repetition.  K tells.
        raise ControlPlaneUnavailableError(
            f"control plane {self._place}: writing the record: refused {_ROUNDS_MAX} times although nobody else has "
            f"written it; the store must support If-Match and If-None-Match of PutObject"
        )

    def operation_revision(self, record_id: str, operation_id: str) -> int | None:
        """See ControlPlane."""
        check_text("operation id", operation_id)
        keys = _keys(record_id)
        found = self._record(keys, "reading the history")
        if found is None:
            return None
        current = found[0].entry
        # In this order: an operation that was overtaken before the record was read is in the history.
        return current.revision if current.operation_id == operation_id else self._past(keys, operation_id, current)

    def history(self, record_id: str, limit: int) -> list[HistoryEntry]:
        """See ControlPlane."""
        keys = _keys(record_id)
        limit = min(limit, self._settings.history_max)
        found = self._record(keys, "reading the history") if limit > 0 else None
        if found is None:
            return []
        newest = found[0].entry
        older = range(newest.revision - 1, max(0, newest.revision - limit), -1)
        entries: list[HistoryEntry | None] = [None] * len(older)

        def look(index: int) -> None:
            key = keys.revision(older[index])
            if (one := self._bucket.get("reading the history", key)) is not None:
                entries[index] = decode(one[0], Past, key).entry

        in_parallel(look, len(older), _READERS_MAX)
        return [newest, *(e for e in entries if e is not None)]  # the oldest may be forgotten meanwhile

    # ------------------------------------------------------------ no leadership

    def acquire(self, record_id: str, holder: str, lease_s: float, *, replaces: int | None = None) -> Lease:
        """See ControlPlane."""
        del holder, lease_s, replaces
        raise self._no_leases(record_id)

    def renew(self, lease: Lease) -> None:
        """See ControlPlane."""
        raise self._no_leases(lease.record_id)

    def release(self, lease: Lease) -> None:
        """See ControlPlane."""
        raise self._no_leases(lease.record_id)

    def leader(self, record_id: str) -> Lease | None:
        """See ControlPlane."""
        check_text("record id", record_id)
        return None

    def lease_left_s(self, lease: Lease) -> float:
        """See ControlPlane."""
        raise self._no_leases(lease.record_id)

    # ------------------------------------------------------------ the registry

    def register(self, record_id: str, kind: str, name: str, value: bytes) -> None:
        """See ControlPlane.  Those who register at the same moment may exceed the bound by their number."""
        check_entry(self._settings, (record_id, kind, name), value)
        keys, stage = Keys(record_id), f"registering {kind} {name}"
        key, others = keys.registry(kind, name), self._bucket.keys(stage, keys.registry(kind))
        if key not in others and len(others) >= self._settings.registry_entries_max:
            raise RefusedError(
                f"registry of record {record_id}: {kind} {name} would exceed registry_entries_max = "
                f"{self._settings.registry_entries_max}; unregister what is gone"
            )
        self._bucket.put(stage, key, encode(Registered(LAYOUT_VERSION, name, value)))

    def lookup(self, record_id: str, kind: str, name: str) -> bytes | None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), b"")
        key = Keys(record_id).registry(kind, name)
        found = self._bucket.get(f"looking up {kind} {name}", key)
        return None if found is None else decode(found[0], Registered, key).value

    def registered(self, record_id: str, kind: str) -> dict[str, bytes]:
        """See ControlPlane."""
        check_text("kind", kind)
        stage = f"listing {kind}"
        keys = self._bucket.keys(stage, _keys(record_id).registry(kind))
        found: dict[str, bytes] = {}

        def look(index: int) -> None:
            if (one := self._bucket.get(stage, keys[index])) is not None:
                entry = decode(one[0], Registered, keys[index])
                found[entry.name] = entry.value

        in_parallel(look, len(keys), _READERS_MAX)
        return dict(sorted(found.items()))

    def unregister(self, record_id: str, kind: str, name: str) -> None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), b"")
        self._bucket.delete(f"unregistering {kind} {name}", Keys(record_id).registry(kind, name))

    def close(self) -> None:
        """See ControlPlane."""
        self._bucket.close()

    # ------------------------------------------------------------ inside

    def _record(self, keys: Keys, stage: str) -> tuple[Kept, str] | None:
        """The record and its tag; ControlPlaneUnavailableError if the store has forgotten what it had."""
        known = self._seen.get(keys.record_id, 0)
        found = self._bucket.get(stage, keys.record)
        kept = None if found is None else decode(found[0], Kept, keys.record)
        revision = 0 if kept is None else kept.entry.revision
        if revision < known:
            raise ControlPlaneUnavailableError(
                f"control plane {self._place}: {stage}: record {keys.record_id!r} is at revision {revision}, after it "
                f"was at {known}: the bucket was put back to an older state, or the record was removed; stop every "
                f"process of the run, and see to the bucket"
            )
        self._saw(keys.record_id, revision)
        return None if found is None or kept is None else (kept, found[1])

    def _saw(self, record_id: str, revision: int) -> None:
        with self._lock:
            self._seen[record_id] = max(revision, self._seen.get(record_id, 0))

    def _settled(
        self, keys: Keys, current: Kept | None, expected_revision: int | None, operation_id: str, body: bytes
    ) -> Stored | None:
        """What the record says of a write before it is tried, and after it was refused; None if nothing against it.

        Raises:
            ConflictError: see ControlPlane.compare_and_set, as of the other.
            RefusedError: the operation id was used with another body.
        """
        if current is None:
            if expected_revision is not None:
                raise ConflictError(
                    f"record {keys.record_id}: is absent, not {expected_revision}; read it and decide again", None
                )
            return None
        stored = current.stored
        if stored.operation_id == operation_id:
            if stored.body != body:
                raise RefusedError(
                    f"record {keys.record_id}: operation {operation_id} is revision {stored.revision} already, with "
                    f"another body; every write needs an id of its own"
                )
            return stored
        if self._past(keys, operation_id, current.entry) is not None:
            raise ConflictError(f"record {keys.record_id}: operation {operation_id} has been overtaken", stored)
        if stored.revision != expected_revision:
            raise ConflictError(
                f"record {keys.record_id}: is at revision {stored.revision}, not {expected_revision}; read it and "
                f"decide again",
                stored,
            )
        return None

    def _past(self, keys: Keys, operation_id: str, current: HistoryEntry) -> int | None:
        """The revision that an operation made which is not the current one's, if it is not forgotten."""
        key = keys.operation(operation_id)
        found = self._bucket.get("reading the history", key)
        if found is None:
            return None
        revision = decode(found[0], Past, key).entry.revision
        return revision if revision > current.revision - self._settings.history_max else None

    def _check_conditions(self, keys: Keys) -> None:
        """Refuse a store that takes conditions and ignores them, before the first write through this object."""
        if self._conditions_hold:
            return
        stage = "checking that the store keeps conditions"
        self._bucket.put(stage, keys.probe, b"")
        try:
            ignored = [t for t in (None, '"0"') if self._bucket.put_after(stage, keys.probe, b"", t)]
        except LostAnswerError as e:
            raise ControlPlaneUnavailableError(str(e)) from e
        if ignored:
            raise RefusedError(
                f"control plane {self._place}: the store puts an object although its condition does not hold "
                f"({'If-None-Match' if None in ignored else 'If-Match'}), so two coordinators could overwrite each "
                f"other: keep the record in another store, or in SQLite or etcd"
            )
        self._conditions_hold = True

    def _put_into_history(self, keys: Keys, entry: HistoryEntry) -> None:
        """Before the write that follows this one; and forget the one that is too old now."""
        stage = "keeping the history"
        data = encode(Past(LAYOUT_VERSION, entry))
        self._bucket.put(stage, keys.revision(entry.revision), data)
        self._bucket.put(stage, keys.operation(entry.operation_id), data)
        forgotten = keys.revision(entry.revision - self._settings.history_max)
        if entry.revision > self._settings.history_max and (old := self._bucket.get(stage, forgotten)) is not None:
            self._bucket.delete(stage, keys.operation(decode(old[0], Past, forgotten).entry.operation_id))
            self._bucket.delete(stage, forgotten)

    def _no_leases(self, record_id: str) -> NoLeasesError:
        return NoLeasesError(
            f"control plane {self._place}: keeps no leases, so nobody can wait for, hold or take over the leadership "
            f"of record {record_id!r}: run one coordinator, that of the trainer, and see that no second one is "
            f"started; for standby coordinators keep the record in SQLite or etcd"
        )


def _unknown(error: Exception, operation_id: str) -> UnknownOutcomeError:
    return UnknownOutcomeError(
        f"{error}; operation {operation_id} may have taken effect: read it back with operation_revision", operation_id
    )


def _keys(record_id: str) -> Keys:
    check_text("record id", record_id)
    return Keys(record_id)
