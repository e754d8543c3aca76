"""What every delivery does, whatever it is made of."""

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcr.delivery.interface import (
    DeliveryConflictError,
    DeliveryError,
    LookPause,
    check_key,
    check_prefix,
    contents_key,
    epoch_prefix,
    manifest_key,
    payload_key,
    sweep,
)
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import PayloadIdentity


def test_put_get_keys_delete(delivery):
    assert delivery.get("a/b", 10) is None
    delivery.put("a/b", b"12345")
    delivery.put("a/b", b"12345")
    delivery.put("a/empty", b"")
    delivery.put("a/empty", b"")
    delivery.put("ab/c", b"x")
    assert delivery.get("a/b", 5) == b"12345"
    assert delivery.get("a/empty", 0) == b""
    assert delivery.get("a/b/c", 5) is None
    assert delivery.keys("a/") == ["a/b", "a/empty"]
    assert delivery.keys("none/") == delivery.segments("none/") == []
    delivery.delete_prefix("a/")
    delivery.delete_prefix("a/")
    assert delivery.get("a/b", 5) is None
    assert delivery.get("ab/c", 5) == b"x"
    delivery.put("a/b", b"another")  # a key that was deleted is free
    assert delivery.get("a/b", 7) == b"another"


def test_segments_are_what_comes_next(delivery):
    for key in ("r/1/a/x", "r/1/b/y", "r/2/a/x", "r/x", "rr/3/z"):
        delivery.put(key, b"-")
    assert delivery.segments("r/") == ["1", "2"]
    assert delivery.segments("r/1/") == ["a", "b"]
    assert delivery.segments("r/2/a/") == []


@pytest.mark.parametrize("other", [b"", b"1234", b"12346", b"123456"])
def test_a_key_is_written_once(delivery, other):
    delivery.put("a/b", b"12345")
    with pytest.raises(DeliveryConflictError, match="a/b"):
        delivery.put("a/b", other)
    assert delivery.get("a/b", 5) == b"12345"


def test_size_max_is_refused_by_name(delivery):
    delivery.put("big", b"x" * 1001)
    assert delivery.get("big", 1001) == b"x" * 1001
    before = delivery.traffic
    with pytest.raises(RefusedError, match=r"object big in .*: 1001 bytes, more than the 1000 allowed"):
        delivery.get("big", 1000)
    assert delivery.traffic.since(before).bytes_down == 0


