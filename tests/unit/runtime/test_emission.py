"""What an owner emits, read back from the folder and compared with the weights by a reading of the test's own."""

import threading
import time

import pytest
import torch

from dcr.data_plane.item import Operation
from dcr.data_plane.payload import decode_payload
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryError, payload_key
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import Base, Kind
from dcr.protocol.messages import Emit
from dcr.runtime.emission import Emission
from dcr.runtime.pipeline import CancelledError
from dcr.runtime.settings import Settings
from dcr.trainer.torch.source import TorchSource
from tests.faults.models import Policy

INCARNATION = 9


def patterns(policy):
    """Stored bits by canonical name as plain Python integers."""
    return {
        n: t.view(torch.int32 if t.dtype == torch.float32 else torch.int16).flatten().tolist()
        for n, t in policy.state_dict().items()
    }


class Setting:
    def __init__(self, folder):
        self.policy = Policy()
        self.old = patterns(self.policy)
        self.source = TorchSource(self.policy, chunk_elements=100)
        self.store = FolderDelivery(folder / "p")

    def emission(self, kind, *, epoch=1, target=1, bucket_bytes=700, operation="add", set_only=(), **bounds):
        held = "" if kind is Kind.DENSE else self.source.baseline_digest.hex()
        base = Base(kind, 0, held, "" if kind is Kind.RESTORE else "c")
        order = Emit("r", epoch, 0 if kind is Kind.RESTORE else target, base, operation, set_only, INCARNATION)
        return Emission(order, self.source, INCARNATION, self.store, Settings(bucket_bytes=bucket_bytes, **bounds))

    def read(self, manifest):
        """Every entry of every payload that the manifest lists: (name, index) -> (operation, value)."""
        entries = {}
        for line in manifest.payloads:
            data = self.store.get(payload_key(manifest.identity(line.sequence)), 1 << 30)
            header, items = decode_payload(data)
            assert header.identity == manifest.identity(line.sequence)
            assert header.base == manifest.base
            assert (line.size_bytes, line.entries) == (len(data), header.entries)
            for item in items:
                for i, value in zip(item.indices.tolist(), item.values.tolist(), strict=True):
                    assert (item.spec.name, i) not in entries
                    entries[item.spec.name, i] = (item.operation, value)
        return entries


def wrapped(value, bits):
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


@pytest.mark.parametrize("operation", ["add", "xor"])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
def test_a_relative_emission_is_the_changed_set(tmp_path, operation, bucket_bytes):
    s = Setting(tmp_path)
    s.policy.step(1, rate=0.01)
    new = patterns(s.policy)
    manifest = s.emission(Kind.RELATIVE, bucket_bytes=bucket_bytes, operation=operation, set_only=("scale", "k")).run()
    expected = {}
    for n, old in s.old.items():
        width = 32 if n == "scale" else 16
        for i, (a, b) in enumerate(zip(old, new[n], strict=True)):
            if a != b and n in ("scale", "k"):
                expected[n, i] = (Operation.SET, b)
            elif a != b:
                value = wrapped(b - a, width) if operation == "add" else a ^ b
                expected[n, i] = (Operation(operation), value)
    assert s.read(manifest) == expected
    assert manifest.changed_entries == len(expected) > 20
    assert manifest.owned_elements == sum(map(len, new.values()))
    assert (len(manifest.payloads) == len(expected)) == (bucket_bytes == 1)
    assert manifest.content_digest == TorchSource(s.policy).baseline_digest.hex()


def test_an_absolute_emission_sets_the_changed_set_and_a_dense_or_restoring_one_everything(tmp_path):
    s = Setting(tmp_path)
    before = s.source.baseline_digest.hex()
    s.policy.step(1, rate=0.01)
    new = patterns(s.policy)
    sets = {(n, i): (Operation.SET, b) for n in new for i, b in enumerate(new[n])}
    changed = {k: v for k, v in sets.items() if s.old[k[0]][k[1]] != v[1]}
    assert s.read(s.emission(Kind.ABSOLUTE, epoch=1).run()) == changed
    dense = s.emission(Kind.DENSE, epoch=2).run()
    assert s.read(dense) == sets
    assert dense.content_digest != before
    restore = s.emission(Kind.RESTORE, epoch=3).run()
    assert s.read(restore) == {(n, i): (Operation.SET, b) for n in s.old for i, b in enumerate(s.old[n])}
    assert restore.content_digest == before


def test_nothing_changed_is_an_empty_manifest(tmp_path):
    s = Setting(tmp_path)
    manifest = s.emission(Kind.RELATIVE).run()
    assert (manifest.payloads, manifest.changed_entries) == ((), 0)
    assert manifest.content_digest == s.source.baseline_digest.hex()
    assert s.store.keys("r/") == []


def test_a_cancelled_emission_delivers_nothing_more(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)
    emission = s.emission(Kind.RELATIVE, deliver_threads=1)
    put, delivered = s.store.put, []

    def put_and_cancel(key, data):
        put(key, data)
        delivered.append(key)
        emission.cancelled.set()

    s.store.put = put_and_cancel
    with pytest.raises(CancelledError):
        emission.run()
    assert len(delivered) == 1
    assert s.store.keys("r/") == delivered
    # What left may have torn a member: the content it was part of is known all the same, and binds the next attempt.
    s.store.put = put
    assert s.emission(Kind.ABSOLUTE, epoch=2).run(emission.found).content_digest == emission.found.hex()
    s.policy.step(2)
    with pytest.raises(RefusedError, match="candidate changed"):
        s.emission(Kind.ABSOLUTE, epoch=3).run(emission.found)


