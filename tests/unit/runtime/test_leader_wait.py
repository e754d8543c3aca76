"""What is said while nobody leads: after a few seconds, then less and less often, and with what the registry tells."""

import logging
from contextlib import closing

import msgspec
import pytest

from dcr.control_plane.address import open_control_plane
from dcr.protocol.record import OwnerRef
from dcr.runtime import leader_wait
from dcr.runtime.leader_wait import LeaderWait, why_unled
from dcr.runtime.roster import close_roster, register_roster
from dcr.runtime.settings import Settings
from dcr.runtime.terms import terms

LOG = logging.getLogger("dcr.test-leader-wait")


@pytest.fixture
def control(tmp_path):
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as made:
        yield made


def asked(control):
    return register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(), b"s" * 32, "default"))


def test_a_wait_is_told_after_3_s_and_then_each_time_after_twice_as_long_up_to_ten_minutes(
    control, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, LOG.name)
    now = [100.0]
    monkeypatch.setattr(leader_wait.time, "monotonic", lambda: now[0])
    wait, told = LeaderWait(LOG, control, "default"), []
    for second in range(3000):
        now[0] = 100.0 + second
        wait.look("engine a", "and waits on")
        if len(caplog.messages) > len(told):
            told.append(second)
    assert told == [3, 9, 21, 45, 93, 189, 381, 765, 1365, 1965, 2565]
    assert caplog.messages[1].startswith(
        "engine a has waited 9 s for a leader of record 'default', and waits on: nobody"
    )
    wait.over("engine a")
    assert caplog.messages[-1] == "engine a has waited 2999 s for a leader, and waits no more"
    said = len(caplog.messages)
    wait.over("engine a")
    wait.look("engine a", "and waits on")  # a new wait, which has its time
    wait.over("engine a")
    assert len(caplog.messages) == said


def test_it_says_what_the_control_plane_knows(control):
    assert why_unled(control, "default").startswith("nobody leads, and no trainer asks for a coordinator")
    first = asked(control)
    assert why_unled(control, "default").startswith("nobody holds the lease: start a `dcr coordinator --record-id def")
    unfit = {"start": first.start, "why": "gate_mode is sync"}
    control.register("default", "unfit", "b", msgspec.msgpack.encode(unfit))
    control.register("default", "unfit", "old", msgspec.msgpack.encode({**unfit, "start": "of another trainer"}))
    control.register("default", "unfit", "strange", b"\xc1")
    lease = control.acquire("default", "a-1", 300)
    assert why_unled(control, "default") == (
        "a-1 holds the lease, and is not reached; if it is gone, another one may lead in at most 300 s; b stands by "
        "and must not lead: gate_mode is sync"
    )
    control.release(lease)
    close_roster(control, "default", first)
    assert why_unled(control, "default").startswith("the trainer was closed, and asks for none")
    control.close()
    assert why_unled(control, "default").startswith("who leads is not known: ")
