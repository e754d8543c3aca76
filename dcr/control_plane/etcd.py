"""The control plane of a cluster: a prefix in etcd.

The record is one key, and every write of it one transaction that compares the key's mod_revision, and with a lease the
create_revision of the leader's key: the fencing token (DESIGN D1, D16).  The leader's key hangs on a lease of etcd,
which removes it when nobody renews the lease.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from dcr.control_plane.etcd_address import EtcdAddress
from dcr.control_plane.etcd_keys import (
    Keys,
    after,
    decode_entry,
    decode_leader,
    decode_stored,
    encode_entry,
    encode_leader,
    encode_stored,
    name_of,
)
from dcr.control_plane.etcd_requests import EtcdRefusedError, EtcdRequests, LostAnswerError, decode, encode
from dcr.control_plane.interface import (
    ConflictError,
    ControlPlaneSettings,
    HistoryEntry,
    Stored,
    UnknownOutcomeError,
    check_entry,
    check_text,
    check_write,
)
from dcr.control_plane.lease import Lease, check_lease_of, check_lease_s, held, lost
from dcr.protocol.errors import DcrError, RefusedError

_Operation = dict[str, Any]
_Pair = dict[str, Any]


class EtcdControlPlane:
    """A ControlPlane under a prefix in etcd (see ``interface.ControlPlane``).

    Args:
        address: where, and how to be let in.
        settings: bounds; ``busy_timeout_s`` is shared out over the members, for each request anew.

    Raises:
        RefusedError: etcd does not let this user in, or certificates or password are no good.
        ControlPlaneUnavailableError: no member of the cluster could be asked.
    """

    leases = True

    def __init__(self, address: EtcdAddress, settings: ControlPlaneSettings) -> None:
        self._prefix = address.prefix
        self._settings = settings
        self._requests = EtcdRequests(address, settings.busy_timeout_s)
        self._read("opening it", [_range(f"/{self._prefix}/", all_of_it=True, count_only=True)])

    def read(self, record_id: str) -> Stored | None:
        """See ControlPlane."""
        keys = self._keys(record_id)
        (found,) = self._read("reading the record", [_range(keys.record)])
        return _stored(found, keys)

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
        check_lease_of(lease, record_id)
        keys = self._keys(record_id)
        stored = Stored((expected_revision or 0) + 1, body, operation_id)
        looked_at = [_range(keys.record), _range(keys.operation(operation_id)), _range(keys.leader)]
        forgotten = keys.revision(max(0, stored.revision - self._settings.history_max))
        *found, oldest = self._read("reading before a write", [*looked_at, _range(forgotten)])
        if (again := self._settled(keys, stored, expected_revision, lease, found)) is not None:
            return again
        compare = [_compare("MOD", keys.record, int(found[0][0]["mod_revision"]) if found[0] else 0)]
        if lease is not None:
            compare.append(_compare("CREATE", keys.leader, lease.token))
        entry = HistoryEntry(stored.revision, operation_id, actor, reason, time.time(), version, digest)
        writes = [
            _put(keys.record, encode_stored(stored)),
            _put(keys.revision(stored.revision), encode_entry(entry)),
            _put(keys.operation(operation_id), str(stored.revision).encode()),
        ]
        if oldest:
            gone = decode_entry(decode(oldest[0]["value"]), forgotten)
            writes += [_delete(forgotten), _delete(keys.operation(gone.operation_id))]
        try:
            done, found = self._transaction("writing the record", compare, writes, looked_at)
        except LostAnswerError as e:
            raise UnknownOutcomeError(
                f"{e}; operation {operation_id} may have taken effect: read it back with operation_revision",
                operation_id,
            ) from e
        if done:
            return stored
        if (again := self._settled(keys, stored, expected_revision, lease, found)) is not None:
            return again
        # Overtaken between reading and writing, by a record that was removed and made anew up to this revision.
        raise ConflictError(f"record {record_id}: was written by somebody else meanwhile", _stored(found[0], keys))

    def operation_revision(self, record_id: str, operation_id: str) -> int | None:
        """See ControlPlane."""
        check_text("operation id", operation_id)
        keys = self._keys(record_id)
        (found,) = self._read("reading the history", [_range(keys.operation(operation_id))])
        return int(decode(found[0]["value"])) if found else None

    def history(self, record_id: str, limit: int) -> list[HistoryEntry]:
        """See ControlPlane."""
        keys = self._keys(record_id)
        limit = min(limit, self._settings.history_max)
        if limit < 1:
            return []
        asked = _range(keys.history, all_of_it=True, limit=limit, sort_order="DESCEND", sort_target="KEY")
        (found,) = self._read("reading the history", [asked])
        return [decode_entry(decode(pair["value"]), decode(pair["key"]).decode()) for pair in found]

    # ------------------------------------------------------------ leadership

    def acquire(self, record_id: str, holder: str, lease_s: float, *, replaces: int | None = None) -> Lease:
        """See ControlPlane."""
        check_text("holder", holder)
        check_lease_s(lease_s)
        keys = self._keys(record_id)
        current = self.leader(record_id)
        if current is not None:
            if current.token != replaces:
                raise held(record_id, current)
            gone = [_compare("CREATE", keys.leader, current.token)]
            self._transaction("taking the lease over", gone, [_delete(keys.leader)], [], repeat=True)
        seconds = math.ceil(lease_s)
        granted = self._requests.ask("granting a lease", "lease/grant", {"TTL": str(seconds), "ID": "0"})
        number = int(granted["ID"])
        try:
            put = _put(keys.leader, encode_leader(holder, float(seconds)))
            put["request_put"]["lease"] = str(number)
            free = [_compare("CREATE", keys.leader, 0)]
            self._transaction("acquiring the lease", free, [put], [], repeat=True)
            won = self.leader(record_id)
        except BaseException:
            with contextlib.suppress(DcrError):  # it runs out by itself
                self._revoke(number)
            raise
        if won is None or won.handle != number:
            self._revoke(number)
            raise held(record_id, won)
        return won

    def renew(self, lease: Lease) -> None:
        """See ControlPlane."""
        answer = self._requests.ask("renewing the lease", "lease/keepalive", {"ID": str(lease.handle)})
        current = self.leader(lease.record_id)
        if int(answer.get("result", {}).get("TTL", 0)) < 1 or current is None or current.token != lease.token:
            raise lost(lease, current)

    def release(self, lease: Lease) -> None:
        """See ControlPlane."""
        self._revoke(lease.handle)

    def leader(self, record_id: str) -> Lease | None:
        """See ControlPlane."""
        keys = self._keys(record_id)
        (found,) = self._read("looking up the lease", [_range(keys.leader)])
        return _lease(found, keys)

    def lease_left_s(self, lease: Lease) -> float:
        """See ControlPlane; etcd tells whole seconds."""
        answer = self._requests.ask("asking how long the lease lasts", "lease/timetolive", {"ID": str(lease.handle)})
        return max(0.0, float(answer.get("TTL", 0)))

    def _revoke(self, number: int) -> None:
        try:
            self._requests.ask("releasing the lease", "lease/revoke", {"ID": str(number)})
        except EtcdRefusedError as e:
            if not e.not_found:
                raise

    # ------------------------------------------------------------ the registry

    def register(self, record_id: str, kind: str, name: str, value: bytes) -> None:
        """See ControlPlane.  Those who register at the same moment may exceed the bound by their number."""
        check_entry(self._settings, (record_id, kind, name), value)
        keys, stage = self._keys(record_id), f"registering {kind} {name}"
        every = _range(keys.registry(kind), all_of_it=True, keys_only=True, limit=self._settings.registry_entries_max)
        same, others = self._read(stage, [_range(keys.registry(kind, name)), every])
        if not same and len(others) >= self._settings.registry_entries_max:
            raise RefusedError(
                f"registry of record {record_id}: {kind} {name} would exceed registry_entries_max = "
                f"{self._settings.registry_entries_max}; unregister what is gone"
            )
        self._transaction(stage, [], [_put(keys.registry(kind, name), value)], [], repeat=True)

    def lookup(self, record_id: str, kind: str, name: str) -> bytes | None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), b"")
        key = self._keys(record_id).registry(kind, name)
        (found,) = self._read(f"looking up {kind} {name}", [_range(key)])
        return _value(found[0]) if found else None

    def registered(self, record_id: str, kind: str) -> dict[str, bytes]:
        """See ControlPlane."""
        check_text("kind", kind)
        (found,) = self._read(f"listing {kind}", [_range(self._keys(record_id).registry(kind), all_of_it=True)])
        return dict(sorted((name_of(decode(pair["key"])), _value(pair)) for pair in found))

    def unregister(self, record_id: str, kind: str, name: str) -> None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), b"")
        key = self._keys(record_id).registry(kind, name)
        self._transaction(f"unregistering {kind} {name}", [], [_delete(key)], [], repeat=True)

    def close(self) -> None:
        """See ControlPlane."""
        self._requests.close()

    # ------------------------------------------------------------ inside

    def _keys(self, record_id: str) -> Keys:
        check_text("record id", record_id)
        return Keys(self._prefix, record_id)

    def _settled(
        self,
        keys: Keys,
        stored: Stored,
        expected_revision: int | None,
        lease: Lease | None,
        found: Sequence[list[_Pair]],
    ) -> Stored | None:
        """What the keys say of a write before it is tried, and after it was refused; None if nothing speaks against.

        Raises:
            ConflictError: see ControlPlane.compare_and_set, as of the others.
            LeadershipLostError: the lease is not the record's.
            RefusedError: the operation id was used with another body.
        """
        record, operation, leader = found
        current = _stored(record, keys)
        if current is not None and current.operation_id == stored.operation_id:
            if current.body != stored.body:
                raise RefusedError(
                    f"record {keys.record_id}: operation {stored.operation_id} is revision {current.revision} already, "
                    f"with another body; every write needs an id of its own"
                )
            return current
        if lease is not None:
            now = _lease(leader, keys)
            if now is None or now.token != lease.token:
                raise lost(lease, now)
        if operation:
            raise ConflictError(f"record {keys.record_id}: operation {stored.operation_id} has been overtaken", current)
        if (None if current is None else current.revision) != expected_revision:
            at = "absent" if current is None else f"at revision {current.revision}"
            raise ConflictError(
                f"record {keys.record_id}: is {at}, not {expected_revision}; read it and decide again", current
            )
        return None

    def _read(self, stage: str, ranges: list[_Operation]) -> list[list[_Pair]]:
        """Ranges of one moment, linearizable: the pairs of each."""
        return self._transaction(stage, [], ranges, [], repeat=True)[1]

    def _transaction(
        self,
        stage: str,
        compare: list[_Pair],
        success: list[_Operation],
        failure: list[_Operation],
        *,
        repeat: bool = False,
    ) -> tuple[bool, list[list[_Pair]]]:
        """Whether all comparisons held, and the pairs of the ranges then asked for."""
        body = {"compare": compare, "success": success, "failure": failure}
        send: Callable[[str, str, dict[str, Any]], dict[str, Any]]
        send = self._requests.ask if repeat else self._requests.write
        answer = send(stage, "kv/txn", body)
        pairs = [r["response_range"].get("kvs", []) for r in answer.get("responses", []) if "response_range" in r]
        return bool(answer.get("succeeded")), pairs


def _range(key: str, *, all_of_it: bool = False, **more: Any) -> _Operation:
    asked = {"key": encode(key), **more}
    if all_of_it:
        asked["range_end"] = encode(after(key))
    return {"request_range": asked}


def _put(key: str, value: bytes) -> _Operation:
    return {"request_put": {"key": encode(key), "value": encode(value)}}


def _delete(key: str) -> _Operation:
    return {"request_delete_range": {"key": encode(key)}}


def _compare(target: str, key: str, revision: int) -> _Pair:
    return {
        "target": target,
        "result": "EQUAL",
        "key": encode(key),
        f"{target.lower()}_revision": str(revision),
    }


def _value(pair: _Pair) -> bytes:
    return decode(pair.get("value", ""))


def _stored(found: list[_Pair], keys: Keys) -> Stored | None:
    return decode_stored(_value(found[0]), keys.record) if found else None


def _lease(found: list[_Pair], keys: Keys) -> Lease | None:
    if not found:
        return None
    holder, lease_s = decode_leader(_value(found[0]), keys.leader)
    return Lease(keys.record_id, holder, int(found[0]["create_revision"]), lease_s, int(found[0].get("lease", 0)))
