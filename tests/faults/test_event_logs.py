"""What real runs write down is a behaviour of the specification: refits, kills, restarts, and many refits in time."""

import time

import pytest

from dcr.modelcheck.eventlog.validate import validate
from tests.faults.conftest import SPEC
from tests.faults.deployment import Deployment
from tests.faults.engine_process import Kill


def logs_of(folder):
    return folder / "record.db.events"


def is_behaviour(folder):
    found = validate(logs_of(folder), SPEC, heap="1g")
    assert found.ok, f"{found.rejected}\n" + "\n".join((*found.why, *found.story))
    return found


def test_refits_of_a_small_fleet(fleet_of, tmp_path):
    fleet = fleet_of()
    engines = [fleet.engine("a"), fleet.engine("b")]
    for _ in range(2):
        fleet.step()
        fleet.push()
        for e in engines:
            fleet.check(e)
    assert is_behaviour(tmp_path).transitions == 2


def test_off_writes_nothing_down(fleet_of, tmp_path):
    fleet = fleet_of(event_log="off")
    fleet.check(fleet.engine("a"))
    assert not logs_of(tmp_path).exists()


@pytest.mark.long
def test_refits_behind_an_open_gate(fleet_of, tmp_path):
    fleet = fleet_of(gate_mode="async")
    engines = [fleet.engine("a"), fleet.engine("b")]
    for _ in range(2):
        fleet.step()
        fleet.push()
        for e in engines:
            fleet.check(e)
    assert is_behaviour(tmp_path).transitions == 2


@pytest.mark.long
@pytest.mark.parametrize("gate_mode", ["sync", "async"])
@pytest.mark.parametrize("action", ["Fence", "BeginWrite", "EndWrite", "Acknowledge", "OpenGate"])
def test_an_engine_that_is_killed_and_comes_back(tmp_path, gate_mode, action):
    d = Deployment(tmp_path, {"gate_mode": gate_mode})
    try:
        stays, dies = d.engine("stays"), d.engine("dies", Kill(action, epoch_min=1))
        for e in (stays, dies):
            e.wait_serving(0)
        d.step()
        d.push()
        dies.wait_killed()
        d.check(d.engine("dies"))
        d.step()
        d.push()
        d.check(stays)
    finally:
        d.close()
    assert is_behaviour(tmp_path).transitions == 2


@pytest.mark.long
def test_a_trainer_that_starts_again(fleet_of, tmp_path):
    fleet = fleet_of()
    engine = fleet.engine("a")
    fleet.step()
    fleet.push()
    fleet.check(engine)
    fleet.restart_trainer()
    fleet.check(engine)
    fleet.step()
    fleet.push()
    fleet.check(engine)
    assert is_behaviour(tmp_path).transitions == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_transitions_are_validated_within_two_minutes(fleet_of, tmp_path):
    fleet = fleet_of()
    engines = [fleet.engine("a"), fleet.engine("b")]
    for _ in range(50):
        fleet.step()
        fleet.push()
    for e in engines:
        fleet.check(e)
    started = time.monotonic()
    assert is_behaviour(tmp_path).transitions == 50
    assert time.monotonic() - started < 120
