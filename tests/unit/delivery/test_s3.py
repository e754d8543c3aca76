"""S3 through a network that fails in every way that it can, against a real server."""

import threading
import time
import tracemalloc

import pytest

from dcr.delivery.address import open_delivery
from dcr.delivery.interface import DeliveryConflictError, DeliveryError, sweep
from dcr.protocol.errors import RefusedError
from tests.object_store import READER_KEY

PART = 5 << 20
PARTS = f"&part_bytes={PART}&parallel_parts=2"


def content(size, seed=0):
    return (seed.to_bytes(4) + bytes(range(251))) * (size // 255) + b"e" * (size % 255)


BIG = content(2 * PART + 7)


@pytest.fixture
def s3_of(bucket, network):
    """Opens the bucket, through the bad network, with more fields in the address."""
    opened = []

    def make(more="", endpoint=network.endpoint):
        opened.append(open_delivery(f"s3://{bucket}/p?endpoint={endpoint}{more}"))
        return opened[-1]

    yield make
    for delivery in opened:
        delivery.close()


def uploads(store, bucket):
    return store.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])


def test_every_fault_of_a_put_is_gone_over_once(s3_of, network):
    delivery = s3_of()
    reasons = {
        "503": "throttled",
        "429": "throttled",
        "500": "server error",
        "reset": "connection lost",
        "lost": "connection lost",
        "damaged": "damaged request",
    }
    for number, (fault, reason) in enumerate(reasons.items()):
        before, data = delivery.traffic, content(3000, number)
        network.once(fault, lambda r: r.method == "PUT")
        delivery.put(f"put/{fault}", data)
        spent = delivery.traffic.since(before)
        assert (spent.retries, spent.bytes_up) == ({reason: 1}, 6000)
        assert spent.requests == (3 if fault == "lost" else 2)  # it is there already: what is there is read back
        assert delivery.get(f"put/{fault}", 3000) == data
    assert set(network.faults()) == set(reasons)


def test_every_fault_of_a_get_is_gone_over_once(s3_of, network):
    delivery, data = s3_of(), content(3000)
    delivery.put("k", data)
    reasons = {
        "503": "throttled",
        "429": "throttled",
        "500": "server error",
        "reset": "connection lost",
        "lost": "connection lost",
        "truncated": "connection lost",
        "cut": "damaged answer",
        "flipped": "damaged object",
    }
    for fault, reason in reasons.items():
        before = delivery.traffic
        network.once(fault, lambda r: r.method == "GET")
        assert delivery.get("k", 3000) == data
        assert delivery.traffic.since(before).retries == {reason: 1}
    network.once("slow")
    assert delivery.get("k", 3000) == data
    assert set(network.faults()) == {*reasons, "slow"}


def test_every_request_of_an_upload_in_parts_may_fail(s3_of, network, bucket, running_store):
    delivery = s3_of(PARTS)
    unseen = []

    def completes(request):
        if request.method == "POST" and "uploadId=" in request.path:
            unseen.append(running_store.client().list_objects_v2(Bucket=bucket)["KeyCount"])
            return True
        return False

    network.once("lost", lambda r: r.method == "POST" and r.path.endswith("?uploads"))
    network.once("reset", lambda r: "partNumber=2" in r.path)
    network.once("damaged", lambda r: "partNumber=3" in r.path)
    network.once("lost", completes)
    before = delivery.traffic
    delivery.put("big", BIG)
    spent = delivery.traffic.since(before)
    assert spent.retries == {"connection lost": 3, "damaged request": 1}
    assert spent.bytes_up == len(BIG) + PART + 7
    assert unseen[0] == 0  # until it is completed nothing of it is to be seen
    network.once("truncated", lambda r: "bytes=5242880-" in r.head.decode().lower())
    assert delivery.get("big", len(BIG)) == BIG
    assert len(network.seen("GET", "/big")) == 4
    assert network.faults() == {"lost": 2, "reset": 1, "damaged": 1, "truncated": 1}
    # What the lost answer began is nobody's, until the sweep finds it old.
    assert len(uploads(running_store, bucket)) <= 1


def test_parts_are_given_up_when_the_upload_fails_or_the_key_is_taken(s3_of, network, bucket, running_store):
    delivery = s3_of(PARTS + "&tries_max=2")
    network.once("500", lambda r: "partNumber=2" in r.path, times=99)
    with pytest.raises(DeliveryError, match=r"storing part 2 of a/big \(5242880 bytes\): server error, after 2 tries"):
        delivery.put("a/big", BIG)
    assert uploads(running_store, bucket) == []
    assert delivery.get("a/big", len(BIG)) is None
    network.quiet()
    delivery.put("a/big", BIG)
    with pytest.raises(DeliveryConflictError, match="a/big"):
        delivery.put("a/big", BIG[:-1] + b"x")
    assert uploads(running_store, bucket) == []
    delivery.put("a/big", BIG)
    assert delivery.get("a/big", len(BIG)) == BIG


