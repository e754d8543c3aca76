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
    assert set(re.search(r"^INVARIANTS (.*)$", config, re.MULTILINE)[1].split()) == INVARIANTS
    if model.module != "RefitTraces.tla":
        assert "MonotoneRecord" in config.partition("PROPERTIES")[2]
    if model.module == "RefitLive.tla":
        assert "Converges" in config.partition("PROPERTIES")[2]
    explored = model.set != "simulated"
    assert (model.distinct_states is not None) == explored, "a model that is explored whole has its count pinned"


def test_no_configuration_is_left_out_of_the_manifest():
    assert {path.name for path in SPEC.glob("*.cfg")} == {m.config for m in MANIFEST.models}


def _named(operator, module):
    body = re.search(rf"^{operator} ==(.*?)^\S", (SPEC / module).read_text(), re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"\\/ (\w+)", body)


def actions():
    """Every action of the specification, by name."""
    groups = {"CoordinatorNext", "OwnerNext", "NodeNext", "RankNext"}
    top = _named("Next", "Refit.tla")
    assert groups < set(top)
    return {*top, *(name for group in groups for name in _named(group, "Refit.tla"))} - groups


def test_traces_have_a_step_for_every_action():
    steps = {name.removeprefix("Step") for name in _named("StepNext", "RefitTraces.tla")}
    assert steps == {name.removesuffix("s") if name == "LateWrites" else name for name in actions()}
    text = (SPEC / "RefitTraces.tla").read_text()
    for name in steps:
        # The step is the action, named as such; and among what could be done it is there exactly when it is enabled.
        assert re.search(rf"^{name}Step\b.* ==(?:.|\n  )*\"{name}\"", text, re.MULTILINE), name
        taken = rf"^Step{name}\b.* ==(?:.|\n  )*\b{name}(For|Of|But)?\b.*/\\ step' = {name}Step\b"
        assert re.search(taken, text, re.MULTILINE), name
        assert re.search(rf"\bENABLED {name}(For|Of|But)?\b.* THEN {{ {name}Step\b", text), name


def test_quick_models_take_every_action():
    # TLC names an action by the definition that says how: `OpenAttemptOf` for `OpenAttempt`.
    taken = {
        re.sub("(For|Of|But)$", "", action)
        for model in QUICK
        for action, (distinct, generated) in verdict_of(model.name).coverage.items()
        if generated
    }
    assert actions() - taken == set()
