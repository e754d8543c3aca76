"""A run's folder: only what the harness made is emptied, one run is in it at a time, and what cannot be is named."""

import contextlib
import os
import resource
import subprocess
import sys

import pytest

from dcr.chaos.disk import Disk
from dcr.chaos.execute import execute, execute_all, validated
from dcr.chaos.report import RunReport
from dcr.chaos.run_folder import FullError, RunFolder, no_room
from dcr.chaos.scenario import Scenario
from dcr.protocol.errors import RefusedError

SCENARIOS = [Scenario(name="first"), Scenario(name="docs")]
_HOLD = """import sys, pathlib, dcr.chaos.run_folder as f
held = f.RunFolder(pathlib.Path(sys.argv[1]))
print(flush=True)
input()"""


def _file(folder):
    (folder / "docs").write_text("mine")


def _foreign(folder):
    (folder / "docs").mkdir()
    (folder / "docs" / "page.md").write_text("mine")


def _link(folder):
    (folder / "elsewhere").mkdir()
    RunFolder(folder / "elsewhere").close()
    (folder / "elsewhere" / "page.md").write_text("mine")
    (folder / "docs").symlink_to(folder / "elsewhere")


@contextlib.contextmanager
def nothing_can_be_written():
    """As on a full disk, but with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("put", "said"), [(_file, "File exists"), (_foreign, "not empty, and without the mark"), (_link, "symbolic link")]
)
def test_what_the_harness_did_not_make_is_refused_by_name_before_any_run_and_stays(tmp_path, put, said):
    put(tmp_path)
    before = {p: p.is_dir() or p.read_text() for p in tmp_path.rglob("*")}
    with pytest.raises(RefusedError, match=f"{tmp_path}/docs: .*{said}"):
        execute_all(SCENARIOS, tmp_path, None, print, print)
    (tmp_path / "first" / ".dcr-chaos").unlink()  # what was made before the refusal, and nothing else in it
    (tmp_path / "first").rmdir()
    assert {p: p.is_dir() or p.read_text() for p in tmp_path.rglob("*")} == before


def test_a_folder_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match=f"{tmp_path}/file/first: .*Not a directory"):
        execute_all(SCENARIOS, tmp_path / "file", None, print, print)


def test_what_an_earlier_run_left_is_removed_and_the_folder_is_held_meanwhile(tmp_path):
    with RunFolder(tmp_path / "run"):
        (tmp_path / "run" / "events").mkdir()
        (tmp_path / "run" / "events" / "a.ndjson").touch()
        (tmp_path / "run" / "link").symlink_to(tmp_path)
    with RunFolder(tmp_path / "run") as folder:
        assert (tmp_path / "run" / "events").exists()
        folder.empty()
        assert [p.name for p in (tmp_path / "run").iterdir()] == [".dcr-chaos"]
        with pytest.raises(RefusedError, match=f"{tmp_path}/run: process {os.getpid()} runs there now"):
            RunFolder(tmp_path / "run")


def test_a_run_of_another_process_is_named_and_its_folder_free_once_it_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(RefusedError, match=f"process {other.pid} runs there now"):
            RunFolder(tmp_path / "run")
        other.kill()
    RunFolder(tmp_path / "run").close()


def test_a_disk_that_is_full_at_the_start_is_refused_and_one_that_fills_later_is_a_problem_by_name(tmp_path):
    with nothing_can_be_written(), pytest.raises(RefusedError, match=f"{tmp_path}/run: no folder for a run: File too"):
        RunFolder(tmp_path / "run")
    with RunFolder(tmp_path / "run") as folder:
        with nothing_can_be_written():
            report = execute(SCENARIOS[0], folder, lambda _: None)
        assert not report.ok
        assert f"{tmp_path}/run: the checkpoints of version 0 cannot be written" in report.problems[0]


@pytest.fixture
def full(tmp_path):
    """A run's folder on a disk of its own without a byte left, and what makes room there."""
    disk = Disk(tmp_path)
    if not disk.mounted:
        disk.close()
        pytest.skip("NOT TESTED: a disk that is full in earnest: no tmpfs can be mounted here, which takes root")
    with RunFolder(disk.payloads) as folder:
        disk.fill()
        yield folder, disk.free
    disk.close()


def test_a_run_whose_disk_is_full_shows_nothing_and_names_its_folder(full):
    folder, free = full
    assert no_room(folder.path)
    said = f"{folder.path}: its disk is full: the run was broken off, and shows nothing; make room there"
    with pytest.raises(FullError, match=f"{said}.*the checkpoints of version 0 cannot be written"):
        execute(SCENARIOS[0], folder, print)
    report = RunReport(name="a", ok=True, deployment="", folder=str(folder.path))
    with pytest.raises(FullError, match=f"{said}.*report and timeline cannot be written"):
        validated(report, folder.path, print)
    free()
    assert not no_room(folder.path)
    assert sorted(p.name for p in folder.path.iterdir() if p.name.startswith(".")) == [".dcr-chaos"]


def test_a_report_that_cannot_be_kept_is_a_problem_by_name(tmp_path):
    (tmp_path / "run").touch()
    report = validated(RunReport(name="a", ok=True, deployment="", folder=str(tmp_path / "run")), tmp_path, print)
    assert not report.ok
    assert f"{tmp_path}/run: report and timeline cannot be written: " in report.problems[-1]
