"""The script for a GPU where there is none: it says so, its exactness runs in the interpreter, its refit on the CPU."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCRIPTS = ("gpu_check", "gpu_exactness", "gpu_refit")


@pytest.fixture
def bench(monkeypatch):
    """The scripts as modules."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return [importlib.import_module(name) for name in SCRIPTS]


def gpu_check(*arguments, **environment):
    command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True, timeout=280)


def test_without_a_gpu_it_says_so_and_has_an_exit_code_of_its_own():
    done = gpu_check("--json", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (3, "")
    assert "sees no GPU here, so nothing was checked" in done.stdout


def test_its_exactness_in_the_interpreter():
    done = gpu_check("--interpret", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "gpu_check"
    assert [row["met"] for row in said["rows"]] == [True, True]
    assert [row["measured"] for row in said["rows"]] == [0, 0]
    assert all(int(row["claim"].split("of ")[1].split()[0]) >= 6 for row in said["rows"])
    assert said["not_measured"] == ["any speed, and any GPU: this was an interpreter"]


def test_its_refits_on_the_cpu(bench):
    *_, gpu_refit = bench
    rows = {row.claim: row for row in gpu_refit.rows(torch.device("cpu"), 2, 64, [0.03])}
    exact = [row.measured for claim, row in rows.items() if "bits of a dense load" in claim]
    assert exact == [1.0, 1.0, 1.0, 1.0]  # the last two of copies, with weights that were stepped at once
    (payload,) = (row for claim, row in rows.items() if claim.endswith("payload"))
    assert 1.0 < payload.measured < 3.5  # of the checkpoint; so small a model has its headers in it
    assert payload.paper == 2.37
    assert any("the whole push" in claim for claim in rows)


def test_its_speeds_on_the_cpu(bench, monkeypatch):
    """Nothing is said of how fast, but that every row can be made."""
    script, *_ = bench
    for name, value in {"ELEMENTS": 1 << 17, "CHUNK_ELEMENTS": 1 << 15, "ROUNDS": 1, "RATES": (0.03,)}.items():
        monkeypatch.setattr(script, name, value)
    claims = [row.claim for row in script.speeds(torch.device("cpu")) if row.measured > 0]
    assert len(claims) == 14
    assert len(set(claims)) == 14


def test_a_wrong_bit_is_counted_and_named(bench, monkeypatch, capsys):
    script, gpu_exactness, _ = bench
    monkeypatch.setattr(gpu_exactness, "of_streams", lambda *_: iter([("one", True), ("two", False)]))
    monkeypatch.setattr(gpu_exactness, "of_boxes", lambda *_: iter([("three", True)]))
    rows = list(script.exactness(torch.device("cpu"), tiny=True))
    assert [row.met for row in rows] == [False, True]
    assert "WRONG: two" in capsys.readouterr().err
