"""`dcr spec`, from the command line: the real TLC on the specification of the modelcheck tests."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dcr.cli.main import main
from dcr.modelcheck.itf import load_trace
from dcr.modelcheck.trace_set import read_traces
from tests.unit.modelcheck import courier, stand_in

SPECS = Path(__file__).parent.parent / "modelcheck" / "specs"


@pytest.fixture
def folder(tmp_path):
    """A copy of the specification, to be changed."""
    copy = tmp_path / "spec"
    shutil.copytree(SPECS, copy, ignore=shutil.ignore_patterns("bad"))
    return copy


@pytest.fixture
def dcr(folder, tmp_path, monkeypatch, capsys):
    """dcr(*arguments) -> (exit status, JSON of the last line, the lines before)."""
    stand_in.nice_java(tmp_path / "bin")
    monkeypatch.setenv("PATH", stand_in.path_with(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main([*arguments, "--spec", str(folder), "--heap", "512m", "--json"])
        said = capsys.readouterr()
        *lines, last = said.out.splitlines()
        return status, json.loads(last), "\n".join([*lines, said.err])

    return run


@pytest.fixture
def with_stand_in(tmp_path, monkeypatch):
    """with_stand_in(what): an `apalache-mc` on PATH that ends so."""

    def put(what):
        stand_in.apalache(tmp_path / "bin")
        monkeypatch.setenv("STAND_IN", what)

    return put


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def states(trace):
    return [courier.of_tlc(step.state) for step in trace.steps]


def test_all_as_expected(dcr, tmp_path):
    status, report, said = dcr("spec", "check", "--workers", "1")  # with several, TLC's depth may be one too many
    assert status == 0
    assert (report["command"], report["ok"], report["findings"]) == ("spec check", True, [])
    assert [(row["name"], row["verdict"]) for row in report["models"]] == [
        ("all", "ok"),
        ("done", "invariant:NeverDone"),
    ]
    reachable, depth, _ = courier.explore()
    assert (report["models"][0]["distinct_states"], report["models"][0]["depth"]) == (len(reachable), depth)
    assert "2 of 2 models as expected" in said
    saved = load_trace((tmp_path / report["models"][1]["itf"]).read_bytes())
    assert courier.is_behaviour(states(saved))
    assert sorted(step.action for step in saved.steps[1:]) == ["Deliver", "Deliver", "Take", "Take"]


def test_a_bug_in_the_specification_is_told_and_saved(dcr, folder, tmp_path):
    parcel = "courier[c].parcel"
    change(folder / "Courier.tla", f"Append(desk, {parcel})", f"Append(Append(desk, {parcel}), {parcel})")
    status, report, said = dcr("spec", "check", "all", "--save", "kept")
    assert status == 1
    (row,) = report["models"]
    assert row["verdict"] == "invariant:Once"
    assert "expected ok, found invariant:Once" in row["wrong"]
    assert "WRONG  all" in said
    assert "delivered + [parcel: 1, who: " in said
    assert row["itf"] == "kept/all.itf.json"
    trace = load_trace((tmp_path / row["itf"]).read_bytes())
    delivered = [d["parcel"] for d in trace.steps[-1].state["delivered"]]
    assert len(set(delivered)) < len(delivered)
    assert row["length"] == len(trace.steps)


def test_a_missing_annotation_does_not_cost_the_counterexample(dcr, folder):
    change(folder / "Courier.tla", "  \\* @type: Seq(Int);\n", "")
    change(folder / "manifest.json", '"expect": "invariant:NeverDone"', '"expect": "ok"')
    status, report, said = dcr("spec", "check", "done")
    assert status == 1
    assert [finding["rule"] for finding in report["findings"]] == ["type"]
    assert report["models"][0]["itf"] is None
    assert "variable desk" in said
    assert "Deliver(" in said


def test_a_state_count_that_moved_is_wrong(dcr, folder):
    change(folder / "ok.cfg", "Parcels = 2", "Parcels = 1")
    status, report, _ = dcr("spec", "check", "all", "--coverage")
    assert status == 1
    assert "expected 47 distinct states, found" in report["models"][0]["wrong"]


def test_a_finding_in_the_sources_is_wrong(dcr, folder):
    change(folder / "Courier.tla", "Next == CourierStep", "Next == CourierStep \\/ UNCHANGED vars")
    status, report, said = dcr("spec", "check", "done")
    assert status == 1
    assert [finding["rule"] for finding in report["findings"]] == ["action"]
    assert "no named action: `UNCHANGED vars`" in said


def test_an_action_that_is_never_taken_is_named(dcr, folder):
    change(folder / "Courier.tla", "  /\\ desk' = Append(", "  /\\ desk = << 9 >>\n  /\\ desk' = Append(")
    _, report, said = dcr("spec", "check", "all", "--coverage")
    assert report["models"][0]["untaken"] == ["Return"]
    assert "never taken: Return" in said


def test_models_are_listed(dcr):
    status, report, said = dcr("spec", "models")
    assert status == 0
    assert [(m["name"], m["set"]) for m in report["models"]][:2] == [("all", "quick"), ("done", "quick")]
    assert "47 states" in said
    assert f"{len(report['models'])} models, {len(report['mutants'])} mutants" in said


def test_a_name_that_is_almost_right_is_guessed(dcr):
    assert "did you mean done?" in dcr("spec", "check", "doen")[2]


def test_mutants(dcr):
    status, report, said = dcr("spec", "mutants", "--workers", "1")
    assert status == 1
    caught, missed = report["mutants"]
    assert (caught["name"], caught["verdict"], caught["caught"]) == ("delivered_and_kept", "invariant:Once", True)
    assert (
        caught["length"] == 6
    )  # take 1, deliver 1, take 2; the other takes 1, which came round again, and delivers it
    assert (missed["name"], missed["verdict"], missed["caught"]) == ("no_effect", "ok", False)
    assert "1 of 2 mutants caught" in said


def test_a_mutant_that_breaks_the_specification_is_not_caught(dcr, folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["mutants"] = [{**manifest["mutants"][1], "new": "/\\ desk # ("}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    before = (folder / "Courier.tla").read_bytes()
    status, report, _ = dcr("spec", "mutants", "no_effect")
    assert status == 1
    assert (report["mutants"][0]["verdict"], report["mutants"][0]["caught"]) == ("parse", False)
    assert (folder / "Courier.tla").read_bytes() == before


def test_simulation(dcr, tmp_path):
    status, report, _ = dcr("spec", "simulate", "all", "--behaviours", "30", "--depth", "10")
    assert (status, report["verdict"], report["behaviours"]) == (0, "ok", 30)
    status, report, said = dcr("spec", "simulate", "done", "--depth", "30")
    assert (status, report["verdict"]) == (0, "invariant:NeverDone")
    assert courier.is_behaviour(states(load_trace((tmp_path / report["itf"]).read_bytes())))
    assert "Take(" in said


def test_traces(dcr, tmp_path):
    status, report, _ = dcr(
        "spec", "traces", "all", "--behaviours", "40", "--depth", "8", "--out", "out/t.itf.jsonl.zst"
    )
    assert status == 0
    read = [states(trace) for trace in read_traces(tmp_path / "out" / "t.itf.jsonl.zst")]
    assert len(read) == report["traces"] == len({tuple(behaviour) for behaviour in read})
    assert all(courier.is_behaviour(behaviour) for behaviour in read)
    taken = [action for behaviour in read for action, _, _ in behaviour[1:]]
    assert report["actions"] == {name: taken.count(name) for name in ("Deliver", "Return", "Take")}


def test_no_traces_of_a_specification_that_is_wrong(dcr, tmp_path):
    status, report, _ = dcr("spec", "traces", "done", "--out", "t.itf.jsonl.zst")
    assert status == 3
    assert "invariant:NeverDone on the way" in report["error"]
    assert not (tmp_path / "t.itf.jsonl.zst").exists()


def test_apalache_where_it_is_missing(dcr, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for arguments in (("check",), ("check", "all"), ("simulate", "all")):
        status, report, said = dcr("spec", *arguments, "--checker", "apalache")
        assert status == 3
        assert report["ok"] is False
        assert "Apalache was NOT run" in report["error"]
        assert "Apalache was NOT run" in said


@pytest.mark.parametrize(
    ("what", "verdict", "right"),
    [
        ("ok", "ok", ["all"]),  # `done` must fail, and does not
        ("violation", "violation", ["done"]),  # `all` must not
        ("too_short", "executions_too_short", []),
        ("smt_timeout", "smt_timeout", []),
        ("type", "type", []),
        ("other", "error", []),
    ],
)
def test_apalache_through_a_stand_in(dcr, with_stand_in, what, verdict, right):
    with_stand_in(what)
    status, report, _ = dcr("spec", "check", "--set", "full", "--checker", "apalache")
    assert status == 1
    assert [(row["name"], row["verdict"]) for row in report["models"]] == [("all", verdict), ("done", verdict)]
    assert [row["name"] for row in report["models"] if not row["wrong"]] == right


def test_apalache_as_expected_through_a_stand_in(dcr, with_stand_in):
    with_stand_in("ok")
    status, report, _ = dcr("spec", "check", "all", "--checker", "apalache")
    assert (status, report["models"][0]["checker"], report["models"][0]["depth"]) == (0, "apalache", 6)
    status, report, _ = dcr("spec", "simulate", "all", "--checker", "apalache", "--behaviours", "3")
    assert (status, report["behaviours"]) == (0, 3)


def test_a_model_that_the_manifest_does_not_give_to_apalache(dcr):
    status, report, _ = dcr("spec", "check", "finishes", "--checker", "apalache")
    assert status == 3
    assert "finishes" in report["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "xyz"), "there are: all, done, finishes"),
        (("mutants", "none"), "there are: delivered_and_kept, no_effect"),
        (("simulate", "xyz"), "there are: all, done, finishes"),
    ],
)
def test_names_that_there_are_not(dcr, arguments, said):
    status, report, printed = dcr("spec", *arguments)
    assert status == 3
    assert said in report["error"]
    assert said in printed


def test_a_model_that_takes_too_long_does_not_stop_the_others(dcr, folder):
    change(folder / "ok.cfg", "Parcels = 2", "Parcels = 9")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["models"][0]["timeout_s"] = 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    status, report, _ = dcr("spec", "check")
    assert status == 1
    assert [row["verdict"] for row in report["models"]] == ["error", "invariant:NeverDone"]
    assert "did not finish within 1 s" in report["models"][0]["wrong"]


def test_help_teaches_and_costs_nothing():
    script = (
        "import sys\nfrom dcr.cli.main import main\n"
        "try:\n    main(['spec', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = {'torch', 'numpy', 'tree_sitter', 'zstandard'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=240)
    for command in ("check", "simulate", "traces", "mutants"):
        assert f"dcr spec {command}" in done.stdout


def test_a_wrong_command_line_is_status_2(capsys):
    with pytest.raises(SystemExit) as end:
        main(["spec", "check", "--workers", "0"])
    assert end.value.code == 2
    assert "at least 1" in capsys.readouterr().err
