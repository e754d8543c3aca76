"""The control plane of one machine: a SQLite file, with nothing to start.

The file is built whole under another name and then linked into place, so that no process ever sees it without its
schema.  Readers and writers are any number of threads and processes of one machine; write-ahead logging needs shared
memory, so a network file system will not do.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
from dcr.control_plane.lease import Lease, check_lease_of, check_lease_s
from dcr.control_plane.sqlite_file import check_file, create_file
from dcr.control_plane.sqlite_lease import check_held, current_lease, end, grant, left_s, prolong
from dcr.protocol.errors import RefusedError

_ADVICE = (
    ("SQLITE_BUSY", "other processes kept it locked for longer than busy_timeout_s; find the one that hangs"),
    ("SQLITE_FULL", "the disk is full; free some space"),
    ("SQLITE_IOERR", "reading or writing failed; check the disk's free space, quota and health"),
    ("SQLITE_READONLY", "it cannot be written; check the permissions of the file and of its folder"),
    ("SQLITE_CANTOPEN", "it cannot be opened; check the permissions of the file and of its folder"),
    ("SQLITE_CORRUPT", "it is damaged; stop every process of the run and restore a copy"),
    ("SQLITE_NOTADB", "it is not a SQLite database; check the address"),
)


class SqliteControlPlane:
    """A ControlPlane in one SQLite file (see ``interface.ControlPlane``).

    Args:
        path: absolute path of the file.  Created readable and writable by its owner alone where it is missing, and so
            is its folder; the folder's own parent must exist.
        settings: bounds.

    Raises:
        RefusedError: the file is something else, or was written by a newer dcr.
        ControlPlaneUnavailableError: the file cannot be created, opened or read.
    """

    leases = True

    def __init__(self, path: Path, settings: ControlPlaneSettings) -> None:
        if not path.is_absolute():
            raise RefusedError(f"control plane file {path}: the path must be absolute")
        self._path = path
        self._settings = settings
        self._lock = threading.Lock()
        self._closed = False
        self._connection: sqlite3.Connection | None = None
        self._inode = (0, 0)
        self._process = os.getpid()
        try:
            if not path.exists():
                create_file(path)
        except OSError as error:
            raise ControlPlaneUnavailableError(
                f"control plane file {path}: cannot be created: {error.strerror}; its folder must exist and be writable"
            ) from error
        except sqlite3.Error as error:
            raise self._unavailable("creating it", error) from error
        with self._connected("opening it"):
            pass

    def read(self, record_id: str) -> Stored | None:
        """See ControlPlane."""
        check_text("record id", record_id)
        with self._connected("reading the record") as connection:
            return _read(connection, record_id)

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
        with self._transaction("writing the record", operation_id) as connection:
            current = _read(connection, record_id)
            if current is not None and current.operation_id == operation_id:
                if current.body != body:
                    raise RefusedError(
                        f"record {record_id}: operation {operation_id} is revision {current.revision} already, with "
                        f"another body; every write needs an id of its own"
                    )
                return current
            if lease is not None:
                check_held(connection, lease)
            if _operation_revision(connection, record_id, operation_id) is not None:
                raise ConflictError(f"record {record_id}: operation {operation_id} has been overtaken", current)
            revision = None if current is None else current.revision
            if revision != expected_revision:
                raise ConflictError(
                    f"record {record_id}: is at revision {revision}, not {expected_revision}; read it and decide again",
                    current,
                )
            stored = Stored((revision or 0) + 1, body, operation_id)
            connection.execute(
                "INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?)", (record_id, stored.revision, operation_id, body)
            )
            connection.execute(
                "INSERT INTO operation VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (record_id, stored.revision, operation_id, actor, reason, time.time(), version, digest),
            )
            connection.execute(
                "DELETE FROM operation WHERE record_id = ? AND revision <= ?",
                (record_id, stored.revision - self._settings.history_max),
            )
        return stored

    def operation_revision(self, record_id: str, operation_id: str) -> int | None:
        """See ControlPlane."""
        check_text("record id", record_id)
        check_text("operation id", operation_id)
        with self._connected("reading the history") as connection:
            return _operation_revision(connection, record_id, operation_id)

    def history(self, record_id: str, limit: int) -> list[HistoryEntry]:
        """See ControlPlane."""
        check_text("record id", record_id)
        with self._connected("reading the history") as connection:
            rows = connection.execute(
                "SELECT revision, operation_id, actor, reason, time_s, version, digest FROM operation "
                "WHERE record_id = ? ORDER BY revision DESC LIMIT ?",
                (record_id, max(0, min(limit, self._settings.history_max))),
            )
            return [HistoryEntry(*row) for row in rows]

    def acquire(self, record_id: str, holder: str, lease_s: float, *, replaces: int | None = None) -> Lease:
        """See ControlPlane."""
        check_text("record id", record_id)
        check_text("holder", holder)
        check_lease_s(lease_s)
        with self._transaction("acquiring the lease") as connection:
            return grant(connection, record_id, holder, lease_s, replaces)

    def renew(self, lease: Lease) -> None:
        """See ControlPlane."""
        with self._transaction("renewing the lease") as connection:
            prolong(connection, lease)

    def release(self, lease: Lease) -> None:
        """See ControlPlane."""
        with self._transaction("releasing the lease") as connection:
            end(connection, lease)

    def leader(self, record_id: str) -> Lease | None:
        """See ControlPlane."""
        check_text("record id", record_id)
        with self._connected("looking up the lease") as connection:
            return current_lease(connection, record_id)

    def lease_left_s(self, lease: Lease) -> float:
        """See ControlPlane."""
        with self._connected("asking how long the lease lasts") as connection:
            return left_s(connection, lease)

    def register(self, record_id: str, kind: str, name: str, value: bytes) -> None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), value)
        with self._transaction(f"registering {kind} {name}") as connection:
            others = connection.execute(
                "SELECT count(*) FROM registry WHERE record_id = ? AND kind = ? AND name <> ?", (record_id, kind, name)
            ).fetchone()[0]
            if others >= self._settings.registry_entries_max:
                raise RefusedError(
                    f"registry of record {record_id}: {kind} {name} would exceed registry_entries_max = "
                    f"{self._settings.registry_entries_max}; unregister what is gone"
                )
            connection.execute("INSERT OR REPLACE INTO registry VALUES (?, ?, ?, ?)", (record_id, kind, name, value))

    def lookup(self, record_id: str, kind: str, name: str) -> bytes | None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), b"")
        with self._connected(f"looking up {kind} {name}") as connection:
            row = connection.execute(
                "SELECT value FROM registry WHERE record_id = ? AND kind = ? AND name = ?", (record_id, kind, name)
            ).fetchone()
        return None if row is None else row[0]

    def registered(self, record_id: str, kind: str) -> dict[str, bytes]:
        """See ControlPlane."""
        check_text("record id", record_id)
        check_text("kind", kind)
        with self._connected(f"listing {kind}") as connection:
            rows = connection.execute(
                "SELECT name, value FROM registry WHERE record_id = ? AND kind = ? ORDER BY name", (record_id, kind)
            )
            return dict(rows.fetchall())

    def unregister(self, record_id: str, kind: str, name: str) -> None:
        """See ControlPlane."""
        check_entry(self._settings, (record_id, kind, name), b"")
        with self._transaction(f"unregistering {kind} {name}") as connection:
            connection.execute(
                "DELETE FROM registry WHERE record_id = ? AND kind = ? AND name = ?", (record_id, kind, name)
            )

    def close(self) -> None:
        """See ControlPlane."""
        with self._lock:
            self._closed = True
            self._disconnect()

    @contextlib.contextmanager
    def _transaction(self, stage: str, operation_id: str | None = None) -> Iterator[sqlite3.Connection]:
        """A write transaction: committed at the end of the block, undone when the block raises.

        With an operation id, a failing commit is an UnknownOutcomeError; without one the write is safe to repeat.
        """
        with self._connected(stage) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
            except sqlite3.Error:
                self._disconnect()  # undoes the transaction, even where a rollback would fail
                raise
            except BaseException:
                connection.rollback()
                raise
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                # The log may or may not hold the commit.  A new connection recovers from what is on disk.
                self._disconnect()
                if operation_id is None:
                    raise
                raise UnknownOutcomeError(
                    f"{self._unavailable(stage, error)}; operation {operation_id} may have taken effect: read it back "
                    f"with operation_revision",
                    operation_id,
                ) from error

    @contextlib.contextmanager
    def _connected(self, stage: str) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone; SQLite's errors become ControlPlaneUnavailableError."""
        if os.getpid() != self._process:
            raise ControlPlaneUnavailableError(
                f"control plane file {self._path}: {stage}: opened by process {self._process}; SQLite does not survive "
                f"a fork, open it again in the child"
            )
        if not self._lock.acquire(timeout=self._settings.busy_timeout_s):
            raise ControlPlaneUnavailableError(
                f"control plane file {self._path}: {stage}: other threads kept it for longer than busy_timeout_s"
            )
        try:
            if self._closed:
                raise ControlPlaneUnavailableError(f"control plane file {self._path}: {stage}: it has been closed")
            if self._connection is None:
                self._connection = self._connect()
            # A file that was removed or replaced still takes writes, which nobody else would ever see.
            if _inode(self._path) != self._inode:
                raise ControlPlaneUnavailableError(
                    f"control plane file {self._path}: {stage}: the file was removed or replaced while in use; stop "
                    f"every process of the run and put it back"
                )
            yield self._connection
        except sqlite3.Error as error:
            raise self._unavailable(stage, error) from error
        finally:
            self._lock.release()

    def _connect(self) -> sqlite3.Connection:
        inode = _inode(self._path)
        connection = sqlite3.connect(
            f"{self._path.as_uri()}?mode=rw",
            uri=True,
            timeout=self._settings.busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            check_file(connection, self._path)
        except BaseException:
            connection.close()
            raise
        self._inode = inode
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _unavailable(self, stage: str, error: sqlite3.Error) -> ControlPlaneUnavailableError:
        code = getattr(error, "sqlite_errorname", "")
        advice = next((text for prefix, text in _ADVICE if code.startswith(prefix)), "see the cause")
        return ControlPlaneUnavailableError(
            f"control plane file {self._path}: {stage}: {error} ({code or type(error).__name__}); {advice}"
        )


def _read(connection: sqlite3.Connection, record_id: str) -> Stored | None:
    row = connection.execute(
        "SELECT revision, body, operation_id FROM record WHERE record_id = ?", (record_id,)
    ).fetchone()
    return None if row is None else Stored(*row)


def _operation_revision(connection: sqlite3.Connection, record_id: str, operation_id: str) -> int | None:
    row = connection.execute(
        "SELECT revision FROM operation WHERE record_id = ? AND operation_id = ?", (record_id, operation_id)
    ).fetchone()
    return None if row is None else int(row[0])


def _inode(path: Path) -> tuple[int, int]:
    """Device and inode of the file; (0, 0) while there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino
