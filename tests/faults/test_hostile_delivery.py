"""A delivery store that spoils what it holds, and strangers at the coordinator's port: named, and never applied."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dcr.protocol.identity import decode_manifest, encode_manifest
from dcr.protocol.messages import Join, StorageState, encode_message
from dcr.protocol.step import Step
from dcr.runtime.channel import ChannelTimeoutError, Peer, Spoke
from dcr.runtime.registry import leader_address
from dcr.runtime.secret import record_secret
from tests.faults.thread_fleet import WAIT_S, Fleet, flip, forge, rewrite, unsealed

Rewrite = Callable[[Path, Callable[[bytes], bytes]], None]


@pytest.fixture
def fleet(tmp_path: Path):
    f = Fleet(tmp_path, {"delivery_timeout_s": 2.0})  # a payload that is lost is waited for so long
    yield f
    f.close()


def cut(data: bytes) -> bytes:
    return data[:-7]


def extend(data: bytes) -> bytes:
    return data + b"\0"


def empty(_: bytes) -> bytes:
    return b""


def on_payload(position: int, change: Callable[[bytes], bytes]) -> Callable[[Fleet, int, Rewrite], None]:
    return lambda fleet, epoch, write: write(fleet.objects(epoch)[position], change)


def on_manifest(change: Callable[[bytes], bytes]) -> Callable[[Fleet, int, Rewrite], None]:
    def act(fleet: Fleet, epoch: int, write: Rewrite) -> None:
        fleet.objects(epoch)
        write(fleet.manifest(epoch), change)

    return act


def lose_payload(fleet: Fleet, epoch: int, _: Rewrite) -> None:
    fleet.objects(epoch)[1].unlink()


def swap_payloads(fleet: Fleet, epoch: int, write: Rewrite) -> None:
    one, other = fleet.objects(epoch)[:2]
    whole = write is rewrite
    first, second = (p.read_bytes() if whole else unsealed(p) for p in (one, other))
    write(one, lambda _: second)
    write(other, lambda _: first)


def earlier_epoch(fleet: Fleet, epoch: int, write: Rewrite) -> None:
    """An intact payload of this owner, from the transition before, under a key of this one."""
    old = fleet.objects(epoch - 1)[0]
    replayed = old.read_bytes() if write is rewrite else unsealed(old)
    write(fleet.objects(epoch)[0], lambda _: replayed)


def huge(fleet: Fleet, epoch: int, _: Rewrite) -> None:
    """A sparse object of half a gigabyte."""
    path = fleet.objects(epoch)[0]
    path.chmod(0o600)
    os.truncate(path, 512 << 20)


def invent(data: bytes) -> bytes:
    return encode_manifest(msgspec.structs.replace(decode_manifest(data), owned_elements=1))


FAULTS = {
    "a bit of the first payload": (on_payload(0, flip), "does not match its own digest"),
    "a bit of the last payload": (on_payload(-1, flip), "does not match its own digest"),
    "a payload cut short": (on_payload(1, cut), "cut short or extended"),
    "a payload extended": (on_payload(1, extend), "cut short or extended"),
    "an empty payload": (on_payload(1, empty), "the preamble alone has"),
    "payloads under each other's key": (swap_payloads, "bytes fetched for .*sequence=0.* are payload .*sequence=1"),
    "a payload of an earlier epoch": (earlier_epoch, "bytes fetched for .*epoch=2.* are payload .*epoch=1"),
    "a bit of the manifest": (on_manifest(flip), "no manifest|is not the one that its owner's manifest lists"),
    "a manifest that nobody sealed": (on_manifest(invent), "a acknowledged other manifests than the owners sealed"),
    "a manifest cut short": (on_manifest(cut), "no manifest that this version of dcr can read"),
}
"""What can be wrong with an object, and what a receiver says of it if a process of the run wrote it so."""
LOSSES = {
    "a listed payload lost": (lose_payload, "that rank-0 lists did not come in 2.0 s"),
    "a huge payload": (huge, "536870912 bytes, more than the 268435496 allowed"),
}
SEAL = "object .* its seal is missing or wrong"


CASES = [
    *(pytest.param(spoil, forge, named, id=f"{fault}, sealed") for fault, (spoil, named) in FAULTS.items()),
    *(pytest.param(spoil, rewrite, SEAL, id=fault) for fault, (spoil, _) in FAULTS.items() if "nobody" not in fault),
    *(pytest.param(spoil, rewrite, named, id=fault) for fault, (spoil, named) in LOSSES.items()),
]


@pytest.mark.parametrize(("spoil", "write", "named"), CASES)
def test_a_spoilt_object_fails_the_attempt_by_name_and_the_retry_commits(
    fleet: Fleet, spoil: Callable[[Fleet, int, Rewrite], None], write: Rewrite, named: str
) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.push()
    fleet.check(e)
    fleet.step()
    fleet.once("OpenApply", lambda step: spoil(fleet, step.epoch, write))
    report = fleet.push()
    assert (report.kind, report.attempts) == ("absolute", 2)
    assert re.search(named, report.failures[0]), report.failures
    fleet.check(e)


def test_a_lost_manifest_fails_the_attempt_by_name_and_the_only_engine_is_asked_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, {"ack_timeout_s": 3.0, "members_timeout_s": 1.0})
    try:
        e = fleet.engine("a")
        fleet.check(e)
        fleet.step()

        def lose(step: Step) -> None:
            fleet.objects(step.epoch)
            fleet.manifest(step.epoch).unlink()

        fleet.once("OpenApply", lose)
        report = fleet.push()
        assert (report.kind, report.attempts) == ("absolute", 2)
        assert "time-out: a did not acknowledge epoch" in report.failures[0]
        fleet.check(e)
    finally:
        fleet.close()


def test_a_restore_from_spoilt_objects_is_tried_again(fleet: Fleet) -> None:
    a = fleet.engine("a")
    fleet.check(a)
    fleet.step()
    fleet.push()
    fleet.check(a)
    fleet.once("OpenApply", lambda step: rewrite(fleet.objects(step.epoch)[0], flip))
    late = fleet.stranger("late")
    fleet.check(late)
    assert [s.action for s in fleet.steps].count("OpenRestore") == 2
    fleet.check(a)


# ---------------------------------------------------------------- strangers


def test_strangers_at_the_coordinators_port_do_not_disturb_a_push(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    address = leader_address(fleet.refit._control, "default")
    assert address is not None
    host, _, port = address.rpartition(":")

    def intrude(_: Step) -> None:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b""):
            with socket.create_connection((host, int(port)), WAIT_S) as s:
                s.sendall(noise)
        stranger = Spoke(b"w" * 32, Peer("node", "a", 1 << 62), lambda _: None, resolve=lambda: address)
        fleet.wait(lambda: re.search("authenticating|refused", stranger.trouble))
        with pytest.raises(ChannelTimeoutError):
            stranger.wait_connected(0.1)
        stranger.close()

    fleet.once("OpenApply", intrude)
    report = fleet.push()
    assert (report.kind, report.attempts, report.failures) == ("relative", 1, ())
    fleet.check(e)


def test_a_peer_of_the_run_cannot_speak_for_another(fleet: Fleet) -> None:
    e = fleet.engine("a")
    fleet.check(e)
    control = fleet.refit._control
    secret = Path(fleet.folder / "record.db.secret").read_bytes()
    address = leader_address(control, "default")
    assert address is not None
    mallory = Spoke(record_secret(secret, "default"), Peer("node", "m", 1), lambda _: None, resolve=lambda: address)
    mallory.wait_connected(WAIT_S)
    mallory.send(b"\xc1 not a report")
    mallory.send(encode_message(Join("a", 1 << 62, 1, 0, ("add",), StorageState(None, "", ()), (), {})))
    fleet.step()
    report = fleet.push()
    assert (report.kind, report.members) == ("relative", ("a",))
    fleet.check(e)
    mallory.close()


# ---------------------------------------------------------------- a full disk

_FULL = """
import json, os, sys
from pathlib import Path
from dcr import PushError
from tests.faults.thread_fleet import Fleet
folder, small = map(Path, sys.argv[1:])
fleet = Fleet(folder, {"attempts_max": 2, "bucket_bytes": 4000}, payloads=small / "payloads")
e = fleet.engine("a")
fleet.check(e)
ballast = small / "ballast"
try:
    with ballast.open("wb", buffering=0) as f:
        while True:
            f.write(bytes(1024))
except OSError:
    pass
os.truncate(ballast, ballast.stat().st_size - 12288)  # room for the first payloads
fleet.step(rate=0.5)
try:
    fleet.refit.push()
    error = ""
except PushError as exc:
    error = str(exc)
torn = e.node.version is None
ballast.unlink()
report = fleet.push()
fleet.check(e)
fleet.close()
print(json.dumps({"error": error, "torn": torn}))
"""


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="this user may not mount a small file system of its own")
def test_a_full_disk_is_named_and_the_push_succeeds_once_there_is_room(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=256k tmpfs "{small}" && exec "$0" -c "$1" "$2" "$3"'
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, _FULL, str(tmp_path), str(small)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert "the transition stopped" in said["error"]
    assert "No space left on device; free some space or raise the quota" in said["error"]
    assert said["torn"]  # so it was closed to requests until it was restored
