"""The models of a scenario: a user's own, a checkpoint's tensors, and what is no model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dcr.chaos.bits import Twins
from dcr.chaos.model import check, make, train_step
from dcr.chaos.scenario import Model
from dcr.protocol.errors import RefusedError

OWN = Path(__file__).parents[3] / "examples" / "chaos"
_LEAVES = """import sys, torch
def make():
    sys.exit(0)
class Loads(torch.nn.Module):
    def load_weights(self, weights):
        sys.exit(0)
    def train_step(self, seed, rate):
        sys.exit(0)
"""


@pytest.mark.parametrize(
    ("trainer", "engine", "said"),
    [
        ("none:Trained", "own_models:Served", "'none:Trained'.*No module named 'none'.*PYTHONPATH"),
        ("own_models:Trained", "own_models:Trained", "no load_weights"),
        ("own_models:Trained", "own_models:Other", "own_models:Other.*no attribute 'Other'"),
        ("dcr.chaos.model:policy", "own_models:Served", "load_weights, given the tensors of .*KeyError: 'embed'"),
        ("dcr.chaos.model:policy", "own_models:Served", "'dcr.chaos.model:policy' is .*own model.* give `trainer` too"),
        ("checkpoint:/not/there", "vllm", "/not/there"),
    ],
)
def test_models_that_cannot_be_run_are_refused_before_anything_is_started(monkeypatch, trainer, engine, said):
    monkeypatch.syspath_prepend(OWN)
    with pytest.raises(RefusedError, match=said):
        check(trainer, engine)


@pytest.mark.parametrize(
    ("trainer", "engine", "said"),
    [
        ("leaves_as_imported:make", "own_models:Served", "'leaves_as_imported:make': SystemExit: 0"),
        ("leaves:make", "own_models:Served", "'leaves:make': called without arguments it raises SystemExit: 0"),
        ("own_models:Trained", "leaves:Loads", "'leaves:Loads': its load_weights, .* raises SystemExit: 0"),
    ],
)
def test_a_model_that_would_end_the_harness_is_refused(monkeypatch, tmp_path, trainer, engine, said):
    (tmp_path / "leaves_as_imported.py").write_text("raise SystemExit(0)")
    (tmp_path / "leaves.py").write_text(_LEAVES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(OWN)
    with pytest.raises(RefusedError, match=said):
        check(trainer, engine)


_NET = """import torch
from torch import nn
class Policy(nn.Module):
    def __init__(self, *shape, name="w"):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(*shape or (3,))))
def other_shape():
    return Policy(5, 7, name="q")
def _private(): pass
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (
            "mynet:Polcy",
            r"no attribute 'Polcy'; in .*mynet\.py there is Policy, other_shape; did you mean mynet:Policy\?$",
        ),
        ("mynet:Zzz", r"no attribute 'Zzz'; in .*mynet\.py there is Policy, other_shape$"),
        ("no_factory:make", r"no attribute 'make'; in .*no_factory\.py there is no class or function that could be"),
        ("lacks:make", r"No module named 'not_installed'; that is what importing lacks raises$"),
        ("mynot:Policy", r"No module named 'mynot'; put the folder of its module on PYTHONPATH$"),
        ("mynet.more:Policy", r"No module named 'mynet.more'; 'mynet' is not a package; put the folder"),
    ],
)
def test_a_factory_that_is_not_found_is_told_what_there_is(monkeypatch, tmp_path, factory, said):
    (tmp_path / "mynet.py").write_text(_NET)
    (tmp_path / "no_factory.py").write_text("from pathlib import Path\nN = 3\n")
    (tmp_path / "lacks.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RefusedError, match=said):
        make(factory)


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("mynet:Policy", "no place for 'w' of 'mynet:Policy'"),
        ("mynet:other_shape", "its load_weights, given the tensors of 'mynet:other_shape', raises RuntimeError"),
    ],
)
def test_a_trainer_of_ones_own_without_an_engine_is_told_that_it_wants_one(monkeypatch, tmp_path, trainer, said):
    """The harness's engine would skip what it does not know, and no push commit."""
    (tmp_path / "mynet.py").write_text(_NET)
    monkeypatch.syspath_prepend(tmp_path)
    hint = "'dcr.chaos.model:served' is the harness's own model, taken where `engine` is left out: .* give `engine` too"
    with pytest.raises(RefusedError, match=f"(?s){said}.*; {hint}$"):
        check(trainer, Model(trainer=trainer).engine)


def test_a_loader_that_would_end_the_harness_late_is_a_problem_by_name(monkeypatch, tmp_path):
    """As a twin is made, in the harness itself, after every refit."""
    (tmp_path / "leaves.py").write_text(_LEAVES)
    monkeypatch.syspath_prepend(tmp_path)
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(RefusedError, match=f"model Loads: its load_weights, given {tmp_path}, raises SystemExit: 0"):
        Twins("leaves:Loads").bits(tmp_path)


def test_a_step_that_would_end_the_harness_is_refused(monkeypatch, tmp_path):
    (tmp_path / "leaves.py").write_text(_LEAVES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RefusedError, match=r"model Loads: its train_step\(3, 0.5\) raises SystemExit: 0"):
        train_step(make("leaves:Loads"), 3, 0.5)


def test_the_example_is_what_it_says(monkeypatch):
    monkeypatch.syspath_prepend(OWN)
    check("own_models:Trained", "own_models:Served")


def test_a_checkpoint_is_a_model_whose_step_is_that_of_its_seed(tmp_path):
    tensors = {"a.b.weight": torch.randn(40, 30).to(torch.bfloat16), "a.scale": torch.randn(7), "n": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    one, two = (make(f"checkpoint:{tmp_path}") for _ in range(2))
    assert {n: t.dtype for n, t in one.state_dict().items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(t, tensors[n]) for n, t in one.state_dict().items())
    train_step(one, 3, 0.5)
    train_step(two, 3, 0.5)
    assert all(torch.equal(t, two.state_dict()[n]) for n, t in one.state_dict().items())
    changed = (one.state_dict()["a.b.weight"] != tensors["a.b.weight"]).float().mean()
    assert 0.2 < changed < 0.6
    assert torch.isfinite(one.state_dict()["a.b.weight"]).all()


def test_an_engine_of_vllm_wants_a_checkpoint_of_hugging_face(tmp_path):
    with pytest.raises(RefusedError, match=r"has no config\.json"):
        check(f"checkpoint:{tmp_path}", "vllm")
