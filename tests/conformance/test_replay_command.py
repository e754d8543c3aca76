"""`dcr spec replay`, from the command line."""

import json
import re

import pytest
from spec_models import MANIFEST, SPEC

from dcr.cli.main import main
from dcr.modelcheck.itf import load_trace
from dcr.modelcheck.source import variable_types
from dcr.modelcheck.trace import Step, Trace
from dcr.modelcheck.trace_set import read_traces, write_traces
from dcr.modelcheck.values import Function
from dcr.protocol.conductor import Conductor

ROLLBACK = SPEC / "traces" / "traces_rollback.itf.jsonl.zst"
TYPES = variable_types(SPEC / "RefitTraces.tla")


@pytest.fixture
def dcr(tmp_path, capsys):
    """dcr(*arguments) -> (exit status, JSON of the last line, the lines before and the errors)."""

    def run(*arguments):
        options = ["--spec", str(SPEC), "--save", str(tmp_path / "saved"), "--json"]
        status = main(["spec", "replay", *map(str, arguments), *options])
        said = capsys.readouterr()
        *lines, last = said.out.splitlines()
        return status, json.loads(last), "\n".join([*lines, said.err])

    return run


def _some(count):
    return [trace for trace, _ in zip(read_traces(ROLLBACK), range(count), strict=False)]


def _tampered(trace, at, change):
    steps = list(trace.steps)
    steps[at] = Step(change(dict(steps[at].state)))
    return Trace(tuple(steps))


def _kept(tmp_path, traces):
    path = tmp_path / "some.itf.jsonl.zst"
    write_traces(path, traces, TYPES, "a test")
    return path


def test_traces_that_are_followed(dcr, tmp_path):
    traces = _some(3)
    status, report, said = dcr(_kept(tmp_path, traces))
    assert (status, report["ok"], report["traces"], report["wrong"]) == (0, True, 3, 0)
    assert sum(report["steps"].values()) == sum(t.length - 1 for t in traces)
    assert report["refused"]["Commit"] > 0
    assert "3 traces followed, 0 not" in said


def test_a_step_that_leads_elsewhere_is_told_and_saved(dcr, tmp_path):
    first, second = _some(2)
    (at,) = [i for i, s in enumerate(second.steps) if s.state["step"]["name"] == "OpenApply"][:1]

    def open_gate(state):
        gate = Function({**state["node"]["e1"], "gate": "open"})
        return state | {"node": Function({**state["node"], "e1": gate})}

    path = _kept(tmp_path, [first, _tampered(second, at, open_gate)])
    status, report, said = dcr(path)
    assert (status, report["ok"], report["traces"], report["wrong"]) == (1, False, 1, 1)
    assert f"some-1: state {at + 1}, OpenApply(e1, " in said
    assert 'node.e1.gate: "open" -> "closed"' in said
    saved = load_trace((tmp_path / "saved" / "some-1.itf.json").read_bytes())
    assert saved.length == at + 1


def test_a_step_that_should_have_been_forbidden_is_told(dcr, tmp_path):
    (trace,) = _some(1)
    # As if the specification forbade the very commit that follows.
    at = next(i for i, s in enumerate(trace.steps) if s.state["step"]["name"] == "Commit")
    path = _kept(tmp_path, [_tampered(trace, at, lambda state: state | {"could": frozenset()})])
    status, _, said = dcr(path)
    assert status == 1
    assert f"at state {at}: Commit(c1) is forbidden, but the code began to do it" in said


def test_traces_of_an_older_specification_say_so(dcr, tmp_path):
    (trace,) = _some(1)
    path = _kept(tmp_path, [_tampered(trace, 0, lambda state: state | {"told": frozenset({7})})])
    status, _, said = dcr(path)
    assert status == 1
    assert "state 1, Init: specification -> code (was it taken from this version of the specification?" in said


@pytest.mark.parametrize("kept", [0, 10, 5000])
def test_a_file_that_is_no_file_of_traces_is_refused(dcr, tmp_path, kept):
    path = tmp_path / "short.itf.jsonl.zst"
    path.write_bytes(ROLLBACK.read_bytes()[:kept])
    status, report, said = dcr(path)
    assert (status, report["ok"]) == (3, False)
    assert str(path) in said


def test_a_file_that_is_not_there_is_refused(dcr, tmp_path):
    status, report, said = dcr(tmp_path / "none.zst")
    assert (status, report["ok"]) == (3, False)
    assert "none.zst" in said


def test_a_graph_that_is_not_followed_is_told_and_saved(dcr, tmp_path, monkeypatch):
    monkeypatch.setattr(Conductor, "roll_back", lambda _: [])
    status, report, said = dcr("--graph", "traces_rollback")
    assert (status, report["ok"], report["wrong"]) == (1, False, 1)
    assert re.search(r"WRONG  traces_rollback-graph: state \d+, RollBack\(c1\): specification -> code\n    K", said)
    saved = load_trace((tmp_path / "saved" / "traces_rollback-graph.itf.json").read_bytes())
    assert saved.steps[-1].state["step"]["name"] == "RollBack"
    assert "could" not in said


def test_a_graph_and_files_are_not_replayed_at_once(dcr):
    status, _, said = dcr(ROLLBACK, "--graph", "traces_rollback")
    assert status == 3
    assert "name one of them" in said


@pytest.mark.parametrize(
    ("model", "why"),
    [("nothing", "no model 'nothing'"), ("plain", "RefitTraces"), ("traces_everything", "too large to explore")],
)
def test_a_graph_that_cannot_be_replayed_is_refused(dcr, model, why):
    status, report, said = dcr("--graph", model)
    assert (status, report["ok"]) == (3, False)
    assert why in said


def test_every_model_with_traces_has_the_variables_of_a_replay():
    assert {m.module for m in MANIFEST.models if m.traces is not None} == {"RefitTraces.tla"}


def test_a_trace_of_another_module_is_refused(dcr, tmp_path):
    (trace,) = _some(1)
    other = Trace(tuple(Step({k: v for k, v in s.state.items() if k != "setting"}) for s in trace.steps))
    path = _kept(tmp_path, [other])
    status, _, said = dcr(path)
    assert status == 3
    assert f"{path}, trace 0: no trace of RefitTraces.tla: it has no variable setting" in said


def test_a_step_that_there_is_not_is_refused(dcr, tmp_path):
    (trace,) = _some(1)
    step = trace.steps[1].state["step"]
    path = _kept(tmp_path, [_tampered(trace, 1, lambda s: s | {"step": Function({**step, "name": "Foo"})})])
    status, _, said = dcr(path)
    assert status in (1, 3)
    assert "no such step of a" in said


def test_a_file_without_traces_is_refused(dcr, tmp_path):
    path = _kept(tmp_path, [])
    status, _, said = dcr(path)
    assert status == 3
    assert "holds no traces" in said


def test_a_counterexample_that_cannot_be_saved_is_told_all_the_same(dcr, tmp_path):
    (tmp_path / "saved").write_text("a file where the folder should be")
    (trace,) = _some(1)
    path = _kept(tmp_path, [_tampered(trace, 0, lambda state: state | {"told": frozenset({7})})])
    status, report, said = dcr(path)
    assert (status, report["wrong"]) == (1, 1)
    assert "not saved" in said


def test_how_much_to_take_is_said_of_one_model_only(capsys):
    assert main(["spec", "traces", "--spec", str(SPEC), "--behaviours", "5"]) == 3
    assert "are for one model" in capsys.readouterr().err
    assert main(["spec", "traces", "plain", "--spec", str(SPEC)]) == 3
    assert "keeps no traces of it" in capsys.readouterr().err
