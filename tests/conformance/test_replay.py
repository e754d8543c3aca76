"""The roles do what the specification does, step by step, and refuse what it forbids."""

from functools import cache

import pytest
from guards import guards
from spec_models import MANIFEST, SPEC
from test_models import actions

from dcr.cli.main import main
from dcr.modelcheck import tlc
from dcr.modelcheck.manifest import Traces
from dcr.modelcheck.replay.graph_replay import replay_graph
from dcr.modelcheck.replay.replayer import Replayed, replay
from dcr.modelcheck.state_graph import read_state_graph
from dcr.modelcheck.trace_set import read_traces

TRACES = SPEC / "traces"
TRACED = [m for m in MANIFEST.models if m.traces is not None]
LEAST, LEAST_LONG = 1000, 10_000
DISTINCT = 0.85
"""The least share of random behaviours that are no repetition."""

GRAPHS = ("traces_rollback", "traces_join")
"""Models whose whole graph is replayed in the normal run: turning back, time-outs; restarts, restores and joins."""

UNSEEN = {
    "conductor.py: open_attempt: a restore is no attempt": "kinds of attempts are a type of the specification",
    "conductor.py: open_attempt: an owner still waits with the push that ended last": (
        "the specification's push is over then"
    ),
    "conductor.py: open_attempt: an owner refuses its candidate:": "the specification's owners offer what they hold",
    "conductor.py: commit: the owners sealed other content than the record names": (
        "the specification's owners fail first, each by its own seal"
    ),
    "conductor.py: open_restore: the baseline is not the committed version": (
        "the specification's owners hold that version or none"
    ),
    "node.py: _prepare: : two different prepare orders for epoch": "a leader sends one order an epoch",
    "node.py: read: : order to prepare epoch , but the record is at epoch : dropped": "an order follows its write of K",
    "node.py: _carry_out: : order to prepare epoch , in which the gate was opened: dropped": (
        "a gate opened at an epoch of K is no member of the session that has it"
    ),
    "node.py: gate_ready: : gate order of epoch refused: a rank was prepared for epoch since": (
        "too deep for random traces; the graph of traces_restore_twice comes there"
    ),
    "node.py: _check_record: : of record , this one obeys": "the specification has one record",
    "owner.py: emit: : a order against version was refused: the baseline holds version": "the fence refuses it before",
    "owner.py: _check_record: : order of record ; this owner obeys": "the specification has one record",
    "receiver.py: prepare: : two different prepare orders for epoch": "a leader sends one order an epoch",
    "receiver.py: open_apply: : open_apply for epoch , which was not prepared here": "the node refuses it before",
    "receiver.py: open_apply: : open_apply for epoch , which has failed here:": "the node refuses it before",
    "receiver.py: open_apply: : open_apply for epoch , which is not staged here yet": "the node refuses it before",
    "receiver.py: payload: : payload is of record": "the specification has one record",
    "receiver.py: manifest: : manifest of is of record": "the specification has one record",
    "receiver.py: manifest: : manifest of for epoch , which was not prepared here": "manifests are read when they help",
    "receiver.py: manifest: : manifest of (incarnation ), which is not an owner of this attempt": "likewise",
    "receiver.py: _check_order: : order of record ; this engine obeys": "the specification has one record",
    "receiver.py: _check_record: : record is not": "the specification has one record",
}
"""Guards that no trace meets, and why; tests/unit/protocol meets them."""


def _file(model):
    return TRACES / f"{model.name}.itf.jsonl.zst"


@cache
def replayed(name):
    done = Replayed()
    for trace in read_traces(_file(MANIFEST.model(name))):
        done += replay(trace)
    return done


def _all():
    total = Replayed()
    for model in TRACED:
        total += replayed(model.name)
    return total


@pytest.mark.parametrize("model", TRACED, ids=lambda m: m.name)
@pytest.mark.timeout(600)
def test_the_code_follows_the_traces(model):
    assert replayed(model.name).traces > 0.9 * model.traces.behaviours


def test_there_are_enough_traces_and_they_take_every_action():
    total = _all()
    assert total.traces >= LEAST
    assert {n.removesuffix("s") if n == "LateWrites" else n for n in actions()} == set(total.steps)


