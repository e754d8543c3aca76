"""A trainer and an engine whose record is in etcd: killed, restarted, and the lease lost and taken over."""

import pytest

from dcr import PushError, TrainerRefit
from dcr.cli.main import main
from dcr.control_plane.address import open_control_plane
from dcr.runtime.secret import create_secret
from tests.etcd_server import HINT, EtcdServer, etcd_binary
from tests.faults.thread_fleet import Fleet

pytestmark = pytest.mark.skipif(etcd_binary() is None, reason=HINT)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "etcd").mkdir()
    made = EtcdServer.started(tmp_path / "etcd")
    yield made
    made.kill()


@pytest.fixture
def fleet(tmp_path, server):
    create_secret(tmp_path / "run.secret")
    f = Fleet(tmp_path, control=f"{server.address}/dcr?secret={tmp_path / 'run.secret'}")
    yield f
    f.close()


def pushed(fleet, e):
    fleet.step()
    report = fleet.refit.push()
    fleet.version = report.version
    fleet.states[report.version] = fleet.state()
    fleet.check(e)
    return report


def test_a_fleet_on_etcd_goes_on_after_a_kill_of_etcd_and_a_leader_without_its_lease_says_so(fleet, server, capsys):
    e = fleet.engine("a")
    fleet.check(e)
    assert pushed(fleet, e).version == 1
    server.kill()
    server.start()
    assert pushed(fleet, e).version == 2

    plane = open_control_plane(fleet.addresses["control"])
    taken = plane.acquire("default", "somebody", 60, replaces=plane.leader("default").token)
    fleet.wait(lambda: any("leads no more" in text for text in [refused(fleet)]))
    fleet.check(e)  # what was committed is served on
    plane.release(taken)
    plane.close()

    fleet.refit.close()
    fleet.refit = TrainerRefit(fleet.policy, **fleet.addresses, observe=fleet.observe)
    assert pushed(fleet, e).version == 3

    control = ["--control", fleet.addresses["control"]]
    assert main(["record", "show", *control]) == 0
    shown = capsys.readouterr().out
    assert "record default: version 3," in shown
    assert "lease      leader-" in shown
    assert main(["record", "history", *control, "--commits", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("version ")[1].split(",")[0] for line in lines] == ["3", "2"]


def refused(fleet):
    fleet.step()
    with pytest.raises(
        PushError,
        match=r"another coordinator \(somebody\) leads record 'default'; if",
    ) as e:
        fleet.refit.push()
    return str(e.value)
