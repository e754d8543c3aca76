"""Random schedules of whole deployments: safety after every step, and convergence once faults stop."""

import pytest
from deployment import run_schedule

BATCH = 250


@pytest.mark.parametrize("batch", range(12))
def test_every_schedule_is_safe_and_converges(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        run_schedule(seed, 60 + 20 * (seed % 12))


@pytest.mark.long
def test_long_schedules_are_safe_and_converge() -> None:
    for seed in range(1_000_000, 1_002_000):
        run_schedule(seed, 600)


def test_schedules_reach_every_action_but_fatal_errors() -> None:
    seen: set[str] = set()
    for seed in range(2_000_000, 2_000_200):
        seen |= set(run_schedule(seed, 300).actions)
    assert seen >= {
        *("CreateRecord", "TakeOver", "OpenAttempt", "OrderOpenApply", "AttemptFailed", "Evict", "Commit", "Stop"),
        *("Abandon", "Publish", "FinishTransition", "OpenRestore", "EndRestore", "RestoreFailed", "Admit"),
        *("RollBack", "ReadBack", "WriteAgain"),
        *("RefuseMember", "MemberServes", "Emit", "EmitFailed", "Seal", "BeginFold", "EndFold", "LoseBaseline"),
        *("Fence", "OpenApply", "BeginWrite", "EndWrite", "FailWrite", "DeliverManifest", "Acknowledge"),
        *("FailAttempt", "LearnCommit", "CloseGate", "GateClosed", "OpenGate", "Prepare", "Stage"),
        *("an attempt of another leader's transition", "a fold that another leader ordered"),
        "a rollback that was committed",
    }
