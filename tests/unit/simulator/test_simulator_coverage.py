"""The simulator counts the specification's actions: all of them, under their names."""

import re
import shlex
from pathlib import Path

from dcr.cli.main import parser
from dcr.simulator.coverage import SPEC_ACTIONS, SPECIAL_CASES, Coverage
from dcr.simulator.scenarios import SCENARIOS

ROOT = Path(__file__).parents[3]
TRACES = ROOT / "spec" / "tla" / "RefitTraces.tla"
PAGE = ROOT / "docs" / "simulator.md"


def test_the_actions_are_those_of_the_specification():
    named = re.findall(r"^(\w+)Step(?:\(.*\))? ==", TRACES.read_text(), re.MULTILINE)
    assert len(named) > 30
    assert sorted(SPEC_ACTIONS) == sorted(named)
    assert not {*SPEC_ACTIONS} & {*SPECIAL_CASES}


def test_what_no_seed_took_is_named():
    c = Coverage()
    c.add({"Commit", "Emit"})
    c.add({"Commit", "something else"})
    assert (c.seeds, dict(c.table())["Commit"], dict(c.table())["Emit"]) == (2, 2, 1)
    assert set(c.never) == {*SPEC_ACTIONS} - {"Commit", "Emit"}


def test_the_page_has_every_property_and_every_scenario():
    spec = (ROOT / "spec" / "tla" / "README.md").read_text()
    properties = re.findall(r"^\| `(\w+)` \| ", spec.partition("## Properties")[2].partition("##")[0], re.MULTILINE)
    assert "ServingExact" in properties
    assert "Converges" in properties
    page = PAGE.read_text()
    assert [p for p in properties if f"| `{p}` |" not in page] == []
    assert [s for s in SCENARIOS if f"| `{s}` |" not in page] == []


def test_every_command_of_the_page_is_one():
    commands = re.findall(r"^(dcr simulate[^\n]*?)(?:   .*)?$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        parser().parse_args(shlex.split(command)[1:])
