"""What a host receives, from a real folder into real files: once, within its bound, and no engine waits for another."""

import random
import resource
import shutil
import threading
import time
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryError, LookPause, manifest_key, payload_key
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind, PayloadIdentity
from dcr.protocol.messages import Prepare
from dcr.protocol.record import OwnerRef
from dcr.runtime import incoming, reception
from dcr.runtime.incoming import StoreInbox
from dcr.runtime.reception import Reception
from dcr.runtime.settings import Settings
from dcr.runtime.shared_memory import SharedMemory, read_shared

OWNER = OwnerRef("rank-0", 7)


class Counting(FolderDelivery):
    """A folder that counts how often each object was read, and how often it was not there."""

    def __init__(self, root):
        super().__init__(root)
        self.read, self.missed = {}, 0

    def get(self, key, size_max):
        data = super().get(key, size_max)
        if data is None:
            self.missed += 1
        else:
            self.read[key] = self.read.get(key, 0) + 1
        return data


def identity(sequence, epoch=3):
    return PayloadIdentity("r", 1, epoch, OWNER.owner, OWNER.incarnation, sequence)


def order(epoch=3):
    return Prepare("r", epoch, 1, Base(Kind.RELATIVE, 0, "", "c"), (OWNER,), 5)


class Host:
    def __init__(self, folder, engines=("a", "b"), memory=None, **bounds):
        self.store = Counting(folder / "p")
        self.memory = memory or SharedMemory("r", 1, folder)
        bounds = {"delivery_timeout_s": 20.0, **bounds}
        self.reception = Reception(self.store, self.memory, engines, Settings(**bounds), payload_bytes_max=1000)
        self.inboxes = {engine: self.reception.inbox(engine) for engine in engines}

    def put(self, sequence, data, epoch=3):
        self.store.put(payload_key(identity(sequence, epoch)), data)

    def seal(self, data, epoch=3):
        self.store.put(manifest_key("r", 1, epoch, OWNER.owner, OWNER.incarnation), data)

    def read(self, engine, sequence, epoch=3):
        """What the engine's ranks would read; None if it is not in sight."""
        shared = self.settled(lambda: self.inboxes[engine].payload(identity(sequence, epoch)))
        return None if shared is None else read_shared(shared, 1000).tobytes()

    def settled(self, ask):
        """What is answered once nothing is being read from the store any more."""
        while True:
            reads = bool(self.reception._reads)  # what comes while it is asked is asked for again
            if (found := ask()) is not None or not reads:
                return found
            time.sleep(0.001)

    def take(self, engine, sequence, epoch=3):
        data = self.read(engine, sequence, epoch)
        self.inboxes[engine].payload_taken(identity(sequence, epoch))
        return data

    @property
    def files(self):
        return sorted(int(path.name) for path in self.memory.folder.iterdir())

    @property
    def used(self):
        return sum(path.stat().st_size for path in self.memory.folder.iterdir())


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """What is asked for first is answered in the same call, however slow the machine is."""
    monkeypatch.setattr(reception, "_AT_ONCE_S", 20.0)


@pytest.fixture
def host_of(tmp_path):
    hosts = []

    def make(**kwargs):
        hosts.append(Host(tmp_path, **kwargs))
        return hosts[-1]

    yield make
    for host in hosts:
        host.memory.close()


def test_each_object_is_received_once_and_goes_with_the_last_engine_that_takes_it(host_of):
    host = host_of()
    host.put(0, b"first")
    host.seal(b"sealed")
    assert host.take("a", 0) == b"first"
    assert host.files == [0]
    assert host.take("b", 0) == b"first"
    assert host.files == []
    for engine in ("a", "b"):
        inbox = host.inboxes[engine]
        assert host.settled(lambda inbox=inbox: inbox.manifest(order(), OWNER)) == b"sealed"
        inbox.manifest_taken(order(), OWNER)
    assert set(host.store.read.values()) == {1}
    assert (host.reception.objects, host.reception.bytes) == (2, 11)
    assert host.reception._held == {}
    assert host.reception._held_bytes == 0


