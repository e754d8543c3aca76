"""The leader is killed at each point of an open attempt: a standby takes over, and the same push ends bit-exact."""

import random
import signal

import pytest

from dcr.runtime.secret import create_secret
from tests.etcd_server import HINT, EtcdServer, etcd_binary
from tests.faults.coordinator_process import Point

POINTS = {
    "": [("after", "OpenAttempt"), ("step", "OrderOpenApply"), ("after", "Commit")],
    "long": [
        ("before", "OpenAttempt"),
        ("step", "OpenAttempt"),
        ("before", "Commit"),
        ("step", "Commit"),
        ("step", "Publish"),
        ("step", "FinishTransition"),
    ],
}


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(Point(*point), id="-".join(point), marks=[pytest.mark.long] if when else [])
        for when, points in POINTS.items()
        for point in points
    ],
)
def test_a_standby_ends_the_push_whose_leader_was_killed(fleet_with, point):
    outlives_its_leader(fleet_with(point=point))


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [("after", "OpenAttempt"), ("step", "OrderOpenApply"), ("before", "Commit"), ("after", "Commit")],
    ids="-".join,
)
def test_the_same_where_engines_serve_on_until_all_is_staged(fleet_with, point):
    outlives_its_leader(fleet_with({"gate_mode": "async"}, point=Point(*point)))


def outlives_its_leader(fleet):
    engines = [fleet.engine("a"), fleet.engine("b")]
    for e in engines:
        fleet.check(e)
    fleet.standby("another")
    fleet.step()
    report = fleet.push()
    assert report.members == ("a", "b")
    assert fleet.coordinators[0].wait_ended() == -signal.SIGKILL
    for e in engines:
        fleet.check(e)
    assert fleet.record().leader.startswith("another-")
    assert [h.reason for h in fleet.history()].count("Commit") == 1  # by whichever leader
    fleet.step()
    assert fleet.push().kind == "relative"  # the baseline was folded
    for e in engines:
        fleet.check(e)


@pytest.fixture
def etcd(tmp_path):
    (tmp_path / "etcd").mkdir()
    create_secret(tmp_path / "run.secret")
    server = EtcdServer.started(tmp_path / "etcd")
    yield f"{server.address}/dcr?secret={tmp_path / 'run.secret'}"
    server.kill()


def goes_on_after_its_lease(fleet, point):
    """The first leader is held still until its lease is another's, and goes on while that one's attempt is open."""
    zombie = fleet.coordinators[0]
    e = fleet.engine("a")
    fleet.check(e)
    fleet.standby("another")
    commits = []

    def wake(step):
        commits.extend(fleet.history())
        zombie.signal(signal.SIGCONT)
        zombie.wait_said("leads no more")

    def second_attempt(step):
        fleet.once("Prepare", wake)

    fleet.once("Prepare", second_attempt)  # that of the leader which is stopped
    fleet.step()
    report = fleet.push()
    assert commits, "the zombie did not go on in the middle of the next leader's attempt"
    assert report.members == ("a",)
    fleet.check(e)
    if point.where == "before":
        zombie.wait_said("leads now, with token")
    zombie.wait_said("stands by: another-")
    written = fleet.history()
    taken = next(h.revision for h in written if h.reason == "TakeOver")
    assert {h.actor.split("-")[0] for h in written if h.revision >= taken} == {"another"}
    assert [h.reason for h in written].count("Commit") == 1
    # It is good for another turn.
    fleet.coordinators[1].signal(signal.SIGKILL)
    fleet.step()
    fleet.push()
    fleet.check(e)
    assert fleet.record().leader.startswith("one-")


@pytest.mark.parametrize(
    "point",
    [pytest.param(("step", "OrderOpenApply"), marks=pytest.mark.long), ("before", "Commit")],
    ids="-".join,
)
def test_a_leader_that_was_stopped_past_its_lease_is_refused_and_stands_by(fleet_with, point):
    where = Point(*point, with_signal=signal.SIGSTOP)
    goes_on_after_its_lease(fleet_with(point=where), where)


@pytest.mark.long
@pytest.mark.skipif(etcd_binary() is None, reason=HINT)
@pytest.mark.parametrize("point", [("step", "OrderOpenApply"), ("before", "Commit")], ids="-".join)
def test_the_same_with_the_record_in_etcd(fleet_with, etcd, point):
    where = Point(*point, with_signal=signal.SIGSTOP)
    goes_on_after_its_lease(fleet_with(control=etcd, point=where), where)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_leaders_are_killed_again_and_again_and_no_push_is_lost(fleet_with):
    fleet = fleet_with(point=Point("step", "Publish"))
    engines = [fleet.engine("a"), fleet.engine("b")]
    for e in engines:
        fleet.check(e)
    kills = random.Random(7)
    actions = ("OpenAttempt", "OrderOpenApply", "Commit", "Publish", "FinishTransition")
    spare = fleet.coordinator("spare0")  # the others may all be killed in one push
    for number in range(10):
        while sum(c.alive for c in fleet.coordinators) < 4:
            where = Point("step", kills.choice(actions), count=kills.choice((1, 2)))
            fleet.coordinator(f"c{len(fleet.coordinators)}", where)
        if fleet.record().leader.startswith(f"{spare.name}-"):
            spare.signal(signal.SIGKILL)
            spare = fleet.coordinator(f"spare{number + 1}")
        fleet.step()
        fleet.push()
        for e in engines:
            fleet.check(e)
        assert fleet.version == number + 1
    assert sum(not c.alive for c in fleet.coordinators) >= 5


def test_a_leader_whose_lease_is_taken_lets_its_owners_go_and_ends_no_push(fleet_with):
    fleet = fleet_with({"leader_lease_s": 3.0})  # which it finds out when it is to renew it
    e = fleet.engine("a")
    fleet.check(e)
    control = fleet.refit._control

    def take(step):
        taken = control.acquire("default", "somebody", 60, replaces=control.leader("default").token)
        fleet.coordinators[0].wait_said("leads no more: another coordinator (somebody) leads")
        control.release(taken)

    fleet.once("Prepare", take)
    fleet.step()
    fleet.push()
    fleet.check(e)
