"""`dcr spec replay`: that the code follows the specification's traces."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dcr.cli import counterexample
from dcr.cli.report import say
from dcr.modelcheck import tlc
from dcr.modelcheck.manifest import load_manifest
from dcr.modelcheck.replay.graph_replay import replay_graph
from dcr.modelcheck.replay.replayer import DivergenceError, Replayed
from dcr.modelcheck.replay.replayer import replay as replay_trace
from dcr.modelcheck.state_graph import read_state_graph
from dcr.modelcheck.trace import Trace
from dcr.modelcheck.trace_set import read_traces
from dcr.protocol.errors import RefusedError

_MODULE = "RefitTraces.tla"
_TOLD_MAX = 3
"""Divergences that are told as stories; the others are counted."""


def replay(options: argparse.Namespace) -> dict[str, Any]:
    """Replay files of traces, or a whole state graph.

    Raises:
        DcrError: A file that holds no traces, the manifest is refused, or a tool is missing.
    """
    if options.graph:
        if options.files:
            raise RefusedError("--graph replays a model, FILE replays traces: name one of them")
        return _graph(options)
    files = options.files or sorted((options.spec / "traces").glob("*.itf.jsonl.zst"))
    if not files:
        raise RefusedError(f"{options.spec / 'traces'}: no traces to replay; `dcr spec traces` makes them")
    done, wrong = Replayed(), 0
    for file in files:
        before, tried = done.traces, done.traces + wrong
        for number, trace in enumerate(read_traces(file)):
            try:
                done += replay_trace(trace)
            except RefusedError as error:
                raise RefusedError(f"{file}, trace {number}: {error}") from None
            except DivergenceError as error:
                wrong += 1
                if wrong <= _TOLD_MAX:
                    _tell(options, f"{file.name.partition('.')[0]}-{number}", trace, error)
        if done.traces + wrong == tried:
            raise RefusedError(f"{file}: holds no traces; `dcr spec traces` makes them anew")
        say(f"{done.traces - before:6} traces followed: {file}")
    if wrong > _TOLD_MAX:
        say(f"{wrong - _TOLD_MAX} more were not followed and are not told")
    return _report(done, wrong, f"{done.traces} traces followed, {wrong} not")


def _graph(options: argparse.Namespace) -> dict[str, Any]:
    model = load_manifest(options.spec).model(options.graph)
    if model.module != _MODULE:
        raise RefusedError(f"model {model.name}: only models of {_MODULE} can be replayed: it names each step")
    if model.set == "simulated":
        raise RefusedError(f"model {model.name}: too large to explore; its traces are replayed without --graph")
    with tempfile.TemporaryDirectory(prefix="dcr-graph-") as folder:
        path = Path(folder) / "graph.dot"
        result = tlc.run(
            options.spec / model.module,
            options.spec / model.config,
            heap=options.heap,
            timeout_s=options.timeout_s,
            graph=path,
        )
        if result.outcome is not tlc.Outcome.OK:
            raise RefusedError(f"model {model.name}: {result.verdict}: {result.message}; see `dcr spec check`")
        graph = read_state_graph(path)
    say(f"{model.name}: {len(graph.states):,} states, {graph.edges:,} steps between them")
    try:
        done = replay_graph(graph)
    except DivergenceError as error:
        _tell(options, f"{model.name}-graph", error.way or Trace(()), error)
        return _report(Replayed(), 1, "the graph was not followed")
    return _report(done, 0, "the whole graph followed")


def _tell(options: argparse.Namespace, name: str, trace: Trace, error: DivergenceError) -> None:
    say(f"WRONG  {name}: {error}")
    story = Trace(trace.steps[: error.step + 1])
    path = Path(options.save) / f"{name}.itf.json"
    counterexample.keep(story, options.spec / _MODULE, path, "what the code did not follow", story=True)


def _report(done: Replayed, wrong: int, followed: str) -> dict[str, Any]:
    say(f"{'step':20} {'taken':>10} {'refused':>10} {'no effect':>10}")
    for name in sorted({*done.steps, *done.refused, *done.without_effect}):
        say(f"{name:20} {done.steps[name]:10,} {done.refused[name]:10,} {done.without_effect[name]:10,}")
    refused = done.refused.total() + done.without_effect.total()
    say(f"{followed}; {done.steps.total():,} steps taken, {refused:,} forbidden events refused")
    return {
        "ok": not wrong,
        "traces": done.traces,
        "wrong": wrong,
        "steps": dict(sorted(done.steps.items())),
        "refused": dict(sorted(done.refused.items())),
        "without_effect": dict(sorted(done.without_effect.items())),
    }
