"""Apalache, the symbolic model checker of TLA+, driven through `apalache-mc` on PATH.

No package index carries it, so it is not installed with dcr: `docs/ci.md` says how a CI gets it.  Where it is missing,
every call raises `CheckerMissingError`; nothing here ever passes for want of a checker.

Contract (sources of Apalache 0.62): options as `--name=value`, the module last; exit status 0, 12 (violation or
deadlock), 75 (cannot be evaluated), 120 (type error), 150 (parse error; today's releases exit with 255), 255 (anything
else).  Status 0 is not enough: `The outcome is: ExecutionsTooShort` and `SmtTimeout` exit with 0 too, so a check has
passed only on 0 together with `NoError`.  Traces are written as ITF into the folder that `--run-dir` names.

A pass is bounded: no error in any execution of up to `length` steps.
"""

import re
import shutil
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from dcr.modelcheck.checker import CheckerError, CheckerMissingError, Finished, run_child
from dcr.modelcheck.itf import ITF_BYTES_MAX, load_trace
from dcr.modelcheck.trace import Trace
from dcr.protocol.errors import RefusedError

PROGRAM = "apalache-mc"
TRACES_MAX = 10_000

_OUTCOME = re.compile(r"The outcome is: (\w+)")
_VERSION = re.compile(r"APALACHE version:?\s+(\S+)")
_PARSE_FAILED = re.compile(r"[Pp]arsing error|Parse error|Error by TLA\+ parser")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_HEAP = re.compile(r"[1-9]\d*[kmgKMG]")


class Outcome(StrEnum):
    """What Apalache found.  Only `OK` is a pass."""

    OK = "ok"
    VIOLATION = "violation"
    DEADLOCK = "deadlock"
    EXECUTIONS_TOO_SHORT = "executions_too_short"
    SMT_TIMEOUT = "smt_timeout"
    EVALUATION = "evaluation"
    TYPE = "type"
    PARSE = "parse"


# (exit status, outcome line) -> outcome; every other pair with these two statuses contradicts itself.
_SAID = {
    (0, "NoError"): Outcome.OK,
    (0, "ExecutionsTooShort"): Outcome.EXECUTIONS_TOO_SHORT,
    (0, "SmtTimeout"): Outcome.SMT_TIMEOUT,
    (12, "Error"): Outcome.VIOLATION,
    (12, "Deadlock"): Outcome.DEADLOCK,
}
_BROKEN = {75: Outcome.EVALUATION, 120: Outcome.TYPE, 150: Outcome.PARSE}


class ApalacheResult(msgspec.Struct, frozen=True):
    """What one run gave."""

    outcome: Outcome
    message: str
    """The end of what Apalache said; empty on a pass."""
    version: str
    """As Apalache states it; empty if it did not."""
    trace: Trace | None
    """The first counterexample.  It carries no actions' names."""
    examples: tuple[Trace, ...]
    """Executions that a simulation took."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether Apalache stated that there is no error."""
        return self.outcome is Outcome.OK


def _program() -> str:
    found = shutil.which(PROGRAM)
    if found is None:
        raise CheckerMissingError(
            f"{PROGRAM} is not on PATH: Apalache was NOT run and nothing was checked; "
            "unpack a release and put its bin/ on PATH (docs/ci.md), or use --checker tlc"
        )
    return found


def _operators(cinit: str, inv: Sequence[str]) -> list[str]:
    for name in (cinit, *inv):
        if name and not _NAME.fullmatch(name):
            raise RefusedError(f"Apalache: {name!r} is no operator's name")
    return [*([f"--cinit={cinit}"] if cinit else []), *([f"--inv={','.join(inv)}"] if inv else [])]


def check(
    module: Path,
    *,
    length: int,
    cinit: str = "",
    inv: Sequence[str] = (),
    heap: str = "3g",
    timeout_s: float = 600,
    deadlock: bool = False,
) -> ApalacheResult:
    """Check all executions of up to `length` steps from `Init` by `Next`.

    Args:
        module: The root module.
        length: Steps at most.
        cinit: Operator that initialises the constants; empty if there are none.
        inv: State and action invariants.
        heap: Java heap, for example `3g`.
        timeout_s: Seconds until Apalache is killed.
        deadlock: Take an execution that cannot go on for an error.

    Raises:
        RefusedError: An argument that is not as above; nothing was started.
        CheckerMissingError: No `apalache-mc` on PATH.
        CheckerTimeoutError: Not finished within `timeout_s`.
        CheckerError: Apalache failed, contradicted itself, or reported a violation without its trace.
    """
    options = [f"--length={length}", f"--no-deadlock={str(not deadlock).lower()}", *_operators(cinit, inv)]
    return _run("check", module, options, heap, timeout_s)


