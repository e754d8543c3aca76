"""Every clause of ``interface.ControlPlane``, on every control plane, started for real."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.control_plane.interface import ConflictError, ControlPlaneUnavailableError, HistoryEntry, Stored
from dcr.control_plane.lease import LeadershipLostError, Lease, LeaseHeldError, NoLeasesError
from dcr.protocol.errors import RefusedError

_ids = itertools.count()


def write(plane, expected, body, operation_id, record_id="run", *, lease=None):
    return plane.compare_and_set(
        record_id, expected, body, operation_id=operation_id, actor="t", reason="because", lease=lease
    )


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


def test_read_back_history_and_its_bound(place):
    plane = place.open(history_max=3)
    before = time.time()
    for i in range(5):
        write(plane, i or None, b"%d" % i, f"op{i}")
    assert [plane.operation_revision("run", f"op{i}") for i in range(6)] == [None, None, 3, 4, 5, None]
    history = plane.history("run", 10)
    assert [(e.revision, e.operation_id) for e in history] == [(5, "op4"), (4, "op3"), (3, "op2")]
    assert isinstance(history[0], HistoryEntry)
    assert (history[0].actor, history[0].reason) == ("t", "because")
    assert before <= history[2].time_s <= history[0].time_s <= time.time()
    assert [e.revision for e in plane.history("run", 1)] == [5]
    assert plane.history("run", 0) == []
    assert plane.history("other", 5) == []
    # A forgotten operation is not done again either.
    with pytest.raises(ConflictError):
        write(plane, None, b"0", "op0")


def test_the_history_has_what_the_writer_said_of_the_version(plane):
    said = {"operation_id": "a", "actor": "t", "reason": "Commit"}
    plane.compare_and_set("run", None, b"", version=7, digest="0f1e", **said)
    write(plane, 1, b"", "b")
    assert [(e.version, e.digest) for e in plane.history("run", 9)] == [(None, ""), (7, "0f1e")]
    with pytest.raises(RefusedError, match="digest must be"):
        plane.compare_and_set("run", 2, b"", version=8, digest="\n", **said)


def test_any_printable_text_and_any_bytes(place):
    plane, other = place.open(), place.open()
    record, body = "a/b %2F ü?#", bytes(range(256))
    assert write(plane, None, body, "op/1 é", record) == other.read(record)
    assert other.operation_revision(record, "op/1 é") == 1
    assert write(plane, 1, b"", "op 2", record).body == other.read(record).body == b""
    for name in ("x/y", "x", "x%2Fy"):
        plane.register(record, "kind/1", name, name.encode())
    plane.register(record, "kind", "1/x", b"")
    plane.register(record, "kinda", "y", b"")
    assert other.registered(record, "kind/1") == {"x/y": b"x/y", "x": b"x", "x%2Fy": b"x%2Fy"}
    assert other.registered(record, "kind") == {"1/x": b""}
    assert other.lookup(record, "kind", "1/x") == b""
    assert other.read("a") is None


def test_registry(place):
    plane = place.open(registry_entries_max=2, registry_value_bytes_max=4)
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


def test_out_of_bounds_is_refused_and_changes_nothing(place):
    plane = place.open(record_bytes_max=10)
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
    assert len(plane.history("run", 10)) == 1


def test_the_largest_of_everything_is_taken(plane):
    body, long, reason = os.urandom(64 * 1024), "ü" * 200, "ü" * 4096
    done = plane.compare_and_set(long, None, body, operation_id=long, actor=long, reason=reason)
    assert plane.read(long) == done == Stored(1, body, long)
    (entry,) = plane.history(long, 1)
    assert (entry.operation_id, entry.actor, entry.reason) == (long, long, reason)
    plane.register(long, long, long, b"v" * 4096)
    assert plane.registered(long, long) == {long: b"v" * 4096}


_writes = st.lists(
    st.tuples(
        st.integers(0, 1),  # which of two clients
        st.one_of(st.none(), st.integers(0, 6)),  # expected revision
        st.binary(max_size=4),
        st.integers(0, 5),  # operation id, so that repetitions happen
    ),
    max_size=25,
)


def test_two_clients_behave_as_one_register(place):
    clients = place.open(), place.open()
    settings(max_examples=place.examples)(given(_writes)(lambda writes: behaves_as_a_register(clients, writes)))()


def behaves_as_a_register(clients, writes):
    """Against a model in ten lines, one record an example."""
    record_id, current, done = f"r{next(_ids)}", None, {}
    for which, expected, body, number in writes:
        operation_id = f"op{number}"
        try:
            got = write(clients[which], expected, body, operation_id, record_id)
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
        reader = clients[1 - which]
        assert reader.read(record_id) == current
        assert reader.operation_revision(record_id, operation_id) == done.get(operation_id)


def test_threads_share_one_client_and_every_revision_has_one_winner(place):
    plane, workers = place.open(), min(8, place.contenders_max)
    write(plane, None, b"", "start")
    barrier = threading.Barrier(workers)

    def contend(worker):
        won = []
        for revision in range(1, 11):
            barrier.wait(60)
            with contextlib.suppress(ConflictError):
                won.append(write(plane, revision, b"%d" % worker, f"{worker}.{revision}").revision)
        return won

    with ThreadPoolExecutor(workers) as pool:
        won = sorted(itertools.chain.from_iterable(pool.map(contend, range(workers))))
    assert won == list(range(2, 12))


CONTENDER = """
import json, sys, time
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ConflictError, ControlPlaneSettings
address, worker, contenders, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
plane = open_control_plane(address, ControlPlaneSettings(busy_timeout_s=60))  # all of them may find the place empty
plane.register("run", "contender", worker, b"")
while len(plane.registered("run", "contender")) < contenders: time.sleep(0.02)
won = []
for r in range(rounds):
    try:
        won.append(plane.compare_and_set("run", r or None, worker.encode(), operation_id=f"{worker}.{r}", actor=worker,
                                         reason="contend").revision)
    except ConflictError as conflict:
        assert conflict.current.revision > r, conflict.current
