"""The control plane's SQLite file: its schema, how it comes about whole, and how an older one is brought forward."""

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path

from dcr.control_plane.sqlite_lease import SCHEMA as LEASE_SCHEMA
from dcr.protocol.errors import RefusedError

_APPLICATION_ID = 0x6463724B  # "dcrK"
_SCHEMA_VERSION = 2
_FIRST_VERSION = 1
"""The schema before leases; it is brought forward where it is opened."""
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE record (record_id TEXT PRIMARY KEY, revision INTEGER NOT NULL, operation_id TEXT NOT NULL,
    body BLOB NOT NULL) STRICT;
CREATE TABLE operation (record_id TEXT NOT NULL, revision INTEGER NOT NULL, operation_id TEXT NOT NULL,
    actor TEXT NOT NULL, reason TEXT NOT NULL, time_s REAL NOT NULL, version INTEGER, digest TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (record_id, revision), UNIQUE (record_id, operation_id)) STRICT;
CREATE TABLE registry (record_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (record_id, kind, name)) STRICT;
{LEASE_SCHEMA}
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""
_FORWARD = (
    *("ALTER TABLE operation ADD COLUMN version INTEGER", LEASE_SCHEMA),
    *("ALTER TABLE operation ADD COLUMN digest TEXT NOT NULL DEFAULT ''", f"PRAGMA user_version = {_SCHEMA_VERSION}"),
)


def create_file(path: Path) -> None:
    """Build the file under another name, then link it into place unless another process was faster."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as building:
        new = Path(building) / "new.db"
        new.touch(0o600)
        new.chmod(0o600)  # whatever the umask says
        connection = sqlite3.connect(new, isolation_level=None)
        try:
            connection.executescript(_SCHEMA)
        finally:
            connection.close()  # folds the write-ahead log into the file
        _sync(new)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(new)
    _sync(path.parent)


def check_file(connection: sqlite3.Connection, path: Path) -> None:
    """Bring an older schema forward; RefusedError if the file is not a control plane that this dcr knows."""
    application_id, version, journal = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "journal_mode")
    )
    if application_id != _APPLICATION_ID:
        raise RefusedError(f"control plane file {path}: a SQLite database of something else; check the address")
    if version == _FIRST_VERSION:
        _bring_forward(connection)
    elif version != _SCHEMA_VERSION:
        raise RefusedError(
            f"control plane file {path}: schema {version}, while this dcr knows {_SCHEMA_VERSION}; use the "
            f"dcr that wrote it, or a newer one"
        )
    if journal != "wal":
        raise RefusedError(
            f"control plane file {path}: journal mode {journal} instead of wal; it was changed by hand, or "
            f"the file system cannot share memory"
        )


def _bring_forward(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == _FIRST_VERSION:  # nobody was faster
            for statement in _FORWARD:
                connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
