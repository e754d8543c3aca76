"""The static check on modules that break each rule: every marked line, and no other, is found."""

import re

import pytest

from dcr.modelcheck.manifest import load_manifest
from dcr.modelcheck.model_run import check_sources
from dcr.modelcheck.static_check import check_module

MARK = re.compile(r"\\\* (refused|type|action)$")


def marked(path):
    lines = path.read_text().splitlines()
    return {(number, mark[1]) for number, line in enumerate(lines, 1) if (mark := MARK.search(line))}


@pytest.mark.parametrize(
    ("name", "rule", "count"), [("Refused", "refused", 25), ("Untyped", "type", 7), ("Unnamed", "action", 6)]
)
def test_each_marked_line_is_found(specs, name, rule, count):
    path = specs / "bad" / f"{name}.tla"
    expected = marked(path)
    assert {kind for _, kind in expected} == {rule}
    assert len(expected) >= count
    found = {(finding.line, finding.rule) for finding in check_module(path)}
    # EXTENDS of a module that Apalache does not have is told at the head of the module.
    assert found == expected | ({(1, "refused")} if name == "Refused" else set())


def test_messages_say_what_and_where(specs):
    said = [str(finding) for finding in check_module(specs / "bad" / "Unnamed.tla")]
    assert "Unnamed.tla:23: action: a disjunct of Next is no named action: `UNCHANGED x`" in said
    assert "Unnamed.tla:27: action: a disjunct of Next, Nowhere, is defined nowhere" in said
    assert "Refused.tla:1: refused: EXTENDS Bags: a module that Apalache does not have" in [
        str(finding) for finding in check_module(specs / "bad" / "Refused.tla")
    ]


def test_what_is_no_tla_is_one_finding(specs):
    (finding,) = check_module(specs / "bad" / "Broken.tla")
    assert finding.rule == "source"


@pytest.mark.parametrize("name", ["Courier", "Values"])
def test_good_modules_pass(specs, name):
    assert check_module(specs / f"{name}.tla") == []


def test_a_module_for_tlc_alone_is_passed_over_only_by_name(specs):
    assert [finding.rule for finding in check_module(specs / "CourierLive.tla")] == ["refused"]
    assert check_sources(specs, load_manifest(specs)) == []


def test_the_specification_passes(pytestconfig):
    folder = pytestconfig.rootpath / "spec" / "tla"
    assert check_sources(folder, load_manifest(folder)) == []
