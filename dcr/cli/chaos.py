"""`dcr chaos`: scripted faults of real processes, and whether a bit was lost."""

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from dcr.cli.report import say
from dcr.cli.seconds import seconds
from dcr.cli.spec import SPEC, spec_folder
from dcr.protocol.errors import RefusedError

FOLDER = Path("run/chaos")
FAILED = 1

_DESCRIPTION = """\
Starts a real deployment (trainer ranks, rollout nodes with their engines, and where a scenario wants them SeaweedFS and
etcd), lets processes die, stall, be cut off or fill their disk at the protocol points that a scenario names, and then
compares every engine's bits with an untouched twin, every answer with the version on its label, the record's history
with what it may be, and the event logs with the specification.

  dcr chaos run scenario.yaml       one scenario, or several
  dcr chaos matrix --quick          a chosen few of those that are shipped, three minutes
  dcr chaos matrix                  all of them, over transports, gate modes and control planes, pairwise
  dcr chaos matrix --list           what that is
  dcr chaos soak --seconds 600      refits under random kills from a seed, then a hundred quiet ones
  dcr chaos bugs                    the harness put to the proof: it must notice each bug that is built in on purpose

docs/chaos.md says how a scenario is written, with models of your own too, and how results are read."""

_RUN = """\
Run scenarios of your own. A scenario says what is started, which faults strike at which protocol points, and within
what time everything must serve again. The shortest one that says something:

  name: an engine dies in the middle of its writes
  deployment: {engines: 2, trainer: {refits: 3}}
  faults:
    - at: "receiver[1] after 1 item of payload 2 in refit 2"

Nothing of it has to be written in code. Each scenario leaves a folder: open its timeline.html first. A key or a
sentence that is not known is refused with those that are."""

_MATRIX = """\
Run the scenarios that are shipped: a fault at every action of every role and at the points between them, over
transports, gate modes and control planes such that every pair of values occurs. Scenarios whose server is not
installed are skipped, and the table says so. Whole, it takes about three quarters of an hour on two busy cores; begin
with --quick, and look with --list --only TEXT for what strikes where you have doubts."""

_SOAK = """\
One deployment, one training step and one push after the other: every second one under a fault of the matrix that the
seed chooses, for --seconds, and then a hundred without a fault, which must all be relative and end bit for bit where
one dense load of the last candidate ends. Told as it goes: faults, pushes that took more than one attempt, and once a
minute how far it is.

After each refit every engine's bits are compared with an untouched twin's, and the writes of the record that came since
are judged; at the end all answers, what each process holds (memory, threads, files), and the event logs are. The logs
of half an hour take the model checker some minutes; those of more than two million lines, a few hours of it, are not
validated. What was not checked is in the row: "ok, logs not validated" is not "ok"."""

_BUGS = """\
Break a rule on purpose in the scenario's own processes (no deduplication, no compare-and-set, a gate that stays open, a
fold before the commit), and expect the checks to notice. A bug that is not noticed is MISSED: then the checks are worth
nothing, whatever the other commands say."""

_EPILOG = """\
exit status: 0 every check held; 1 one did not, and what the run left is named; 2 the command line is wrong;
3 a scenario, or the folder for it, was refused, or its disk became full; 130 interrupted"""


def _seed(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("0 or more")
    return number


def add(commands: Any) -> None:
    """Add `chaos` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "chaos",
        help="kill, stall and cut off real processes at protocol points, and check every bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="run|matrix|soak|bugs")

    def kind(name: str, help_: str, description: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        found: argparse.ArgumentParser = kinds.add_parser(
            name, help=help_, description=description, epilog=_EPILOG, formatter_class=raw
        )
        return found

    one = kind("run", "run scenarios from files", _RUN)
    one.add_argument("files", nargs="+", type=Path, metavar="FILE", help="scenarios, YAML")
    matrix = kind("matrix", "run the scenarios that are shipped", _MATRIX)
    matrix.add_argument("--quick", action="store_true", help="a chosen few, about three minutes")
    matrix.add_argument("--list", action="store_true", help="list them, and run nothing")
    matrix.add_argument("--only", metavar="TEXT", help="those whose name, deployment or faults have this text in them")
    matrix.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the combinations and the steps (0)")
    soak = kind("soak", "refits for long, under random kills", _SOAK)
    soak.add_argument("--seconds", type=seconds, default=300.0, metavar="N", help="how long faults go on (300)")
    soak.add_argument("--seed", type=_seed, default=0, metavar="N", help="of steps and faults (0)")
    soak.add_argument("--gate", choices=("sync", "async"), default="sync", help="gate mode (sync)")
    bugs = kind("bugs", "put the harness to the proof", _BUGS)
    for each in (one, matrix, soak, bugs):
        each.set_defaults(run=run, command_name=f"chaos {each.prog.split()[-1]}")
        each.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help=f"what runs leave ({FOLDER})")
        each.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    for each in (one, matrix, soak):
        each.add_argument(
            "--spec", type=spec_folder, default=str(SPEC), metavar="DIR", help=f"folder of the specification ({SPEC})"
        )
        each.add_argument("--no-logs", action="store_true", help="do not hold event logs to the specification")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for.

    Raises:
        RefusedError: a scenario is not what it should be, or there is none to run.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))  # on the way out every process is ended
    if options.kind == "bugs":
        return _bugs(options)
    if options.kind == "soak":
        return _soak(options)
    from dcr.chaos.execute import describe  # noqa: PLC0415 - torch is slow to import
    from dcr.chaos.matrix import full_matrix, quick_matrix  # noqa: PLC0415
    from dcr.chaos.scenario_file import read_scenario  # noqa: PLC0415

    if options.kind == "run":
        chosen = [read_scenario(file) for file in options.files]
        _refuse_early(chosen)
        return _run(options, chosen)
    scenarios = quick_matrix(options.seed) if options.quick else full_matrix(options.seed)
    if options.only:
        scenarios = [
            s
            for s in scenarios
            if any(options.only in said for said in (s.name, describe(s.deployment), *map(str, s.faults)))
        ]
        if not scenarios:
            raise RefusedError(f"--only {options.only!r}: no shipped scenario has that in it; see --list")
    if not options.list:
        return _run(options, scenarios)
    for s in scenarios:
        say(f"{s.name}: {describe(s.deployment)}")
        for fault in s.faults:
            say(f"    {fault}")
    faults = sum(len(s.faults) for s in scenarios)
    say(f"{len(scenarios)} scenarios, {faults} faults")
    return {"ok": True, "scenarios": [msgspec.to_builtins(s) for s in scenarios]}


def _refuse_early(scenarios: list[Any]) -> None:
    """What can be known before the first process is started must not come after some scenarios have run."""
    from dcr.chaos.execute import in_a_path  # noqa: PLC0415 - torch is slow to import
    from dcr.chaos.model import check  # noqa: PLC0415

    folders: dict[str, str] = {}
    for s in scenarios:
        folder = in_a_path(s.name)
        if folder in folders:
            raise RefusedError(f"scenarios {folders[folder]!r} and {s.name!r} would share one folder: rename one")
        folders[folder] = s.name
    for models in {s.deployment.model for s in scenarios}:
        check(models.trainer, models.engine)


class _Screen:
    """A table that grows while runs go on; on a terminal, below it what the present one is at."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._began = time.monotonic()

    def tell(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:6.1f} s] {text}"
        if self._live:
            print(f"\r\x1b[K{line[:150]}", end="", flush=True)  # noqa: T201 - a line that the next one replaces
        else:
            say(line)

    def row(self, text: str) -> None:
        if self._live:
            print("\r\x1b[K", end="")  # noqa: T201
        say(text)


