"""The manifest: what is read and what is refused."""

import json
import shutil

import pytest

from dcr.modelcheck.manifest import ManifestError, load_manifest
from dcr.modelcheck.model_run import meets


@pytest.fixture
def folder(specs, tmp_path):
    for path in specs.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def changed(folder, change):
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_read(folder):
    manifest = load_manifest(folder)
    assert [model.name for model in manifest.models] == ["all", "done", "finishes"]
    assert manifest.model("all").distinct_states == 47
    assert manifest.model("all").apalache.inv == ("Once",)
    assert manifest.model("finishes").apalache is None
    assert manifest.mutants[0].caught_by == "invariant:Once"
    with pytest.raises(ManifestError, match=r"no model 'x' in the manifest; there are: all, done, finishes"):
        manifest.model("x")


def first_model(**fields):
    return lambda document: document["models"][0].update(fields)


def first_mutant(**fields):
    return lambda document: document["mutants"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (first_model(surprise=1), "surprise"),
        (first_model(set="slow"), "slow"),
        (first_model(distinct_states="many"), "distinct_states"),
        (lambda document: document["models"][0].pop("expect"), "expect"),
        (lambda document: document.pop("mutants"), "mutants"),
        (first_model(expect="fine"), "model all: expect 'fine'"),
        (first_model(expect="invariant:"), "expect 'invariant:'"),
        (first_model(timeout_s=0), "timeout_s"),
        (first_model(name="done"), "model done occurs twice"),
        (first_model(name="a b"), "model 'a b'"),
        (first_model(module="None.tla"), r"None\.tla"),
        (first_model(config="../ok.cfg"), r"\.\./ok\.cfg"),
        (first_mutant(model="none"), "no model 'none'"),
        (first_mutant(file="None.tla"), r"mutant delivered_and_kept: 'None\.tla'"),
        (first_mutant(caught_by="ok"), "caught_by 'ok'"),
        (first_mutant(old="not there"), "occurs 0 times"),
        (first_mutant(old="parcel"), r"occurs \d\d times"),
        (first_mutant(new="desk' = Tail(desk)"), "differ"),
        (first_mutant(new="TRUE\n/\\ TRUE"), "one line"),
        (lambda document: document.update(tlc_only=["None.tla"]), "tlc_only"),
    ],
)
def test_refused(folder, change, said):
    changed(folder, change)
    with pytest.raises(ManifestError, match=said):
        load_manifest(folder)


def test_a_missing_or_broken_file_is_named(folder):
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        load_manifest(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(ManifestError, match="--spec"):
        load_manifest(folder)


@pytest.mark.parametrize(
    ("expected", "verdict", "met"),
    [
        ("ok", "ok", True),
        ("ok", "property", False),
        ("invariant:A", "invariant:A", True),
        ("invariant:A", "invariant:B", False),
        ("property", "property:A", True),
        ("property", "property", True),
        ("property:A", "property", False),
        ("property:A", "property:A", True),
        ("any", "invariant:A", True),
        ("any", "deadlock", True),
        *(("any", verdict, False) for verdict in ("ok", "evaluation", "parse", "config", "error", "assumption")),
    ],
)
def test_expectations(expected, verdict, met):
    assert meets(expected, verdict) is met