def test_an_engine_that_sees_nothing_does_not_make_the_store_be_asked_twice(host_of):
    host = host_of(fetch_poll_s=60.0)
    assert host.read("a", 0) is None
    assert host.read("b", 0) is None
    assert host.store.missed == 1
    host.put(0, b"there")
    assert host.read("a", 0) == b"there"  # whoever asked last asks again
    assert host.read("b", 0) == b"there"


def test_a_store_where_looks_cost_is_asked_with_growing_pauses(host_of, monkeypatch):
    now = [100.0]
    for module in (reception, incoming):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    host = host_of()
    host.store.look_pause = LookPause(0.02, 0.3)
    direct = StoreInbox(Counting(host.store._root), 1000)
    direct._delivery.look_pause = host.store.look_pause
    for _ in range(1500):
        assert host.inboxes["a"].payload(identity(0)) is host.inboxes["b"].payload(identity(0)) is None
        assert direct.payload(identity(0)) is None
        now[0] += 0.001
    # 0.02 + 0.03 + 0.045 + ... + 0.3 + 0.3: ten looks in a second and a half, where a folder is asked each time.
    assert host.store.missed == direct._delivery.missed == 10
    for n in range(2):
        host.put(n, b"there")
    now[0] += 0.3
    assert host.read("a", 0) == direct.payload(identity(0)) == b"there"
    missed = host.store.missed
    assert host.read("a", 1) == b"there"  # the next one is looked for at once
    assert host.store.missed == missed


def test_an_engine_that_is_behind_holds_up_nobody_and_reads_anew_what_had_to_go(host_of):
    host = host_of(receive_bytes_max=100)
    sent = [bytes([n]) * 40 for n in range(8)]
    for n, data in enumerate(sent):
        host.put(n, data)
    assert host.read("b", 0) == sent[0]  # b's ranks stand still with this one
    assert [host.take("a", n) for n in range(8)] == sent
    assert host.used <= 100
    assert host.read("b", 0) == sent[0]
    assert [host.take("b", n) for n in range(8)] == sent
    assert host.used <= 100
    assert max(host.store.read.values()) == 2
    host.inboxes["a"].passed(3)
    host.inboxes["b"].passed(3)
    assert host.files == []


