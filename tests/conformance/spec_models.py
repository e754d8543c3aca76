"""The specification's folder, and a model's verdict: run once, however many tests ask for it."""

import shutil
from functools import cache
from pathlib import Path

import pytest

from dcr.modelcheck import tlc
from dcr.modelcheck.manifest import Model, Mutant, load_manifest

SPEC = Path(__file__).resolve().parents[2] / "spec" / "tla"
MANIFEST = load_manifest(SPEC)

INVARIANTS = {
    *("ServingExact", "CommitStored", "CommitHeld", "BaselineExact", "RelativeOnce", "FencedWrites", "OneCommit"),
}
"""Safety by the design's names; MonotoneRecord is an action property, Converges a temporal one."""


def _explore(folder: Path, model: Model, *, coverage: bool) -> tlc.TlcResult:
    with pytest.MonkeyPatch.context() as patch:
        if model.set == "quick":
            patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")  # too short a run for the second compiler
        return tlc.run(folder / model.module, folder / model.config, timeout_s=model.timeout_s, coverage=coverage)


@cache
def verdict_of(model: str) -> tlc.TlcResult:
    """What exploring a model gives, actions counted."""
    return _explore(SPEC, MANIFEST.model(model), coverage=True)


def verdict_with(mutant: Mutant, folder: Path) -> tlc.TlcResult:
    """What exploring the mutant's model gives, the bug made in a copy of the specification."""
    m = MANIFEST.model(mutant.model)
    for path in [*SPEC.glob("*.tla"), SPEC / m.config]:
        shutil.copy(path, folder)
    broken = folder / mutant.file
    source = broken.read_text()
    assert source.count(mutant.old) == 1
    broken.write_text(source.replace(mutant.old, mutant.new))
    return _explore(folder, m, coverage=False)
