"""How a process notices its points: which coordinator it was, and a point that another one came to first."""

import pytest

from dcr.chaos.journal import Journal, entries
from dcr.chaos.trigger import Armed, Trigger
from dcr.protocol.step import Step

COMMIT = Armed(
    number=3,
    role="coordinator",
    index=0,
    kind="step",
    action="Commit",
    count=1,
    items=0,
    payload=0,
    epoch_min=0,
    do="error",
    for_s=0.0,
    own=True,
)


@pytest.fixture
def told():
    return []


@pytest.fixture
def trigger(tmp_path, told):
    return Trigger(Journal(tmp_path / "journal"), lambda what, **fields: told.append((what, fields)), "coordinator[1]")


def commit():
    return Step("coordinator-1-abc", "Commit", 4)


def test_the_journal_says_which_coordinator_it_was(trigger, told, tmp_path):
    trigger.arm([COMMIT])
    trigger.observer("coordinator", 1)(commit())
    assert told == [("fault", {"number": 3})]
    assert [(e.what, e.who, e.action) for e in entries(tmp_path / "journal")] == [
        ("step", "coordinator[1]", "Commit"),
        ("fault", "coordinator[1]", "error"),
    ]


def test_a_point_that_another_coordinator_came_to_first_is_passed(trigger, told):
    trigger.arm([COMMIT])
    trigger.disarm(3)
    trigger.disarm(4)
    trigger.observer("coordinator", 1)(commit())
    assert told == []
