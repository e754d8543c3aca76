"""One-line bugs in the specification: each is caught, by the property that the manifest names."""

import pytest
from spec_models import INVARIANTS, MANIFEST, verdict_with

QUICK = {
    *("duplicate_written_again", "ack_before_synchronised", "commit_on_any_acknowledgement", "baseline_at_emission"),
    *("join_without_baseline_check", "write_under_open_gate", "relative_retry", "failed_payload_retried_in_its_epoch"),
}
"""Those of the normal run: a few seconds each."""


def _mutants(*, quick):
    return [m for m in MANIFEST.mutants if (m.name in QUICK) == quick]


@pytest.mark.parametrize("mutant", _mutants(quick=True), ids=lambda m: m.name)
def test_caught(mutant, tmp_path):
    assert verdict_with(mutant, tmp_path).verdict == mutant.caught_by


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", _mutants(quick=False), ids=lambda m: m.name)
def test_caught_too(mutant, tmp_path):
    assert verdict_with(mutant, tmp_path).verdict == mutant.caught_by


def test_every_property_catches_a_mutant():
    caught = {m.caught_by for m in MANIFEST.mutants}
    assert caught == {*(f"invariant:{name}" for name in INVARIANTS), "property:MonotoneRecord", "property"}
    assert {m.name for m in MANIFEST.mutants} >= QUICK
