"""The ranks that ask for a coordinator, as the registry has them."""

from contextlib import closing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.control_plane.address import open_control_plane
from dcr.control_plane.interface import ControlPlaneSettings
from dcr.protocol.errors import RefusedError
from dcr.protocol.record import OwnerRef
from dcr.runtime import roster as module
from dcr.runtime.roster import close_roster, register_roster, roster, why_stranger, withdraw_roster
from dcr.runtime.settings import Settings
from dcr.runtime.terms import terms

TERMS = terms(Settings(), b"s" * 32, "default")


@pytest.fixture
def control(tmp_path):
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as made:
        yield made


def ranks(count, incarnation=1 << 60):
    return [OwnerRef(f"rank-{n}", incarnation + n) for n in range(count)]


@pytest.mark.parametrize("count", [1, 8, 700])
def test_what_was_asked_for_is_read_whatever_its_size(control, count):
    assert roster(control, "default") is None
    register_roster(control, "default", ranks(3, 5), TERMS)
    register_roster(control, "default", reversed(ranks(count)), TERMS)
    found = roster(control, "default")
    assert set(found.owners) == set(ranks(count))
    assert found.names == tuple(sorted(f"rank-{n}" for n in range(count)))
    entries = control.registered("default", "roster")
    assert all(len(value) <= ControlPlaneSettings().registry_value_bytes_max for value in entries.values())
    assert len({name.split("-")[0] for name in entries}) == 1  # nothing is left of the one before
    assert (len(entries) > 1) == (count > 100)
    assert roster(control, "another") is None
    withdraw_roster(control, "default")
    assert roster(control, "default") is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8"), min_size=1, max_size=200), st.integers(0, 2**63 - 1))))
def test_parts_hold_every_owner_once_and_fit(owners):
    refs = tuple(OwnerRef(*o) for o in owners)
    parts = module._parts(refs)
    assert all(len(part) <= ControlPlaneSettings().registry_value_bytes_max for part in parts)
    read = [o for part in parts for o in module.msgspec.msgpack.decode(part, type=list[OwnerRef])]
    assert tuple(read) == refs


def test_an_owner_is_known_by_its_incarnation(control):
    register_roster(control, "default", ranks(2), TERMS)
    found = roster(control, "default")
    assert why_stranger(found.owners, "rank-1", (1 << 60) + 1) == ""
    for name, incarnation in [("rank-1", 7), ("rank-2", (1 << 60) + 2)]:
        why = why_stranger(found.owners, name, incarnation)
        assert why.startswith("this coordinator leads another trainer")
        assert len(why) <= 200  # what the channel passes on


def test_a_trainer_that_was_closed_has_its_roster_marked_and_one_that_came_since_has_not(control):
    first = register_roster(control, "default", ranks(2), TERMS)
    assert not roster(control, "default").closed
    close_roster(control, "default", first)
    assert roster(control, "default") == msgspec.structs.replace(first, closed=True)
    second = register_roster(control, "default", ranks(2, 9), TERMS)
    close_roster(control, "default", first)  # it was slow
    assert roster(control, "default") == second


def test_two_trainers_in_one_moment_are_told(control, monkeypatch):
    def and_another(*args):
        entered(*args)
        if args[1:3] == ("trainer", "current"):
            monkeypatch.setattr(control, "register", entered)
            register_roster(control, "default", ranks(1, 9), TERMS)

    entered = control.register
    monkeypatch.setattr(control, "register", and_another)
    with pytest.raises(RefusedError, match="another trainer has asked for a coordinator of record 'default' in this"):
        register_roster(control, "default", ranks(2), TERMS)
    assert roster(control, "default").owners == tuple(ranks(1, 9))


def test_what_another_version_wrote_is_refused_by_name(control):
    control.register("default", "trainer", "current", b"\xc1")
    with pytest.raises(RefusedError, match="what the registry says of the trainer's ranks is nothing"):
        roster(control, "default")
