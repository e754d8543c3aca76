"""A disk that is full: a real one where that can be had, and what stands for it otherwise."""

import errno

import pytest

from dcr.chaos.disk import Disk, check_not_full


def store(folder, disk):
    check_not_full(folder)
    (disk.payloads / "object").write_bytes(b"x" * 100_000)


def test_a_full_disk_is_full_until_there_is_room_again(tmp_path):
    disk = Disk(tmp_path)
    try:
        disk.payloads.mkdir()
        disk.fill()
        with pytest.raises(OSError, match="No space left") as full:
            store(tmp_path, disk)
        assert full.value.errno == errno.ENOSPC
        disk.free()
        store(tmp_path, disk)
        assert ("tmpfs of 4 MiB" in disk.how) == disk.mounted
    finally:
        disk.close()
    assert not disk.mounted


def test_what_a_killed_harness_left_mounted_is_cleared(tmp_path):
    Disk(tmp_path)
    Disk.clear(tmp_path)
    assert not (tmp_path / "disk").is_mount()
    Disk.clear(tmp_path / "nothing there")
