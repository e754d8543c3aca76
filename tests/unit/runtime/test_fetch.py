"""Fetching an attempt out of a real folder; the rank is a list of what it was given, and of what it says."""

import re
import threading
import time
from types import SimpleNamespace

import pytest

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import manifest_key, payload_key
from dcr.protocol.identity import Base, Kind, Manifest, PayloadIdentity, SealedPayload, encode_manifest
from dcr.protocol.messages import Prepare, StorageState
from dcr.protocol.record import OwnerRef
from dcr.runtime import fetch as fetch_module
from dcr.runtime import reception
from dcr.runtime.fetch import Fetch
from dcr.runtime.rank_messages import Answer, Payload, SealedManifest, Undeliverable
from dcr.runtime.reception import Reception
from dcr.runtime.settings import Settings
from dcr.runtime.shared_memory import SharedMemory

STATE = StorageState(0, "", ())
OWNERS = (OwnerRef("rank-0", 7), OwnerRef("rank-1", 8))
ORDER = Prepare("r", 3, 1, Base(Kind.RELATIVE, 0, "", "c"), OWNERS, 5)


def identity(owner, sequence):
    return PayloadIdentity("r", 1, 3, owner.owner, owner.incarnation, sequence)


def manifest(owner, count):
    lines = tuple(SealedPayload(n, "", 0, 0) for n in range(count))
    return Manifest("r", 1, 3, owner.owner, owner.incarnation, ORDER.base, lines, "", 0, 0)


class Rank:
    """Takes everything, unless told how to answer."""

    def __init__(self):
        self.got = []
        self.answers = {}

    def __call__(self, request):
        match request:
            case Payload():
                what = (request.identity.owner, request.identity.sequence)
            case SealedManifest():
                what = (request.owner, "manifest")
            case Undeliverable():
                what = ("undeliverable", request.reason)
        self.got.append(what)
        said = self.answers.get(what, [])
        return {"0": said.pop(0) if said else Answer((), STATE)}


class Setting:
    def __init__(self, folder, timeout_s=0.05, store=None, ahead=0):
        self.store = store or FolderDelivery(folder / "p")
        self.rank = Rank()
        self.memory = SharedMemory("r", 1, folder)
        bounds = Settings(delivery_timeout_s=timeout_s)
        self.reception = Reception(self.store, self.memory, ["a"], bounds, payload_bytes_max=1000)
        self.fetch = Fetch(ORDER, self.reception.inbox("a"), self.rank, ahead=ahead, timeout_s=timeout_s)

    def put(self, owner, sequence, data=b"x"):
        self.store.put(payload_key(identity(owner, sequence)), data)

    def seal(self, owner, count, data=None):
        key = manifest_key("r", 1, 3, owner.owner, owner.incarnation)
        self.store.put(key, encode_manifest(manifest(owner, count)) if data is None else data)

    def run(self):
        for _ in range(10_000):
            if self.fetch.done:
                return self.rank.got
            self.fetch.step()
        raise AssertionError("it never ended")

    @property
    def failures(self):
        return [why for what, why in self.rank.got if what == "undeliverable"]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """What lies in the folder is seen in the step that asks for it, however slow the machine is."""
    monkeypatch.setattr(reception, "_AT_ONCE_S", 20.0)


@pytest.fixture
def at(tmp_path):
    return Setting(tmp_path)


def test_payloads_are_handed_over_as_they_come_into_sight(at):
    a, b = OWNERS
    assert at.fetch.step() == []
    at.put(a, 1)  # not the next one
    assert at.fetch.step() == []
    at.put(a, 0)
    at.fetch.step()
    assert at.rank.got == [("rank-0", 0)]
    at.put(b, 0)
    at.fetch.step()
    assert at.rank.got[1:] == [("rank-0", 1), ("rank-1", 0)]
    assert not at.fetch.done
    at.seal(b, 1)
    at.fetch.step()
    assert not at.fetch.done
    at.seal(a, 2)
    at.fetch.step()
    assert at.rank.got[3:] == [("rank-1", "manifest"), ("rank-0", "manifest")]
    assert at.fetch.done
    assert at.failures == []


