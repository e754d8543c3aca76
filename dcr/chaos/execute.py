"""From a scenario to its report: the run, its event logs held to the specification, and its timeline."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from dcr.chaos.report import FaultReport, RunReport
from dcr.chaos.run import Run
from dcr.chaos.run_folder import FolderError, FullError, RunFolder, is_full, no_room
from dcr.chaos.scenario import Deployment, Scenario
from dcr.chaos.servers import missing
from dcr.chaos.timeline import write_timeline
from dcr.modelcheck.checker import CheckerError, CheckerMissingError
from dcr.modelcheck.eventlog.validate import validate
from dcr.protocol.errors import RefusedError

TIMELINE = "timeline.html"
REPORT = "report.json"
_HEAP = "1g"
_VALIDATE_TIMEOUT_S = 600
"""Of each part of a long log."""


def execute(scenario: Scenario, folder: RunFolder, tell: Callable[[str], None], bug: str = "") -> RunReport:
    """Run a scenario; everything but the event logs is checked afterwards.

    Args:
        scenario: what to run.
        folder: for everything that it leaves; what an earlier run left there is removed first.
        tell: takes a line of progress.
        bug: what is broken on purpose; empty for nothing.

    Raises:
        RefusedError: a model cannot be made.
        FullError: the disk of the folder became full, and everything was ended.
    """
    d = scenario.deployment
    nothing = RunReport(name=scenario.name, ok=True, deployment=describe(d), folder=str(folder.path))
    lacks = missing(s3=d.store_process, etcd=d.control == "etcd")
    if lacks:
        return msgspec.structs.replace(nothing, skipped=f"no {lacks}")
    try:
        folder.empty()
        run = Run(scenario, folder.path, tell, bug)
    except FolderError as e:
        if no_room(folder.path):
            raise FullError(folder.path, str(e)) from e
        return msgspec.structs.replace(nothing, ok=False, problems=(str(e),))
    run.run()
    return report_of(run)


def report_of(run: Run) -> RunReport:
    """What a run came to, kept in its folder beside its timeline.

    Raises:
        FullError: there is no room for it.
    """
    scenario, folder = run.scenario, run.fleet.folder
    zero_s = min((child.started_s for child in run.fleet.everyone), default=run.totals.began_s)
    faults = tuple(
        FaultReport(
            str(s),
            _since(s.fired_s, zero_s),
            _since(s.committed_s, s.fired_s),
            _since(s.recovered_s, s.fired_s),
        )
        for s in run.strikes
    )
    report = RunReport(
        name=scenario.name,
        ok=not run.checks.problems,
        deployment=describe(scenario.deployment),
        folder=str(folder),
        problems=tuple(run.checks.problems),
        notes=tuple(_notes(run)),
        faults=faults,
        commits=run.totals.commits,
        kills=run.totals.kills,
        retries=run.totals.retries,
        restarts=run.totals.restarts,
        requests=run.checks.answers,
        bytes_compared=run.checks.bytes,
        recovery_s=max([0.0, *(s.recovered_s - s.quiet_s for s in run.strikes if s.recovered_s is not None)]),
        seconds=time.monotonic() - run.totals.began_s,
        began_s=zero_s,
    )
    return _kept(report)


def _notes(run: Run) -> Iterator[str]:
    """What whoever reads the times should know."""
    if run.fleet.disk is not None:
        yield f"the full disk was {run.fleet.disk.how}"
    if held_up_s := run.totals.held_up_s:
        yield f"the machine let the harness itself stand still for {held_up_s:.1f} s: times say little"


def _since(at: float | None, began: float | None) -> float | None:
    return None if at is None or began is None else round(at - began, 3)


def describe(d: Deployment) -> str:
    """A deployment in a few words."""
    ranks = f" {d.trainer.ranks} ranks" if d.trainer.ranks > 1 else ""
    coordinators = f" {d.coordinators}c" if d.coordinators else ""
    return f"{d.transport} {d.control} {d.gate} {d.engines}e{coordinators}{ranks}"


def _kept(report: RunReport) -> RunReport:
    """The same report, now in its folder; where it cannot be written, that is one more problem.

    Raises:
        FullError: that is because the disk is full.
    """
    folder = Path(report.folder)
    try:
        (folder / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
        write_timeline(folder, report)
    except OSError as e:
        said = f"{folder}: report and timeline cannot be written: {e}"
        if is_full(e):
            raise FullError(folder, said) from e
        return msgspec.structs.replace(report, ok=False, problems=(*report.problems, said))
    return report


def validated(report: RunReport, spec: Path, tell: Callable[[str], None]) -> RunReport:
    """The same report, once the run's event logs were held to the specification.

    Args:
        report: of the run.
        spec: folder of the specification.
        tell: takes a line of progress, if the logs are long.

    Raises:
        FullError: there is no room for the report.
    """
    if report.skipped:
        return report
    logs, validated, problems = _validate(Path(report.folder) / "events", spec, tell)
    report = msgspec.structs.replace(
        report, logs=logs, validated=validated, ok=report.ok and not problems, problems=report.problems + problems
    )
    return _kept(report)


def _validate(events: Path, spec: Path, tell: Callable[[str], None]) -> tuple[str, bool, tuple[str, ...]]:
    """What the logs are, whether they were validated, and the problems."""

    def taken(steps: int, of: int) -> None:
        tell(f"event logs: {steps:,} of {of:,} steps are a behaviour of the specification")

    try:
        found = validate(events, spec, heap=_HEAP, timeout_s=_VALIDATE_TIMEOUT_S, tell=taken)
    except (CheckerMissingError, RefusedError) as e:
        return f"not validated: {e}", False, ()
    except CheckerError as e:
        return f"not validated: {e}", False, (f"the checker came to no verdict on the event logs: {e}",)
    if found.ok:
        said = f"a behaviour of the specification: {found.lines:,} lines, {found.steps:,} steps"
        return said, True, ()
    what = "no behaviour of the specification"
    return what, False, (f"the event logs are {what}: {found.rejected}: {'; '.join(found.why)}",)


def execute_all(
    scenarios: Sequence[Scenario],
    folder: Path,
    spec: Path | None,
    tell: Callable[[str], None],
    done: Callable[[RunReport], None],
) -> list[RunReport]:
    """Run scenarios one after the other; event logs are validated beside the runs that follow.

    Args:
        scenarios: what to run.
        folder: each scenario gets one in it.
        spec: folder of the specification; None to validate nothing.
        tell: takes a line of progress.
        done: is given each report, in the order of the scenarios.

    Raises:
        RefusedError: one of the folders cannot be used, and nothing was started; or a model cannot be made.
        FullError: the disk became full; scenarios that come later are not run.
    """
    reports: list[RunReport] = []
    waiting: list[Future[RunReport]] = []

    def collect(*, wait: bool) -> None:
        while waiting and (wait or waiting[0].done()):
            report = waiting.pop(0).result()
            reports.append(report)
            done(report)

    with contextlib.ExitStack() as taken, ThreadPoolExecutor(1) as checker:
        folders = [taken.enter_context(RunFolder(folder / in_a_path(s.name))) for s in scenarios]
        for scenario, its in zip(scenarios, folders, strict=True):
            tell(f"{scenario.name}: {describe(scenario.deployment)}")
            try:
                report = execute(scenario, its, tell)
            except FullError:
                collect(wait=True)  # of the runs before
                raise
            if spec is None:
                waiting.append(_known(report))
            else:
                waiting.append(checker.submit(validated, report, spec, tell))
            collect(wait=False)
        collect(wait=True)
    return reports


def _known(report: RunReport) -> Future[RunReport]:
    future: Future[RunReport] = Future()
    future.set_result(report)
    return future


def in_a_path(name: str) -> str:
    """The folder of a scenario of this name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".-") or "scenario"