class Small(SharedMemory):
    """Memory of 100 bytes, as of a container whose /dev/shm is smaller than the bound."""

    def write(self, data):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        free = 100 - sum(path.stat().st_size for path in self.folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
        try:
            return super().write(data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_smaller_than_the_bound_lets_no_engine_that_is_behind_hold_up_another(host_of, tmp_path):
    host = host_of(memory=Small("r", 1, tmp_path))
    sent = [bytes([n]) * 40 for n in range(8)]
    for n, data in enumerate(sent):
        host.put(n, data)
    assert host.read("b", 0) == sent[0]
    assert [host.take("a", n) for n in range(8)] == sent
    assert host.reception._held_bytes == host.used
    host.put(8, b"x" * 101)
    with pytest.raises(DeliveryError, match="101 bytes could not be written"):
        host.read("a", 8)
    assert [host.take("b", n) for n in range(8)] == sent


def test_memory_that_was_taken_away_is_made_anew_and_counted(host_of):
    host = host_of()
    host.put(0, b"first")
    host.put(1, b"second")
    assert host.take("a", 0) == b"first"
    shutil.rmtree(host.memory.folder)
    assert host.take("a", 1) == b"second"
    assert host.used == 6
    host.inboxes["b"].payload_again(identity(0))  # its file is gone, as its ranks find
    assert host.take("b", 0) == b"first"
    assert host.take("b", 1) == b"second"
    assert host.reception._held_bytes == host.used == 5, "the one that was read again, for whom it may concern"
    for engine in ("a", "b"):
        host.inboxes[engine].passed(3)
    assert host.reception._held_bytes == host.used == 0


def test_what_is_read_ahead_is_there_when_it_is_asked_for_and_was_read_once(host_of):
    host = host_of()
    for n in range(4):
        host.put(n, b"%d" % n)
    assert host.read("a", 0) == b"0"
    host.inboxes["a"].ahead([identity(n) for n in (1, 2, 7)])
    keys = {payload_key(identity(n)) for n in (1, 2)}
    host.settled(lambda: keys <= host.reception._held.keys() or None)  # several threads read, in any order
    reads = host.reception.objects
    assert reads == 3
    for n in (1, 2):
        assert host.take("a", n) == b"%d" % n
        assert host.take("b", n) == b"%d" % n
    assert host.reception.objects == reads, "each was read once"
    assert host.read("a", 7) is None
    host.put(7, b"late")
    assert host.read("a", 7) == b"late"


def test_what_nobody_asked_for_leaves_readers_for_what_is_asked_for(host_of):
    host = host_of(delivery_timeout_s=20.0)
    for n in range(30):
        host.put(n, b"%d" % n)
    get, release = host.store.get, threading.Event()

    def slow(key, size_max):
        if not key.endswith(f"{29:020d}.payload"):
            assert release.wait(20)
        return get(key, size_max)

    host.store.get = slow
    host.inboxes["a"].ahead([identity(n) for n in range(20)])
    assert host.read("a", 29) == b"29", "it waits behind none of these"
    release.set()
    assert host.read("a", 3) == b"3"


def test_what_is_read_ahead_takes_no_room_that_anything_else_wants(host_of):
    host = host_of(receive_bytes_max=100)
    for n in range(4):
        host.put(n, b"%d" % n * 60)
    assert host.read("a", 0) == b"0" * 60
    host.inboxes["a"].ahead([identity(1)])
    host.settled(lambda: None)
    assert host.files == [0], "no room beside what a rank reads"
    host.inboxes["a"].payload_taken(identity(0))
    host.inboxes["b"].payload_taken(identity(0))
    host.inboxes["a"].ahead([identity(3)])
    host.settled(lambda: host.reception._held.get(payload_key(identity(3))))
    assert host.read("a", 1) == b"1" * 60, "what was read ahead makes room"
    host.inboxes["a"].payload_taken(identity(1))
    host.inboxes["b"].payload_taken(identity(1))
    assert host.read("a", 3) == b"3" * 60, "and is read again"
    assert host.reception._held_bytes == host.used


def test_what_ranks_are_reading_is_not_taken_from_them_for_want_of_room(host_of):
    host = host_of(receive_bytes_max=100, delivery_timeout_s=0.7)
    host.put(0, b"x" * 60)
    host.put(1, b"y" * 60)
    assert host.read("b", 0) == b"x" * 60
    started = time.monotonic()
    with pytest.raises(DeliveryError, match=r"60 bytes found no room in 0\.7 s beside 60 that ranks are reading"):
        host.read("a", 1)
    assert time.monotonic() - started > 0.5
    threading.Timer(0.05, lambda: host.inboxes["b"].payload_taken(identity(0))).start()
    until = time.monotonic() + 60
    while True:
        try:
            assert host.read("a", 1) == b"y" * 60
        except DeliveryError:  # the timer was late: it waited 0.7 s for room
            assert time.monotonic() < until
        else:
            break


def test_whoever_asks_waits_neither_for_room_nor_for_long(host_of, monkeypatch):
    monkeypatch.setattr(reception, "_AT_ONCE_S", 0.05)
    host = host_of(receive_bytes_max=100, delivery_timeout_s=60.0)
    host.put(0, b"x" * 60)
    host.put(1, b"y" * 60)
    assert host.read("b", 0) == b"x" * 60
    began = time.monotonic()
    assert host.inboxes["a"].payload(identity(1)) is None
    assert host.inboxes["a"].payload(identity(1)) is None
    assert time.monotonic() - began < 30  # of a minute
    host.inboxes["b"].payload_taken(identity(0))
    assert host.read("a", 1) == b"y" * 60


def test_what_is_larger_than_the_bound_is_refused_by_name(host_of):
    host = host_of(receive_bytes_max=50)
    host.put(0, b"x" * 51)
    with pytest.raises(RefusedError, match="has 51 bytes, more than receive_bytes_max = 50: raise it"):
        host.read("a", 0)
    host.put(1, b"x" * 1001)
    with pytest.raises(RefusedError, match="1001 bytes, more than the 1000 allowed"):
        host.read("a", 1)
    assert host.files == []
    assert host.reception._held_bytes == 0


def test_a_bad_copy_is_received_anew(host_of):
    host = host_of()
    host.put(0, b"first")
    assert host.read("a", 0) == b"first"
    host.inboxes["a"].payload_again(identity(0))
    assert host.files == []
    assert host.take("a", 0) == b"first"
    assert host.take("b", 0) == b"first"
    assert host.store.read[payload_key(identity(0))] == 2
    assert host.files == []


def test_an_engine_that_takes_no_part_or_leaves_keeps_nothing(host_of):
    host = host_of(engines=("a", "b", "c"))
    host.put(0, b"first")
    host.put(0, b"later", epoch=4)
    host.take("a", 0)
    host.take("b", 0, epoch=4)
    assert len(host.files) == 2
    host.inboxes["b"].passed(3)
    host.inboxes["c"].passed(3)
    assert len(host.files) == 2
    host.inboxes["a"].passed(3)
    assert len(host.files) == 1
    assert host.read("c", 0, epoch=4) == b"later"
    host.inboxes["a"].passed(4)
    host.inboxes["b"].passed(4)
    assert len(host.files) == 1  # c's ranks may be reading it
    host.inboxes["c"].leave()
    assert host.files == []


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(60, 200),
)
def test_whatever_the_order_every_engine_reads_everything_within_the_bound(
    tmp_path_factory, seed, engines, sizes, bound
):
    rng = random.Random(seed)
    names = [f"e{n}" for n in range(engines)]
    host = Host(tmp_path_factory.mktemp("h"), engines=names, receive_bytes_max=bound * engines)
    try:
        sent = [rng.randbytes(size) for size in sizes]
        for n, data in enumerate(sent):
            host.put(n, data)
        got = {name: [] for name in names}
        while behind := [name for name in names if len(got[name]) < len(sent)]:
            name = rng.choice(behind)
            data = host.read(name, len(got[name]))
            assert host.used <= bound * engines
            if rng.random() < 0.1:
                host.inboxes[name].payload_again(identity(len(got[name])))
                continue
            host.inboxes[name].payload_taken(identity(len(got[name])))
            got[name].append(data)
        assert all(read == sent for read in got.values())
        for name in names:
            host.inboxes[name].passed(3)
        assert host.files == []
        assert host.reception._held_bytes == 0
    finally:
        host.memory.close()


def test_threads_of_many_engines_read_each_object_once(host_of):
    names = [f"e{n}" for n in range(6)]
    host = host_of(engines=names, delivery_timeout_s=60.0)
    sent = [bytes([n]) * 100 for n in range(30)]
    got = {name: [] for name in names}

    def engine(name):
        while len(got[name]) < len(sent):
            data = host.read(name, len(got[name]))
            if data is not None:
                host.inboxes[name].payload_taken(identity(len(got[name])))
                got[name].append(data)

    threads = [threading.Thread(target=engine, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for n, data in enumerate(sent):
        host.put(n, data)
    for thread in threads:
        thread.join(60)
    assert all(read == sent for read in got.values())
    assert set(host.store.read.values()) == {1}
    assert host.files == []
