"""Leases in the control plane's SQLite file: one row a record, whose token only grows (DESIGN D16).

Who shares the file shares the kernel, so its clock since boot, which nobody can set, says when a lease ends.  A lease
of another boot has ended.
"""

import math
import sqlite3
import time
from pathlib import Path

from dcr.control_plane.lease import Lease, held, lost

SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (record_id TEXT PRIMARY KEY, token INTEGER NOT NULL, holder TEXT NOT NULL,
    lease_s REAL NOT NULL, boot TEXT NOT NULL, ends_s REAL NOT NULL) STRICT;
"""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ENDED = -math.inf


def current_lease(connection: sqlite3.Connection, record_id: str) -> Lease | None:
    """The lease that is the record's now, or None."""
    row = connection.execute(
        "SELECT holder, token, lease_s FROM lease WHERE record_id = ? AND boot = ? AND ends_s > ?",
        (record_id, _boot(), _now_s()),
    ).fetchone()
    return None if row is None else Lease(record_id, *row)


def left_s(connection: sqlite3.Connection, lease: Lease) -> float:
    """See ``ControlPlane.lease_left_s``."""
    row = connection.execute(
        "SELECT ends_s FROM lease WHERE record_id = ? AND token = ? AND boot = ?",
        (lease.record_id, lease.token, _boot()),
    ).fetchone()
    return 0.0 if row is None else max(0.0, float(row[0]) - _now_s())


def grant(connection: sqlite3.Connection, record_id: str, holder: str, lease_s: float, replaces: int | None) -> Lease:
    """See ``ControlPlane.acquire``; within a write transaction, as all below."""
    current = current_lease(connection, record_id)
    if current is not None and current.token != replaces:
        raise held(record_id, current)
    row = connection.execute("SELECT token FROM lease WHERE record_id = ?", (record_id,)).fetchone()
    lease = Lease(record_id, holder, 1 if row is None else row[0] + 1, float(math.ceil(lease_s)))
    connection.execute(
        "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?, ?)",
        (record_id, lease.token, holder, lease.lease_s, _boot(), _now_s() + lease.lease_s),
    )
    return lease


def check_held(connection: sqlite3.Connection, lease: Lease) -> None:
    """Raise LeadershipLostError unless the lease is the record's."""
    current = current_lease(connection, lease.record_id)
    if current is None or current.token != lease.token:
        raise lost(lease, current)


def prolong(connection: sqlite3.Connection, lease: Lease) -> None:
    """See ``ControlPlane.renew``."""
    check_held(connection, lease)
    _set_end(connection, lease, _now_s() + lease.lease_s)


def end(connection: sqlite3.Connection, lease: Lease) -> None:
    """See ``ControlPlane.release``.  The row stays, and with it the token."""
    _set_end(connection, lease, _ENDED)


def _set_end(connection: sqlite3.Connection, lease: Lease, ends_s: float) -> None:
    connection.execute(
        "UPDATE lease SET ends_s = ? WHERE record_id = ? AND token = ?", (ends_s, lease.record_id, lease.token)
    )


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    return _BOOT.read_text().strip()
