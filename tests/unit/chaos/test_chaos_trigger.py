"""How a process notices its points: which coordinator it was, and a point that another one came to first."""

import msgspec
import pytest

from dcr.chaos.hooks import InjectedError, WatchedStorage
from dcr.chaos.journal import Journal, entries
from dcr.chaos.scenario import Fault
from dcr.chaos.strike import Strike
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


class Written:
    """A storage that keeps what is applied, call by call."""

    def __init__(self):
        self.calls = []

    def apply(self, items):
        self.calls.append(list(items))
        return len(items)


def within_items(items):
    return msgspec.structs.replace(COMMIT, role="receiver", index=1, kind="items", action="", items=items, payload=2)


@pytest.mark.parametrize("items", [0, 1, 3])
def test_an_item_fault_strikes_with_as_many_written_and_no_more(trigger, told, items):
    """With all of them where it says so: the write has not ended."""
    made = Written()
    watched = WatchedStorage(made, trigger, 1)
    watched.writing = (4, 2)
    trigger.arm([within_items(items)])
    with pytest.raises(InjectedError, match=f"after {items} of 3 items"):
        watched.apply(["a", "b", "c"])
    assert made.calls == [["a", "b", "c"][:items]]
    assert told == [("fault", {"number": 3})]


def test_a_payload_with_fewer_items_has_no_such_point(trigger, told):
    """Another attempt's may have more, so the fault stays armed; the harness is told."""
    made = Written()
    watched = WatchedStorage(made, trigger, 1)
    watched.writing = (4, 2)
    trigger.arm([within_items(4)])
    assert watched.apply(["a", "b", "c"]) == 3
    assert (made.calls, told) == ([["a", "b", "c"]], [("short", {"number": 3, "items": 3})])
    watched.writing = (5, 2)
    with pytest.raises(InjectedError, match="after 4 of 5 items"):
        watched.apply(["a", "b", "c", "d", "e"])


def test_a_fault_that_never_came_says_how_many_items_there_were():
    strike = Strike(0, Fault(at="receiver[1] after 9 items of payload 0"))
    assert not strike.missed
    strike.short_items = 2
    assert "payload 0 of that refit had no more than 2 items when receiver[1] wrote it" in strike.missed
