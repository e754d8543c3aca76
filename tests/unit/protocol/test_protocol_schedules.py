"""Random schedules of whole deployments: safety after every move, and convergence once faults stop."""

import pytest

from dcr.simulator.coverage import SPEC_ACTIONS, SPECIAL_CASES
from dcr.simulator.run import run_seed

BATCH = 500
STEPS_OF_A_MILLION = 1_000_000


def holds(seed: int, steps: int) -> set[str]:
    """Run a seed; the actions that it took."""
    run = run_seed(seed, steps)
    f = run.failure
    assert f is None, f"dcr simulate --start-seed {seed} --seeds 1 --steps {steps}: {f.invariant}: {f.what}"
    return set(run.actions)


@pytest.mark.parametrize("batch", range(20))
def test_every_schedule_is_safe_and_converges(batch: int) -> None:
    """Ten thousand short seeds."""
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        holds(seed, 60)


def test_schedules_that_go_on_are_safe_and_converge() -> None:
    for seed in range(20_000, 20_050):
        holds(seed, 400)


def test_schedules_take_every_action() -> None:
    seen: set[str] = set()
    for seed in range(30_000, 30_400):
        seen |= holds(seed, 60)
    assert seen >= {*SPEC_ACTIONS, *SPECIAL_CASES}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_steps_are_safe_and_converge() -> None:
    steps, seed = 0, 1_000_000
    while steps < STEPS_OF_A_MILLION:
        run = run_seed(seed, 60 + 50 * (seed % 20))
        assert run.failure is None, f"seed {seed}: {run.failure.invariant}: {run.failure.what}"
        steps += run.steps
        seed += 1
