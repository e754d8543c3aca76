"""Every scenario holds, comes to what it is about, and notices a bug that it is there for."""

import pytest

from dcr.cli.main import main
from dcr.protocol.announcer import Announcer
from dcr.protocol.coordinator import Coordinator
from dcr.simulator.run import run_schedule
from dcr.simulator.scenarios import SCENARIOS
from tests.conformance.code_mutants import CODE_MUTANTS, ON_A_GRAPH
from tests.mutation import Mutant, apply

OF_THE_POLICY = (
    Mutant(
        "whoever_waits_is_told_that_it_succeeded",
        Announcer,
        "_push_over",
        "if seat.ready and (took_part is None or took_part.get(name) == pushed):",
        "if seat.ready:",
    ),
    Mutant(
        "a_stopped_transition_goes_on_by_itself",
        Coordinator,
        "_next_of_idle",
        "if self.held and not self.resumed:",
        "if False:",
    ),
    Mutant(
        "engines_are_not_waited_for",
        Coordinator,
        "_open_attempt_or_wait",
        "if self.seats.missing or self.awaited:",
        "if self.seats.missing:",
    ),
)
MUTANTS = {m.what: m for m in (*CODE_MUTANTS, *ON_A_GRAPH, *OF_THE_POLICY)}
NOTICES = {
    "commit-after-take-over": "take_over_without_epoch",
    "commit-before-take-over": "commit_without_compare",
    "answered-too-late": "acknowledgement_outlives_a_write",
    "opened-twice": "open_by_committed_epoch_alone",
    "orders-of-a-sleeper": "attempts_forgotten_by_take_over",
    "stopped-until-the-word": "a_stopped_transition_goes_on_by_itself",
    "an-engine-comes-late": "engines_are_not_waited_for",
    "restored-before-the-fold": "delta_against_an_unfolded_baseline",
    "another-incarnations-seal": "fold_of_another_seal",
    "pushed-while-it-is-folded": "whoever_waits_is_told_that_it_succeeded",
    "torn-both-ways": "rollback_turned_forward",
    "payloads-of-the-attempt-before": "stale_epoch_written",
    "torn-by-an-order": "dense_tears_marked_as_candidate",
    "torn-by-a-dense-attempt": "commit_on_any_acknowledgement",
    "gate-order-after-a-prepare": "gate_opens_after_a_prepare",
    "gate-order-of-another-epoch": "gate_order_without_epoch",
    "restored-from-half-a-fold": "restore_while_folding",
    "prepared-in-vain": "prepared_in_vain_is_admitted",
    "two-incarnations-emit": "duplicate_written_again",
    "dies-while-it-folds": "mark_cleared_before_the_last_byte",
    "the-second-push-alone": "abandon_without_epoch",
    "staged-and-abandoned": "write_under_open_gate",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_holds_and_comes_to_what_it_is_about(name):
    scenario = SCENARIOS[name]
    run = run_schedule(scenario.schedule())
    assert run.failure is None, run.failure
    assert run.actions >= {*scenario.shows}


def test_each_has_a_bug_that_it_notices():
    assert {*NOTICES} == {*SCENARIOS}


@pytest.mark.parametrize(("name", "mutant"), NOTICES.items())
def test_it_notices(name, mutant, monkeypatch):
    schedule = SCENARIOS[name].schedule()
    apply(MUTANTS[mutant], monkeypatch)
    assert run_schedule(schedule).failure is not None


def test_the_command_lists_and_tells_them(capsys):
    assert main(["simulate", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in SCENARIOS)
    assert main(["simulate", "--scenario", "torn-both-ways"]) == 0
    told = capsys.readouterr().out
    assert SCENARIOS["torn-both-ways"].sentence in told
    assert "c1: RollBack" in told
    assert told.splitlines()[-1].startswith("all held: version ")
