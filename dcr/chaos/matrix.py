"""The shipped scenarios: cases over transports, gate modes and control planes, several in a row in one deployment."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dcr.chaos.cases import BUCKET_TOO, CASES, COORDINATORS_ELSEWHERE, GATES, TRANSPORTS, Case
from dcr.chaos.pairwise import Choice, cover
from dcr.chaos.point import Point
from dcr.chaos.scenario import Deployment, Fault, Scenario, Trainer

IN_A_ROW_MAX = 12
"""Cases of one deployment: what starts a deployment costs more than a refit."""

Where = tuple[str, str, str, int, int]
"""Transport, control, gate, ranks of the trainer, and coordinators that are no part of it."""
Settings = tuple[tuple[str, Any], ...]

QUICK: tuple[tuple[Where, tuple[str, ...]], ...] = (
    (
        ("file", "sqlite", "sync", 1, 0),
        (
            "kill receiver[1] at Fence",
            "kill receiver[1] after 1 items of payload 2",
            "kill receiver[1] at Acknowledge",
            "kill engine[1] at OpenGate",
            "kill receiver[1] at BeginWrite in restore",
            "kill coordinator at OpenAttempt",
            "kill coordinator between CAS sent and answered of Commit",
            "kill coordinator before CAS of Commit",
            "kill owner[0] during manifest",
            "kill owner[0] at BeginFold",
            "kill owner[0] at LoseBaseline",
            "replace the coordinator before its commit",
            "a payload comes twice",
        ),
    ),
    (
        ("file", "sqlite", "async", 2, 0),
        (
            "kill receiver[1] at Stage",
            "kill receiver[1] at EndWrite",
            "kill owner[1] before payload 1",
            "stall receiver[1]",
        ),
    ),
    (("file", "sqlite", "sync", 1, 0), ("the store's disk is full", "kill coordinator at Stop")),
    (
        ("relay", "sqlite", "sync", 1, 0),
        ("kill receiver[1] at BeginWrite", "partition engine[1]", "partition relay[0] to relay[1] for 1 s"),
    ),
    (
        ("s3", "etcd", "sync", 1, 0),
        ("kill store during the manifest", "kill etcd after a commit", "kill coordinator at Publish"),
    ),
    (("file", "sqlite", "sync", 1, 2), ("stall coordinator past its lease before CAS of Commit",)),
)
"""One deployment each: where, and the names of its cases, which need the same settings."""


def quick_matrix(seed: int = 0) -> list[Scenario]:
    """The chosen few."""
    by_name = {case.name: case for case in CASES}
    return [
        _scenario(f"quick {number}", where, [by_name[n] for n in names], by_name[names[0]].settings, seed)
        for number, (where, names) in enumerate(QUICK, 1)
    ]


def full_matrix(seed: int = 0) -> list[Scenario]:
    """Every case with every transport, gate mode and control plane that it can be with, pairwise."""
    by_name = {case.name: case for case in CASES}
    assert len(by_name) == len(CASES), "two cases have one name"
    # Control plane and coordinators are one factor: a takeover depends on the leases of the one that it happens in.
    led = [(control, number) for control in BUCKET_TOO for number in COORDINATORS_ELSEWHERE]
    factors = {"case": list(by_name), "transport": TRANSPORTS, "led": led, "gate": GATES}

    def allowed(c: Choice) -> bool:
        case = by_name[c["case"]]
        control, coordinators = c["led"]
        if control == "s3" and coordinators:
            return False
        led_so = control in case.controls and coordinators in case.coordinators
        return led_so and c["transport"] in case.transports and c["gate"] in case.gates

    return list(_grouped([(c, by_name[c["case"]]) for c in cover(factors, allowed, seed)], seed))


def _grouped(chosen: Sequence[tuple[Choice, Case]], seed: int) -> Iterable[Scenario]:
    groups: dict[tuple[Where, Settings, str], list[Case]] = defaultdict(list)
    for choice, case in chosen:
        alone = case.name if case.start else ""
        control, coordinators = choice["led"]
        where = (choice["transport"], control, choice["gate"], case.ranks, coordinators)
        groups[where, case.settings, alone].append(case)
    number = itertools.count(1)
    for key, cases in sorted(groups.items(), key=repr):
        where, settings, _ = key
        cases.sort(key=_turn)
        for first in range(0, len(cases), IN_A_ROW_MAX):
            some = cases[first : first + IN_A_ROW_MAX]
            yield _scenario(f"matrix {next(number)}", where, some, settings, seed)


def _turn(case: Case) -> int:
    """A restore comes before a trainer's death: the dense push that may follow that is one to catch up from.

    A baseline that is lost comes last: in the refit after it nothing can be restored or rolled back.
    """
    if any(Point.parse(f.at).restore for f in case.faults):
        return 0
    return 2 if case.faults[-1].do == "step_early" else 1


def _scenario(
    name: str,
    where: Where,
    cases: Sequence[Case],
    settings: Settings,
    seed: int,
) -> Scenario:
    transport, control, gate, ranks, coordinators = where
    # The first refit and the last are without a fault: what is restored is a later version than the one that engines
    # start from, and what the faults leave behind must do no harm.
    faults = [f for refit, case in enumerate(cases, 2) for f in _in_refit(case, refit)]
    return Scenario(
        name=name,
        deployment=Deployment(
            trainer=Trainer(ranks=ranks, refits=len(cases) + 2),
            transport=transport,  # type: ignore[arg-type]
            control=control,  # type: ignore[arg-type]
            gate=gate,  # type: ignore[arg-type]
            coordinators=coordinators,
            settings=dict(settings),
        ),
        faults=tuple(faults),
        seed=seed,
    )


def _in_refit(case: Case, refit: int) -> Iterable[Fault]:
    for fault in case.faults:
        moved = Point.parse(fault.at).refit != 0
        yield msgspec.structs.replace(fault, at=f"{fault.at} in refit {refit}") if moved else fault
