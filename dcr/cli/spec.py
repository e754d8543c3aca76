"""`dcr spec`: the protocol's TLA+ specification, checked, simulated, mutated and turned into traces."""

import argparse
import os
from pathlib import Path
from typing import Any

SPEC = Path("spec/tla")
_OWN = Path(__file__).resolve().parents[2] / SPEC
"""Of the tree that dcr itself runs from."""
SAVE = Path("run/spec")

_DESCRIPTION = """\
The protocol is written in TLA+ in spec/tla; manifest.json there lists its models (configurations small enough to
explore) with what checking each must give, and one-line bugs that they must notice.  A change of the protocol starts
there:

  dcr spec models                   what there is to check
  dcr spec check                    the quick models, every reachable state of each
  dcr spec check --set full         all models
  dcr spec check MODEL --coverage   one model, and which actions it never takes
  dcr spec mutants                  that each property notices the bugs it is there for
  dcr spec simulate MODEL           random behaviours of a model that is too large to explore
  dcr spec traces                   behaviours as ITF, to be replayed: spec/tla/traces, all of it made again
  dcr spec replay                   that the code does what these traces do, and refuses what they could not
  dcr spec replay --graph MODEL     the same for every step of a model's whole state graph
  dcr spec validate DIR             that what the processes of a run wrote down is a behaviour of the specification

A counterexample is printed as a story and saved as ITF.  TLC is installed with dcr.  Apalache (--checker apalache) is
used where apalache-mc is on PATH; where it is not, the command says so and fails."""


def spec_folder(given: str) -> Path:
    """The folder that ``--spec`` names; where its default is not here, that of the tree that dcr runs from."""
    return _OWN if given == str(SPEC) and not SPEC.is_dir() and _OWN.is_dir() else Path(given)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _command(commands: Any, name: str, run: Any, summary: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=text)
    parser.set_defaults(run=run, command_name=f"spec {name}")
    parser.add_argument(
        "--spec", type=spec_folder, default=str(SPEC), metavar="DIR", help=f"folder of manifest.json ({SPEC})"
    )
    parser.add_argument("--heap", default="3g", metavar="SIZE", help="Java heap of the checker (3g)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    return parser


def _exploring(parser: argparse.ArgumentParser) -> None:
    workers = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=_count, default=workers, metavar="N", help=f"TLC's threads ({workers})")