def _run(options: argparse.Namespace, scenarios: list[Any]) -> dict[str, Any]:
    from dcr.chaos.execute import describe, execute_all  # noqa: PLC0415 - torch is slow to import
    from dcr.chaos.report import RunReport, Table, Totals, details  # noqa: PLC0415

    began = time.monotonic()
    screen, table = _Screen(), Table((s.name, describe(s.deployment)) for s in scenarios)
    screen.row(table.header)

    def done(report: RunReport) -> None:
        screen.row(table.row(report))
        for line in details(report, page=options.kind == "run"):
            screen.row(line)

    spec = None if options.no_logs else options.spec.absolute()
    reports = execute_all(scenarios, options.folder.absolute(), spec, screen.tell, done)
    totals = Totals.of(reports, time.monotonic() - began)
    screen.row(str(totals))
    failed = [r for r in reports if not r.ok]
    for r in failed:
        screen.row(f"WRONG  {r.name}: {r.folder}")
    ok = not failed and totals.runs > 0
    return {"ok": ok, "totals": msgspec.to_builtins(totals), "runs": msgspec.to_builtins(reports)}


def _soak(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.chaos.execute import report_of, validated  # noqa: PLC0415 - torch is slow to import
    from dcr.chaos.report import Table, details  # noqa: PLC0415
    from dcr.chaos.run_folder import RunFolder  # noqa: PLC0415
    from dcr.chaos.soak import Soak  # noqa: PLC0415

    screen = _Screen()

    def tell(text: str) -> None:
        if not text.endswith("committed, relative"):  # of what goes as it should, the count at the end is enough
            screen.tell(text)

    with RunFolder(options.folder.absolute() / "soak") as folder:
        folder.empty()
        soak = Soak(folder.path, options.seconds, options.seed, options.gate, tell)
        soak.soak()
        screen.row(str(soak.row or "WRONG  it did not come to a hundred relative refits in a row"))
        report = report_of(soak.run)
        if not options.no_logs:
            screen.tell("event logs are held to the specification")
            report = validated(report, options.spec.absolute(), screen.tell)
    table = Table([(report.name, report.deployment)])
    screen.row(table.header)
    screen.row(table.row(report))
    for line in details(report):
        screen.row(line)
    screen.row(f"{soak.refits} refits" + ("" if report.ok else ", and not every check held"))
    in_a_row = None if soak.row is None else msgspec.to_builtins(soak.row)
    return {"ok": report.ok, "refits": soak.refits, "in_a_row": in_a_row, "run": msgspec.to_builtins(report)}


def _bugs(options: argparse.Namespace) -> dict[str, Any]:
    from dcr.chaos.bugs import BUGS  # noqa: PLC0415 - torch is slow to import
    from dcr.chaos.execute import execute  # noqa: PLC0415
    from dcr.chaos.run_folder import RunFolder  # noqa: PLC0415

    screen, found = _Screen(), {}
    with contextlib.ExitStack() as taken:
        folders = {n: taken.enter_context(RunFolder(options.folder.absolute() / f"bug-{n}")) for n in BUGS}
        for name, bug in BUGS.items():
            screen.tell(f"{name}: {bug.sentence}")
            report = execute(bug.scenario, folders[name], screen.tell, name)
            noticed = next((p for p in report.problems if any(n in p for n in bug.notices)), "")
            found[name] = noticed
            screen.row(f"{'caught' if noticed else 'MISSED':8}{name:24}{bug.sentence}: {noticed or report.problems}")
    return {"ok": all(found.values()), "bugs": found}
