"""`dcr chaos` with coordinators that stand by, and with the record in a bucket: who dies, who goes on, who writes."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from dcr.chaos.journal import entries
from dcr.chaos.servers import missing
from dcr.control_plane.address import open_control_plane
from tests.faults.chaos_command import chaos
from tests.faults.conftest import SPEC

STALLED = """
name: one is held still, and then the other
deployment:
  trainer: {refits: 2}
  engines: 1
  coordinators: 2
faults:
  - {at: coordinator before CAS of Commit, do: stall, for_s: 6.0}
  - at: coordinator at OrderOpenApply in refit 2
"""

LEADER_KILLED = """
name: whoever leads is killed
deployment:
  trainer: {ranks: 2, refits: 3}
  control: CONTROL
  coordinators: 2
faults:
  - {at: "receiver[1] at BeginWrite in refit 2", who: coordinator}
  - at: coordinator between CAS sent and answered of Commit in refit 3
"""

BUCKET = """
name: the record is in a bucket
deployment:
  trainer: {refits: 4}
  control: s3
  transport: TRANSPORT
faults:
  - at: store before CAS of Commit in refit 2
  - at: store between CAS sent and answered of Commit in refit 3
  - {at: store before CAS of OpenAttempt in refit 4, do: partition, for_s: 1.0}
"""


def ran(tmp_path, scenario, *arguments, timeout_s=200):
    """The report of a scenario whose every check held."""
    (tmp_path / "s.yaml").write_text(scenario)
    status, report, said = chaos(tmp_path / "left", "run", tmp_path / "s.yaml", *arguments, timeout_s=timeout_s)
    assert status == 0, said
    (run,) = report["runs"]
    return run


@pytest.mark.timeout(200)
def test_a_stalled_leader_and_then_a_killed_one_are_replaced_and_the_trainer_goes_on(tmp_path):
    run = ran(tmp_path, STALLED, "--no-logs")
    assert (run["commits"], run["kills"], run["restarts"]) == (2, 1, 1)  # what starts again is the coordinator
    struck = [re.search(r"\((coordinator-\d)\)$", f["what"])[1] for f in run["faults"]]
    folder = Path(run["folder"])
    with closing(open_control_plane(f"sqlite://{folder}/record.db")) as plane:
        written = plane.history("default", 1000)[::-1]
    assert [h.reason for h in written].count("Commit") == 2
    # Who was to write the first commit did not: it was held still, and its lease was the other one's by then.
    first = next(h for h in written if h.reason == "Commit")
    assert not first.actor.startswith(struck[0])
    assert "leads now, with token" in (folder / f"{struck[0]}-1.log").read_text()
    assert [p.name for p in sorted(folder.glob("trainer-*.journal"))] == ["trainer-0-1.journal"]
    page = (folder / "timeline.html").read_text()
    assert all(f"<b>coordinator-{n}</b>" in page for n in (0, 1))
    assert f"({struck[0]})" in page
    assert {e.who for p in folder.glob("coordinator-*.journal") for e in entries(p) if e.what == "step"} == {
        "coordinator[0]",
        "coordinator[1]",
    }


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("control", ["sqlite", "etcd"])
def test_the_leader_of_the_moment_is_killed_and_the_logs_of_all_leaders_are_one_behaviour(tmp_path, control):
    if control == "etcd" and (lacks := missing(s3=False, etcd=True)):
        pytest.skip(lacks)
    run = ran(tmp_path, LEADER_KILLED.replace("CONTROL", control), "--spec", SPEC, timeout_s=380)
    assert (run["commits"], run["kills"], run["restarts"]) == (3, 2, 2)
    assert run["logs"].startswith("a behaviour of the specification")
    assert len(list((Path(run["folder"]) / "events").glob("coordinator-coordinator-*"))) >= 3  # each term has its own


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["file", "s3"])
def test_a_store_that_holds_the_record_is_killed_and_cut_off_around_its_writes(tmp_path, transport):
    if lacks := missing(s3=True, etcd=False):
        pytest.skip(lacks)
    run = ran(tmp_path, BUCKET.replace("TRANSPORT", transport), "--spec", SPEC, timeout_s=380)
    assert (run["commits"], run["kills"]) == (4, 2)
    assert run["logs"].startswith("a behaviour of the specification")
    assert json.loads((Path(run["folder"]) / "report.json").read_text())["deployment"].startswith(f"{transport} s3")
