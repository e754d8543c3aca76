"""What a bug in a role has to get past, beside the unit tests: seeds of the simulator, and traces of the specification.

``make mutation`` runs this file; its name keeps it out of the other runs, which do the same at greater length.
"""

from itertools import islice
from pathlib import Path

import pytest

from dcr.modelcheck.replay.replayer import replay
from dcr.modelcheck.trace_set import read_traces
from dcr.simulator.run import run_seed

TRACES = Path(__file__).parents[3] / "spec" / "tla" / "traces"
SEEDS, BATCH = 80, 20
MODELS = ("traces_rollback", "traces_gate_async", "traces_owner_restart", "traces_two_ranks", "traces_unknown_outcome")
TRACES_OF_A_MODEL = 2


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_seeds_hold(first: int) -> None:
    for seed in range(first, first + BATCH):
        failure = run_seed(seed).failure
        assert failure is None, f"seed {seed}: {failure.invariant}"


@pytest.mark.parametrize("model", MODELS)
def test_traces_are_followed(model: str) -> None:
    for trace in islice(read_traces(TRACES / f"{model}.itf.jsonl.zst"), TRACES_OF_A_MODEL):
        replay(trace)
