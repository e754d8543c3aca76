"""A local folder as a delivery: what ``test_delivery`` does not ask of every one."""

import os
import resource
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcr.delivery.address import open_delivery
from dcr.delivery.folder import FolderDelivery
from dcr.delivery.interface import DeliveryConflictError, DeliveryError
from dcr.protocol.errors import RefusedError
from dcr.runtime.secret_path import secret_path


@pytest.fixture
def root(tmp_path):
    return tmp_path / "payloads"


@pytest.fixture
def delivery(root):
    return open_delivery(f"file://{root}")


def staged(root):
    return list((root / ".staging").iterdir())


def test_files_belong_to_their_user_alone_and_nothing_stays_staged(delivery, root):
    delivery.put("ab/c", b"x")
    with pytest.raises(DeliveryConflictError):
        delivery.put("ab/c", b"y")
    assert staged(root) == []
    assert stat.S_IMODE((root / "ab/c").stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "ab").stat().st_mode) == stat.S_IMODE(root.stat().st_mode) == 0o700
    delivery.close()


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


def test_refused_keys_leave_nothing(delivery, root):
    for key in ("a/../b", ".staging/x", "x" * 201):
        with pytest.raises(RefusedError):
            delivery.put(key, b"")
    assert [entry.name for entry in root.iterdir()] == [".staging"]


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
        "gs://b",
        "/x",
        "file:///x?y",
        "file://[x",
        "file:///x%00y",
        "file:///\ud800",
    ],
)
def test_other_addresses_are_refused(address):
    with pytest.raises(RefusedError, match=r"file:///absolute/folder, s3://bucket.* or relay://"):
        open_delivery(address)
    with pytest.raises(RefusedError, match="sqlite:///absolute"):
        secret_path(address.replace("file", "sqlite"))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs://bucket/run", "delivery address 'gs://bucket/run': there is no delivery of scheme 'gs'; it must be of"),
        ("https://me:hunter2@host/x", "delivery address 'https://...@host/x': there is no delivery of scheme 'https'"),
        ("gs://bucket?key=hunter2", "delivery address 'gs://bucket?...': there is no delivery of scheme 'gs'"),
        ("me:hunter2@host", "delivery address '...@host': "),
        ("payloads", "delivery address 'payloads': must be of the form file:///absolute/folder, s3://"),
    ],
)
def test_an_address_of_no_known_scheme_is_named_without_its_secrets(address, said):
    with pytest.raises(RefusedError) as refused:
        open_delivery(address)
    assert str(refused.value).startswith(said)
    assert "hunter2" not in str(refused.value)
