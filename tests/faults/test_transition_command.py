"""A transition that stopped waits for the operator, who ends the wait by `dcr transition`, wherever the leader is."""

import json
import re
import signal
import threading
import time
from contextlib import closing

import pytest

from dcr import PushError
from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.protocol.record import CommitRecord, OwnerRef, encode_record
from dcr.runtime.registry import register_leader
from dcr.runtime.roster import close_roster, register_roster
from dcr.runtime.settings import Settings
from dcr.runtime.terms import terms
from tests.faults.coordinator_process import Point
from tests.faults.thread_fleet import WAIT_S, flip, forge

WAITS = {"attempts_max": 1, "stopped_push": "wait"}


class Push:
    """A push in a thread of its own, as a trainer that waits."""

    def __init__(self, fleet):
        self._fleet = fleet
        self.report = self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.report = self._fleet.push()
        except PushError as e:
            self.error = str(e)

    @property
    def waits(self):
        return self._thread.is_alive()

    def end(self):
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


class Operator:
    def __init__(self, fleet, capsys):
        self._control = ["--control", fleet.addresses["control"], "--json"]
        self._capsys = capsys

    def __call__(self, what):
        """Exit status, and the object on the last line."""
        self._capsys.readouterr()
        status = main(["transition", what, *self._control])
        self.lines = self._capsys.readouterr().out.splitlines()
        said = json.loads(self.lines[-1])
        assert said["command"] == "transition"
        return status, said


@pytest.fixture(params=["trainer", "elsewhere"])
def fleet(request, fleet_of, fleet_with):
    return fleet_of(**WAITS) if request.param == "trainer" else fleet_with(WAITS)


def stopped(fleet, spoilt=-1):
    """A push whose one attempt failed: a stored payload has a flipped bit, the last one if the engine is to be torn."""
    e = fleet.engine("a")
    fleet.check(e)
    fleet.step()
    fleet.once("OpenApply", lambda step: forge(fleet.objects(step.epoch)[spoilt], flip))
    push = Push(fleet)
    fleet.wait(lambda: (tr := fleet.record().open) is not None and tr.stopped)
    return e, push


@pytest.mark.parametrize(("order", "kind"), [("resume", "absolute"), ("dense", "dense")])
def test_a_push_goes_on_as_the_operator_says(fleet, capsys, order, kind):
    operator = Operator(fleet, capsys)
    assert "transition" not in fleet.refit._under_way()
    e, push = stopped(fleet)
    fleet.wait(lambda: "transition" in fleet.refit._under_way())
    told = fleet.refit._under_way()["transition"].text()
    assert "rank-0, its push waits, at most 200 s in all: the transition to version 1 of record 'default'" in told
    assert re.search(r"has stopped after 1 attempt, for: .*does not match its own digest.*; an operator ends", told)
    assert "dcr transition show|resume|dense|abandon|roll-back --control ..." in told
    status, shown = operator("show")
    assert (status, shown["record"]["open"]["stopped"], shown["waiting"]) == (0, True, ["rank-0"])
    assert "does not match its own digest" in shown["failures"][0]
    assert "waits for the operator" in shown["waits_for"]
    (a,) = shown["standings"]
    assert (a["engine"], a["state"], shown["standings_left_out"]) == ("a", "gated", 0)
    assert re.fullmatch(
        r"holds version 0, torn by v1-\w{16}; epoch \d failed there: .*does not match its own digest.*", a["why"]
    )
    assert f"  gated     a: {a['why']}" in operator.lines
    assert e.node.version is None  # torn
    assert push.waits
    assert operator(order)[0] == 0
    push.end()
    assert push.report.kind == kind
    assert "transition" not in fleet.refit._under_way()
    fleet.check(e)
    for again in ("resume", "dense", "abandon", "roll-back"):
        status, said = operator(again)
        assert (status, said["refused"]) == (1, "no transition is open: version 1 is committed")
    fleet.step()
    assert fleet.push().kind == "relative"
    fleet.check(e)


@pytest.mark.parametrize(
    ("order", "told"),
    [("abandon", "was abandoned: on the operator's order"), ("roll-back", "was rolled back to version 0")],
)
def test_a_push_ends_as_the_operator_says(fleet, capsys, order, told):
    e, push = stopped(fleet)
    assert e.node.version is None  # torn
    operator = Operator(fleet, capsys)
    assert operator(order)[0] == 0
    assert operator.lines[0] == "before the order:"
    assert operator.lines[-2].startswith("ordered: ")
    push.end()
    assert told in push.error
    fleet.check(e)  # version 0
    fleet.push()
    fleet.check(e)


