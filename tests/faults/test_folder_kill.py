"""Real kills and a full disk under the delivery folder."""

import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dcr.delivery.address import open_delivery

UNSHARE = shutil.which("unshare") and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0

CYCLES_MAX = 20  # a few are enough, unless the machine has no time for those that are killed

PUTTER = """
import itertools, os, sys
from dcr.delivery.address import open_delivery
delivery = open_delivery(f"file://{sys.argv[1]}")
for i in itertools.count():
    key = f"run/{sys.argv[2]}/{i // 10}/{i}"
    os.write(1, f"try {key}\\n".encode())
    delivery.put(key, key.encode() * (1 + i % 5 * 20000))
    os.write(1, f"ack {key}\\n".encode())
"""


def content(key):
    return key.encode() * (1 + int(key.rsplit("/", 1)[1]) % 5 * 20000)


def test_kills_leave_whole_objects_or_none_and_no_staged_files(tmp_path):
    root, rng, acked, tried = tmp_path / "payloads", random.Random(11), set(), set()
    left_staged = 0
    for cycle in range(CYCLES_MAX):
        putters = [
            subprocess.Popen(
                [sys.executable, "-c", PUTTER, str(root), f"c{cycle}w{i}"], stdout=subprocess.PIPE, text=True
            )
            for i in range(3)
        ]
        firsts = [putter.stdout.readline() for putter in putters]
        time.sleep(rng.uniform(0.0, 0.2))
        for putter in putters:
            putter.send_signal(signal.SIGKILL)
        for first, putter in zip(firsts, putters, strict=True):
            for line in (first + putter.stdout.read()).splitlines():
                (acked if line.startswith("ack") else tried).add(line[4:])
            putter.wait(60)
            putter.stdout.close()
        left_staged += len(list((root / ".staging").iterdir()))

        delivery = open_delivery(f"file://{root}")
        assert list((root / ".staging").iterdir()) == []
        keys = set(delivery.keys("run/"))
        assert acked <= keys <= tried
        for key in keys:
            assert (root / key).read_bytes() == content(key)
        for key in tried - keys:  # an owner that lives on would store it again
            delivery.put(key, content(key))
            acked.add(key)
        if cycle >= 3 and len(acked) > 20 and left_staged:
            break
    assert len(acked) > 20
    assert left_staged > 0  # otherwise no kill came in the middle, and this shows nothing


def test_a_live_writers_staged_file_is_not_swept(tmp_path):
    root = tmp_path / "payloads"
    open_delivery(f"file://{root}")
    # Stopped in the middle of a put: it holds a staged file and its lock.
    code = PUTTER.replace("import itertools, os, sys", "import itertools, os, signal, sys").replace(
        "for i in",
        "fsync, os.fsync = os.fsync, lambda fd: (os.kill(os.getpid(), signal.SIGSTOP), fsync(fd))\nfor i in",
        1,
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(root), "w"], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "try run/w/0/0\n"
    deadline = time.monotonic() + 60
    while not list((root / ".staging").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    delivery = open_delivery(f"file://{root}")
    delivery.delete_prefix("other/")
    assert len(list((root / ".staging").iterdir())) == 1
    child.kill()
    child.communicate(timeout=60)
    delivery.delete_prefix("other/")
    assert list((root / ".staging").iterdir()) == []
    assert delivery.keys("run/") == []


FULL_DISK = """
import sys
from dcr.delivery.address import open_delivery
from dcr.delivery.interface import DeliveryError
delivery = open_delivery(f"file://{sys.argv[1]}/payloads")
delivery.put("run/small", b"y" * 1000)
try: delivery.put("run/big", b"x" * 400000); sys.exit("a full disk took an object")
except DeliveryError as error: print(error)
assert delivery.get("run/big", 400000) is None
assert delivery.keys("run/") == ["run/small"]
delivery.put("run/fits", b"x" * 100000)   # what was staged is gone again
print("recovered")
"""


@pytest.mark.skipif(not UNSHARE, reason="needs user and mount namespaces")
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    mount = f'mount -t tmpfs -o size=200k none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    child = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, FULL_DISK], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("recovered\n")
    assert f"delivery folder {tmp_path}/payloads: storing run/big (400000 bytes): No space left" in child.stdout
    assert "free some space" in child.stdout


def test_an_object_beyond_the_file_size_limit_is_named_and_leaves_nothing(tmp_path):
    child = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert child.returncode == 0, child.stderr
    assert "storing run/big (400000 bytes): File too large; free some space or raise the quota" in child.stdout
    assert list((tmp_path / "payloads/.staging").iterdir()) == []
    assert {entry.name for entry in (tmp_path / "payloads/run").iterdir()} == {"small", "fits"}