def test_two_writers_of_one_key_one_wins(delivery_of):
    writers = [delivery_of() for _ in range(3)]
    barrier, won, lost = threading.Barrier(3), [], []

    def contend(i):
        barrier.wait(60)
        try:
            writers[i].put("k/x", bytes([i]) * 1000)
            won.append(i)
        except DeliveryConflictError:
            lost.append(i)

    threads = [threading.Thread(target=contend, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 2)
    assert writers[0].get("k/x", 1000) == bytes(won) * 1000


def test_several_threads_share_one_delivery(delivery):
    def work(i, failed):
        for n in range(3):
            delivery.put(f"t/{i}/{n}", bytes([i, n]) * 500)
            if delivery.get(f"t/{i}/{n}", 1000) != bytes([i, n]) * 500:
                failed.append((i, n))

    failed = []
    threads = [threading.Thread(target=work, args=(i, failed)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(delivery.keys("t/")) == 24


def test_what_is_asked_is_counted(delivery):
    before = delivery.traffic
    delivery.put("a", b"12345")
    delivery.get("a", 5)
    delivery.get("b", 5)
    delivery.keys("c/")
    spent = delivery.traffic.since(before)
    assert (spent.requests, spent.retries, spent.bytes_up, spent.bytes_down) == (4, {}, 5, 5)
    assert str(spent) == "4 requests, 5 bytes up, 5 bytes down"


def test_pauses_between_looks_grow_and_are_bounded():
    assert [LookPause().after(n) for n in (1, 2, 1000)] == [0, 0, 0]
    pauses = [LookPause(0.1, 1.0).after(n) for n in range(1, 200)]
    assert pauses[:3] == pytest.approx([0.1, 0.15, 0.225])
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0
    # Nobody waits longer for an object than half as long again as it took to come, until the bound is reached.
    assert all(pause <= 0.5 * sum(pauses[:n]) + 0.1 for n, pause in enumerate(pauses))


BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    ".",
    "a/.b",
    ".staging/x",
    "a b",
    "a\n",
    "ä",
    "a\\b",
    "a\0",
    "x" * 201,
]


def test_bad_keys_are_refused_everywhere(delivery):
    before = delivery.traffic
    for key in [*BAD_KEYS, "/".join(["x" * 100] * 6)]:
        for call, more in ((delivery.put, [b""]), (delivery.get, [1]), (check_key, [])):
            with pytest.raises(RefusedError):
                call(key, *more)
        for call in (delivery.keys, delivery.segments, delivery.delete_prefix, delivery.tidy):
            with pytest.raises(RefusedError):
                call(key + "/")
    with pytest.raises(RefusedError, match="mid-segment"):
        delivery.delete_prefix("a")
    with pytest.raises(RefusedError):
        check_prefix("")
    assert delivery.traffic == before  # nothing was asked


def test_keys_have_the_documented_form():
    identity = PayloadIdentity("run 1", 7, 12, "rank/0", 3, 5)
    owner = "run=201/00000000000000000012/00000000000000000007/rank=2F0/00000000000000000003/"
    assert payload_key(identity) == owner + "00000000000000000005.payload"
    assert manifest_key("run 1", 7, 12, "rank/0", 3) == owner + "manifest"
    assert epoch_prefix("run 1", 12) == "run=201/00000000000000000012/"
    long = payload_key(PayloadIdentity("x" * 500, 0, 0, "é" * 200, 2**64 - 1, 0))
    assert long.startswith("x" * 80 + "=.")
    check_key(long)


@pytest.mark.parametrize(
    "bad", [("", 1, 1, "o", 1, 1), ("r", 1, 1, "", 1, 1), ("r", -1, 1, "o", 1, 1), ("r", 1, 2**64, "o", 1, 1)]
)
def test_identities_without_a_key_are_refused(bad):
    with pytest.raises(RefusedError):
        payload_key(PayloadIdentity(*bad))


names = st.text(min_size=1, max_size=150) | st.sampled_from(
    ["..", "a/b", "a=2Fb", "A", "a", "=.", "x" * 121, "x" * 122]
)
numbers = st.integers(0, 2**64 - 1)
identities = st.builds(PayloadIdentity, names, numbers, numbers, names, numbers, numbers)


@given(identities, identities)
def test_keys_are_legal_and_one_to_one(one, other):
    check_key(payload_key(one))
    assert (payload_key(one) == payload_key(other)) == (one == other)
    manifest = manifest_key(one.record_id, one.target, one.epoch, one.owner, one.owner_incarnation)
    check_key(manifest)
    assert manifest.startswith(epoch_prefix(one.record_id, one.epoch))
    assert payload_key(one).startswith(epoch_prefix(one.record_id, one.epoch))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(identities, st.binary(max_size=300)), min_size=1, max_size=3, unique_by=lambda pair: pair[0]))
def test_whatever_the_identities_every_object_is_found_again(delivery, pairs):
    for identity, data in pairs:
        delivery.put(payload_key(identity), data)
    for identity, data in pairs:
        assert delivery.get(payload_key(identity), len(data)) == data
        assert payload_key(identity) in delivery.keys(epoch_prefix(identity.record_id, identity.epoch))
    for identity, _ in pairs:
        delivery.delete_prefix(epoch_prefix(identity.record_id, identity.epoch))
        assert delivery.get(payload_key(identity), 300) is None


