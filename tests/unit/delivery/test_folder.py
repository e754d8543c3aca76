import os
import resource
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.delivery.address import open_delivery
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import (
    DeliveryConflictError,
    DeliveryError,
    check_key,
    check_prefix,
    epoch_prefix,
    manifest_key,
    payload_key,
    sweep,
)
from dcr.protocol.errors import RefusedError
from dcr.protocol.identity import PayloadIdentity
from dcr.runtime.secret_path import secret_path


@pytest.fixture
def root(tmp_path):
    return tmp_path / "payloads"


@pytest.fixture
def delivery(root):
    return open_delivery(f"file://{root}")


def staged(root):
    return list((root / ".staging").iterdir())


def test_put_get_keys_delete(delivery, root):
    assert delivery.get("a/b", 10) is None
    delivery.put("a/b", b"12345")
    delivery.put("a/b", b"12345")
    delivery.put("a/empty", b"")
    delivery.put("ab/c", b"x")
    assert delivery.get("a/b", 5) == b"12345"
    assert delivery.get("a/empty", 0) == b""
    assert delivery.get("a/b/c", 5) is None
    assert delivery.keys("a/") == ["a/b", "a/empty"]
    assert delivery.keys("none/") == []
    delivery.delete_prefix("a/")
    delivery.delete_prefix("a/")
    assert delivery.get("a/b", 5) is None
    assert delivery.get("ab/c", 5) == b"x"
    assert staged(root) == []
    assert stat.S_IMODE((root / "ab/c").stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "ab").stat().st_mode) == stat.S_IMODE(root.stat().st_mode) == 0o700
    delivery.close()


@pytest.mark.parametrize("other", [b"", b"1234", b"12346", b"123456"])
def test_a_key_is_written_once(delivery, root, other):
    delivery.put("a/b", b"12345")
    with pytest.raises(DeliveryConflictError, match="a/b"):
        delivery.put("a/b", other)
    assert delivery.get("a/b", 5) == b"12345"
    assert staged(root) == []


def test_size_max_is_checked_before_reading(delivery, root):
    with (root / "big").open("wb") as file:
        file.truncate(1 << 43)  # eight terabytes that are not there: reading them first would not end well
    with pytest.raises(RefusedError, match="8796093022208 bytes"):
        delivery.get("big", 1 << 20)


def test_two_writers_of_one_key_one_wins(root):
    deliveries = [open_delivery(f"file://{root}") for _ in range(8)]
    for round_ in range(10):
        barrier, won = threading.Barrier(8), []

        def contend(i, key=f"k/{round_}", barrier=barrier, won=won):
            barrier.wait(60)
            try:
                deliveries[i].put(key, bytes([i]) * 1000)
                won.append(i)
            except DeliveryConflictError:
                pass

        threads = [threading.Thread(target=contend, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert deliveries[0].get(f"k/{round_}", 1000) == bytes(won) * 1000


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


@pytest.mark.parametrize("key", [*BAD_KEYS, "/".join(["x" * 100] * 6)])
def test_bad_keys_are_refused_everywhere(delivery, root, key):
    for act in (lambda: delivery.put(key, b""), lambda: delivery.get(key, 1), lambda: check_key(key)):
        with pytest.raises(RefusedError):
            act()
    for act in (lambda: delivery.keys(key + "/"), lambda: delivery.delete_prefix(key + "/")):
        with pytest.raises(RefusedError):
            act()
    assert [entry.name for entry in root.iterdir()] == [".staging"]


def test_a_prefix_ends_a_segment(delivery):
    with pytest.raises(RefusedError, match="mid-segment"):
        delivery.delete_prefix("a")
    with pytest.raises(RefusedError):
        check_prefix("")


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


def test_sweep_deletes_older_epochs_of_one_record_alone(delivery):
    kept = []
    for record_id in ("run", "run2"):
        for epoch in (1, 2, 10, 11):
            key = payload_key(PayloadIdentity(record_id, 1, epoch, "o", 1, 0))
            delivery.put(key, b"x")
            if record_id == "run2" or epoch >= 10:
                kept.append(key)
    delivery.put("run/notes/x", b"not an epoch")
    assert sweep(delivery, "run", 10) == [1, 2]
    assert delivery.keys("run/") + delivery.keys("run2/") == [*kept[:2], "run/notes/x", *kept[2:]]
    assert sweep(delivery, "run", 10) == []


def test_an_object_cut_from_outside_is_not_taken_for_stored(delivery, root):
    delivery.put("a/b", b"12345")
    os.truncate(root / "a/b", 3)
    with pytest.raises(DeliveryConflictError):
        delivery.put("a/b", b"12345")


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DeliveryError, match="opening it: File exists"):
        open_delivery(f"file://{tmp_path}/file")
    with pytest.raises(DeliveryError, match="No such file"):
        open_delivery(f"file://{tmp_path}/no/such")


def test_a_folder_that_went_away_is_named(delivery, root):
    root.rename(root.with_name("gone"))
    with pytest.raises(DeliveryError, match="storing a"):
        delivery.put("a", b"x")
    assert not root.exists()


def test_what_others_left_in_the_staging_folder_is_left_alone(root):
    """A pipe would make whoever opens it wait for a writer."""
    FolderDelivery(root)
    staging = root / ".staging"
    os.mkfifo(staging / "pipe")
    (staging / "folder").mkdir()
    (staging / "link").symlink_to("link")
    (staging / "left").write_bytes(b"by a process that died")
    FolderDelivery(root).put("a", b"x")
    assert sorted(p.name for p in staging.iterdir()) == ["folder", "link", "pipe"]


def test_two_processes_may_delete_at_once(delivery, root):
    for k in range(300):
        (root / f"a/{k}").mkdir(parents=True)
        (root / f"a/{k}/x").write_bytes(b"x")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: FolderDelivery(root).delete_prefix("a/"), range(4)))
    assert delivery.keys("a/") == []


def test_a_full_disk_is_named_and_leaves_nothing(delivery, root):
    """A limit on the size of files is the nearest to a full disk that everybody can have."""
    limit, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(DeliveryError, match=r"storing a .5000 bytes.*free some space"):
            delivery.put("a", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert delivery.get("a", 5000) is None
    assert list((root / ".staging").iterdir()) == []
    delivery.put("a", bytes(5000))


def test_what_cannot_be_deleted_is_named(delivery, root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (root / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeliveryError, match=r"deleting a/: .*symbolic link"):
        delivery.delete_prefix("a/")


@pytest.mark.parametrize(
    "address",
    [
        "file:relative",
        "file://host/x",
        "file:///",
        "s3://b",
        "/x",
        "file:///x?y",
        "file://[x",
        "file:///x%00y",
        "file:///\ud800",
    ],
)
def test_other_addresses_are_refused(address):
    with pytest.raises(RefusedError, match="file:///absolute"):
        open_delivery(address)
    with pytest.raises(RefusedError, match="sqlite:///absolute"):
        secret_path(address.replace("file", "sqlite"))
