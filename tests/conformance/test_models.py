"""Every model of the specification gives what its manifest says, and between them they take every action."""

import re

import pytest
from spec_models import INVARIANTS, MANIFEST, SPEC, verdict_of

QUICK = [m for m in MANIFEST.models if m.set == "quick"]
FULL = [m for m in MANIFEST.models if m.set == "full"]
EXHAUSTIVE = [m for m in MANIFEST.models if m.expect == "ok" and m.name != "one_commit"]


def _holds(model):
    found = verdict_of(model.name)
    assert found.verdict == model.expect, found.message
    if model.distinct_states is not None:
        assert found.distinct_states == model.distinct_states, "the specification says something else than before"


@pytest.mark.parametrize("model", QUICK, ids=lambda m: m.name)
def test_quick_model(model):
    _holds(model)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", FULL, ids=lambda m: m.name)
def test_full_model(model):
    _holds(model)


@pytest.mark.parametrize("model", EXHAUSTIVE, ids=lambda m: m.name)
def test_a_model_checks_every_safety_property(model):
    config = (SPEC / model.config).read_text()
    assert set(re.findall(r"\w+", config.partition("INVARIANTS")[2].partition("PROPERTIES")[0])) == INVARIANTS
    if model.module != "RefitTraces.tla":
        assert "MonotoneRecord" in config.partition("PROPERTIES")[2]
    if model.module == "RefitLive.tla":
        assert "Converges" in config.partition("PROPERTIES")[2]
    assert model.distinct_states, "a model that is explored whole has its count pinned"


def test_no_configuration_is_left_out_of_the_manifest():
    assert {path.name for path in SPEC.glob("*.cfg")} == {m.config for m in MANIFEST.models}


def _named(operator, module):
    body = re.search(rf"^{operator} ==(.*?)^\S", (SPEC / module).read_text(), re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"\\/ (\w+)", body)


def _actions():
    groups = {"CoordinatorNext", "OwnerNext", "NodeNext", "RankNext"}
    top = _named("Next", "Refit.tla")
    assert groups < set(top)
    return {*top, *(name for group in groups for name in _named(group, "Refit.tla"))} - groups


def test_traces_have_a_step_for_every_action():
    steps = {name.removeprefix("Step") for name in _named("StepNext", "RefitTraces.tla")}
    assert steps == {name.removesuffix("s") if name == "LateWrites" else name for name in _actions()}
    for name in steps:
        text = (SPEC / "RefitTraces.tla").read_text()
        assert re.search(rf'^Step{name}\b.* == .*\b{name}\b.*"{name}"', text, re.MULTILINE), name


def test_quick_models_take_every_action():
    taken = {
        action
        for model in QUICK
        for action, (distinct, generated) in verdict_of(model.name).coverage.items()
        if generated
    }
    assert _actions() - taken == set()
