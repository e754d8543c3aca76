"""Old epochs are swept beside the coordinator, whatever the store does."""

import threading
import time

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryError, committed_key, payload_key
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from dcr.protocol.record import OwnerRef
from dcr.runtime import sweeper as sweeper_module
from dcr.runtime.committed_attempt import FORMAT, CommittedAttempt
from dcr.runtime.sweeper import Sweeper


class Moody(FolderDelivery):
    """A folder whose lists wait for a word, or fail."""

    def __init__(self, root):
        super().__init__(root)
        self.go, self.errors, self.lists = threading.Event(), [], 0

    def segments(self, prefix):
        self.lists += 1
        assert self.go.wait(60)
        if self.errors:
            raise self.errors.pop()
        return super().segments(prefix)


def key(epoch):
    return payload_key(PayloadIdentity("run", 1, epoch, "o", 1, 0))


def wait(what):
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_nobody_waits_for_a_sweep_and_the_latest_word_counts(tmp_path, caplog):
    store = Moody(tmp_path / "p")
    for epoch in range(1, 8):
        store.put(key(epoch), b"x")
    store.errors = [RuntimeError("unforeseen"), DeliveryError("the store is away")]
    sweeper = Sweeper(store, "run", 8)
    sweeper.sweep(2, 0)
    wait(lambda: store.lists == 1)  # and there it hangs
    began = time.monotonic()
    for epoch in (3, 4, 5):
        sweeper.sweep(epoch, 0)
    assert time.monotonic() - began < 30  # of the minute that the store hangs
    assert len(store.keys("run/")) == 7
    store.go.set()
    wait(lambda: len(caplog.records) == 2)
    assert store.lists == 2
    sweeper.sweep(6, 0)
    wait(lambda: store.keys("run/") == [key(6), key(7)])
    assert "old payloads could not be swept: the store is away" in caplog.text
    assert "unforeseen" in caplog.text
    sweeper.close()
    lists = store.lists
    sweeper.sweep(7, 0)
    time.sleep(0.05)
    assert store.lists == lists


def test_a_sweep_that_hangs_is_left_alone_when_it_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeper_module, "_CLOSE_S", 0.2)
    store = Moody(tmp_path / "p")
    sweeper = Sweeper(store, "run", 8)
    sweeper.sweep(3, 0)
    wait(lambda: store.lists == 1)
    began = time.monotonic()
    sweeper.close()
    assert time.monotonic() - began < 30
    store.go.set()


def attempt(epoch, before):
    base = Base(Kind.RELATIVE, 0, "aa", "c")
    return CommittedAttempt(FORMAT, "run", epoch, 1, "bb", base, "aa", (OwnerRef("o", 1),), "root", before)


def epochs(store):
    return {int(k.split("/")[1]) for k in store.keys("run/") if k.endswith(".payload")}


def test_the_last_commits_are_kept_whoever_led_when_they_were_made(tmp_path):
    store = FolderDelivery(tmp_path / "p")
    commits = [2, 3, 7, 11]
    for epoch in range(1, 13):
        store.put(key(epoch), b"x")
    first = Sweeper(store, "run", 3)
    for before, epoch in zip([0, *commits], commits[:3], strict=False):
        first.leave(attempt(epoch, before))
    first.sweep(6, 3)
    wait(lambda: epochs(store) == {2, 3, *range(6, 13)})
    first.close()
    second = Sweeper(store, "run", 3)  # which knows of no commit but those that the store tells of
    second.leave(attempt(11, 7))
    second.sweep(12, 11)
    wait(lambda: epochs(store) == {3, 7, 11, 12})
    second.close()
    (tmp_path / "p" / committed_key("run", 7)).write_bytes(b"something else")
    third = Sweeper(store, "run", 3)
    third.sweep(12, 11)  # what is older than what can be read is of no use
    wait(lambda: epochs(store) == {7, 11, 12})
    third.close()