@pytest.mark.long
@pytest.mark.parametrize(("end", "told"), [("abandon", "was abandoned"), ("roll_back", "was rolled back")])
def test_the_trainer_ends_it_too(fleet, end, told):
    e, push = stopped(fleet)
    getattr(fleet.refit, end)()
    push.end()
    assert told in push.error
    fleet.check(e)
    getattr(fleet.refit, end)()  # nothing is open: nothing happens
    fleet.push(dense=True)
    fleet.check(e)


def test_what_makes_no_sense_is_refused_and_changes_nothing(fleet_of, capsys):
    fleet = fleet_of(attempts_max=1)
    operator = Operator(fleet, capsys)
    e = fleet.engine("a")
    fleet.check(e)
    answers = {}

    def while_under_way(step):
        for order in ("resume", "dense", "abandon"):
            answers[order] = operator(order)

    fleet.once("Prepare", while_under_way)  # on the engine's thread: the attempt waits for it
    fleet.step()
    fleet.once("OpenApply", lambda step: forge(fleet.objects(step.epoch)[-1], flip))
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.push()
    for status, said in answers.values():
        assert status == 1
        assert said["refused"].startswith("not stopped: the transition to version 1 is at its attempt 1;")
    status, said = operator("resume")
    assert (status, said["waiting"]) == (1, [])
    assert said["refused"].startswith("no push waits with the weights of version 1: call push() in the trainer")
    assert fleet.record().open.stopped
    assert operator("dense")[0] == 0  # of the next push
    assert fleet.push().kind == "dense"
    fleet.check(e)


def test_a_leader_that_takes_over_goes_on_waiting(fleet_with, capsys):
    fleet = fleet_with(WAITS)
    e, push = stopped(fleet)
    fleet.standby("another")
    fleet.coordinators[0].close()
    fleet.wait(lambda: fleet.record().leader.startswith("another"))
    operator = Operator(fleet, capsys)
    fleet.wait(lambda: operator("show")[1]["waiting"] == ["rank-0"])
    assert push.waits
    fleet.wait(lambda: operator("resume")[0] == 0)
    push.end()
    assert push.report.kind == "absolute"
    fleet.check(e)


@pytest.mark.long  # what of it is not the same for an end that is ordered, test_kept_order has
@pytest.mark.parametrize(("order", "kind"), [("resume", "absolute"), ("dense", "dense")])
def test_an_order_outlives_the_leader_that_dies_before_it_has_opened_an_attempt(fleet_with, capsys, order, kind):
    """It was killed when it was about to write; the operator says it once, answered or not."""
    fleet = fleet_with(WAITS, point=Point("before", "OpenAttempt", 2))
    e, push = stopped(fleet)
    fleet.standby("another")
    capsys.readouterr()
    assert main(["transition", order, "--control", fleet.addresses["control"], "--timeout-s", "10"]) in (0, 3)
    assert fleet.coordinators[0].wait_ended() == -signal.SIGKILL
    push.end()
    assert push.report.kind == kind
    fleet.check(e)
    assert fleet.record().leader.startswith("another-")
    fleet.coordinators[1].wait_said(f"goes on: an operator ordered {order} of the last leader")
    # It is obeyed once: what stops later waits for the operator anew.
    fleet.step()
    fleet.once("OpenApply", lambda step: forge(fleet.objects(step.epoch)[-1], flip))
    again = Push(fleet)
    fleet.wait(lambda: (tr := fleet.record().open) is not None and tr.stopped)
    assert fleet.refit._control.lookup("default", "operator", "order") is not None  # of the stop before
    stays(fleet)
    assert again.waits
    assert Operator(fleet, capsys)("abandon")[0] == 0
    again.end()


@pytest.mark.parametrize(
    ("order", "write", "told"),
    [
        ("abandon", Point("before", "Abandon"), "was abandoned: on the operator's order"),
        pytest.param(
            "roll-back", Point("before", "OpenAttempt", 2), "was rolled back to version 0", marks=pytest.mark.long
        ),
    ],
)
def test_an_end_outlives_the_leader_that_dies_before_it_has_written_it(fleet_with, capsys, order, write, told):
    """The next one ends the push, whoever was answered; the operator waits for the answer of one of the two."""
    fleet = fleet_with(WAITS, point=write)
    e, push = stopped(fleet)
    fleet.standby("another")
    assert Operator(fleet, capsys)(order)[0] == 0
    assert fleet.coordinators[0].wait_ended() == -signal.SIGKILL
    push.end()
    assert told in push.error
    fleet.coordinators[1].wait_said(f"is given up: an operator ordered {order} of the last leader")
    fleet.check(e)  # version 0
    fleet.push()
    fleet.check(e)


