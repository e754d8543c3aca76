r"""The manifest: which models the specification folder holds, and what checking each of them must give.

`spec/tla/manifest.json` is one JSON object.  Unknown and missing keys are refused; optional keys are marked.

    {
      "models": [
        {
          "name": "two_transitions",             what `dcr spec check NAME` takes; unique; letters, digits, _ and -
          "module": "MCRefit.tla",               a bare file name in the manifest's folder
          "config": "two_transitions.cfg",       likewise
          "set": "quick",                        "quick" or "full", `--set full` checks both; "simulated": too large
                                                 to explore, random behaviours only
          "expect": "ok",                        or "invariant:NAME", "property", "property:NAME", "deadlock"
          "distinct_states": 180789,             pinned count of an exhaustive run, or null: not pinned
          "timeout_s": 120,                      the run is stopped, and fails, after this long
          "features": ["crash", "failover"],     optional: which feature constants are on; for the reader
          "apalache": null,                      optional: see below; null or absent: TLC only
          "traces": null                         optional: {"behaviours": 64, "depth": 60, "seed": 1}: what
                                                 `dcr spec traces` without MODEL takes of it, to be replayed
        }
      ],
      "mutants": [
        {
          "name": "commit_without_cas",          unique
          "file": "Refit.tla",                   the file in which the bug is made
          "old": "/\\ K.rev = c.rev",            text that occurs exactly once in the file, within one line
          "new": "/\\ TRUE",                     what takes its place, within one line
          "model": "base",                       the model that must notice
          "caught_by": "invariant:OneCommit"     an `expect` other than "ok", or "any"
        }
      ],
      "tlc_only": ["Liveness.tla"]               optional: modules that only TLC reads (fairness, liveness); the
                                                 static check of what Apalache refuses passes over them
    }

`expect` names what TLC reports first: "invariant:NAME" is a violated state invariant of that name; "property" is a
violated temporal property, an action property such as `[][A]_v` included, and "property:NAME" an action property of
that name (TLC names no other); "deadlock" asks TLC to look for one, which no other expectation does.  A must-fail
model, which proves that an interesting state is reachable, lists the negated goal as an invariant and expects it.
`distinct_states` of a must-fail model should be null: where TLC stops depends on its workers.

`apalache`, where present, is {"length": 10, "cinit": "ConstInit", "inv": ["A", "B"]}: steps to unroll, the operator
that initialises the constants ("" where the module has none) and the invariants; `--checker apalache` runs these
models, and expects no error of one whose `expect` is "ok" and an error of any other.  TLC 2.15 and Apalache read
different keywords in a .cfg, so Apalache is given none.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import msgspec

from dcr.protocol.errors import RefusedError

MANIFEST_BYTES_MAX = 1 << 20


class ManifestError(RefusedError):
    """A manifest that cannot be read, contradicts itself, or names a file that is not there."""


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """Text about a name that the manifest does not have: those that look like it, or else all that there are."""
    close = get_close_matches(name, known, n=3)
    return f"no {what} {name!r} in the manifest; " + (
        f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(known)}"
    )


class ApalacheRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How Apalache checks a model: bounded to `length` steps."""

    length: int
    cinit: str
    inv: tuple[str, ...]


class Traces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which random behaviours of a model are kept, to be replayed on the code."""

    behaviours: int
    depth: int
    seed: int


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration of the specification, with its expected result."""

    name: str
    module: str
    config: str
    set: Literal["quick", "full", "simulated"]
    expect: str
    distinct_states: int | None
    timeout_s: float
    features: tuple[str, ...] = ()
    apalache: ApalacheRun | None = None
    traces: Traces | None = None


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A one-line bug, and the model and property that must catch it."""

    name: str
    file: str
    old: str
    new: str
    model: str
    caught_by: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the file holds."""

    models: tuple[Model, ...]
    mutants: tuple[Mutant, ...]
    tlc_only: tuple[str, ...] = ()

    def model(self, name: str) -> Model:
        """The model of that name.

        Raises:
            ManifestError: There is none; the message names those that there are.
        """
        for model in self.models:
            if model.name == name:
                return model
        raise ManifestError(unknown("model", name, [m.name for m in self.models]))


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_EXPECT = re.compile(r"ok|property|deadlock|(invariant|property):[A-Za-z_]\w*", re.ASCII)


def _unique(what: str, names: list[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name):
            raise ManifestError(f"{what} {name!r}: a name is 1 to 64 letters, digits, _ and -")
        if names.count(name) > 1:
            raise ManifestError(f"{what} {name} occurs twice")


def _file(folder: Path, name: str, where: str) -> None:
    if Path(name).name != name or not (folder / name).is_file():
        raise ManifestError(f"{where}: {name!r} is no file directly in {folder}")


def _check_mutant(mutant: Mutant, folder: Path, manifest: Manifest) -> None:
    where = f"mutant {mutant.name}"
    _file(folder, mutant.file, where)
    manifest.model(mutant.model)
    if mutant.caught_by != "any" and (mutant.caught_by == "ok" or not _EXPECT.fullmatch(mutant.caught_by)):
        raise ManifestError(f"{where}: caught_by {mutant.caught_by!r}: any, invariant:NAME, property or deadlock")
    if not mutant.old or mutant.old == mutant.new or "\n" in mutant.old + mutant.new:
        raise ManifestError(f"{where}: old and new differ, and each is within one line")
    if (times := (folder / mutant.file).read_text().count(mutant.old)) != 1:
        raise ManifestError(f"{where}: {mutant.old!r} occurs {times} times in {mutant.file}; it must occur once")


def load_manifest(folder: Path) -> Manifest:
    """Read `manifest.json` of a specification folder.

    Raises:
        ManifestError: It is missing, over `MANIFEST_BYTES_MAX`, not of the form above, contradicts itself, names a file
            that is not there, or a mutant's text does not occur exactly once.
    """
    path = folder / "manifest.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror}; --spec names the folder that holds it") from None
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"{path}: {len(data)} bytes, at most {MANIFEST_BYTES_MAX}")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise ManifestError(f"{path}: {error}") from None
    _unique("model", [model.name for model in manifest.models])
    _unique("mutant", [mutant.name for mutant in manifest.mutants])
    for model in manifest.models:
        for name in (model.module, model.config):
            _file(folder, name, f"model {model.name}")
        if not _EXPECT.fullmatch(model.expect):
            raise ManifestError(f"model {model.name}: expect {model.expect!r}: ok, invariant:NAME, property, deadlock")
        if model.set == "simulated" and (model.expect != "ok" or model.distinct_states is not None):
            raise ManifestError(f"model {model.name}: what is only simulated expects ok and has no count of states")
        if model.traces is not None and not (model.traces.behaviours > 0 and model.traces.depth > 0):
            raise ManifestError(f"model {model.name}: traces: behaviours and depth are above 0")
        if not model.timeout_s > 0:
            raise ManifestError(f"model {model.name}: timeout_s is above 0")
    for name in manifest.tlc_only:
        _file(folder, name, "tlc_only")
    for mutant in manifest.mutants:
        _check_mutant(mutant, folder, manifest)
    return manifest
