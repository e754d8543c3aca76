"""The harness put to the proof: it notices every bug that is built in on purpose, and nothing where there is none."""

import pytest

from dcr.chaos.bugs import BUGS, plant
from dcr.chaos.run import Run
from dcr.protocol.errors import RefusedError

NORMAL = ("apply-twice", "write-without-compare")
"""The others take longer."""


def problems(name, tmp_path, bug):
    run = Run(BUGS[name].scenario, tmp_path / "run", print, bug)
    run.run()
    return run.checks.problems


@pytest.mark.parametrize(
    "name", [name if name in NORMAL else pytest.param(name, marks=pytest.mark.long) for name in BUGS]
)
def test_a_built_in_bug_is_noticed(name, tmp_path):
    found = problems(name, tmp_path, name)
    assert any(BUGS[name].notices in p for p in found), found


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_without_the_bug_there_is_nothing_to_notice(name, tmp_path):
    assert problems(name, tmp_path, "") == []


def test_a_bug_that_is_none_is_named():
    with pytest.raises(RefusedError, match="no bug 'nope'; there are apply-twice"):
        plant("nope")