def test_the_sweep_aborts_old_uploads_of_its_record_alone(s3_of, bucket, running_store):
    client = running_store.client()
    keys = ["p/run/00000000000000000012/x", "p/run2/x", "elsewhere"]
    old, *others = [client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"] for key in keys]
    sweep(s3_of(), "run", 10)
    assert {u["UploadId"] for u in uploads(running_store, bucket)} == {old, *others}  # they may still be at work
    time.sleep(2.5)
    sweep(s3_of("&upload_age_max_s=1"), "run", 10)
    assert {u["UploadId"] for u in uploads(running_store, bucket)} == set(others)


def test_bounds_hold_and_the_error_says_what_was_tried(s3_of, network):
    delivery = s3_of("&tries_max=3")
    network.once("503", times=99)
    before = delivery.traffic
    with pytest.raises(DeliveryError) as error:
        delivery.put("a/b", b"12345")
    said = str(error.value)
    for part in (network.endpoint, "storing a/b (5 bytes)", "throttled, after 3 tries", "503 SlowDown: please reduce"):
        assert part in said
    spent = delivery.traffic.since(before)
    assert (spent.requests, spent.retries) == (3, {"throttled": 2})

    hurried = s3_of("&retry_timeout_s=1") if network.quiet() is None else None
    network.once("500", times=999)
    began = time.monotonic()
    with pytest.raises(DeliveryError, match="reading a/b: server error, after"):
        hurried.get("a/b", 5)
    assert time.monotonic() - began < 30  # of 45


def test_a_store_that_is_silent_is_not_waited_for_without_a_bound(s3_of, network):
    network.slow_s = 3.0
    delivery = None
    until = time.monotonic() + 60
    while delivery is None:  # a store that is asked on a busy machine may be that slow by itself
        try:
            delivery = s3_of("&answer_timeout_s=0.3&tries_max=2")
        except DeliveryError:
            assert time.monotonic() < until
    network.once("slow", times=99)
    with pytest.raises(DeliveryError, match=r"reading a: no answer, after 2 tries in .* raise answer_timeout_s"):
        delivery.get("a", 5)


def test_close_ends_waiting(s3_of, network):
    delivery = s3_of("&tries_max=1000&retry_timeout_s=3600")
    network.once("reset", times=10_000)
    errors = []

    def work():
        try:
            delivery.get("a", 5)
        except DeliveryError as e:
            errors.append(str(e))

    thread = threading.Thread(target=work)
    thread.start()
    while not network.faults():
        time.sleep(0.01)
    delivery.close()
    delivery.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "it is closed" in errors[0]


def test_connections_are_bounded(s3_of, network):
    network.slow_s = 0.05
    delivery = s3_of("&connections_max=2" + PARTS.replace("parallel_parts=2", "parallel_parts=8"))
    network.once("slow", times=999)
    threads = [threading.Thread(target=delivery.put, args=(f"k/{i}", content(1000, i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    network.at_once_max, before = 0, len(network.requests)
    for thread in [threading.Thread(target=delivery.get, args=(f"k/{i}", 1000)) for i in range(8)]:
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    assert len(network.requests) == before + 8
    assert network.at_once_max == 2


def test_a_large_object_is_read_in_ranges_into_one_buffer(s3_of, network, running_store):
    delivery, data = s3_of(PARTS), content(2 * PART + 1)
    delivery.put("big", data)
    direct = s3_of(PARTS, running_store.endpoint)  # the network's own memory is not what is measured
    tracemalloc.start()
    try:
        found = direct.get("big", len(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == data
    assert peak < len(data) + (2 << 20)
    before = delivery.traffic
    assert delivery.get("big", len(data)) == data
    spent = delivery.traffic.since(before)
    assert (spent.requests, spent.retries, spent.bytes_down) == (3, {}, len(data))
    with pytest.raises(RefusedError, match="10485761 bytes, more than the 10485760 allowed"):
        delivery.get("big", len(data) - 1)
    assert len(network.seen("GET", "/big")) == 4  # and nothing after the first


def test_what_is_overwritten_from_outside_is_not_mixed_up(s3_of, network, bucket, running_store):
    delivery, client = s3_of(PARTS), running_store.client()
    delivery.put("k", BIG)
    other = s3_of(PARTS, running_store.endpoint)
    other.put("spare", content(len(BIG), 9))

    def replaced(request):
        if "bytes=10485760-" in request.head.decode().lower():
            client.copy_object(Bucket=bucket, Key="p/k", CopySource={"Bucket": bucket, "Key": "p/spare"})
            return True
        return False

    network.once("500", replaced)  # between the first part and the last
    assert delivery.get("k", len(BIG)) == content(len(BIG), 9)
    assert delivery.traffic.retries["damaged object"] == 1


def test_bad_bytes_in_the_store_and_what_others_wrote_are_named(s3_of, bucket, running_store):
    delivery, client = s3_of(), running_store.client()
    delivery.put("k", b"12345")
    metadata = client.head_object(Bucket=bucket, Key="p/k")["Metadata"]
    client.put_object(Bucket=bucket, Key="p/k", Body=b"12346", Metadata=metadata)
    with pytest.raises(DeliveryError, match=r"object k in .* its 5 bytes are not those that were stored, 5 times"):
        delivery.get("k", 5)
    client.put_object(Bucket=bucket, Key="p/foreign", Body=b"12345")
    with pytest.raises(DeliveryError, match=r"foreign in .*: has no metadata dcr-xxh3-128: something else wrote it"):
        delivery.get("foreign", 5)
    with pytest.raises(DeliveryConflictError, match="foreign"):
        delivery.put("foreign", b"12345")
    with pytest.raises(RefusedError):
        delivery.get("foreign", 4)


def test_a_put_whose_key_is_freed_meanwhile_is_made_again(s3_of, network, bucket, running_store):
    delivery = s3_of()
    running_store.client().put_object(Bucket=bucket, Key="p/k", Body=b"old")

    def freed(request):
        if request.method == "HEAD":
            running_store.client().delete_object(Bucket=bucket, Key="p/k")
        return False

    network.once("", freed)
    delivery.put("k", b"12345")
    assert delivery.get("k", 5) == b"12345"


def test_a_missing_bucket_is_no_missing_object(s3_of, bucket, running_store):
    delivery = s3_of()
    assert delivery.get("k", 5) is None
    running_store.client().delete_bucket(Bucket=bucket)
    for act in (lambda: delivery.get("k", 5), lambda: delivery.keys("k/")):  # a put makes this server's bucket anew
        with pytest.raises(DeliveryError, match=r"no such bucket.*create the bucket, or correct the address"):
            act()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bucket": "not-there"}, r"no such bucket, after 1 try.*create the bucket, or correct the address"),
        ({"AWS_SECRET_ACCESS_KEY": "another"}, r"refused, after 1 try.*403 SignatureDoesNotMatch.*check what boto3"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, r"403 InvalidAccessKeyId.*rights that docs/delivery.md lists"),
        ({"AWS_ACCESS_KEY_ID": None}, r"check what boto3 finds where this process runs"),
        ({"endpoint": "http://127.0.0.1:9"}, r"at http://127.0.0.1:9: opening it: unreachable, after 4 tries"),
        ({"endpoint": ""}, r"add region=NAME to the address, or set AWS_REGION"),
    ],
)
def test_opening_what_cannot_be_used_says_what_to_do(change, said, bucket, running_store, monkeypatch):
    for name in [name for name in change if name.isupper()]:
        if change[name] is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, change[name])
    place = {"bucket": bucket, "endpoint": running_store.endpoint, **change}
    with pytest.raises(DeliveryError, match=said) as error:
        open_delivery(f"s3://{place['bucket']}/p?endpoint={place['endpoint']}")
    assert "\n" not in str(error.value)
    assert "a-secret-key" not in str(error.value)


def test_a_node_needs_no_right_to_write(s3_of, monkeypatch):
    s3_of().put("k/1", b"12345")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    reader = s3_of()
    assert reader.get("k/1", 5) == b"12345"
    assert reader.get("not-there", 5) is None
    with pytest.raises(DeliveryError, match=r"storing k2 \(1 bytes\): refused, after 1 try.*403 AccessDenied"):
        reader.put("k2", b"1")
    with pytest.raises(DeliveryError, match="AccessDenied"):
        reader.delete_prefix("k/")


def test_a_server_killed_in_the_middle_of_everything_loses_and_mixes_up_nothing(s3_of, bucket, running_store, network):
    delivery = s3_of(PARTS + "&tries_max=1000&retry_timeout_s=250", running_store.endpoint)
    expected, failed, stop = {}, [], threading.Event()
    lock = threading.Lock()

    def work(thread):
        try:
            for n in range(200):
                if stop.is_set():
                    return
                size = [700, 90_000, PART + 1000][n % 3]
                key, data = f"run/{thread}/{n}", content(size, 1000 * thread + n)
                delivery.put(key, data)
                with lock:
                    expected[key] = data
                assert delivery.get(key, size) == data
        except BaseException as e:  # noqa: BLE001
            failed.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    while len(expected) < 6 and not failed:
        time.sleep(0.01)
    running_store.kill()
    running_store.start()
    while len(expected) < 12 and not failed:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(delivery.traffic.retries.values()) > 0  # otherwise the kill came in the middle of nothing
    assert set(delivery.keys("run/")) == set(expected)
    for key, data in expected.items():
        assert delivery.get(key, len(data)) == data


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_of_faults_ends_with_the_right_bytes(s3_of, network, seed):
    delivery = s3_of(PARTS)
    network.slow_s = 0.05
    network.at_random(0.3, ("503", "500", "slow", "truncated", "cut", "lost", "reset", "damaged"), seed)
    for n in range(30):
        data = content([0, 10, 3000, PART, PART + 1, len(BIG)][n % 6], n)
        delivery.put(f"k/{n}", data)
        assert delivery.get(f"k/{n}", len(data)) == data
    assert delivery.keys("k/") == sorted(f"k/{n}" for n in range(30))
    delivery.delete_prefix("k/")
    assert delivery.keys("k/") == []
    assert len(network.faults()) > 5
