"""A receiver process is killed after every payload and between every two protocol steps; nobody else loses a bit."""

import threading
from pathlib import Path

import pytest

from dcr.control_plane.address import open_control_plane
from dcr.protocol.record import decode_record
from tests.faults.deployment import Deployment
from tests.faults.engine_process import Kill

BEFORE_COMMIT = ["CloseGate", "GateClosed", "Fence", "Prepare", "OpenApply", "DeliverManifest", "Acknowledge"]
AFTER_COMMIT = ["LearnCommit", "OpenGate"]


@pytest.fixture
def fleet(tmp_path: Path):
    d = Deployment(tmp_path, {"retain_versions": 100})
    yield d
    d.close()


def test_kill_after_every_payload_and_between_every_two_steps(fleet: Deployment) -> None:
    survivor = fleet.engine("survivor")
    victim = fleet.engine("victim")
    fleet.check(survivor)
    fleet.check(victim)
    fleet.step()
    payloads = fleet.push().payloads
    fleet.check(survivor)
    fleet.check(victim)
    assert payloads >= 4, "the transition must be cut into several payloads for the kills to fall between them"

    # k of n payloads written: killed just before the write of payload k + 1, or just after the last one ended.
    kills = [Kill("BeginWrite", k) for k in range(1, payloads + 1)] + [Kill("EndWrite", payloads)]
    kills += [Kill(action) for action in BEFORE_COMMIT]
    kills += [Kill(action) for action in AFTER_COMMIT]
    for kill in kills:
        # The last victim is replaced by one that loads version 0, catches up to the present version, and rejoins.  Its
        # own kill must wait for the next transition: on its way it takes the same steps, in epochs up to the present.
        victim.kill()
        epoch = _epoch(fleet)
        victim = fleet.engine("victim", Kill(kill.action, kill.count, epoch_min=epoch + 1))
        fleet.check(victim)
        assert _epoch(fleet) == epoch

        fleet.step()
        report = fleet.push()
        victim.wait_killed()
        if kill.action in AFTER_COMMIT:
            assert (report.kind, report.attempts, report.members) == ("relative", 1, ("survivor", "victim"))
        else:
            assert (report.kind, report.attempts, report.members) == ("absolute", 2, ("survivor",)), kill
            assert "victim" in report.failures[0]
        fleet.check(survivor)
    assert fleet.check_requests() > 100


@pytest.mark.long
def test_kill_in_the_middle_of_a_restore(fleet: Deployment) -> None:
    survivor = fleet.engine("survivor")
    fleet.check(survivor)
    fleet.step()
    fleet.push()
    for kill in [Kill("Fence"), Kill("BeginWrite", 1), Kill("BeginWrite", 3), Kill("Acknowledge")]:
        victim = fleet.engine("victim", kill, loaded=False)  # of which nothing is known: it cannot catch up
        victim.wait_killed()
        again = fleet.engine("victim", loaded=False)
        fleet.check(again)  # restored and admitted, beside a survivor that goes on serving
        again.kill()
        fleet.check(survivor)
    fleet.step()
    assert fleet.push().members == ("survivor",)
    fleet.check(survivor)
    fleet.check_requests()


def test_kill_while_serving_is_noticed_by_the_next_push(fleet: Deployment) -> None:
    a, b = fleet.engine("a"), fleet.engine("b")
    fleet.check(a)
    fleet.check(b)
    b.kill()
    fleet.step()
    report = fleet.push()
    assert report.members == ("a",)
    fleet.check(a)
    fleet.check_requests()


def test_engine_without_a_checkpoint_is_restored_and_takes_deltas(fleet: Deployment) -> None:
    a, empty = fleet.engine("a"), fleet.engine("empty", loaded=False)
    fleet.check(a)
    fleet.check(empty)
    fleet.step()
    assert fleet.push().members == ("a", "empty")
    fleet.check(a)
    fleet.check(empty)


def test_all_engines_killed_and_a_new_one_ends_the_transition_densely(fleet: Deployment) -> None:
    only = fleet.engine("only", Kill("BeginWrite", 2))
    only.wait_serving(0)
    fleet.step()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (fleet.push(), done.set()))
    thread.start()
    only.wait_killed()
    assert not done.wait(0.5), "a push without an engine must wait for one"
    newcomer = fleet.engine("newcomer")
    assert done.wait(100)
    thread.join(60)
    fleet.check(newcomer)
    fleet.check_requests()


def _epoch(fleet: Deployment) -> int:
    control = open_control_plane(fleet.addresses["control"])
    stored = control.read("default")
    control.close()
    assert stored is not None
    return decode_record(stored.body).epoch
