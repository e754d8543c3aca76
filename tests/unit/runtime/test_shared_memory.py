"""Memory that a node shares: who may read it, what stays of it, and what a rank takes."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from dcr.data_plane.payload import payload_digest
from dcr.protocol.errors import CorruptPayloadError
from dcr.runtime.rank_messages import Shared
from dcr.runtime.shared_memory import ROOT, SharedMemory, SharedMemoryError, read_shared

HOLDER = """
import sys, time
from pathlib import Path
from dcr.runtime.shared_memory import SharedMemory
memory = SharedMemory("r", 7, Path(sys.argv[1]))
memory.write(b"left behind")
print(memory.folder, flush=True)
time.sleep(600)
"""


@pytest.fixture
def memory(tmp_path):
    memory = SharedMemory("record", 5, tmp_path)
    yield memory
    memory.close()


def test_a_rank_reads_what_was_written_and_nobody_else_may(memory):
    shared = memory.write(b"some bytes")
    assert shared == Shared(str(memory.folder / "0"), 10, payload_digest(b"some bytes"))
    assert read_shared(shared, 10).tobytes() == b"some bytes"
    assert stat.S_IMODE(Path(shared.path).stat().st_mode) == 0o600
    assert stat.S_IMODE(memory.folder.stat().st_mode) == 0o700
    assert "-5-" in memory.folder.name
    with pytest.raises(TypeError, match="read-only"):
        read_shared(shared, 10)[0] = 1


def test_what_was_mapped_outlives_the_file_and_the_node(memory):
    shared = memory.write(b"some bytes")
    view = read_shared(shared, 10)
    memory.remove(shared)
    assert not Path(shared.path).exists()
    memory.close()
    assert not memory.folder.exists()
    assert view.tobytes() == b"some bytes"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"path": "/dev/shm/dcr-nothing/0"}, "cannot be opened.* must run on its node's host"),
        ({"size": 9}, "has 10 bytes, its node wrote 9"),
        ({"size": 11}, "has 10 bytes, its node wrote 11"),
        ({"size": 0}, "has 10 bytes, its node wrote 0"),
    ],
)
def test_what_is_not_as_it_is_said_to_be_is_refused(memory, change, named):
    shared = memory.write(b"some bytes")
    with pytest.raises(CorruptPayloadError, match=named):
        read_shared(msgspec.structs.replace(shared, **change), 100)


def test_a_rank_follows_no_link_opens_no_pipe_and_maps_no_more_than_it_allows(memory):
    shared = memory.write(b"some bytes")
    with pytest.raises(CorruptPayloadError, match="at most 9 are allowed"):
        read_shared(shared, 9)
    link, pipe = memory.folder / "link", memory.folder / "pipe"
    link.symlink_to(shared.path)
    os.mkfifo(pipe)
    for path in (link, pipe, memory.folder):
        with pytest.raises(CorruptPayloadError):
            read_shared(msgspec.structs.replace(shared, path=str(path)), 100)


def test_what_does_not_fit_is_an_error_by_name_and_leaves_nothing(memory):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(SharedMemoryError, match=r"1001 bytes could not be written.*lower receive_bytes_max"):
            memory.write(b"x" * 1001)
        assert list(memory.folder.iterdir()) == []
        assert memory.write(b"x" * 1000).size == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_folder_can_be_made(tmp_path):
    with pytest.raises(SharedMemoryError, match=r"no folder can be made in .*absent"):
        SharedMemory("r", 1, tmp_path / "absent")


def test_what_a_killed_node_left_is_swept_and_what_a_living_one_has_is_not(tmp_path):
    foreign = tmp_path / "something else"
    foreign.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        left = Path(holder.stdout.readline().strip())
        SharedMemory("other", 1, tmp_path).close()
        assert (left / "0").read_bytes() == b"left behind"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(30)
    assert left.exists()
    SharedMemory("other", 2, tmp_path).close()
    assert not left.exists()
    assert list(tmp_path.iterdir()) == [foreign]


@pytest.mark.parametrize("name", ["dcr-run", "dcr-0123456789abcdef", "dcr-0123456789abcdef-7-payload"])
def test_a_sweep_takes_nothing_that_no_node_made(tmp_path, name):
    """A run's record or payloads may lie in the same memory, in a folder that is called after dcr."""
    record = tmp_path / name / "record.db"
    record.parent.mkdir()
    record.write_bytes(b"all there is")
    SharedMemory("record", 1, tmp_path).close()
    assert record.read_bytes() == b"all there is"


def test_a_folder_that_was_taken_away_is_made_anew_and_locked_and_ends_with_its_node(memory, tmp_path):
    """As systemd does with what a user leaves in /dev/shm when the last session ends (RemoveIPC)."""
    memory.write(b"gone with it")
    before = memory.folder
    shutil.rmtree(before)
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(memory.write, [b"some bytes"] * 8))
    assert {Path(shared.path).parent for shared in written} == {memory.folder} != {before}
    assert [read_shared(shared, 10).tobytes() for shared in written] == [b"some bytes"] * 8
    assert stat.S_IMODE(memory.folder.stat().st_mode) == 0o700
    SharedMemory("other", 1, tmp_path).close()  # sweeps what nobody locks
    assert list(tmp_path.iterdir()) == [memory.folder]
    memory.close()
    with pytest.raises(SharedMemoryError, match="10 bytes could not be written"):
        memory.write(b"some bytes")
    assert list(tmp_path.iterdir()) == []


def test_it_lies_in_memory_unless_told_otherwise():
    memory = SharedMemory("r", time.time_ns())
    try:
        assert memory.folder.parent == ROOT
        line = next(m for m in Path("/proc/mounts").read_text().splitlines() if m.split()[1] == str(ROOT))
        assert line.split()[2] == "tmpfs"
    finally:
        memory.close()