def simulate(
    module: Path,
    *,
    length: int,
    max_run: int,
    cinit: str = "",
    inv: Sequence[str] = (),
    heap: str = "3g",
    timeout_s: float = 600,
) -> ApalacheResult:
    """Check `max_run` random symbolic executions of `length` steps and keep an example of each.

    Args:
        module: The root module.
        length: Steps of an execution at most.
        max_run: Executions, `TRACES_MAX` at most.
        cinit: Operator that initialises the constants; empty if there are none.
        inv: State and action invariants.
        heap: Java heap, for example `3g`.
        timeout_s: Seconds until Apalache is killed.

    Raises:
        RefusedError: An argument that is not as above; nothing was started.
        CheckerMissingError: No `apalache-mc` on PATH.
        CheckerTimeoutError: Not finished within `timeout_s`.
        CheckerError: Apalache failed, contradicted itself, or reported a violation without its trace.
    """
    if not 1 <= max_run <= TRACES_MAX:
        raise RefusedError(f"Apalache: {max_run} runs; 1 to {TRACES_MAX}")
    options = [f"--max-run={max_run}", "--output-traces=true", f"--length={length}", "--no-deadlock=true"]
    return _run("simulate", module, [*options, *_operators(cinit, inv)], heap, timeout_s)


def typecheck(module: Path, *, heap: str = "3g", timeout_s: float = 600) -> ApalacheResult:
    """Check the types of a module.  The outcome is `OK`, `TYPE` or `PARSE`.

    Raises:
        RefusedError: An argument that is not as above; nothing was started.
        CheckerMissingError: No `apalache-mc` on PATH.
        CheckerTimeoutError: Not finished within `timeout_s`.
        CheckerError: Apalache failed or contradicted itself.
    """
    return _run("typecheck", module, [], heap, timeout_s)


def _run(command: str, module: Path, options: list[str], heap: str, timeout_s: float) -> ApalacheResult:
    if not module.is_file():
        raise RefusedError(f"Apalache: {module} is no file")
    if not _HEAP.fullmatch(heap):
        raise RefusedError(f"Apalache: heap {heap!r}; write for example 3g or 512m")
    program = _program()
    name = f"Apalache {command} on {module.name}"
    with tempfile.TemporaryDirectory(prefix="dcr-apalache-") as folder:
        private = Path(folder)
        here, traces = private / "empty", private / "run"
        here.mkdir()
        # Apalache reads .apalache.json of the working directory and of the home: both are empty folders here.
        java = f"-Xmx{heap} -Duser.home={here} -Djava.io.tmpdir={private}"
        arguments = [f"--out-dir={private / 'out'}", f"--run-dir={traces}", *options, str(module.resolve())]
        finished = run_child(
            name,
            [program, command, *arguments],
            folder=here,
            log=private / "log",
            environment={"JVM_ARGS": java},
            timeout_s=timeout_s,
        )
        outcome = _outcome(name, command, finished)
        found = _read(traces, "violation")
        examples = _read(traces, "example")
    if outcome is Outcome.VIOLATION and not found:
        raise CheckerError(f"{name}: reported a violation but wrote no violation.itf.json:\n{finished.tail}")
    version = _VERSION.search(finished.output)
    return ApalacheResult(
        outcome,
        "" if outcome is Outcome.OK else finished.tail,
        version[1] if version else "",
        found[0] if found else None,
        examples,
        finished.seconds,
    )


def _outcome(name: str, command: str, finished: Finished) -> Outcome:
    status, output = finished.returncode, finished.output
    if status in _BROKEN:
        return _BROKEN[status]
    if status == 255 and _PARSE_FAILED.search(output):  # noqa: PLR2004 -- the contract's number, see above
        return Outcome.PARSE
    if command == "typecheck" and status == 0 and "Type checker [OK]" in output:
        return Outcome.OK
    lines = _OUTCOME.findall(output)
    outcome = _SAID.get((status, lines[-1])) if lines and command != "typecheck" else None
    if outcome is None:
        said = f"outcome {lines[-1]}" if lines else "no outcome"
        raise CheckerError(f"{name}: ended with status {status} and {said}, which is no verdict:\n{finished.tail}")
    return outcome


def _read(folder: Path, stem: str) -> tuple[Trace, ...]:
    """Traces `stem1`, `stem2`, ...; Apalache repeats the latest one without a number."""
    numbered = {
        int(match[1]): path
        for path in folder.glob(f"{stem}*.itf.json")
        if (match := re.fullmatch(rf"{stem}(\d+)\.itf\.json", path.name))
    }
    paths = [numbered[number] for number in sorted(numbered)] or list(folder.glob(f"{stem}.itf.json"))
    if len(paths) > TRACES_MAX:
        raise CheckerError(f"Apalache wrote {len(paths)} traces, at most {TRACES_MAX} are read")
    return tuple(load_trace(_bounded(path)) for path in paths)


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(ITF_BYTES_MAX + 1)