def test_a_manifest_without_payloads_is_all_there_is(at):
    for owner in OWNERS:
        at.seal(owner, 0)
    assert at.run() == [("rank-0", "manifest"), ("rank-1", "manifest")]


def test_a_payload_that_is_listed_and_stays_away_is_undeliverable(at):
    a, b = OWNERS
    at.put(a, 0)
    at.seal(a, 2)
    at.seal(b, 0)
    at.run()
    assert at.failures == ["payload 1 of the 2 that rank-0 lists did not come in 0.05 s"]


def test_a_payload_that_comes_after_the_manifest_is_in_time(tmp_path):
    at = Setting(tmp_path, timeout_s=60)
    a, b = OWNERS
    at.seal(a, 1)
    at.seal(b, 0)
    for _ in range(5):
        at.fetch.step()
    assert not at.fetch.done
    at.put(a, 0)
    assert at.run()[-1] == ("rank-0", 0)
    assert at.failures == []


def test_bytes_that_the_rank_finds_corrupt_are_read_again_a_few_times(at):
    a, b = OWNERS
    at.put(a, 0)
    at.seal(a, 1)
    at.seal(b, 0)
    bad = Answer((), STATE, refused="damaged on the way", corrupt=True)
    at.rank.answers["rank-0", 0] = [bad, bad]
    at.run()
    assert at.rank.got.count(("rank-0", 0)) == 3
    assert at.failures == []


def test_bytes_that_stay_corrupt_fail_the_epoch_by_the_ranks_own_words(at):
    a, b = OWNERS
    at.put(a, 0)
    at.seal(a, 1)
    at.seal(b, 0)
    bad = Answer((), STATE, refused="damaged on the way", corrupt=True)
    at.rank.answers["rank-0", 0] = [bad] * 9
    at.run()
    assert at.rank.got.count(("rank-0", 0)) == 3
    assert at.failures == ["damaged on the way"]


def test_what_is_refused_for_good_is_not_read_again(at):
    a, b = OWNERS
    at.put(a, 0)
    at.seal(b, 0)
    at.rank.answers["rank-0", 0] = [Answer((), STATE, refused="no such tensor")]
    at.run()
    assert at.rank.got.count(("rank-0", 0)) == 1
    assert at.failures == ["no such tensor"]


def test_an_object_beyond_the_bound_is_refused_before_it_is_read(at):
    a, b = OWNERS
    at.put(a, 0, b"x" * 1001)
    at.seal(b, 0)
    at.run()
    assert ("rank-0", 0) not in at.rank.got
    (why,) = at.failures
    assert why.startswith("fetching from rank-0: ")
    assert "1001 bytes, more than the 1000 allowed" in why


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000, b"\x80"])
def test_a_manifest_that_is_none_is_named(at, data):
    a, b = OWNERS
    at.seal(a, 0, data)
    at.seal(b, 0)
    at.run()
    (why,) = at.failures
    assert why.startswith("fetching from rank-0: ")
    assert "no manifest that this version of dcr can read" in why


def test_a_store_that_cannot_be_read_is_named(at):
    a, b = OWNERS
    at.seal(b, 0)
    folder = at.store._root / payload_key(identity(a, 0))
    folder.mkdir(parents=True)  # a folder where a file should be
    at.run()
    (why,) = at.failures
    assert why.startswith("fetching from rank-0: ")


def test_another_incarnations_payloads_are_never_looked_at(at):
    a, b = OWNERS
    old = OwnerRef(a.owner, a.incarnation - 1)
    at.put(old, 0)
    at.seal(old, 1)
    at.seal(b, 0)
    for _ in range(20):
        at.fetch.step()
    assert at.rank.got == [("rank-1", "manifest")]
    assert not at.fetch.done