def _checker(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checker", choices=("tlc", "apalache"), default="tlc", help="which model checker (tlc)")


def _saving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", type=Path, default=SAVE, metavar="DIR", help=f"where counterexamples go ({SAVE})")


def _sampling(parser: argparse.ArgumentParser, behaviours: str, depth: str, seed: str) -> None:
    parser.add_argument("--behaviours", type=_count, metavar="N", help=f"behaviours to take ({behaviours})")
    parser.add_argument("--depth", type=_count, metavar="N", help=f"states of a behaviour at most ({depth})")
    parser.add_argument("--seed", type=int, metavar="N", help=f"same seed, same behaviours, with TLC ({seed})")


def add(commands: Any) -> None:
    """Add `spec` and its commands to the command line."""
    spec = commands.add_parser(
        "spec",
        help="check the protocol's TLA+ specification",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inner = spec.add_subparsers(dest="spec_command", required=True, metavar="COMMAND")
    _command(
        inner,
        "models",
        _models,
        "list the models",
        "List the models of the manifest: the set, what checking each must give, its distinct states, and what it has.",
    )
    check = _command(
        inner,
        "check",
        _check,
        "check models against what the manifest expects",
        "Check that the modules are typed and free of what Apalache refuses, then run models: every reachable state "
        "(TLC), or every execution up to the manifest's length (Apalache).  A model whose expected result is a "
        "violation proves that an interesting state can be reached.",
    )
    check.add_argument("models", nargs="*", metavar="MODEL", help="models of the manifest (all of the set)")
    check.add_argument("--set", choices=("quick", "full"), default="quick", help="which models without MODEL (quick)")
    check.add_argument("--coverage", action="store_true", help="name the actions that a model never takes (TLC)")
    _checker(check)
    _exploring(check)
    _saving(check)
    simulate = _command(
        inner,
        "simulate",
        _simulate,
        "check random behaviours of a model",
        "Take random behaviours and check the model's properties along them.  Finding nothing proves nothing.",
    )
    simulate.add_argument("model", metavar="MODEL", help="a model of the manifest")
    _sampling(simulate, "200", "60", "1")
    _checker(simulate)
    _saving(simulate)
    simulate.add_argument("--timeout-s", type=_count, default=600, metavar="N", help="seconds at most (600)")
    traces = _command(
        inner,
        "traces",
        _traces,
        "write random behaviours of a model as ITF",
        "Take random behaviours with TLC and write them to one compressed file a model, an ITF document a line "
        "(.itf.jsonl.zst).  Without MODEL: of every model for which the manifest says how many, into the folder "
        "`traces` beside it.  The specification should have a variable `step`, a record whose field `name` says which "
        "action was taken: TLC's files do not.",
    )
    traces.add_argument("model", metavar="MODEL", nargs="?", help="a model of the manifest (all that have traces)")
    _sampling(traces, *["as the manifest says"] * 3)
    traces.add_argument("--out", type=Path, metavar="FILE", help="the file to write, with MODEL (traces/MODEL.itf...)")
    traces.add_argument("--timeout-s", type=_count, default=600, metavar="N", help="seconds at most (600)")
    replay = _command(
        inner,
        "replay",
        _replay,
        "replay traces on the code",
        "Give the roles of dcr.protocol the events of each trace, step by step: each must be possible and lead to the "
        "state that the specification has there.  At every step everything that the specification forbids there is "
        "tried too, and must be refused or change nothing.  A trace that the code does not follow is told as a story "
        "up to the step that differs, and saved.",
    )
    replay.add_argument("files", nargs="*", type=Path, metavar="FILE", help="files of traces (all of spec/tla/traces)")
    replay.add_argument("--graph", metavar="MODEL", help="replay every step of this model's graph instead")
    _saving(replay)
    replay.add_argument("--timeout-s", type=_count, default=600, metavar="N", help="seconds for the checker (600)")
    validate = _command(
        inner,
        "validate",
        _validate,
        "decide whether the event logs of a run are a behaviour of the specification",
        "Every process of a run writes the protocol steps that it takes into the folder RECORD.events beside the "
        "record (setting event_log).  Read such a folder, put its lines in an order that their contents prove, "
        "without looking at a clock, and have TLC take them one after the other: each must be a step that the "
        "specification allows there, and its properties must hold after it.  The first line that is none is named, "
        "with the guard that does not hold and what happened before.  Processes may have been killed at any moment. "
        "Status 0: it is a behaviour; 1: it is not; 3: nothing could be decided.  docs/event-log.md says what a "
        "line holds and what cannot be checked.",
    )
    validate.add_argument("folder", type=Path, metavar="DIR", help="the run's logs, for example run/record.db.events")
    validate.add_argument("--timeout-s", type=_count, default=600, metavar="N", help="seconds for the checker (600)")
    mutants = _command(
        inner,
        "mutants",
        _mutants,
        "make one-line bugs and see that they are caught",
        "Make each bug of the manifest in a private copy of the folder and run the model that must notice it.",
    )
    mutants.add_argument("mutants", nargs="*", metavar="MUTANT", help="mutants of the manifest (all)")
    _exploring(mutants)


def _models(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_check  # noqa: PLC0415 -- `dcr --help` must not load parsers and checkers

    return spec_check.models(options)


def _check(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_check  # noqa: PLC0415 -- as above

    return spec_check.check(options)


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_sample  # noqa: PLC0415 -- as above

    return spec_sample.simulate(options)


def _traces(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_sample  # noqa: PLC0415 -- as above

    return spec_sample.traces(options)


def _replay(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_replay  # noqa: PLC0415 -- as above

    return spec_replay.replay(options)


def _validate(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_validate  # noqa: PLC0415 -- as above

    return spec_validate.validate_logs(options)


def _mutants(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.cli import spec_check  # noqa: PLC0415 -- as above

    return spec_check.mutants(options)
