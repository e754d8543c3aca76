import contextlib
import itertools
import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import (
    ConflictError,
    ControlPlaneSettings,
    ControlPlaneUnavailableError,
    HistoryEntry,
    Stored,
)
from dcr.protocol.errors import RefusedError

_ids = itertools.count()


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


def test_create_only_if_absent_then_only_from_the_current_revision(plane):
    assert plane.read("run") is None
    assert write(plane, None, b"zero", "a") == Stored(1, b"zero", "a")
    with pytest.raises(ConflictError) as refused:
        write(plane, None, b"other", "b")
    assert refused.value.current == Stored(1, b"zero", "a")
    assert write(plane, 1, b"one", "c") == Stored(2, b"one", "c")
    with pytest.raises(ConflictError, match="at revision 2, not 1"):
        write(plane, 1, b"late", "d")
    with pytest.raises(ConflictError) as absent:
        write(plane, 7, b"x", "e", record_id="another")
    assert absent.value.current is None
    assert plane.read("run") == Stored(2, b"one", "c")


def test_a_repeated_operation_takes_effect_once(plane):
    first = write(plane, None, b"zero", "a")
    assert write(plane, None, b"zero", "a") == first
    with pytest.raises(RefusedError, match="another body"):
        write(plane, None, b"forged", "a")
    write(plane, 1, b"one", "b")
    with pytest.raises(ConflictError, match="overtaken") as overtaken:
        write(plane, 2, b"zero", "a")
    assert overtaken.value.current == Stored(2, b"one", "b")
    assert plane.read("run").revision == 2


def test_read_back_history_and_its_bound(path):
    plane = opened(path, history_max=3)
    for i in range(5):
        write(plane, i or None, b"%d" % i, f"op{i}")
    assert [plane.operation_revision("run", f"op{i}") for i in range(6)] == [None, None, 3, 4, 5, None]
    history = plane.history("run", 10)
    assert [(e.revision, e.operation_id) for e in history] == [(5, "op4"), (4, "op3"), (3, "op2")]
    assert isinstance(history[0], HistoryEntry)
    assert (history[0].actor, history[0].reason) == ("t", "because")
    assert [e.revision for e in plane.history("run", 1)] == [5]
    assert plane.history("run", 0) == []
    # A forgotten operation is not done again either.
    with pytest.raises(ConflictError):
        write(plane, None, b"0", "op0")
    plane.close()


def test_registry(path):
    plane = opened(path, registry_entries_max=2, registry_value_bytes_max=4)
    plane.register("run", "node", "a", b"1")
    plane.register("run", "node", "b", b"2")
    plane.register("run", "node", "a", b"3")
    plane.register("run", "leader", "a", b"9")
    plane.register("other", "node", "z", b"8")
    assert plane.lookup("run", "node", "a") == b"3"
    assert plane.lookup("run", "node", "c") is None
    assert plane.registered("run", "node") == {"a": b"3", "b": b"2"}
    with pytest.raises(RefusedError, match="registry_entries_max"):
        plane.register("run", "node", "c", b"4")
    with pytest.raises(RefusedError, match="registry_value_bytes_max"):
        plane.register("run", "node", "a", b"12345")
    plane.unregister("run", "node", "b")
    plane.unregister("run", "node", "b")
    plane.register("run", "node", "c", b"4")
    assert plane.registered("run", "node") == {"a": b"3", "c": b"4"}
    assert plane.read("run") is None
    plane.close()


def test_out_of_bounds_is_refused_and_changes_nothing(path):
    plane = opened(path, record_bytes_max=10)
    write(plane, None, b"x" * 10, "a")
    refused = [
        ("run", b"x" * 11, "b", "t", "r", "record_bytes_max"),
        ("", b"x", "b", "t", "r", "record id"),
        ("run", b"x", "b" * 201, "t", "r", "operation id"),
        ("run", b"x", "b", "t\n", "r", "actor"),
        ("run", b"x", "b", "t", "r" * 4097, "reason"),
    ]
    for record_id, body, operation_id, actor, reason, named in refused:
        with pytest.raises(RefusedError, match=named):
            plane.compare_and_set(record_id, 1, body, operation_id=operation_id, actor=actor, reason=reason)
    assert plane.read("run") == Stored(1, b"x" * 10, "a")
    plane.close()


