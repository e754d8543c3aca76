"""Answers that get lost, kills of the store, and contenders under the control plane in a bucket; a fleet whose only
meeting place is that bucket."""

import json
import logging
import threading

import pytest

from dcr import PushError, TrainerRefit
from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import (
    ConflictError,
    ControlPlaneSettings,
    ControlPlaneUnavailableError,
    Stored,
    UnknownOutcomeError,
)
from dcr.protocol.errors import RefusedError
from dcr.runtime.secret import create_secret
from tests.bad_network import error_body
from tests.faults.record_writers import kills_lose_nothing, write
from tests.faults.thread_fleet import Fleet


@pytest.fixture
def planes(bucket, running_store, network):
    """One client behind the network that misbehaves, and one beside it."""
    made = [open_control_plane(f"s3://{bucket}/runs?endpoint={e}") for e in (network.endpoint, running_store.endpoint)]
    yield made
    for plane in made:
        plane.close()


def record_puts(request):
    """Writes of the record alone; what is put into the history before one is another key."""
    return request.method == "PUT" and request.key.endswith("/control/record")


def test_an_answer_that_is_lost_is_an_unknown_outcome_and_read_back(planes, network):
    plane, direct = planes
    assert write(plane, None, "a").revision == 1
    network.once("lost", record_puts)
    with pytest.raises(UnknownOutcomeError, match=r"writing the record.*operation b may have taken effect") as doubt:
        write(plane, 1, "b")
    assert doubt.value.operation_id == "b"
    assert len([r for r in network.seen("PUT") if record_puts(r)]) == 2  # nobody sent it again behind our back
    assert plane.operation_revision("run", "b") == 2
    assert write(plane, 1, "b") == Stored(2, b"b" * 100, "b")  # the same again is safe
    network.answer("gateway", 503, b"<html>try later</html>", "text/html")
    for fault in ("reset", "500", "gateway"):  # the server was never asked, and nobody can tell
        before = plane.read("run").revision
        network.once(fault, record_puts)
        with pytest.raises(UnknownOutcomeError):
            write(plane, before, fault)
        assert plane.operation_revision("run", fault) is None
        assert write(plane, before, fault).revision == before + 1
    network.once("lost", record_puts)
    with pytest.raises(UnknownOutcomeError):
        write(plane, 5, "d")
    write(direct, 6, "e")
    with pytest.raises(ConflictError, match="overtaken"):
        write(plane, 5, "d")
    assert [e.operation_id for e in direct.history("run", 9)] == ["e", "d", "gateway", "500", "reset", "b", "a"]


def test_what_certainly_had_no_effect_is_no_doubt(planes, network):
    plane, _ = planes
    network.answer("slow-down", 503, error_body("SlowDown"))
    network.answer("forbidden", 403, error_body("AccessDenied"))
    for fault, said in (
        ("slow-down", "throttled, .*fewer processes"),
        ("forbidden", "refused, .*docs/control-plane.md"),
    ):
        network.once(fault, record_puts)
        with pytest.raises(ControlPlaneUnavailableError, match=f"writing the record: {said}"):
            write(plane, None, "a")
    assert plane.read("run") is None
    network.answer("conflict", 409, error_body("ConditionalRequestConflict"))
    network.once("conflict", record_puts, times=2)
    assert write(plane, None, "a").revision == 1  # S3 asks that such a one be tried again
    network.once("conflict", record_puts, times=99)
    with pytest.raises(ControlPlaneUnavailableError, match="refused 5 times although nobody else"):
        write(plane, 1, "b")
    assert [e.operation_id for e in plane.history("run", 9)] == ["a"]


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(planes, network, condition):
    plane, direct = planes
    network.answer("ignored", 200, b"", 'application/xml\r\nETag: "1"')
    network.once("ignored", lambda r: r.method == "PUT" and f"\r\n{condition.lower()}: ".encode() in r.head.lower())
    with pytest.raises(RefusedError, match=rf"condition does not hold \({condition}\).*in SQLite or etcd"):
        write(plane, None, "a")
    assert direct.read("run") is None
    network.quiet()
    assert write(plane, None, "a").revision == 1


def test_a_write_that_a_gateway_sends_twice_is_not_a_conflict_with_itself(planes, network):
    plane, direct = planes
    for expected, operation in ((None, "a"), (1, "b"), (2, "c")):
        network.once("twice", record_puts)
        assert write(plane, expected, operation) == direct.read("run")
    assert network.faults()["twice"] == 3
    assert [r.status for r in network.seen("PUT") if record_puts(r)] == [412] * 3  # what boto3's client was told
    assert [e.operation_id for e in direct.history("run", 9)] == ["c", "b", "a"]


def test_a_refusal_that_cannot_be_looked_into_is_an_unknown_outcome(planes, network):
    plane, direct = planes
    network.once("twice", record_puts)
    network.once("reset", lambda request: request.method == "GET" and direct.read("run") is not None, times=99)
    with pytest.raises(UnknownOutcomeError, match=r"reading before a write: .*operation a may have taken effect"):
        write(plane, None, "a")
    network.quiet()
    assert write(plane, None, "a") == direct.read("run")