@pytest.mark.long
def test_a_rollback_that_came_in_an_attempt_outlives_its_leader_too(fleet_with, capsys):
    """What the next leader opens forward, before it has heard of the order, is not committed."""
    fleet = fleet_with(WAITS, point=Point("before", "OpenAttempt", 2))
    e = fleet.engine("a")
    fleet.check(e)
    fleet.standby("another")
    fleet.step()
    answers = []
    fleet.once("Prepare", lambda step: answers.append(Operator(fleet, capsys)("roll-back")[0]))
    push = Push(fleet)
    push.end()
    assert (answers, fleet.coordinators[0].wait_ended()) == ([0], -signal.SIGKILL)
    assert "was rolled back to version 0" in push.error
    assert fleet.record().version == 0
    fleet.check(e)
    fleet.push()
    fleet.check(e)


def stays(fleet):
    """Nothing is opened in what would be time for it."""
    epoch = fleet.record().epoch
    time.sleep(5 * fleet.addresses["settings"]["record_poll_s"])
    assert fleet.record().epoch == epoch


@pytest.mark.long
def test_an_order_that_comes_to_nothing_is_not_kept(fleet_with, capsys):
    """No engine comes within members_timeout_s; the next leader does not try it again."""
    fleet = fleet_with({**WAITS, "members_timeout_s": 1.0, "rejoin_timeout_s": 5.0})
    e, push = stopped(fleet)
    e.close()
    fleet.engines.clear()
    kept = lambda: fleet.refit._control.lookup("default", "operator", "order")  # noqa: E731
    assert Operator(fleet, capsys)("resume")[0] == 0
    assert kept() is not None
    fleet.wait(lambda: kept() is None)
    fleet.standby("another")
    fleet.coordinators[0].close()
    fleet.wait(lambda: fleet.record().leader.startswith("another"))
    fleet.wait(lambda: Operator(fleet, capsys)("show")[1]["waiting"] == ["rank-0"])
    stays(fleet)
    assert push.waits
    assert Operator(fleet, capsys)("abandon")[0] == 0
    push.end()


def shown(fleet, capsys, *more):
    """Exit status, and what `show` prints for people."""
    capsys.readouterr()
    status = main(["transition", "show", "--control", fleet.addresses["control"], *more])
    return status, capsys.readouterr().out.splitlines()


def test_after_a_take_over_it_shows_whom_the_next_attempt_waits_for_and_what_is_not_known(fleet_with, capsys):
    fleet = fleet_with({"rejoin_timeout_s": 60.0}, point=Point("step", "OrderOpenApply"))
    e = fleet.engine("a")
    fleet.check(e)
    fleet.standby("another")
    spoke = e.node._agents["a"]._spoke
    resolve, spoke._resolve = spoke._resolve, lambda: None  # it does not find the next leader
    fleet.step()
    push = Push(fleet)
    fleet.wait(lambda: fleet.record().leader.startswith("another"))
    waits = "  waits for a push waits; engines not connected again since the last leader: a"
    fleet.wait(lambda: waits in shown(fleet, capsys)[1])
    k = fleet.record()
    assert shown(fleet, capsys) == (
        0,
        [
            f"record default: version 0, epoch {k.epoch}, led by {k.leader}",
            "  open      to version 1, 1 attempt, the last one relative, none under way now",
            "  pushing   rank-0",
            waits,
            "  failed    an older attempt: the coordinator that led it is gone; its log has the reason",
            f"  away      a: it has not come back since {k.leader} leads",
        ],
    )
    spoke._resolve = resolve
    push.end()
    fleet.check(e)
    status, out = shown(fleet, capsys)
    assert (status, out[1:]) == (0, ["  open      no transition", "  pushing   nobody"])


@pytest.mark.long
def test_a_rollback_after_a_take_over_waits_for_the_engines_that_are_on_their_way(fleet_with, capsys):
    """None of them is left out of it, and none has to be restored."""
    fleet = fleet_with({"rejoin_timeout_s": 60.0}, point=Point("step", "OrderOpenApply"))
    engines = [fleet.engine("a"), fleet.engine("b")]
    for e in engines:
        fleet.check(e)
    fleet.standby("another")
    spoke = engines[1].node._agents["b"]._spoke
    resolve, spoke._resolve = spoke._resolve, lambda: None
    fleet.step()
    push = Push(fleet)
    waits = "  waits for a push waits; engines not connected again since the last leader: b"
    fleet.wait(lambda: fleet.record().leader.startswith("another") and waits in shown(fleet, capsys)[1])
    assert Operator(fleet, capsys)("roll-back")[0] == 0
    stays(fleet)
    spoke._resolve = resolve
    push.end()
    assert "was rolled back to version 0" in push.error
    assert [m.engine for m in fleet.record().committed.members] == ["a", "b"]
    for e in engines:
        fleet.check(e)
    assert "OpenRestore" not in {h.reason for h in fleet.history()}