def test_the_payloads_after_this_one_are_read_meanwhile_and_none_that_is_not_listed(tmp_path):
    at = Setting(tmp_path, timeout_s=60, ahead=2)
    owner = ORDER.owners[0]
    for n in range(4):
        at.put(owner, n)
    asked = []
    ahead = at.reception.ahead

    def record(engine, key, epoch):
        asked.append(int(key.rsplit("/", 1)[1].removesuffix(".payload")))
        ahead(engine, key, epoch)

    at.reception.ahead = record
    while ("rank-0", 0) not in at.rank.got:
        at.fetch.step()
    assert asked == [1, 2]
    at.seal(owner, 4)
    while ("rank-0", 3) not in at.rank.got:
        at.fetch.step()
    assert asked[:4] == [1, 2, 2, 3]
    assert at.reception.objects <= 5, "none was read twice"


def test_silence_of_an_owner_is_told_once(tmp_path, monkeypatch, caplog):
    at = Setting(tmp_path)
    at.put(ORDER.owners[0], 0)
    now = [time.monotonic()]
    monkeypatch.setattr("dcr.runtime.fetch.time.monotonic", lambda: now[0])
    at.fetch.step()
    assert caplog.messages == []
    for _ in range(3):
        now[0] += 10.1
        at.fetch.step()
    (told,) = caplog.messages
    assert told.startswith(f"epoch 3: nothing of {ORDER.owners[1].owner} has come in 10 s")
    assert "compare delivery and record_id of both sides" in told


def test_every_owner_has_a_time_of_its_own(at, monkeypatch):
    a, b = OWNERS
    now = [100.0]
    monkeypatch.setattr(fetch_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    at.seal(a, 2)
    at.fetch.step()
    at.fetch.step()  # a's first payload is late from here on
    now[0] += 0.04
    at.seal(b, 3)
    at.fetch.step()
    at.fetch.step()  # and b's from here
    now[0] += 0.04
    at.put(a, 0)
    at.fetch.step()  # a has not waited for its second one yet; b waits on, though a was late before it
    assert at.failures == []
    now[0] += 0.04
    at.put(a, 1)
    at.fetch.step()
    # What a sends keeps b from ending no longer than b's own time.
    assert at.failures == ["payload 0 of the 3 that rank-1 lists did not come in 0.05 s"]
    assert at.rank.got.index(("rank-0", 1)) < at.rank.got.index(("undeliverable", at.failures[0]))
    assert at.fetch.done


class Hanging(FolderDelivery):
    """A folder in which one object cannot be read: whoever tries, waits for minutes."""

    def __init__(self, root, hangs):
        super().__init__(root)
        self.hangs, self.goes_on = hangs, threading.Event()

    def get(self, key, size_max):
        if key == self.hangs:
            self.goes_on.wait(200)
        return super().get(key, size_max)


def test_a_read_that_hangs_holds_up_nobody_and_fails_its_own_owner_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(reception, "_AT_ONCE_S", 0.05)
    now = [100.0]
    monkeypatch.setattr(reception, "time", SimpleNamespace(monotonic=lambda: now[0]))
    a = OWNERS[0]
    at = Setting(tmp_path, timeout_s=1.0, store=Hanging(tmp_path / "p", payload_key(identity(a, 0))))
    try:
        for owner in OWNERS:
            at.put(owner, 0)
            at.seal(owner, 1)
        began = time.monotonic()
        while len(at.rank.got) < 3:  # the time-out has not begun to run
            at.fetch.step()
            assert time.monotonic() - began < 60
        assert set(at.rank.got) == {("rank-0", "manifest"), ("rank-1", 0), ("rank-1", "manifest")}
        now[0] += 1.1
        at.fetch.step()
        assert at.fetch.done
        (why,) = at.failures
        assert re.fullmatch(r"fetching from rank-0: object .*0\.payload: the store has not answered for 1\.1 s", why)
        # The engine goes on to another epoch: what comes of the read then is wanted by nobody.
        at.reception.inbox("a").passed(ORDER.epoch)
    finally:
        at.store.goes_on.set()
    deadline = time.monotonic() + 60
    while at.reception._reads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert at.reception._reads == {}
    assert at.reception._held == {}
    assert list(at.memory.folder.iterdir()) == []