def test_stepped_weights_are_refused_before_a_payload_leaves(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)
    s.emission(Kind.RELATIVE, epoch=1).run()
    found = s.source.candidate_digest
    again = s.emission(Kind.ABSOLUTE, epoch=2).run(found)  # the same weights: as before
    assert again.content_digest == found.hex()
    held = {n: t.clone() for n, t in s.policy.state_dict().items()}
    s.policy.step(2)
    kept = s.store.keys("r/")
    with pytest.raises(RefusedError, match="candidate changed: the weights owned by rank-0 were stepped"):
        s.emission(Kind.ABSOLUTE, epoch=3).run(found)
    assert s.store.keys("r/") == kept
    s.policy.load_state_dict(held)
    assert s.emission(Kind.ABSOLUTE, epoch=4).run(found).content_digest == found.hex()


def test_a_store_that_fails_is_named(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)
    (tmp_path / "p" / "r").write_bytes(b"a file where the record's folder should be")
    with pytest.raises(DeliveryError, match=r"storing r/0{19}1/.*\.payload"):
        s.emission(Kind.RELATIVE).run()


def test_an_epoch_emitted_twice_with_other_bytes_is_refused_by_the_store(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)
    s.emission(Kind.RELATIVE).run()
    s.policy.step(2)
    with pytest.raises(DeliveryError, match="holds other bytes already"):
        s.emission(Kind.RELATIVE).run()


def test_times_are_those_of_the_stages(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)
    emission = s.emission(Kind.RELATIVE)
    emission.run()
    assert set(emission.seconds) == {"detect", "encode", "deliver", "blocked"}
    assert min(emission.seconds.values()) > 0


def test_payloads_are_the_same_however_many_are_on_their_way(tmp_path):
    made = {}
    for place, bounds in enumerate(({"buckets_ahead": 1}, {"encode_threads": 3, "deliver_threads": 5})):
        (tmp_path / str(place)).mkdir()
        s = Setting(tmp_path / str(place))
        s.policy.step(1)
        manifest = s.emission(Kind.RELATIVE, **bounds).run()
        assert len(manifest.payloads) > 5
        assert [p.sequence for p in manifest.payloads] == list(range(len(manifest.payloads)))
        made[place] = manifest, {key: s.store.get(key, 1 << 30) for key in s.store.keys("r/")}
    assert made[0] == made[1]


def at_rest(found):
    """How many there are once there has come none for a while."""
    while True:
        before = len(found)
        time.sleep(0.3)
        if len(found) == before:
            return before


def test_a_slow_store_holds_up_detection_and_the_bound_holds(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)
    emission = s.emission(Kind.RELATIVE, buckets_ahead=3, deliver_threads=2)
    put, release, begun = s.store.put, threading.Event(), threading.Semaphore(0)
    encoded = []

    def wait(key, data):
        begun.release()
        assert release.wait(120)
        put(key, data)

    s.store.put = wait
    changes = s.source.changes

    def counted(kind):
        for change in changes(kind):
            encoded.append(change.indices.numel())
            yield change

    s.source.changes = counted
    thread = threading.Thread(target=emission.run)
    thread.start()
    assert begun.acquire(timeout=60)
    assert begun.acquire(timeout=60)
    seen = at_rest(encoded)
    assert not begun.acquire(timeout=0.1), "two threads deliver"
    release.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(encoded) > seen, "detection waited, and goes on"
    assert emission.seconds["blocked"] > 0.25


def test_no_thread_is_left_of_an_emission_that_fails(tmp_path):
    s = Setting(tmp_path)
    s.policy.step(1)

    def refuse(key, data):
        raise DeliveryError("the disk is full")

    s.store.put = refuse
    before = set(threading.enumerate())
    with pytest.raises(DeliveryError, match="the disk is full"):
        s.emission(Kind.RELATIVE).run()
    assert {t for t in threading.enumerate() if "epoch" in t.name} <= before


def test_a_rollback_sends_the_committed_bits_of_what_the_candidate_changed(tmp_path):
    s = Setting(tmp_path)
    before = s.source.baseline_digest.hex()
    s.policy.step(1, rate=0.01)
    new = patterns(s.policy)
    back = s.emission(Kind.ABSOLUTE, target=0)
    manifest = back.run()
    expected = {
        (n, i): (Operation.SET, a)
        for n, old in s.old.items()
        for i, (a, b) in enumerate(zip(old, new[n], strict=True))
        if a != b
    }
    assert s.read(manifest) == expected
    assert len(expected) > 20
    assert (manifest.target, manifest.content_digest) == (0, before)
    assert back.found.hex() == TorchSource(s.policy).baseline_digest.hex()
    kept = s.store.keys("r/")
    s.policy.step(2)
    with pytest.raises(RefusedError, match="candidate changed"):
        s.emission(Kind.ABSOLUTE, epoch=2, target=0).run(back.found)
    assert s.store.keys("r/") == kept


@pytest.mark.parametrize("target", [0, 1])
def test_weights_that_are_stepped_while_they_are_emitted_are_not_sealed(tmp_path, target):
    s = Setting(tmp_path)
    s.policy.step(1)
    s.emission(Kind.RELATIVE, epoch=1).run()
    found = s.source.candidate_digest
    # One bucket at a time: the first has left before the second is found.
    emission = s.emission(Kind.ABSOLUTE, epoch=2, target=target, buckets_ahead=1)
    put, left = s.store.put, [1]

    def put_and_step(key, data):
        put(key, data)
        if left:
            left.pop()
            s.policy.step(2, rate=0.5)

    s.store.put = put_and_step
    with pytest.raises(RefusedError, match="candidate changed"):
        emission.run(found)
