"""The harness put to the proof: it notices every bug that is built in on purpose, and nothing where there is none."""

import pytest

from dcr.chaos.bugs import BUGS, plant
from dcr.chaos.run import Run
from dcr.protocol.errors import RefusedError
from tests.faults.chaos_command import chaos


@pytest.mark.timeout(400)
def test_every_built_in_bug_is_noticed(tmp_path):
    status, report, said = chaos(tmp_path, "bugs", timeout_s=380)
    assert status == 0, said
    assert report["bugs"].keys() == BUGS.keys()
    for name, noticed in report["bugs"].items():
        assert any(n in noticed for n in BUGS[name].notices)


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_without_the_bug_there_is_nothing_to_notice(name, tmp_path):
    run = Run(BUGS[name].scenario, tmp_path / "run", print)
    run.run()
    assert run.checks.problems == []


def test_a_bug_that_is_none_is_named():
    with pytest.raises(RefusedError, match="no bug 'nope'; there are apply-twice"):
        plant("nope")
