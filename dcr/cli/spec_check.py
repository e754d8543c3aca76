"""`dcr spec check` and `dcr spec mutants`."""

import argparse
from pathlib import Path
from typing import Any

import msgspec

from dcr.cli import counterexample
from dcr.cli.report import say
from dcr.modelcheck.manifest import Manifest, ManifestError, Model, load_manifest, unknown
from dcr.modelcheck.model_run import ModelRun, check_sources, run_apalache, run_tlc
from dcr.modelcheck.mutants import run_mutant


def _chosen(manifest: Manifest, options: argparse.Namespace) -> list[Model]:
    if options.models:
        chosen = [manifest.model(name) for name in options.models]
        if too_large := [model.name for model in chosen if model.set == "simulated"]:
            raise ManifestError(
                f"{', '.join(too_large)}: too large to explore; `dcr spec simulate` takes random behaviours of a model"
            )
        return chosen
    sets = {"quick"} if options.set == "quick" else {"quick", "full"}
    chosen = [model for model in manifest.models if model.set in sets]
    if options.checker == "apalache":
        chosen = [model for model in chosen if model.apalache is not None]
    if not chosen:
        raise ManifestError(
            f"{options.spec}: no model in the set {options.set} for {options.checker}; nothing to check"
        )
    return chosen


def _line(run: ModelRun) -> str:
    states = "" if run.distinct_states is None else f"{run.distinct_states:>12,} states"
    depth = "" if run.depth is None else f"  depth {run.depth}"
    mark = "WRONG" if run.wrong else "ok"
    return f"{mark:5}  {run.name:28} {run.verdict:32} {states:19}{depth:10} {run.seconds:7.1f} s"


def _told(run: ModelRun, model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """Print a run and return its row; a trace that was not expected is told, one that was is only saved."""
    say(_line(run))
    module, path = options.spec / model.module, Path(options.save) / f"{model.name}.itf.json"
    if run.wrong:
        say(f"       {run.wrong}")
    itf = None
    if run.trace is not None:
        if not run.wrong:
            say(f"       reached as expected, in {run.trace.length} states")
        itf = counterexample.keep(run.trace, module, path, run.checker, story=bool(run.wrong))
    if run.untaken:
        say(f"       never taken: {', '.join(run.untaken)}")
    row = {field: getattr(run, field) for field in run.__struct_fields__ if field != "trace"}
    length = run.trace.length if run.trace is not None else None
    return {**row, "length": length, "itf": itf}


def models(options: argparse.Namespace) -> dict[str, Any]:
    """List what there is to check: each model's set, what is expected of it, how large it is and what it has.

    Raises:
        DcrError: The manifest is refused.
    """
    manifest = load_manifest(options.spec)
    for model in manifest.models:
        states = "" if model.distinct_states is None else f"{model.distinct_states:,} states"
        say(f"{model.name:28} {model.set:10} {model.expect:32} {states:>18}  {', '.join(model.features)}")
    say(f"{len(manifest.models)} models, {len(manifest.mutants)} mutants")
    return {
        "ok": True,
        "models": [msgspec.to_builtins(model) for model in manifest.models],
        "mutants": [msgspec.to_builtins(mutant) for mutant in manifest.mutants],
    }


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Check the sources, then each chosen model.

    Raises:
        DcrError: The manifest is refused, or a tool is missing.
    """
    manifest = load_manifest(options.spec)
    chosen = _chosen(manifest, options)
    findings = check_sources(options.spec, manifest)
    for finding in findings:
        say(f"WRONG  {finding}")
    rows = []
    for model in chosen:
        if options.checker == "apalache":
            run = run_apalache(options.spec, model, heap=options.heap)
        else:
            run = run_tlc(options.spec, model, workers=options.workers, heap=options.heap, coverage=options.coverage)
        rows.append(_told(run, model, options))
    wrong = [row["name"] for row in rows if row["wrong"]]
    say(f"{len(rows) - len(wrong)} of {len(rows)} models as expected, {len(findings)} findings in the sources")
    return {
        "ok": not wrong and not findings,
        "checker": options.checker,
        "findings": [msgspec.structs.asdict(finding) for finding in findings],
        "models": rows,
    }


def mutants(options: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen mutants.

    Raises:
        DcrError: The manifest is refused, or a tool is missing.
    """
    manifest = load_manifest(options.spec)
    known = {mutant.name: mutant for mutant in manifest.mutants}
    if strange := next((name for name in options.mutants if name not in known), None):
        raise ManifestError(unknown("mutant", strange, list(known)))
    chosen = [known[name] for name in options.mutants] or list(manifest.mutants)
    if not chosen:
        raise ManifestError(f"{options.spec}: the manifest has no mutants; nothing to run")
    say(f"{'':7}{'bug':36} {'caught by':32} {'states':>6} {'time':>9}")
    runs = []
    for mutant in chosen:
        run = run_mutant(options.spec, manifest, mutant, workers=options.workers, heap=options.heap)
        mark = "ok" if run.caught else "WRONG"
        say(f"{mark:5}  {run.name:36} {run.verdict:32} {run.length or '-':>6} {run.seconds:7.1f} s")
        if not run.caught:
            say(f"       {run.said}")
        runs.append(run)
    caught = sum(run.caught for run in runs)
    say(f"{caught} of {len(runs)} mutants caught by what must catch them")
    return {"ok": caught == len(runs), "mutants": [msgspec.structs.asdict(run) for run in runs]}
