"""The driver of Apalache, against a stand-in that obeys the contract of `apalache-mc`; no result here is Apalache's."""

import json

import pytest

from dcr.modelcheck import apalache
from dcr.modelcheck.apalache import Outcome
from dcr.modelcheck.checker import CheckerError, CheckerMissingError, CheckerTimeoutError
from dcr.protocol.errors import RefusedError
from tests.unit.modelcheck import stand_in


@pytest.fixture
def ending(tmp_path, monkeypatch):
    """ending(what): a stand-in on PATH that ends so; returns the file in which it records its calls."""

    def put(what):
        stand_in.apalache(tmp_path / "bin")
        monkeypatch.setenv("PATH", stand_in.path_with(tmp_path / "bin"))
        monkeypatch.setenv("STAND_IN", what)
        monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record"))
        return tmp_path / "record"

    return put


def desks(trace):
    return [step.state["desk"] for step in trace.steps]


def test_a_pass(ending, specs):
    record = ending("ok")
    result = apalache.check(specs / "Courier.tla", length=6, cinit="ConstInit", inv=("A", "B"), heap="4g")
    assert result.passed
    assert (result.outcome, result.version, result.trace, result.message) == (Outcome.OK, "0.61.0", None, "")
    command, options, java = json.loads(record.read_text())
    assert command == "check"
    assert (options["length"], options["cinit"], options["inv"]) == ("6", "ConstInit", "A,B")
    assert options["no-deadlock"] == "true"
    assert "-Xmx4g" in java.split()


def test_deadlock_is_looked_for_only_where_asked(ending, specs):
    record = ending("deadlock")
    result = apalache.check(specs / "Courier.tla", length=6, deadlock=True)
    assert result.outcome is Outcome.DEADLOCK
    assert not result.passed
    assert desks(result.trace) == [()]
    assert json.loads(record.read_text())[1]["no-deadlock"] == "false"


@pytest.mark.parametrize("what", ["violation", "violation_unnumbered"])
def test_a_violation_has_its_trace(ending, specs, what):
    ending(what)
    result = apalache.check(specs / "Courier.tla", length=6, inv=("Once",))
    assert result.outcome is Outcome.VIOLATION
    assert desks(result.trace) == [(1, 2), (2,)]
    assert "The outcome is: Error" in result.message


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        ("too_short", Outcome.EXECUTIONS_TOO_SHORT),
        ("smt_timeout", Outcome.SMT_TIMEOUT),
        ("evaluation", Outcome.EVALUATION),
        ("parse", Outcome.PARSE),
        ("parse_255", Outcome.PARSE),
    ],
)
def test_what_is_not_a_pass(ending, specs, what, outcome):
    ending(what)
    result = apalache.check(specs / "Courier.tla", length=6)
    assert result.outcome is outcome
    assert not result.passed
    assert "EXITCODE" in result.message


@pytest.mark.parametrize(
    "what",
    [
        *("other", "violation_without_trace", "silent_success", "error_with_success", "success_with_error"),
        *("unheard_of", "unheard_of_status"),
    ],
)
def test_what_is_no_verdict(ending, specs, what):
    ending(what)
    with pytest.raises(CheckerError, match=r"Apalache check on Courier\.tla"):
        apalache.check(specs / "Courier.tla", length=6)


def test_types(ending, specs):
    ending("ok")
    assert apalache.typecheck(specs / "Courier.tla").passed
    ending("type")
    result = apalache.typecheck(specs / "Courier.tla")
    assert result.outcome is Outcome.TYPE
    assert "should be integers" in result.message


def test_a_simulation_keeps_its_executions(ending, specs):
    record = ending("ok")
    result = apalache.simulate(specs / "Courier.tla", length=3, max_run=12)
    assert result.passed
    assert [desks(example)[1] for example in result.examples] == [(number,) for number in range(1, 13)]
    options = json.loads(record.read_text())[1]
    assert (options["max-run"], options["output-traces"]) == ("12", "true")


def test_a_run_that_takes_too_long_is_named(ending, specs):
    ending("hang")
    with pytest.raises(CheckerTimeoutError, match=r"Apalache check on Courier\.tla: did not finish within 1 s"):
        apalache.check(specs / "Courier.tla", length=6, timeout_s=1)


def test_where_it_is_missing_nothing_passes(specs, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for run in (
        lambda: apalache.check(specs / "Courier.tla", length=1),
        lambda: apalache.simulate(specs / "Courier.tla", length=1, max_run=1),
        lambda: apalache.typecheck(specs / "Courier.tla"),
    ):
        with pytest.raises(CheckerMissingError, match="Apalache was NOT run"):
            run()


def test_arguments_are_refused(ending, specs):
    record = ending("ok")
    for options in ({"inv": ("A B",)}, {"cinit": "--out-dir=x"}, {"heap": "lots"}):
        with pytest.raises(RefusedError):
            apalache.check(specs / "Courier.tla", length=1, **options)
    with pytest.raises(RefusedError):
        apalache.simulate(specs / "Courier.tla", length=1, max_run=0)
    with pytest.raises(RefusedError):
        apalache.typecheck(specs / "None.tla")
    assert not record.exists()
