"""What the registry holds beside the record, damaged: nobody dies of it."""

from contextlib import closing

import pytest

from dcr.control_plane.address import open_control_plane
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.meeting import missed
from dcr.delivery.relay.sender import decode_node
from dcr.delivery.relay.wire import RelayError
from dcr.runtime.eligibility import unfit_coordinators
from dcr.runtime.registry import catching_up, leader_address, register_catch_up, register_leader
from dcr.runtime.roster import Roster
from dcr.runtime.settings import Settings
from dcr.runtime.terms import terms

ENDLESS = b"\x81\xa1x" + b"\x91" * 4000
"""A field that this version does not know, nested deeper than anything is read."""


@pytest.fixture
def control(tmp_path):
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as made:
        yield made


def test_an_address_that_is_no_text_is_as_none_and_told_of_once(control, caplog, tmp_path):
    record_id = f"r{tmp_path.name}"
    control.register(record_id, "leader", "address", b"\xff\xfe\x00bad")
    assert [leader_address(control, record_id) for _ in range(3)] == [None] * 3
    (told,) = (r.getMessage() for r in caplog.records if "leader/address" in r.getMessage())
    assert repr(record_id) in told
    register_leader(control, record_id, "127.0.0.1:1")
    assert leader_address(control, record_id) == "127.0.0.1:1"


def test_how_far_an_engine_is_can_be_shown_whatever_is_there(control):
    register_catch_up(control, "default", "a", "half way")
    control.register("default", "catching-up", "b", b"half \xff")
    assert catching_up(control, "default") == {"a": "half way", "b": r"half \xff"}


def test_what_a_coordinator_says_of_itself_is_passed_over_if_it_cannot_be_read(control):
    for name, entry in (("a", b"\xff\xfe"), ("b", ENDLESS)):
        control.register("default", "unfit", name, entry)
    asked = Roster((), terms(Settings(), b"s" * 32, "default"), "start")
    assert unfit_coordinators(control, "default", asked) == {}


@pytest.mark.parametrize("entry", [b"\xff\xfe", b'{"kind": "\xff"}', b'{"x":' + b"[" * 4000], ids=range(3))
def test_a_meeting_point_that_cannot_be_read_stands_against_nothing(tmp_path, entry):
    assert missed(FolderDelivery(tmp_path), entry) == ""


@pytest.mark.parametrize("entry", [b"\xff\xfe", ENDLESS], ids=range(2))
def test_an_entry_of_the_relay_that_is_no_node_is_named(entry):
    with pytest.raises(RelayError, match="entry 'node-3' is no rollout node"):
        decode_node(entry, "node-3")
