"""An engine that looks elsewhere than where the owners deliver: told by name, at once, and the fleet goes on."""

import time

import pytest

from dcr import PushError, RolloutNode
from dcr.protocol.errors import DcrError
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.channel import Peer, Spoke
from dcr.runtime.offer import PushTimeoutError
from dcr.runtime.registry import leader_address
from dcr.runtime.serving_wait import NodeError
from tests.faults.models import Served
from tests.faults.test_transports import Relayed
from tests.faults.thread_fleet import Fleet


@pytest.fixture
def elsewhere(monkeypatch):
    """Nothing takes long to be seen on a local folder."""
    monkeypatch.setattr("dcr.runtime.meeting.PATIENCE_S", 0.5)
    monkeypatch.setattr("dcr.runtime.coordinator_host._SILENT_S", 1.0)

    def open_engine(fleet: Fleet, name: str, delivery: str):
        kept = fleet.addresses
        fleet.addresses = {**kept, "delivery": delivery}
        try:
            return fleet.engine(name)
        finally:
            fleet.addresses = kept

    return open_engine


def test_an_engine_with_another_address_holds_nobody_up_and_joins_once_both_agree(tmp_path, elsewhere, caplog):
    fleet = Fleet(tmp_path, {"prepare_timeout_s": 60.0, "restore_timeout_s": 60.0})
    try:
        right = fleet.engine("right")
        fleet.check(right)
        wrong = elsewhere(fleet, "wrong", f"file://{tmp_path}/elsewhere")
        fleet.wait(lambda: wrong.node.statuses["wrong"].reason.startswith("it does not ask to be let in: "))
        said = wrong.node.statuses["wrong"].reason
        assert f"the trainer delivers to file://{tmp_path}/payloads" in said
        assert f"this node looks in file://{tmp_path}/elsewhere" in said
        assert sum("does not ask to be let in" in line for line in caplog.messages) == 1
        fleet.wait(lambda: any("node wrong (incarnation" in line for line in caplog.messages))
        fleet.wait(lambda: fleet.refit.status.fleet.not_joined == ("wrong",))
        assert "connected, and not asking to be let in: wrong" in str(fleet.refit.status)
        with pytest.raises(NodeError, match="give both sides the same delivery"):
            wrong.node.wait_serving(0, 0.1)
        for _ in range(2):
            fleet.step()
            began = time.monotonic()
            assert fleet.push().members == ("right",)
            assert time.monotonic() - began < 50  # of 60
            fleet.check(right)
        fleet.refit.close()
        fleet.wait(lambda: not wrong.node._agents["wrong"]._spoke.connected)
        last = wrong.node.statuses["wrong"].last_error
        assert f"it does not ask to be let in: the trainer delivers to file://{tmp_path}/payloads" in last
        # The trainer moves to where the other one looks: now that one joins, and the first does not.
        fleet.addresses = {**fleet.addresses, "delivery": f"file://{tmp_path}/elsewhere"}
        fleet.restart_trainer()
        fleet.check(wrong)
        fleet.wait(lambda: right.node.statuses["right"].reason == "" and right.node.version == fleet.version)
        fleet.step()
        report = fleet.push()
        fleet.check(wrong)
        assert "wrong" in report.members
    finally:
        fleet.close()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"members_timeout_s": 1.0}, PushError), ({"push_timeout_s": 1.0}, PushTimeoutError)],
    ids=["no members", "no outcome"],
)
def test_a_push_without_engines_tells_of_those_that_are_there_and_take_no_part(tmp_path, elsewhere, settings, kind):
    fleet = Fleet(tmp_path, settings)
    try:
        wrong = elsewhere(fleet, "wrong", f"file://{tmp_path}/elsewhere")
        address = leader_address(fleet.refit._control, "default")
        stranger = Spoke(b"w" * 32, Peer("node", "stranger", 1), lambda _: None, resolve=lambda: address)
        fleet.wait(lambda: wrong.node.statuses["wrong"].reason.startswith("it does not ask to be let in: "))
        fleet.wait(lambda: "stranger" in stranger_seen(fleet))
        with pytest.raises(DcrError) as raised:
            fleet.refit.push()
        stranger.close()
        assert type(raised.value) is kind
        said = str(raised.value)
        assert "connected, and not asking to be let in: wrong (its log says why)" in said
        assert "127.0.0.1: 'node stranger' left at the proof of the secret" in said
    finally:
        fleet.close()


def stranger_seen(fleet: Fleet) -> str:
    assert fleet.refit.status.fleet is not None
    return str(fleet.refit.status.fleet.refused)


def test_a_relay_and_a_folder_are_told_apart(tmp_path, elsewhere):
    fleet = Relayed(tmp_path, {}, "heartbeat_s=0.5&peer_timeout_s=8")
    try:
        one = fleet.engine("one")
        fleet.check(one)
        model = Served()
        model.load_weights(fleet.states[0].items())
        engine = TorchEngine(model, name="wrong", checkpoint=fleet.checkpoint)
        wrong = RolloutNode(engine, **{**fleet.addresses, "delivery": f"file://{tmp_path}/folder"})
        try:
            fleet.wait(lambda: "the trainer delivers to relay" in wrong.statuses["wrong"].reason)
        finally:
            wrong.close()
        fleet.step()
        assert fleet.push().members == ("one",)
        fleet.check(one)
    finally:
        fleet.close()


def test_a_node_that_starts_first_is_not_told_of_a_trainer_that_is_gone(tmp_path, elsewhere):
    fleet = Fleet(tmp_path, {"record_poll_s": 0.1})
    try:
        fleet.refit.close()
        engine = elsewhere(fleet, "a", f"file://{tmp_path}/new")
        fleet.wait(lambda: "no coordinator reached" in engine.node.statuses["a"].reason)
        time.sleep(0.7)  # it has no more patience with what cannot be seen, and still
        assert "no coordinator reached" in engine.node.statuses["a"].reason
        fleet.addresses = {**fleet.addresses, "delivery": f"file://{tmp_path}/new"}
        fleet.restart_trainer()
        fleet.check(engine)
    finally:
        fleet.close()
