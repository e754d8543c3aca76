"""The shipped scenarios: every point of every role, every pair of settings, and the chosen few."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.chaos.cases import BUCKET_TOO, CASES, CONTROLS, COORDINATORS, GATES, TRANSPORTS
from dcr.chaos.execute import describe
from dcr.chaos.matrix import QUICK, full_matrix, quick_matrix
from dcr.chaos.pairwise import cover
from dcr.chaos.point import ACTIONS, WHERE_ROLES, WRITES, Who
from dcr.chaos.report import RunReport, Table

PEER_TIMEOUT_S = 3.0
"""Of the relay in scenarios: a peer that says nothing for longer is lost."""


def pairs(choice):
    return set(combinations(sorted(choice.items()), 2))


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(0, 3))
def test_every_pair_that_may_be_is_covered(sizes, seed):
    factors = {f"f{n}": list(range(size)) for n, size in enumerate(sizes)}

    def allowed(c):
        return (c["f0"] + c["f1"]) % 3 != 2

    wanted = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    found = cover(factors, allowed, seed)
    assert all(allowed(c) for c in found)
    assert set().union(*map(pairs, found)) == set().union(*(pairs(c) for c in wanted if allowed(c)))
    assert len(found) <= len([c for c in wanted if allowed(c)])


def test_a_seed_decides_everything():
    assert full_matrix(1) == full_matrix(1)
    assert full_matrix(1) != full_matrix(2)


def test_every_point_of_every_role_is_shipped():
    points = [f.point for s in full_matrix() for f in s.faults if f.do in ("kill", "stall")]
    struck = {(p.taken_by.role, p.action) for p in points if p.kind == "step"}
    assert struck == {(role, action) for role, actions in ACTIONS.items() for action in actions}
    written = {(p.kind, p.action) for p in points if p.kind in ("cas_sent", "cas_done")}
    assert written == set(product(("cas_sent", "cas_done"), WRITES))
    between = {(p.taken_by.role, p.kind) for p in points}
    assert between >= {(role, kind) for kind, roles in WHERE_ROLES.items() for role in {*roles} & {*ACTIONS}}


def test_every_link_of_the_relay_and_every_process_is_cut_off_for_a_moment_and_past_its_time_outs():
    cut = {(f.victim, f.for_s < PEER_TIMEOUT_S) for s in full_matrix() for f in s.faults if f.do == "partition"}
    for link in ("owner[0] to relay[1]", "owner[1] to relay[0]", "relay[0] to relay[1]"):
        assert {(Who.parse(link), True), (Who.parse(link), False)} <= cut
    roles = {victim.role for victim, _ in cut if victim.to is None}
    assert roles == {"engine", "owner", "store", "etcd"}


def test_nothing_is_struck_in_the_refit_after_a_baseline_was_lost():
    last = [(s, f) for s in full_matrix() for f in s.faults if f.do == "step_early"]
    left = [(s, f) for s, f in last if f is s.faults[-1]]
    assert left
    for scenario, fault in last:
        after = [f.point for f in scenario.faults if f.point.refit == fault.point.refit + 1]
        died = any(f.do == "kill" and f.point.refit == fault.point.refit for f in scenario.faults)
        assert died or not after, scenario.name


def test_every_case_is_combined_with_every_setting_that_it_can_have():
    ran = {
        (f.at.split(" in refit ")[0], setting)
        for s in full_matrix()
        for f in s.faults
        for setting in (s.deployment.transport, s.deployment.control, s.deployment.gate, s.deployment.coordinators)
    }
    for case in CASES:
        for setting in (*case.transports, *case.controls, *case.gates, *case.coordinators):
            assert (case.faults[-1].at.split(" in refit ")[0], setting) in ran, (case.name, setting)
    met = {(s.deployment.transport, s.deployment.control, s.deployment.gate) for s in full_matrix()}
    assert met >= set(product(TRANSPORTS, CONTROLS, GATES))
    assert {(control, gate) for _, control, gate in met} == set(product(BUCKET_TOO, GATES))


def test_every_fault_of_a_coordinator_but_its_replacement_is_shipped_with_coordinators_elsewhere():
    ran = {
        (f.at.split(" in refit ")[0], f.do, s.deployment.control)
        for s in full_matrix()
        for f in s.faults
        if s.deployment.coordinators
    }
    for case in COORDINATORS:
        last = case.faults[-1]
        if last.do != "replace":
            assert {(last.at.split(" in refit ")[0], last.do, c) for c in CONTROLS} <= ran, case.name


def test_the_quick_ones_are_all_transports_gates_controls_and_roles():
    scenarios = quick_matrix()
    assert {s.deployment.transport for s in scenarios} == set(TRANSPORTS)
    assert {s.deployment.control for s in scenarios} == set(CONTROLS)
    assert {s.deployment.gate for s in scenarios} == set(GATES)
    assert {s.deployment.coordinators for s in scenarios} == {0, 2}
    assert len(scenarios) == len(QUICK)
    roles = {f.point.taken_by.role for s in scenarios for f in s.faults}
    assert roles == {"coordinator", "owner", "engine", "receiver"}


@pytest.mark.parametrize("scenarios", [quick_matrix(), full_matrix()])
def test_names_are_folders_of_their_own(scenarios):
    assert len({s.name for s in scenarios}) == len(scenarios)


@pytest.mark.parametrize("scenarios", [quick_matrix(), full_matrix()])
def test_the_table_of_the_matrix_has_whole_names_deployments_and_verdicts_in_120_columns(scenarios):
    table = Table((s.name, describe(s.deployment)) for s in scenarios)
    for s in scenarios:
        many = {"requests": 99_999_999, "bytes_compared": 999_999_999, "seconds": 9999.0, "recovery_s": 9999.9}
        report = RunReport(name=s.name, ok=False, deployment=describe(s.deployment), folder="", **many)
        line = table.row(report)
        assert len(line) <= 120
        assert line.endswith("  WRONG")
        name, told = line[: table.header.index("deployment")], line[table.header.index("deployment") :]
        assert name.strip() == s.name
        d = s.deployment
        assert told.split()[:4] == [d.transport, d.control, d.gate, f"{d.engines}e"]
        assert (f" {d.trainer.ranks} ranks " in told) == (d.trainer.ranks > 1)
        assert (f" {d.coordinators}c " in told) == (d.coordinators > 0)
