"""`dcr coordinator` as a user runs it: several of them, signals, trainers that come and go, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dcr import PushError, TrainerRefit
from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from tests.faults.models import Policy
from tests.faults.thread_fleet import Fleet

WAIT_S = 60.0


class Command:
    """One `dcr coordinator` in a process of its own."""

    def __init__(self, name, fleet, *more):
        self.log = fleet.folder / f"{name}.log"
        settings = fleet.folder / "settings.json"
        settings.write_text(json.dumps(fleet.addresses["settings"]))
        command = [sys.executable, "-m", "dcr.cli.main", "coordinator", "--name", name, "--json"]
        command += ["--control", fleet.addresses["control"], "--delivery", fleet.addresses["delivery"]]
        command += ["--settings", str(settings), *more]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def wait_said(self, text):
        deadline = time.monotonic() + WAIT_S
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, f"it did not say {text!r}:\n{self.log.read_text()}"
            time.sleep(0.02)

    def end(self, number=signal.SIGTERM):
        """Exit status, and the object on the last line."""
        if number:
            self.process.send_signal(number)
        status = self.process.wait(WAIT_S)
        return status, json.loads(self.log.read_text().splitlines()[-1])

    def close(self):
        self.process.kill()
        self.process.wait(WAIT_S)


class CommandFleet(Fleet):
    """A trainer without a coordinator of its own, and two commands."""

    def __init__(self, folder, names=("one", "two"), **settings):
        self.commands = []
        self._names = names
        super().__init__(folder, {"coordinator": "elsewhere", **settings})

    def start_trainer(self):
        if not self.commands:
            self.commands = [Command(name, self) for name in self._names]
        return super().start_trainer()

    def leading(self):
        name = self.refit._control.leader("default").holder.split("-")[0]
        return next(c for c in self.commands if c.log.name == f"{name}.log")

    def close(self):
        super().close()
        for c in self.commands:
            c.close()


def test_it_leads_and_a_signal_ends_it(tmp_path):
    fleet = CommandFleet(tmp_path, ["one"])
    try:
        fleet.check(fleet.engine("a"))
        fleet.step()
        fleet.push()
        held = fleet.leading().process
        held.send_signal(signal.SIGSTOP)  # shorter than the lease
        time.sleep(1.5)
        held.send_signal(signal.SIGCONT)
        fleet.step()
        fleet.push()
        assert fleet.leading().end() == (
            0,
            {"command": "coordinator", "ok": True, "name": "one", "terms": 1, "error": ""},
        )
        assert fleet.refit._control.leader("default") is None
    finally:
        fleet.close()


@pytest.mark.long
def test_a_leader_that_is_told_to_end_gives_the_lease_back_and_a_trainer_may_start_again(tmp_path):
    fleet = CommandFleet(tmp_path, leader_lease_s=3600.0)  # that nobody has the time to wait for
    try:
        e = fleet.engine("a")
        fleet.check(e)
        fleet.step()
        fleet.push()
        leader = fleet.leading()
        fleet.step()
        status, said = leader.end()
        assert (status, said["ok"], said["terms"]) == (0, True, 1)
        assert fleet.push().attempts == 1
        fleet.check(e)
        fleet.restart_trainer()
        fleet.step()
        fleet.push()
        fleet.check(e)
        other = next(c for c in fleet.commands if c is not leader)
        other.wait_said("leads no more: the trainer that it leads was")
        assert other.end(signal.SIGINT)[1]["terms"] == 2
        assert fleet.refit._control.leader("default") is None
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("coordinator", "said"),
    [("elsewhere", "which asks for a coordinator too"), ("trainer", "with a coordinator of its own")],
)
def test_a_trainer_that_is_replaced_is_told(fleet_with, coordinator, said):
    fleet = fleet_with()
    errors = []

    def push():
        with pytest.raises(PushError) as e:
            fleet.refit.push()
        errors.append(str(e.value))

    pushing = threading.Thread(target=push)
    pushing.start()  # it waits for an engine
    settings = {**fleet.addresses["settings"], "coordinator": coordinator}
    with TrainerRefit(Policy(1), **{**fleet.addresses, "settings": settings}):
        pushing.join(WAIT_S)
    (error,) = errors
    assert error.startswith(f"another trainer, {said}, was started on record 'default' after this one and takes its")


@pytest.mark.long
def test_a_leader_that_fails_by_itself_ends_and_gives_the_lease_back(tmp_path):
    control = open_control_plane(f"sqlite://{tmp_path}/record.db")
    control.compare_and_set("default", None, b"of another version", operation_id="x", actor="x", reason="x")
    fleet = CommandFleet(tmp_path, leader_lease_s=3600.0)
    try:
        with pytest.raises(PushError, match="the coordinator leads no more: record 'default', revision 1: these bytes"):
            fleet.refit.push()
        for command in fleet.commands:
            status, said = command.end(0)
            assert status == 1
            assert "no commit record that this version of dcr can read" in said["error"]
        assert control.leader("default") is None
    finally:
        fleet.close()
        control.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("leader_lease_s=0.1", "setting leader_lease_s: 0.1 must be from 1 to 3600"),
        ("leader_lease=5", "did you mean leader_lease_s?"),
        ("/nowhere.json", "--settings /nowhere.json: No such file or directory; give a file, or key=value"),
        (__file__, "no JSON"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path, capsys, settings, said):
    refused_beforehand(tmp_path, capsys, ["--settings", settings], said)


def test_an_empty_name_is_refused(tmp_path, capsys):
    refused_beforehand(tmp_path, capsys, ["--name", ""], "name must be 1 to 100 printable characters, not ''")


def refused_beforehand(tmp_path, capsys, given, said):
    places = ["--control", f"sqlite://{tmp_path}/record.db", "--delivery", f"file://{tmp_path}/payloads"]
    assert main(["coordinator", *places, *given]) == 3
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
