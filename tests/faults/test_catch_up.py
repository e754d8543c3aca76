"""An engine that starts from an older version reaches the committed one by the payloads that are kept (DESIGN D15)."""

import logging


def steps_of(fleet, action):
    return [s for s in fleet.steps if s.action == action]


def pushed(fleet, count, rate=0.05):
    for _ in range(count):
        fleet.step(rate)
        fleet.push()


def test_an_engine_from_version_0_catches_up_and_the_trainer_does_nothing(fleet_of, caplog):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    pushed(fleet, 3)
    emitted = len(steps_of(fleet, "Emit"))
    caplog.set_level(logging.INFO, "dcr.node")
    fleet.check(fleet.engine("late"))
    assert not steps_of(fleet, "OpenRestore")
    assert len(steps_of(fleet, "Emit")) == emitted
    assert "engine late catches up from version 0 to 3: 3 versions" in caplog.text
    pushed(fleet, 1)
    for e in fleet.engines:
        fleet.check(e)
