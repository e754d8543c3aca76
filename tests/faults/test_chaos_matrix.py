"""`dcr chaos`, as an operator runs it: the quick matrix, the whole of it, and a scenario with own models."""

import json
from pathlib import Path

import pytest

from tests.faults.chaos_command import ROOT, chaos
from tests.faults.conftest import SPEC


@pytest.mark.timeout(600)
def test_the_quick_matrix(tmp_path):
    status, report, said = chaos(tmp_path, "matrix", "--quick", "--spec", SPEC, timeout_s=540)
    assert status == 0, said
    totals = report["totals"]
    assert totals["failed"] == 0
    assert totals["kills"] >= 14
    assert totals["commits"] >= totals["runs"]
    assert totals["requests"] > 100
    assert totals["bytes_compared"] > 100_000
    for run in report["runs"]:
        assert run["skipped"] or (Path(run["folder"]) / "timeline.html").stat().st_size > 10_000
        assert all(f["recovered_s"] is not None for f in run["faults"])


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_whole_matrix(tmp_path):
    status, report, said = chaos(tmp_path, "matrix", "--spec", SPEC, timeout_s=7000)
    assert status == 0, said
    assert report["totals"]["failed"] == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gate", ["sync", "async"])
def test_a_soak(tmp_path, gate):
    arguments = ("soak", "--seconds", 90, "--seed", 7, "--gate", gate, "--spec", SPEC)
    status, report, said = chaos(tmp_path, *arguments, timeout_s=850)
    assert status == 0, said
    assert report["refits"] > 100
    assert report["run"]["kills"] > 0
    assert report["run"]["validated"]
    assert report["in_a_row"]["refits"] == 100
    assert report["in_a_row"]["equal"]


OWN = """
import torch

class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(600.0).reshape(20, 30), requires_grad=False)

    def train_step(self, seed, rate):
        self.w += seed

class Served(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(30, 20, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        with torch.no_grad():
            for _, w in weights:
                self.w.copy_(w.t())
        return {"w"}
"""

SCENARIO = """
name: my models
deployment:
  engines: 2
  nodes: [2]
  model: {trainer: "own_models:Trained", engine: "own_models:Served"}
faults:
  - at: receiver[1] at EndWrite in refit 2
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_scenario_with_own_models(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    status, report, said = chaos(tmp_path / "left", "run", tmp_path / "s.yaml", "--no-logs", timeout_s=200)
    assert status == 0, said
    (run,) = report["runs"]
    assert (run["kills"], run["commits"], run["restarts"]) == (1, 2, 1)
    assert run["bytes_compared"] == 2 * 2 * 30 * 20 * 2  # refits, engines, elements, bytes
    assert json.loads((Path(run["folder"]) / "report.json").read_text())["name"] == "my models"


def test_a_model_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "s.yaml").write_text(SCENARIO)
    status, report, said = chaos(tmp_path / "left", "run", tmp_path / "s.yaml", timeout_s=100)
    assert status == 3, said
    assert "own_models" in report["error"]
