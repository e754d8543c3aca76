"""One-line bugs in the roles, each of which the random schedules must find."""

import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from deployment import run_schedule

from dcr.protocol import conductor, fleet, receiver
from dcr.protocol.conductor import Conductor
from dcr.protocol.coordinator import Coordinator
from dcr.protocol.node import Node
from dcr.protocol.receiver import Receiver
from dcr.protocol.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS_MAX = 1000
STEPS = 300


@dataclass
class Mutant:
    what: str
    of: Any
    """The class, or the modules that name the function."""
    name: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "the gate opens by version alone",
        Node,
        "learned",
        "if clean and (",
        "if rank.state.version == record.version and (",
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
        '*self._fail(a, f"payload {_text(identity)}: {reason}"),',
        "*([] if a.seen.pop(identity) else []),",
    ),
    Mutant(
        "an acknowledgement without every manifest",
        Receiver,
        "_complete",
        "if set(a.manifests) != {o.owner for o in a.order.owners}:",
        "if not a.manifests:",
    ),
    Mutant(
        "an acknowledgement before every payload is written",
        Receiver,
        "_complete",
        "if any(m.identity(p.sequence) not in a.written for m in a.manifests.values() for p in m.payloads):",
        "if any(m.payloads and not a.written for m in a.manifests.values()):",
    ),
    Mutant(
        "a duplicate is written again",
        Receiver,
        "payload",
        "if identity in a.seen:",
        "if identity in a.seen and a.seen[identity] != digest:",
    ),
    Mutant(
        "a relative payload over torn storage",
        (receiver, fleet, conductor),
        "admits",
        "return at_base and state.clean",
        "return at_base",
    ),
    Mutant(
        "an absolute payload over another candidate's tears",
        (receiver, fleet, conductor),
        "admits",
        "return at_base and set(state.torn_by) <= {base.candidate}",
        "return at_base",
    ),
    Mutant(
        "a commit with a missing acknowledgement",
        Session,
        "complete",
        "set(self.roots) == self.members",
        "bool(self.roots)",
    ),
    Mutant(
        "storage taken for an epoch that was overwritten since",
        Receiver,
        "payload",
        "self._acknowledged.clear()",
        "pass",
    ),
    Mutant("the rank is prepared before the gate is closed", Node, "_prepare", 'if self.gate == "closed":', "if True:"),
    Mutant(
        "a delta against a baseline that is not the committed one",
        Coordinator,
        "_baseline_held",
        "== self._k.baseline_id",
        '!= ""',
    ),
    Mutant(
        "a candidate goes on after its owner restarted",
        Coordinator,
        "_candidate_lost",
        "any(o not in self._seats.refs for o in tr.owners)",
        "False",
    ),
    Mutant(
        "a restarted owner is told that its push succeeded",
        Coordinator,
        "_push_over",
        "if seat.ready and took_part.get(name, pushed) == pushed:",
        "if seat.ready:",
    ),
    Mutant(
        "the push after one that was given up is told that it succeeded",
        Coordinator,
        "_push_over",
        "(o.incarnation, s.pushes[o.owner])",
        "(o.incarnation, self._seats[o.owner].ready)",
    ),
    Mutant(
        "an engine is refused without being told",
        Conductor,
        "_out_of_session",
        "filter(None, [self.fleet.of(m)])",
        "[]",
    ),
]


def _apply(m: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    first = m.of[0] if isinstance(m.of, tuple) else m.of
    found = vars(first)[m.name]
    function: Callable[..., object] = found.fget if isinstance(found, property) else found
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(m.old) == 1, f"{m.what}: the line has changed; bring this mutant up to date"
    names: dict[str, Any] = {}
    exec(compile(source.replace(m.old, m.new), f"mutant of {m.name}", "exec"), function.__globals__, names)
    for of in m.of if isinstance(m.of, tuple) else (m.of,):
        monkeypatch.setattr(of, m.name, names[m.name])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what)
def test_schedules_find(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    _apply(mutant, monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            run_schedule(seed, STEPS)
        except AssertionError:
            return
    pytest.fail(f"{SEEDS_MAX} schedules did not find it")