_writes = st.lists(
    st.tuples(
        st.integers(0, 1),  # which of two connections
        st.one_of(st.none(), st.integers(0, 6)),  # expected revision
        st.binary(max_size=4),
        st.integers(0, 5),  # operation id, so that repetitions happen
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_writes)
def test_two_connections_behave_as_one_register(path, writes):
    """Against a model in ten lines, through two connections to one file, one record an example."""
    planes = (opened(path), opened(path))
    record_id, current, done = f"r{next(_ids)}", None, {}
    try:
        for which, expected, body, number in writes:
            operation_id = f"op{number}"
            try:
                got = write(planes[which], expected, body, operation_id, record_id)
            except ConflictError as conflict:
                got = ("conflict", conflict.current)
            except RefusedError:
                got = "refused"
            if current is not None and current.operation_id == operation_id:
                assert got == (current if current.body == body else "refused")
            elif operation_id in done or expected != (current.revision if current else None):
                assert got == ("conflict", current)
            else:
                current = Stored((current.revision if current else 0) + 1, body, operation_id)
                done[operation_id] = current.revision
                assert got == current
            for plane in planes:
                assert plane.read(record_id) == current
                assert plane.operation_revision(record_id, operation_id) == done.get(operation_id)
    finally:
        for plane in planes:
            plane.close()


def test_threads_share_one_control_plane_and_every_revision_has_one_winner(plane):
    write(plane, None, b"", "start")
    barrier = threading.Barrier(8)

    def contend(worker):
        won = []
        for revision in range(1, 11):
            barrier.wait(60)
            with contextlib.suppress(ConflictError):
                won.append(write(plane, revision, b"%d" % worker, f"{worker}.{revision}").revision)
        return won

    with ThreadPoolExecutor(8) as pool:
        won = sorted(itertools.chain.from_iterable(pool.map(contend, range(8))))
    assert won == list(range(2, 12))


_CONTENDER = """
import json, sys
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ConflictError
path, worker, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
plane = open_control_plane(f"sqlite://{path}")          # all eight may find the file missing
plane.register("run", "contender", worker, b"")
while len(plane.registered("run", "contender")) < 8: pass
won = []
for r in range(rounds):
    try:
        won.append(plane.compare_and_set("run", r or None, worker.encode(), operation_id=f"{worker}.{r}", actor=worker,
                                         reason="contend").revision)
    except ConflictError as conflict:
        assert conflict.current.revision > r, conflict.current
print(json.dumps(won))
"""


def test_eight_processes_one_winner_a_round(path):
    rounds = 15
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", _CONTENDER, str(path), str(i), str(rounds)], stdout=subprocess.PIPE, text=True
        )
        for i in range(8)
    ]
    won = {i: json.loads(c.communicate(timeout=120)[0]) for i, c in enumerate(contenders)}
    assert all(c.returncode == 0 for c in contenders)
    assert sorted(itertools.chain.from_iterable(won.values())) == list(range(1, rounds + 1))
    plane = opened(path)
    assert {e.revision: e.actor for e in plane.history("run", 100)} == {r: str(i) for i in won for r in won[i]}
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
    [("PRAGMA user_version = 2", "schema 2"), ("PRAGMA application_id = 5", "something else")],
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


def test_closed_and_forked(path):
    plane = opened(path)
    child = os.fork()
    if child == 0:
        try:
            plane.read("run")
        except ControlPlaneUnavailableError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    plane.close()
    plane.close()
    with pytest.raises(ControlPlaneUnavailableError, match="closed"):
        plane.read("run")


@pytest.mark.parametrize(
    "address",
    ["sqlite:relative.db", "sqlite://host/x.db", "sqlite:///", "etcd://h", "/x.db", "sqlite:///x.db?mode=ro", ""],
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