def test_every_guard_of_the_code_has_refused_something_that_is_forbidden():
    hit = _all().refusals
    unseen = {g.name for g in guards() if not any(f == g.file and g.first <= line <= g.last for f, line in hit)}
    assert unseen == set(UNSEEN)


def test_every_event_that_a_role_may_refuse_was_forbidden_somewhere():
    total = _all()
    tried = total.refused + total.without_effect
    by_the_world = {"CandidateReady", "StepCandidate", "EngineRestart", "OwnerRestart", "FoldCell", "LateWrite"}
    after_an_effect = {"EmitFailed", "EndFold", "LoseBaseline", "EndWrite", "FailWrite", "TakeOver"}
    after_an_effect |= {"ReadBack", "WriteAgain"}
    assert set(total.steps) - set(tried) == by_the_world | after_an_effect


def _graph_of(name, folder):
    model = MANIFEST.model(name)
    result = tlc.run(SPEC / model.module, SPEC / model.config, timeout_s=model.timeout_s, graph=folder / "graph.dot")
    assert (result.verdict, result.distinct_states) == ("ok", model.distinct_states)
    graph = read_state_graph(folder / "graph.dot")
    assert len(graph.states) == model.distinct_states
    return graph


def follows_every_step(name, folder):
    graph = _graph_of(name, folder)
    done = replay_graph(graph)
    assert done.steps.total() == graph.edges
    return graph


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.timeout(600)
def test_the_code_follows_every_step_of_a_whole_graph(name, tmp_path):
    graph = follows_every_step(name, tmp_path)
    if name == "traces_join":
        assert {what for edge in _edges(graph) for what in _loaded(*edge)} == {"named", "older", "candidate"}


def _edges(graph):
    return ((graph.states[a], graph.states[b]) for a, found in graph.successors.items() for b in found)


def _loaded(before, after):
    """Which checkpoint a restarted engine found after the first commit."""
    if after["step"]["name"] != "EngineRestart" or before["K"]["version"] == 0:
        return
    content = after["mem"][after["step"]["engine"]]["r1"]
    if content == before["K"]["baseline"]:
        yield "named"
    else:
        yield "candidate" if content == before["weights"] else "older"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [m.name for m in TRACED if m.set != "simulated" and m.name not in GRAPHS])
def test_the_code_follows_every_step_of_larger_graphs(name, tmp_path):
    follows_every_step(name, tmp_path)


FRESH = {m.name: 150 if m.set == "simulated" else 800 for m in TRACED}
"""How many traces of each model are taken anew in the long run, with another seed; few occur twice."""


def test_the_long_run_takes_ten_thousand_traces():
    assert DISTINCT * sum(FRESH.values()) >= LEAST_LONG


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", TRACED, ids=lambda m: m.name)
def test_the_code_follows_fresh_traces(model, tmp_path):
    out = _taken(model, Traces(FRESH[model.name], model.traces.depth, 20261129), tmp_path)
    followed = 0
    for trace in read_traces(out):
        replay(trace)
        followed += 1
    assert followed >= DISTINCT * FRESH[model.name]


def test_no_file_of_traces_is_left_over():
    assert {p.name for p in TRACES.iterdir()} == {_file(m).name for m in TRACED}


def _taken(model, traces, folder):
    out = folder / "traces.itf.jsonl.zst"
    how = ["--behaviours", str(traces.behaviours), "--depth", str(traces.depth), "--seed", str(traces.seed)]
    assert (
        main(["spec", "traces", model.name, "--spec", str(SPEC), "--out", str(out), "--timeout-s", "3000", *how]) == 0
    )
    return out


def test_traces_are_those_of_this_specification(tmp_path):
    model = MANIFEST.model("traces_rollback")
    assert _taken(model, model.traces, tmp_path).read_bytes() == _file(model).read_bytes(), "make traces"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", TRACED, ids=lambda m: m.name)
def test_all_traces_are_those_of_this_specification(model, tmp_path):
    assert _taken(model, model.traces, tmp_path).read_bytes() == _file(model).read_bytes(), "make traces"