def test_sweep_deletes_older_epochs_of_one_record_alone(delivery):
    kept = []
    for record_id in ("run", "run2"):
        for epoch in (1, 2, 10, 11):
            key = payload_key(PayloadIdentity(record_id, 1, epoch, "o", 1, 0))
            delivery.put(key, b"x")
            delivery.put(manifest := manifest_key(record_id, 1, epoch, "o", 1), b"m")
            delivery.put(table := contents_key(record_id, epoch, "o", 1, "d"), b"t")
            if record_id == "run2" or epoch >= 10:
                kept += [key, manifest, table]
    delivery.put("run/7/x", b"not an epoch, for those have 20 digits")
    for record_id in ("run", "run", "other"):
        sweep(delivery, record_id, 10)
        assert delivery.keys("run/") + delivery.keys("run2/") == sorted([*kept, "run/7/x"])


def test_what_cannot_be_deleted_keeps_nothing_else_and_is_named(delivery, monkeypatch):
    """An object that is locked in one epoch must not let every later epoch pile up."""
    keys = {epoch: payload_key(PayloadIdentity("run", 1, epoch, "o", 1, 0)) for epoch in range(1, 6)}
    for key in keys.values():
        delivery.put(key, b"x")
    delete, tidied = delivery.delete_prefix, []

    def stubborn(prefix):
        if any(prefix == epoch_prefix("run", epoch) for epoch in (1, 3)):
            raise DeliveryError(f"deleting {prefix}: it is locked")
        delete(prefix)

    monkeypatch.setattr(delivery, "delete_prefix", stubborn)
    monkeypatch.setattr(delivery, "tidy", tidied.append)
    with pytest.raises(DeliveryError, match=r"deleting run/0+1/: it is locked \(and 1 more failures\)"):
        sweep(delivery, "run", 5)
    assert delivery.keys("run/") == [keys[1], keys[3], keys[5]]
    assert tidied == ["run/"]
    monkeypatch.undo()
    sweep(delivery, "run", 5)
    assert delivery.keys("run/") == [keys[5]]


def test_who_reads_while_it_is_swept_gets_whole_objects_or_none_and_new_epochs_stay(delivery_of):
    """A slow node still reads an older epoch while the coordinator sweeps: it may miss objects, and must never fail."""
    writer, reader, sweeper = delivery_of(), delivery_of(), delivery_of()
    epochs, data = range(1, 9), {n: bytes([n]) * 3000 for n in range(4)}

    def key(epoch, n):
        return payload_key(PayloadIdentity("run", 1, epoch, "o", 1, n))

    for epoch in epochs:
        for n, body in data.items():
            writer.put(key(epoch, n), body)
    swept, over, failed, found = [0], threading.Event(), [], []

    def read():
        try:
            last = False
            while not last:
                last = over.is_set()  # once more after the end, so that something is missed in any case
                for epoch in epochs:
                    least = swept[0]
                    for n, body in data.items():
                        got = reader.get(key(epoch, n), 3000)
                        found.append(got is not None)
                        assert got == body or (got is None and epoch < swept[0]), (epoch, n, least, swept[0])
        except BaseException as e:  # noqa: BLE001 - raised below
            failed.append(e)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not found and not failed:
        time.sleep(0.001)
    for epoch_min in epochs:
        swept[0] = epoch_min
        sweep(sweeper, "run", epoch_min)
    over.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert set(found) == {True, False}
    assert writer.keys("run/") == [key(epochs[-1], n) for n in data]


@pytest.mark.parametrize("letter", ["a", "\0", "\U000e0001"])
def test_a_refused_key_is_quoted_in_part(letter):
    for check, key in ((check_key, letter * 100_000), (check_prefix, letter * 100_000)):
        with pytest.raises(RefusedError, match=r"characters left out\) \.\.\. ") as e:
            check(key)
        assert len(str(e.value)) < 600
