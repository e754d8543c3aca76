import os
import sqlite3
import stat

import pytest

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import (
    ControlPlaneSettings,
    ControlPlaneUnavailableError,
)
from dcr.protocol.errors import RefusedError


def opened(path, **bounds):
    return open_control_plane(f"sqlite://{path}", ControlPlaneSettings(**bounds))


def write(plane, expected, body, operation_id, record_id="run"):
    return plane.compare_and_set(record_id, expected, body, operation_id=operation_id, actor="t", reason="because")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record.db"


@pytest.fixture
def plane(path):
    plane = opened(path)
    yield plane
    plane.close()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o277])
def test_the_file_is_its_owners_alone_whatever_the_umask(tmp_path, umask):
    folder = tmp_path / "new" if umask == 0 else tmp_path
    before = os.umask(umask)
    try:
        plane = opened(folder / "record.db")
        write(plane, None, b"x", "a")
    finally:
        os.umask(before)
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in folder.iterdir()}
    assert modes == dict.fromkeys(("record.db", "record.db-wal", "record.db-shm"), 0o600)
    assert umask or stat.S_IMODE(folder.stat().st_mode) == 0o700
    plane.close()


def test_durable_and_wal(path, plane):
    write(plane, None, b"x", "a")
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    other.close()
    assert plane._connection.execute("PRAGMA synchronous").fetchone() == (2,)


@pytest.mark.parametrize(
    ("statement", "named"),
    [("PRAGMA user_version = 3", "schema 3"), ("PRAGMA application_id = 5", "something else")],
)
def test_a_newer_schema_and_a_strange_database_are_refused_unchanged(path, statement, named):
    opened(path).close()
    other = sqlite3.connect(path)
    other.execute(statement)
    other.close()
    before = path.read_bytes()
    with pytest.raises(RefusedError, match=named):
        opened(path)
    assert path.read_bytes() == before


def test_a_file_from_before_leases_is_brought_forward_with_all_it_holds(path):
    plane = opened(path)
    write(plane, None, b"x", "a")
    plane.close()
    other = sqlite3.connect(path)
    other.executescript(
        "DROP TABLE lease; ALTER TABLE operation DROP COLUMN version;"
        "ALTER TABLE operation DROP COLUMN digest; PRAGMA user_version = 1"
    )
    other.close()
    older = [opened(path) for _ in range(2)]
    assert older[1].read("run").body == b"x"
    (entry,) = older[1].history("run", 9)
    assert (entry.operation_id, entry.version, entry.digest) == ("a", None, "")
    lease = older[0].acquire("run", "one", 60)
    assert older[1].leader("run") == lease
    for plane in older:
        plane.close()
    other = sqlite3.connect(path)
    assert other.execute("PRAGMA user_version").fetchone() == (2,)
    other.close()


def test_a_lease_of_another_boot_has_ended(path):
    plane = opened(path)
    lease = plane.acquire("run", "one", 3600)
    other = sqlite3.connect(path)
    other.execute("UPDATE lease SET boot = 'the-boot-before'")
    other.commit()
    other.close()
    assert plane.leader("run") is None
    assert plane.acquire("run", "two", 60).token == lease.token + 1
    plane.close()


def test_damage_is_named(path):
    path.write_bytes(b"not a database at all, but long enough to look like one" * 100)
    with pytest.raises(ControlPlaneUnavailableError, match="NOTADB"):
        opened(path)
    path.unlink()
    plane = opened(path)
    for i in range(40):
        write(plane, i or None, os.urandom(3000), f"op{i}")
    plane.close()
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)  # the schema's page is left, the tables' pages are not
    path.write_bytes(data)
    plane = opened(path)
    with pytest.raises(ControlPlaneUnavailableError, match="damaged"):
        plane.read("run")
    with pytest.raises(ControlPlaneUnavailableError, match="damaged"):
        write(plane, 40, b"x", "late")
    plane.close()


def test_a_locked_file_is_unavailable_in_bounded_time_and_usable_after(path):
    plane = opened(path, busy_timeout_s=0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ControlPlaneUnavailableError, match="busy_timeout_s"):
        write(plane, None, b"x", "a")
    assert plane.read("run") is None  # readers do not wait for writers
    other.execute("ROLLBACK")
    other.close()
    assert write(plane, None, b"x", "a").revision == 1
    plane.close()


def test_a_removed_or_replaced_file_takes_no_more_writes(path):
    plane = opened(path)
    write(plane, None, b"x", "a")
    path.rename(path.with_name("moved.db"))
    with pytest.raises(ControlPlaneUnavailableError, match="removed or replaced"):
        write(plane, 1, b"y", "b")
    opened(path).close()
    with pytest.raises(ControlPlaneUnavailableError, match="removed or replaced"):
        plane.read("run")
    plane.close()


@pytest.mark.parametrize(
    "address",
    ["sqlite:relative.db", "sqlite://host/x.db", "sqlite:///", "redis://h", "/x.db", "sqlite:///x.db?mode=ro", ""],
)
def test_other_addresses_are_refused(address):
    with pytest.raises(RefusedError, match="sqlite:///absolute"):
        open_control_plane(address)


def test_an_address_may_hold_escapes_and_a_missing_grandparent_is_named(tmp_path):
    plane = open_control_plane(f"sqlite://{tmp_path}/my%20record%23.db")
    plane.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["my record#.db"]
    with pytest.raises(ControlPlaneUnavailableError, match="No such file"):
        opened(tmp_path / "no" / "such" / "record.db")


def test_bounds_must_be_positive():
    with pytest.raises(RefusedError):
        ControlPlaneSettings(record_bytes_max=0)
    with pytest.raises(RefusedError):
        ControlPlaneSettings(busy_timeout_s=0)
