"""Triton's kernels where there is no GPU: run in its interpreter, compiled for a GPU, and not imported unasked.

The interpreter is chosen by the environment before Triton is imported, so it has a process of its own; its tests are
those of the folder ``interpreted``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent


def python(*arguments, timeout, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def interpreted(marks, timeout):
    selection = ("-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted"), "-m", marks, "-rN")
    said = python(*selection, "-o", f"timeout={timeout}", "-o", "addopts=", timeout=timeout, TRITON_INTERPRET="1")
    return int(re.search(r"(\d+) passed", said)[1])


@pytest.mark.timeout(600)  # half a minute, on a machine that has nothing else to do
def test_kernels_in_the_interpreter():
    assert interpreted("not long", timeout=560) > 50


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_kernels_in_the_interpreter_at_length():
    assert interpreted("long", timeout=2900) > 40


def compiled(widths, folder, timeout):
    said = python(str(HERE / "triton_targets.py"), *widths, timeout=timeout, TRITON_CACHE_DIR=str(folder))
    return {line.split()[0] for line in said.splitlines()}


KERNELS = {"count_differences", "compact_differences", "digest_entries", "first_disorder", "sum_boxes", "survey"} | {
    "place",
    "write",
}


def test_kernels_compile_for_a_gpu(tmp_path):
    assert compiled(["2"], tmp_path, timeout=280) == KERNELS


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_kernels_of_every_width_compile_for_a_gpu(tmp_path):
    assert compiled(["1", "2", "4", "8"], tmp_path, timeout=1400) == KERNELS


def test_triton_is_not_imported_where_there_is_no_gpu():
    script = """
import sys
import torch
import dcr.rollout.node, dcr.rollout.torch.engine, dcr.trainer.torch.refit
from dcr.data_plane.kernels.choice import kernels_for
from dcr.data_plane.kernels.stream_choice import stream_kernels
stream_kernels([torch.zeros(1)]), kernels_for([])
print([name for name in sys.modules if name.split(".")[0] == "triton"])
"""
    assert python("-c", script, timeout=280) == "[]\n"
