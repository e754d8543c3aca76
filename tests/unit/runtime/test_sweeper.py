"""Old epochs are swept beside the coordinator, whatever the store does."""

import threading
import time

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryError, payload_key
from dcr.protocol.identity import PayloadIdentity
from dcr.runtime.sweeper import Sweeper


class Moody(FolderDelivery):
    """A folder whose lists wait for a word, or fail."""

    def __init__(self, root):
        super().__init__(root)
        self.go, self.errors, self.lists = threading.Event(), [], 0

    def segments(self, prefix):
        self.lists += 1
        assert self.go.wait(20)
        if self.errors:
            raise self.errors.pop()
        return super().segments(prefix)


def key(epoch):
    return payload_key(PayloadIdentity("run", 1, epoch, "o", 1, 0))


def wait(what):
    deadline = time.monotonic() + 20
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
    assert time.monotonic() - began < 1
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


def test_a_sweep_that_hangs_is_left_alone_when_it_is_closed(tmp_path):
    store = Moody(tmp_path / "p")
    sweeper = Sweeper(store, "run", 8)
    sweeper.sweep(3, 0)
    wait(lambda: store.lists == 1)
    began = time.monotonic()
    sweeper.close()
    assert time.monotonic() - began < 10
    store.go.set()
