"""`dcr chaos`, as an operator runs it: the quick matrix, the whole of it, and a scenario with own models."""

import json
from pathlib import Path

import pytest
import torch

from dcr.cli.main import main
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


OWN = ROOT / "examples" / "chaos"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_scenario_with_own_models_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{OWN}:{ROOT}")
    status, report, said = chaos(tmp_path / "left", "run", OWN / "own_models.yaml", timeout_s=200, cwd=tmp_path)
    assert status == 0, said
    (run,) = report["runs"]
    assert (run["kills"], run["commits"], run["restarts"]) == (1, 2, 1)
    assert run["bytes_compared"] == 2 * 2 * 24 * 80 * 2  # refits, engines, elements, bytes
    assert run["logs"].startswith("a behaviour of the specification")
    kept = json.loads((Path(run["folder"]) / "report.json").read_text())
    assert kept["name"] == "an engine with models of your own dies in the middle of its writes"


SCENARIO = """
name: no models
deployment:
  model: {trainer: "own_models:Trained", engine: "own_models:Served"}
"""


def test_a_model_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text(SCENARIO)
    threads = torch.get_num_threads()
    try:  # nothing is started, so it needs no process of its own
        status = main(["chaos", "run", f"{tmp_path}/s.yaml", "--folder", f"{tmp_path}/left", "--json"])
    finally:
        torch.set_num_threads(threads)
    assert status == 3
    assert "own_models" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