print(json.dumps(won))
"""


@pytest.mark.parametrize(
    ("place", "contenders"),
    [
        ("sqlite", 4),
        ("etcd", 4),
        pytest.param("sqlite", 20, marks=pytest.mark.long),
        pytest.param("etcd", 20, marks=pytest.mark.long),
        pytest.param("s3", 5, marks=pytest.mark.long),  # a few do while its server is killed, in tests/faults
    ],
    indirect=["place"],
)
def test_processes_contend_and_every_revision_has_one_winner(place, contenders):
    rounds = 15
    command = [sys.executable, "-c", CONTENDER, place.address]
    processes = [
        subprocess.Popen([*command, str(i), str(contenders), str(rounds)], stdout=subprocess.PIPE, text=True)
        for i in range(contenders)
    ]
    try:
        while any(process.poll() is None for process in processes):
            assert not any(process.poll() for process in processes)  # the others would wait for it
            time.sleep(0.05)
        won = {i: json.loads(process.communicate()[0]) for i, process in enumerate(processes)}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert sorted(itertools.chain.from_iterable(won.values())) == list(range(1, rounds + 1))
    history = place.open().history("run", 100)
    assert {e.revision: e.actor for e in history} == {r: str(i) for i in won for r in won[i]}


def test_closed_and_forked(place):
    plane = place.open()
    plane.read("run")
    child = os.fork()
    if child == 0:
        try:
            plane.read("run")
        except ControlPlaneUnavailableError as error:
            os._exit(0 if "fork" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert plane.read("run") is None
    plane.close()
    plane.close()
    with pytest.raises(ControlPlaneUnavailableError, match="closed"):
        plane.read("run")
    with pytest.raises(ControlPlaneUnavailableError, match="closed"):
        write(plane, None, b"x", "a")


# ---------------------------------------------------------------- leadership


def test_who_holds_the_lease_writes_and_its_predecessors_do_not(led_place):
    old, new = led_place.open(), led_place.open()
    assert old.leader("run") is None
    first = old.acquire("run", "one", 60)
    assert (first.holder, first.lease_s) == ("one", 60.0)
    assert new.leader("run") == first
    assert write(old, None, b"0", "a", lease=first).revision == 1
    with pytest.raises(LeaseHeldError, match="one leads it") as refused:
        new.acquire("run", "two", 60)
    assert refused.value.current == first
    with pytest.raises(LeaseHeldError):
        new.acquire("run", "two", 60, replaces=first.token + 1000)

    second = new.acquire("run", "two", 60, replaces=first.token)
    assert second.token > first.token
    # The zombie's revision is right, its token is not.
    with pytest.raises(LeadershipLostError, match=r"lease \d+ of record run held by one: two leads now"):
        write(old, 1, b"zombie", "b", lease=first)
    with pytest.raises(LeadershipLostError, match="two leads now"):
        old.renew(first)
    old.release(first)
    new.renew(second)
    assert old.leader("run") == second
    assert write(new, 1, b"1", "c", lease=second) == old.read("run") == Stored(2, b"1", "c")
    assert old.operation_revision("run", "b") is None


def test_a_released_lease_is_free_at_once_and_tokens_only_grow(led):
    tokens = []
    for i in range(3):
        lease = led.acquire("run", f"l{i}", 600)
        tokens.append(lease.token)
        led.release(lease)
        led.release(lease)
        assert led.leader("run") is None
        with pytest.raises(LeadershipLostError, match="ran out or was given up"):
            write(led, None, b"", f"op{i}", lease=lease)
        with pytest.raises(LeadershipLostError, match="ran out or was given up"):
            led.renew(lease)
    assert tokens == sorted(set(tokens))
    assert led.read("run") is None


def test_a_lease_that_nobody_renews_runs_out_and_one_that_is_renewed_does_not(led):
    began = time.monotonic()
    kept, left = led.acquire("kept", "a", 3), led.acquire("left", "b", 3)
    seen = [led.lease_left_s(left)]
    assert 2 - (time.monotonic() - began) <= seen[0] <= 3
    while led.leader("left") is not None:
        renewed = time.monotonic()
        assert renewed < began + 60
        led.renew(kept)
        assert led.lease_left_s(kept) > 2 - (time.monotonic() - renewed)
        time.sleep(0.2)
        seen.append(led.lease_left_s(left))
    assert seen == sorted(seen, reverse=True)
    assert led.lease_left_s(left) == 0
    with pytest.raises(LeadershipLostError, match="held by b: it ran out"):
        write(led, None, b"", "late", "left", lease=left)
    assert write(led, None, b"", "ok", "kept", lease=kept).revision == 1
    assert led.acquire("left", "c", 3).token > left.token


def test_a_lease_is_of_one_record(led):
    lease = led.acquire("run", "a", 60)
    with pytest.raises(RefusedError, match="of another record"):
        write(led, None, b"", "x", "other", lease=lease)
    assert led.leader("other") is None


def test_a_repetition_of_what_took_effect_is_answered_whoever_leads_now(led):
    lease = led.acquire("run", "a", 60)
    done = write(led, None, b"0", "a", lease=lease)
    led.acquire("run", "b", 60, replaces=lease.token)
    assert write(led, None, b"0", "a", lease=lease) == done


@pytest.mark.parametrize("lease_s", [0.5, 3601, float("nan")])
def test_leases_have_bounds(led, lease_s):
    with pytest.raises(RefusedError, match="lease must be"):
        led.acquire("run", "a", lease_s)


def test_one_of_many_gets_the_lease(led_place):
    """First when it is free, then when all of them would take the same one over."""
    planes = [led_place.open() for _ in range(8)]
    barrier = threading.Barrier(8)

    def contend(worker):
        wins, replaces = [], None
        for _ in range(4):
            barrier.wait(60)
            with contextlib.suppress(LeaseHeldError):
                wins.append(planes[worker].acquire("run", f"w{worker}", 60, replaces=replaces).token)
            barrier.wait(60)
            replaces = planes[worker].leader("run").token
        return wins

    with ThreadPoolExecutor(8) as pool:
        tokens = list(itertools.chain.from_iterable(pool.map(contend, range(8))))
    assert len(tokens) == len(set(tokens)) == 4
    assert planes[0].leader("run").token == max(tokens)


def test_where_no_leases_are_kept_nobody_leads_and_that_is_told(plane):
    if plane.leases:
        assert isinstance(plane.acquire("run", "one", 60), Lease)
        return
    lease = Lease("run", "one", 1, 60.0)
    for act in (
        lambda: plane.acquire("run", "one", 60),
        lambda: plane.renew(lease),
        lambda: plane.release(lease),
        lambda: plane.lease_left_s(lease),
        lambda: write(plane, None, b"", "a", lease=lease),
    ):
        with pytest.raises(NoLeasesError, match=r"control plane s3://.* keeps no leases.*'run'.*keep the record in"):
            act()
    assert plane.leader("run") is None
    assert plane.read("run") is None