def test_a_write_between_reading_and_writing_is_a_conflict(planes, network):
    plane, direct = planes
    for expected, operation in ((None, "a"), (1, "b")):

        def first(request, expected=expected, operation=operation):
            if record_puts(request) and direct.operation_revision("run", f"{operation} first") is None:
                write(direct, expected, f"{operation} first")
            return False

        network.once("", first)
        with pytest.raises(ConflictError, match=f"at revision {(expected or 0) + 1}, not {expected}") as conflict:
            write(plane, expected, operation)
        network.quiet()
        assert conflict.value.current == direct.read("run")
    assert [e.operation_id for e in plane.history("run", 9)] == ["b first", "a first"]


def test_a_writer_that_ends_between_history_and_record_leaves_nothing_to_be_seen(planes, network):
    plane, direct = planes
    write(plane, None, "a")
    network.once("reset", record_puts)
    with pytest.raises(UnknownOutcomeError):
        write(plane, 1, "b")  # revision 1 is among the past already
    assert [e.operation_id for e in direct.history("run", 9)] == ["a"]
    assert direct.operation_revision("run", "a") == 1
    write(direct, 1, "c")
    assert [(e.revision, e.operation_id) for e in plane.history("run", 9)] == [(2, "c"), (1, "a")]


def test_what_may_be_repeated_passes_over_a_bad_network(planes, network):
    plane, _ = planes
    write(plane, None, "a")
    network.at_random(0.3, ("lost", "reset", "500", "truncated", "flipped"), seed=3)
    for i in range(8):
        for _ in range(20):  # more than the tries of one request, by chance
            try:
                plane.register("run", "node", str(i), b"1")
                assert plane.read("run").body == b"a" * 100
                assert plane.operation_revision("run", "a") == 1
                break
            except ControlPlaneUnavailableError:
                continue
    network.quiet()
    assert plane.registered("run", "node") == {str(i): b"1" for i in range(8)}
    assert len(network.faults()) >= 4


@pytest.mark.long
def test_a_store_that_is_away_is_named_in_bounded_time_and_used_again_when_it_is_back(bucket, running_store):
    address = f"s3://{bucket}/p?endpoint={running_store.endpoint}"
    plane = open_control_plane(address, ControlPlaneSettings(busy_timeout_s=2))
    write(plane, None, "a")
    running_store.kill()
    for act in (lambda: plane.read("run"), lambda: write(plane, 1, "b")):
        with pytest.raises(ControlPlaneUnavailableError, match=r"s3://.*: unreachable, after 4 tries.*the server runs"):
            act()
    running_store.start()
    assert plane.read("run").operation_id == "a"
    assert write(plane, 1, "b").revision == 2
    plane.close()


@pytest.mark.long
@pytest.mark.parametrize(("contenders", "kills"), [(3, 2), (5, 8)])
def test_kills_of_store_and_writers_lose_nothing_acknowledged(bucket, running_store, contenders, kills):
    def disturb(turn, rng):
        running_store.kill()
        running_store.start()

    kills_lose_nothing(f"s3://{bucket}/p?endpoint={running_store.endpoint}", disturb, contenders, kills, attempts=4)


# ---------------------------------------------------------------- a fleet


def test_a_fleet_that_shares_a_bucket_alone(tmp_path, bucket, running_store, caplog, capsys):
    """Record and payloads in one place; the store is killed and comes back; a second trainer overtakes the first."""
    secret = tmp_path / "run.secret"
    create_secret(secret)
    place = f"s3://{bucket}/run?endpoint={running_store.endpoint}"
    caplog.set_level(logging.WARNING, "dcr")
    bounds = {"delivery_timeout_s": 100.0, "ack_timeout_s": 120.0, "event_log": f"{tmp_path}/events"}
    fleet = Fleet(tmp_path, bounds, delivery=place, control=f"{place}&secret={secret}")
    try:
        assert any("kept where there are no leases: that only one coordinator" in line for line in caplog.messages)
        e = fleet.engine("a")
        fleet.check(e)
        fleet.step()
        assert fleet.push().version == 1
        fleet.check(e)

        running_store.kill()
        again = threading.Thread(target=running_store.start)
        again.start()
        fleet.step()
        assert fleet.push().version == 2
        again.join()
        fleet.check(e)

        first = fleet.record().leader
        second = TrainerRefit(fleet.policy, **fleet.addresses)
        fleet.wait(lambda: fleet.record().leader != first)
        fleet.step()
        with pytest.raises(
            PushError, match=r"another coordinator.* leads record 'default'; if that is another trainer's"
        ):
            fleet.refit.push()
        fleet.refit.close()
        fleet.refit = second
        assert fleet.push().version == 3
        fleet.check(e)

        control = ["--control", place]
        assert main(["record", "show", *control]) == 0
        shown = capsys.readouterr().out
        assert "record default: version 3," in shown
        assert "lease      none are kept here" in shown
        assert main(["record", "history", *control, "--commits", "--limit", "2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("version ")[1].split(",")[0] for line in lines] == ["3", "2"]
        assert main(["record", "export", *control]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["record"]["version"], document["lease"]) == (3, None)
        revisions = [entry["revision"] for entry in document["history"]]
        assert revisions == list(range(document["revision"], 0, -1))
    finally:
        fleet.close()
    assert list((tmp_path / "events").glob("coordinator-*.ndjson"))