def test_without_a_leader_it_shows_the_record_and_says_what_is_not_known(fleet_of, capsys):
    fleet = fleet_of(attempts_max=1)
    fleet.check(fleet.engine("a"))
    fleet.step()
    fleet.once("OpenApply", lambda step: forge(fleet.objects(step.epoch)[-1], flip))
    with pytest.raises(PushError, match="the transition stopped"):
        fleet.push()
    epoch = fleet.record().epoch
    leader = fleet.record().leader
    fleet.refit.close()
    began = time.monotonic()
    assert shown(fleet, capsys) == (
        3,
        [
            f"record default: version 0, epoch {epoch}, nobody leads",
            "  open      to version 1, 1 attempt, stopped",
            "  not known who pushes, what is waited for, why attempts failed, and who serves: only the leader knows",
        ],
    )
    assert main(["transition", "show", "--control", fleet.addresses["control"], "--json"]) == 3
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    for order in ("resume", "dense", "abandon", "roll-back"):
        assert main(["transition", order, "--control", fleet.addresses["control"]]) == 3
    assert time.monotonic() - began < 20  # none of six waits for 30 s, though the address of the leader is still there
    assert (said["ok"], said["leader"], said["record"]["open"]["stopped"]) == (False, "", True)
    assert said["error"].startswith(
        f"nobody leads record 'default': {leader}, the last leader that wrote it, holds no lease any more, and no "
        f"trainer asks for a coordinator; start the trainer again"
    )
    assert capsys.readouterr().err.count("nobody leads record 'default'") == 4
    fleet.restart_trainer()
    assert Operator(fleet, capsys)("show")[1]["leader"]


def test_a_coordinator_that_may_stand_by_is_waited_for(tmp_path, capsys):
    address = f"sqlite://{tmp_path}/record.db"
    with closing(open_control_plane(address)) as control:
        written(control)
        register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(), b"s" * 32, "default"))
    assert main(["transition", "show", "--control", address, "--timeout-s", "0.3"]) == 3
    assert (
        "no leader of record 'default' could be reached in 0.3 s: is its trainer running, or a dcr coordinator?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("what", ["show", "resume", "dense", "abandon", "roll-back"])
def test_a_record_that_does_not_exist_is_told_at_once(tmp_path, capsys, what):
    address = f"sqlite://{tmp_path}/record.db"
    with closing(open_control_plane(address)) as control:
        written(control)
        register_leader(control, "other", "127.0.0.1:1")  # as by a trainer that ended before it wrote any
    began = time.monotonic()
    assert main(["transition", what, "--control", address, "--record-id", "other", "--json"]) == 1
    assert time.monotonic() - began < 10  # of 30
    error = "there is no record 'other' at this address"
    said = capsys.readouterr()
    assert (said.out.splitlines()[0], said.err) == (error, "")
    assert json.loads(said.out.splitlines()[1])["error"] == error


def test_a_leader_that_has_not_made_its_record_yet_is_asked(tmp_path, capsys):
    address = f"sqlite://{tmp_path}/record.db"
    with closing(open_control_plane(address)) as control:
        control.acquire("default", "one", 300)
    assert main(["transition", "show", "--control", address, "--timeout-s", "0.3"]) == 3
    assert "one holds the lease, and is not reached" in capsys.readouterr().err


def written(control):
    k = encode_record(CommitRecord.create("default", "leader", "0" * 32))
    control.compare_and_set("default", None, k, operation_id="op", actor="leader", reason="test")


def test_a_trainer_that_was_closed_is_not_waited_for(tmp_path, capsys):
    address = f"sqlite://{tmp_path}/record.db"
    with closing(open_control_plane(address)) as control:
        asked = register_roster(control, "default", [OwnerRef("rank-0", 1)], terms(Settings(), b"s" * 32, "default"))
        written(control)
        close_roster(control, "default", asked)
    began = time.monotonic()
    assert main(["transition", "show", "--control", address]) == 3
    assert main(["verify", "--control", address]) == 3
    assert time.monotonic() - began < 18  # of 30 and of 20
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "record default: version 0, epoch 0, nobody leads"
    assert said.err.count("no leader of record 'default': the trainer was closed, and asks for none") == 2
