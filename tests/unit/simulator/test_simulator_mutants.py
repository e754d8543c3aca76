"""The specification's one-line bugs, made in the roles: seeds find them, but for those that something else hides."""

import pytest

from dcr.simulator.run import run_seed
from tests.conformance.code_mutants import CODE_MUTANTS, ON_A_GRAPH
from tests.mutation import apply

MUTANTS = {m.what: m for m in (*CODE_MUTANTS, *ON_A_GRAPH)}
SEEDS_MAX = 2000
QUICK = ("no_mark_before_first_byte", "write_under_open_gate", "ack_before_every_payload")
MORE = (
    *("relative_retry", "duplicate_written_again", "commit_without_compare", "read_back_believed"),
    *("tears_of_another_candidate", "restore_while_folding", "gate_order_without_epoch"),
    *("failed_payload_retried_in_its_epoch", "dense_tears_marked_as_candidate", "stepped_candidate_sealed"),
    *("rollback_turned_forward", "fence_not_raised_by_reading_K", "join_without_baseline_check"),
)


def finds(name: str, seeds: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    apply(MUTANTS[name], monkeypatch)
    return any(run_seed(seed).failure is not None for seed in range(seeds))


@pytest.mark.parametrize("name", QUICK)
def test_a_few_seeds_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finds(name, 50, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_seeds_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finds(name, SEEDS_MAX, monkeypatch)
