"""What may happen to the files of compiled code: a kernel that is called gives its result all the same."""

import logging
import re
import resource
import signal

import numba as nb
import pytest

from dcr.data_plane.kernels import compiling, stream_choice
from dcr.data_plane.kernels.code_cache import compiled


def double(x):
    return x + x


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(nb.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def hits():
    """How many of two signatures were found compiled, by a dispatcher that knows nothing but the files."""
    kernel = compiled(double)
    assert kernel(3) == 6
    assert kernel(1.5) == 3.0
    return sum(kernel.stats.cache_hits.values())


def test_files_that_a_crash_has_cut_are_written_again(folder, caplog):
    assert [hits(), hits()] == [0, 2]
    assert not caplog.records
    (index,) = folder.glob("*/*.nbi")
    index.write_bytes(b"")
    assert [hits(), hits()] == [0, 2]
    assert "compiled code of double could not be loaded" in caplog.text
    assert "NUMBA_CACHE_DIR" in caplog.text
    for data in folder.glob("*/*.nbc"):
        data.write_bytes(data.read_bytes()[:1000])
    assert [hits(), hits()] == [0, 2]


def test_a_full_disk_is_no_reason_to_fail(folder, caplog):
    limit, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert hits() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "compiled code of double could not be saved" in caplog.text
    assert [hits(), hits()] == [0, 2]


def test_a_folder_that_cannot_be_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setattr(nb.config, "CACHE_DIR", "/dev/null/none")
    hits()


def test_code_of_another_signature_is_not_taken(folder):
    """Two processes that save at once may leave one file under two signatures."""
    assert hits() == 0
    one, other = sorted(folder.glob("*/*.nbc"))
    one.write_bytes(other.read_bytes())
    assert hits() == 1


def test_what_takes_long_is_told_with_what_comes_next_and_nothing_else_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "dcr.kernels")
    monkeypatch.setattr(stream_choice, "_tried", {})
    monkeypatch.setattr(compiling, "TOLD_AFTER_S", 60.0)
    stream_choice.stream_kernels()
    assert not caplog.messages
    monkeypatch.setattr(stream_choice, "_tried", {})
    monkeypatch.setattr(compiling, "TOLD_AFTER_S", 0.0)  # the trial takes longer, compiled or not
    stream_choice.stream_kernels()
    said, done = caplog.messages
    assert said.startswith("compiles kernels for cpu, and tries them: ")
    assert said.endswith("; then it compares weights, or encodes and decodes changes")
    assert re.search(r"^kernels for cpu are ready, after \d+\.\d s; now it compares weights", done)
