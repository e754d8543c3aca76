"""One-line bugs in the roles, each of which a schedule that has a name must find, or else random ones."""

import pytest

from dcr.protocol import fleet, receiver, registrar
from dcr.protocol.announcer import Announcer
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.node import Node
from dcr.protocol.owner import Owner
from dcr.protocol.rank_attempt import RankAttempt
from dcr.protocol.receiver import Receiver
from dcr.protocol.registrar import Registrar
from dcr.protocol.session import Session
from dcr.simulator.run import run_schedule, run_seed
from dcr.simulator.scenarios import SCENARIOS
from tests.mutation import Mutant, apply

SEEDS_MAX = 2000
STEPS = 150


MUTANTS = [
    Mutant(
        "the gate opens by version alone",
        Node,
        "learned",
        "clean = all(s.state.clean and s.state.version == record.version for s in ranks)",
        "clean = all(s.state.version == record.version for s in ranks)",
    ),
    Mutant(
        "no mark before the first byte",
        Receiver,
        "payload",
        "self.torn_by |= {_TEARS.get(base.kind, base.candidate)}",
        "pass",
    ),
    Mutant(
        "a failed payload is tried again in its epoch",
        Receiver,
        "write_failed",
        '*self._fail(a, f"payload {name_of(identity)}: {reason}"),',
        "*([] if a.seen.pop(identity) else []),",
    ),
    Mutant(
        "an acknowledgement without every manifest",
        RankAttempt,
        "lacks",
        "if set(self.manifests) != {o.owner for o in self.order.owners}:",
        "if not self.manifests:",
    ),
    Mutant(
        "an acknowledgement before every payload is written",
        RankAttempt,
        "lacks",
        "return any(m.identity(p.sequence) not in where for m in self.manifests.values() for p in m.payloads)",
        "return any(m.payloads and not where for m in self.manifests.values())",
    ),
    Mutant("a duplicate is written again", Receiver, "payload", "if identity in arrived:", "if False:"),
    Mutant(
        "a relative payload over torn storage",
        (receiver, fleet, registrar),
        "admits",
        "return at_base and state.clean",
        "return at_base",
    ),
    Mutant(
        "an absolute payload over another candidate's tears",
        (receiver, fleet, registrar),
        "admits",
        "return at_base and set(state.torn_by) <= {base.candidate}",
        "return at_base",
    ),
    Mutant(
        "a commit with a missing acknowledgement",
        Session,
        "complete",
        "if self.unsealed or not self.acknowledged:",
        "if self.unsealed or not self.roots:",
    ),
    Mutant(
        "storage taken for an epoch that was overwritten since",
        Receiver,
        "payload",
        "self._acknowledged = None",
        "pass",
    ),
    Mutant(
        "what is staged is written while the gate is still open",
        Node,
        "_open_apply",
        'if self.gate == "closed":',
        "if True:",
    ),
    Mutant(
        "a candidate goes on after its owner restarted",
        Registrar,
        "candidate_alive",
        "tr.owners == self.seats.refs",
        "True",
    ),
    Mutant(
        "whatever was folded is the baseline",
        Owner,
        "folded",
        "if baseline_digest != self._fold_content:",
        "if False:",
    ),
    Mutant(
        "a restarted owner is told that its push succeeded",
        Announcer,
        "_push_over",
        "if seat.ready and (took_part is None or took_part.get(name) == pushed):",
        "if seat.ready:",
    ),
    Mutant(
        "the push after one that was given up is told that it succeeded",
        Announcer,
        "_finish",
        "(o.incarnation, push)",
        "(o.incarnation, self.seats[o.owner].ready)",
    ),
    Mutant(
        "a new leader forgets to publish the commit of the old one",
        Coordinator,
        "_next",
        "if not self._published:",
        "if not self._published and self.session is not None:",
    ),
    Mutant(
        "an engine is refused without being told",
        Registrar,
        "_cannot_go_on",
        "filter(None, [self.fleet.of(m)])",
        "[]",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what)
def test_schedules_find(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [scenario.schedule() for scenario in SCENARIOS.values()]  # as the roles have them that are not changed
    apply(mutant, monkeypatch)
    if any(run_schedule(schedule).failure is not None for schedule in named):
        return
    for seed in range(SEEDS_MAX):
        if run_seed(seed, STEPS).failure is not None:
            return
    pytest.fail(f"{SEEDS_MAX} schedules did not find it")
