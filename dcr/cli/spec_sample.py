"""`dcr spec simulate` and `dcr spec traces`: random behaviours of a model."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from dcr.cli import counterexample
from dcr.cli.report import say
from dcr.modelcheck import apalache, tlc
from dcr.modelcheck.manifest import ManifestError, Model, Traces, load_manifest
from dcr.modelcheck.model_run import meets
from dcr.modelcheck.source import variable_types
from dcr.modelcheck.story import STEP
from dcr.modelcheck.trace import Trace
from dcr.modelcheck.trace_set import write_traces
from dcr.modelcheck.values import Function, State, Value
from dcr.protocol.errors import RefusedError

_FEW, _MANY = Traces(200, 60, 1), Traces(1000, 60, 1)
"""What is taken where nobody says how much: to look at, and to keep."""


def _sample(options: argparse.Namespace, model: Model, wanted: Traces) -> tlc.TlcResult:
    return tlc.run(
        options.spec / model.module,
        options.spec / model.config,
        heap=options.heap,
        timeout_s=options.timeout_s,
        simulate=tlc.Simulation(wanted.behaviours, wanted.depth, wanted.seed),
    )


def _taken(state: State) -> Value:
    record = state.get(STEP)
    return record.get("name", "") if isinstance(record, Function) else ""


def _found(options: argparse.Namespace, model: Model) -> tuple[str, str, Trace | None, int]:
    """(verdict, message, counterexample, behaviours) of a simulation."""
    if options.checker == "tlc":
        result = _sample(options, model, _wanted(options, _FEW))
        return result.verdict, result.message, result.trace, len(result.behaviours)
    bounds = model.apalache
    if bounds is None:
        raise ManifestError(f"model {model.name}: the manifest does not say how Apalache checks it (key `apalache`)")
    said = apalache.simulate(
        options.spec / model.module,
        length=_wanted(options, _FEW).depth,
        max_run=_wanted(options, _FEW).behaviours,
        cinit=bounds.cinit,
        inv=bounds.inv,
        heap=options.heap,
        timeout_s=options.timeout_s,
    )
    return str(said.outcome), said.message, said.trace, len(said.examples)


def simulate(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate a model; what the manifest expects of it, or finding nothing, is in order.

    Raises:
        DcrError: The manifest is refused, a tool is missing, or a checker came to no verdict.
    """
    model = load_manifest(options.spec).model(options.model)
    verdict, message, trace, behaviours = _found(options, model)
    expected = "violation" if options.checker == "apalache" and model.expect != "ok" else model.expect
    ok = verdict == "ok" or meets(expected, verdict)
    say(f"{'ok' if ok else 'WRONG':5}  {model.name}: {verdict}, {behaviours} behaviours")
    if message and not ok:
        say(f"       {message}")
    path, itf = Path(options.save) / f"{model.name}.itf.json", None
    if trace is not None:
        source = f"{options.checker} simulation"
        itf = counterexample.keep(trace, options.spec / model.module, path, source, story=True)
    return {
        "ok": ok,
        "checker": options.checker,
        "model": model.name,
        "verdict": verdict,
        "message": message,
        "behaviours": behaviours,
        "itf": itf,
    }


def traces(options: argparse.Namespace) -> dict[str, Any]:
    """Write behaviours of models as ITF; behaviours that occur twice are written once.

    Raises:
        DcrError: The manifest is refused, a tool is missing, or a property was violated on the way: of that model
            nothing is written.
    """
    manifest = load_manifest(options.spec)
    if options.model:
        model = manifest.model(options.model)
        if options.out is None and model.traces is None:
            raise RefusedError(
                f"model {model.name}: the manifest keeps no traces of it; name a file with --out, or a model that has "
                "some"
            )
        out = options.out or traces_of(options.spec, model.name)
        return {"ok": True, **_write(options, model, _wanted(options, model.traces or _MANY), out)}
    if (options.out, options.behaviours, options.depth, options.seed) != (None, None, None, None):
        raise RefusedError(
            "--out, --behaviours, --depth and --seed are for one model: name it, or leave them away to take every file "
            "of traces again as the manifest says"
        )
    rows = [
        _write(options, model, model.traces, traces_of(options.spec, model.name))
        for model in manifest.models
        if model.traces is not None
    ]
    say(f"{sum(row['traces'] for row in rows)} traces, {sum(row['bytes'] for row in rows):,} bytes in all")
    return {"ok": True, "models": rows}


def _wanted(options: argparse.Namespace, usual: Traces) -> Traces:
    given = (options.behaviours, options.depth, options.seed)
    return Traces(*(u if g is None else g for g, u in zip(given, msgspec.structs.astuple(usual), strict=True)))


def traces_of(spec: Path, model: str) -> Path:
    """Where the traces of a model are kept."""
    return spec / "traces" / f"{model}.itf.jsonl.zst"


def _write(options: argparse.Namespace, model: Model, wanted: Traces, out: Path) -> dict[str, Any]:
    types = variable_types(options.spec / model.module)
    result = _sample(options, model, wanted)
    if result.outcome is not tlc.Outcome.OK:
        raise RefusedError(
            f"model {model.name}: {result.verdict} on the way: {result.message}\n"
            f"no traces were written; see `dcr spec simulate {model.name}`"
        )
    distinct = {tuple(tuple(step.state.items()) for step in trace.steps): trace for trace in result.behaviours}
    chosen = list(distinct.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    size = write_traces(out, chosen, types, f"tlc simulation of {model.name}, seed {wanted.seed}")
    actions = Counter(str(_taken(step.state)) for trace in chosen for step in trace.steps[1:])
    states = sum(trace.length for trace in chosen)
    say(f"{len(chosen)} traces, {states} states, {size:,} bytes: {out}")
    if options.model:
        for action, times in sorted(actions.items()):
            say(f"  {times:8}  {action or '(no variable step)'}")
    return {
        "model": model.name,
        "out": str(out),
        "traces": len(chosen),
        "states": states,
        "bytes": size,
        "actions": dict(sorted(actions.items())),
    }
