"""What a coordinator that stands by says while it waits, and how often."""

import logging
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from dcr.control_plane.address import open_control_plane
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.sealed import SealedDelivery
from dcr.protocol.record import OwnerRef
from dcr.runtime import standby
from dcr.runtime.roster import close_roster, register_roster
from dcr.runtime.secret import record_secret
from dcr.runtime.settings import Settings
from dcr.runtime.standby import Standby
from dcr.runtime.terms import terms

SECRET = b"s" * 32


def wait(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Spoken(logging.Handler):
    """What was logged, from setup to teardown: what comes in between pytest's phases is in none of caplog's."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def control(tmp_path):
    with closing(open_control_plane(f"sqlite://{tmp_path}/record.db")) as made:
        yield made


class Clock:
    """The clock by which it tells of waits again; it stands still unless it is told to go on."""

    def __init__(self):
        self.now_s, self.looks = 100.0, 0

    def monotonic(self):
        self.looks += 1
        return self.now_s

    def go_on(self, seconds):
        """Let time pass, and wait until it has looked at the clock, and has said what there was to say."""
        self.now_s += seconds
        looks = self.looks
        wait(lambda: self.looks > looks + 1)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(standby, "time", SimpleNamespace(monotonic=clock.monotonic, time_ns=time.time_ns))
    return clock


@pytest.fixture
def waiting(control, tmp_path, monkeypatch, caplog, clock):
    """What it has said so far; it looks often, and has nobody to lead."""
    spoken, log = Spoken(), logging.getLogger("dcr.coordinator")
    monkeypatch.setattr(log, "handlers", [*log.handlers, spoken])
    caplog.set_level(logging.INFO, log.name)
    one = Standby(
        record_id="default",
        name="one",
        control=control,
        delivery=SealedDelivery(FolderDelivery(tmp_path), record_secret(SECRET, "default")),
        secret=SECRET,
        settings=Settings(record_poll_s=0.02),
    )
    thread = threading.Thread(target=one.run)
    thread.start()
    yield lambda: list(spoken.messages)
    one.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_wait_for_a_trainer_is_told_again_and_less_and_less_often(waiting, control, clock):
    asks = "waits for a trainer of record 'default' that asks for a coordinator (setting coordinator = elsewhere)"
    wait(waiting)
    told = []
    for seconds in (9.9, 0.2, 19.8, 0.4, 39.8, 0.4):
        clock.go_on(seconds)
        told.append(len(waiting()))
    assert told == [1, 2, 2, 3, 3, 4]
    assert waiting()[:3] == [
        f"coordinator one {asks}",
        f"coordinator one still {asks}",
        f"coordinator one still {asks}",
    ]
    lease = control.acquire("default", "another", 600)  # so that this one does not lead
    asked = register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(), SECRET, "default"))
    wait(lambda: waiting()[-1].endswith(f"stands by: another leads record 'default', with token {lease.token}"))
    said = len(waiting())
    clock.go_on(10_000)
    assert len(waiting()) == said  # that somebody leads is as it should be: it is told once
    close_roster(control, "default", asked)
    wait(lambda: waiting()[-1] == f"coordinator one {asks}: the one that it stood by for was closed")


def test_a_roster_that_cannot_be_read_is_told_and_waited_out(waiting, control):
    control.register("default", "trainer", "current", b"\xff\xfe\x00bad")
    wait(lambda: any("does not lead record 'default'" in m and "can read" in m for m in waiting()))
    control.unregister("default", "trainer", "current")
    wait(lambda: "waits for a trainer of record 'default'" in waiting()[-1])  # it lives


def test_a_leader_that_renews_its_lease_no_more_is_named(waiting, control, monkeypatch):
    def last():
        return (waiting() or [""])[-1]

    control.acquire("default", "another", 60)
    left_s = control.lease_left_s  # half of it has gone by: nobody waits for that here
    monkeypatch.setattr(control, "lease_left_s", lambda led: left_s(led) - (31 if led.holder == "another" else 0))
    register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(members_min=2), SECRET, "default"))
    wait(lambda: "members_min is 2 in the trainer's settings and 1 in this coordinator's" in last())
    register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(), SECRET, "default"))
    wait(lambda: "waits for the lease of another, which has not renewed it for more than half of its" in last())
    assert last().endswith("of its 60 s, to end, as it does in at most 30 s")
    control.acquire("default", "yet another", 60, replaces=control.leader("default").token)
    wait(lambda: "stands by: yet another leads" in last())
