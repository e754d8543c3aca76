"""Roles under any messages in any order, each beside a small model of the specification; and bugs that each must find.

The settings are the same with and without a bug, and so are the examples: what is found is the bug's.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from dcr.protocol.conductor import Conductor
from dcr.protocol.node import Node
from dcr.protocol.owner import Owner
from dcr.protocol.receiver import Receiver
from dcr.protocol.record import CommitRecord
from tests.conformance.code_mutants import CODE_MUTANTS, ON_A_GRAPH
from tests.mutation import Mutant, apply
from tests.unit.protocol.machines.conductor_machine import ConductorMachine
from tests.unit.protocol.machines.coordinator_machine import CoordinatorMachine
from tests.unit.protocol.machines.node_machine import NodeMachine
from tests.unit.protocol.machines.owner_machine import OwnerMachine
from tests.unit.protocol.machines.receiver_machine import ReceiverMachine
from tests.unit.protocol.machines.record_machine import RecordMachine

LONG = 20
"""So many times more examples in the long run."""
OF_THE_SPECIFICATION = {m.what: m for m in (*CODE_MUTANTS, *ON_A_GRAPH)}


@dataclass(frozen=True)
class Machine:
    """A machine, its budget, and the bugs that it finds within it."""

    of: type[RuleBasedStateMachine]
    examples: int
    steps: int
    names: tuple[str, ...]
    """Bugs of the specification, made in the code (tests/conformance/code_mutants.py)."""
    more: tuple[Mutant, ...] = ()
    deep: tuple[str, ...] = ()
    """Bugs of the specification that take the long run."""

    @property
    def name(self) -> str:
        return self.of.__name__

    @property
    def mutants(self) -> list[Mutant]:
        return [*(OF_THE_SPECIFICATION[name] for name in self.names), *self.more]

    def run(self, examples: int) -> None:
        how = settings(
            max_examples=examples,
            stateful_step_count=self.steps,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(self.of, settings=how)


MACHINES = (
    Machine(
        ReceiverMachine,
        120,
        30,
        (
            *("duplicate_written_again", "ack_before_every_payload", "ack_before_synchronised", "ack_without_manifest"),
            *("stale_epoch_written", "dedup_outlives_its_epoch", "open_by_committed_epoch_alone"),
            *("open_by_acknowledgement_alone", "tears_of_another_candidate", "relative_over_tears"),
            *("identity_without_incarnation_and_digest", "failed_payload_retried_in_its_epoch"),
            *("no_mark_before_first_byte", "acknowledgement_outlives_a_write", "dense_tears_marked_as_candidate"),
            *("fence_not_raised_by_reading_K", "join_without_baseline_check"),
        ),
        (Mutant("staged early", Receiver, "_staged", "or a.lacks(a.held)", ""),),
    ),
    Machine(
        NodeMachine,
        80,
        30,
        (
            *("admitted_by_read_back", "open_by_version_alone"),
            *("write_under_open_gate", "gate_opens_after_a_prepare"),
        ),
        (
            Mutant("prepared with the first rank", Node, "rank_prepared", 'if not w.all_are("fenced"):', "if False:"),
            Mutant("ranks may differ", Node, "rank_acknowledged", "if len(set(w.roots.values())) > 1:", "if False:"),
        ),
        deep=("engine_opens_as_any_incarnation", "gate_order_without_epoch"),
    ),
    Machine(
        OwnerMachine,
        240,
        30,
        (
            *("baseline_at_emission", "restore_while_folding", "emission_repeated", "fold_of_other_weights"),
            *("stepped_candidate_sealed", "mark_cleared_before_the_last_byte"),
            *("delta_against_an_unfolded_baseline", "fold_of_another_seal"),
        ),
        (
            Mutant("of an older order", Owner, "emitted", "or manifest.epoch != order.epoch", ""),
            Mutant("a baseline of no known version owes no fold", Owner, "_owes_fold", "self.base is None or", ""),
        ),
    ),
    Machine(
        RecordMachine,
        80,
        30,
        (
            *("attempts_forgotten_by_take_over", "abandon_without_epoch", "stop_without_epoch"),
            "take_over_without_epoch",
        ),
        (
            Mutant(
                "a rollback grows",
                CommitRecord,
                "commit",
                "self.version if back else self.open.target",
                "self.open.target",
            ),
            Mutant("a stopped transition is committed", CommitRecord, "commit", "assert not self.open.stopped", "pass"),
        ),
    ),
    Machine(
        CoordinatorMachine,
        60,
        20,
        ("commit_without_compare", "commit_on_any_acknowledgement", "restore_from_weights"),
    ),
    Machine(
        ConductorMachine,
        100,
        20,
        (
            *("relative_retry", "commit_without_compare", "commit_on_any_acknowledgement", "commit_without_members"),
            *("pin_released_before_the_fold", "restore_from_weights"),
        ),
        (Mutant("members unheard", Conductor, "order_open_apply", "s.restore or s.ready", "True"),),
    ),
)
MUTANTS = [(machine, mutant) for machine in MACHINES for mutant in machine.mutants]
DEEP = [(machine, OF_THE_SPECIFICATION[name]) for machine in MACHINES for name in machine.deep]


@pytest.fixture(autouse=True)
def _the_same_examples_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis mixes in the constants of whatever modules other tests have loaded, derandomized or not."""
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)


def _named(x: object) -> str:
    return x.name if isinstance(x, Machine) else getattr(x, "what", "")


@pytest.mark.parametrize("machine", MACHINES, ids=_named)
def test_the_role_does_what_the_specification_says(machine: Machine) -> None:
    machine.run(machine.examples)


def finds(machine: Machine, mutant: Mutant, examples: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    apply(mutant, monkeypatch)
    try:
        machine.run(examples)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 -- a difference, or whatever a role raises on the way; pytest's own among them
        return True
    return False


@pytest.mark.parametrize(("machine", "mutant"), MUTANTS, ids=_named)
def test_a_bug_is_found(machine: Machine, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finds(machine, mutant, machine.examples, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("machine", "mutant"), DEEP, ids=_named)
def test_a_bug_is_found_in_the_end(machine: Machine, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert finds(machine, mutant, LONG * machine.examples, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES, ids=_named)
def test_many_more_examples(machine: Machine) -> None:
    machine.run(LONG * machine.examples)
