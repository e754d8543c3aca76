"""Storage is read back before a request sees it: at the start, after a restore or, if asked, a refit, and on demand."""

import pytest
import torch

from dcr import RolloutNode
from dcr.data_plane.item import TensorSpec
from dcr.protocol.errors import RefusedError
from dcr.runtime.contents import ReadbackError
from dcr.runtime.rank_messages import Learn, decode_request
from dcr.runtime.serving_wait import NodeError
from tests.faults.test_node_ranks import ROWS, Sharded, fresh, single
from tests.faults.thread_fleet import WAIT_S


def swap_halves(shard):
    """What a kernel's layout does to a fused weight: other places, same address, shape and set of values."""
    shard.gate.data.copy_(shard.gate.data.roll(10, 0))


def one_bit(shard):
    shard.up.data.view(torch.int16)[3, 4] ^= 1


def discard(shard):
    """What a runtime's sleep does to weights that it does not keep."""
    for parameter in shard.parameters():
        parameter.data.zero_()


HARM = {"gate": swap_halves, "up": one_bit, "embed": discard}


@pytest.mark.parametrize("named", HARM)
def test_an_engine_that_does_not_hold_its_checkpoint_is_refused_by_name_and_nothing_is_written(
    fleet_of, node_of, named
):
    fleet = fleet_of()
    sharded = Sharded(fleet, "sharded")
    HARM[named](sharded.shards[1])
    before = sharded.bits()
    with pytest.raises(
        ReadbackError, match=f"engine sharded does not hold what it was loaded from.*{named}: its bits.*restart"
    ):
        node_of(fleet, sharded)
    assert sharded.bits() == before
    assert sharded.gate.version is None


def test_two_ranks_are_read_back_at_every_version_and_cost_no_weights(fleet_of, node_of):
    fleet = fleet_of(readback="always")
    sharded = Sharded(fleet, "sharded")
    node = node_of(fleet, sharded)
    node.wait_serving(0, WAIT_S)
    for version in (1, 2):
        fleet.step()
        fleet.push()
        node.wait_serving(version, WAIT_S)
        report = node.readback(WAIT_S)["sharded"]
        assert (report.version, report.compared_with, report.unread) == (version, "record", {})
        assert report.tensors == len(ROWS) + 1
        assert report.elements == sum(t.numel() for t in fleet.states[0].values())
        assert sharded.bits() == fresh(fleet, version)


@pytest.mark.parametrize("named", HARM)
def test_an_engine_that_something_else_wrote_to_is_out_when_it_is_read_back(fleet_of, node_of, named):
    fleet = fleet_of()
    sharded, one = Sharded(fleet, "sharded"), single(fleet, "one")
    node = node_of(fleet, [sharded, one])
    node.wait_serving(0, WAIT_S)
    HARM[named](sharded.shards[0])
    with pytest.raises(ReadbackError, match="engine sharded does not hold version 0, and serves nothing: all 6"):
        node.readback(WAIT_S)
    fleet.wait(lambda: sharded.gate.version is None)
    assert "restart the engine" in node.failures["sharded"]
    with pytest.raises(NodeError, match="engine sharded: engine sharded does not hold version 0"):
        node.readback(WAIT_S)
    fleet.step()
    assert list(fleet.push().members) == ["one"]
    assert sharded.gate.version is None


class Unknown(Sharded):
    """Nothing tells what it was loaded from, so it is restored before it serves."""

    def checkpoint_tensors(self):
        return None


def specs_of(fleet):
    return [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in sorted(fleet.states[0].items())]


def harmed_once(sharded, when):
    """Another writer, at the first record that ``when`` picks: after everything was applied, before a request."""
    done = []

    def hurt(request):
        asked = decode_request(request)
        if not done and isinstance(asked, Learn) and when(asked.record):
            done.append(True)
            one_bit(sharded.shards[0])

    return hurt


@pytest.mark.parametrize("readback", ["start", "restore"])
def test_a_restored_engine_is_read_back_before_it_serves(fleet_of, readback):
    fleet = fleet_of(readback=readback)
    engine = Unknown(fleet, "sharded")
    discard(engine.shards[0])
    engine.hurt = harmed_once(engine, lambda record: bool(record.members))  # admitted: the restore is over
    node = RolloutNode(engine, **fleet.addresses, observe=fleet.observe, specs=specs_of(fleet))
    try:
        if readback == "start":  # the harm is real: without the readback it is served
            assert node.wait_serving(0, WAIT_S) == 0
            assert engine.bits() != fresh(fleet, 0)
            return
        with pytest.raises(NodeError, match="does not hold version 0, and serves nothing: all 6 canonical tensors"):
            node.wait_serving(0, WAIT_S)
        assert engine.gate.version is None
        assert not any(s.action == "OpenGate" for s in fleet.steps)
    finally:
        node.close()


def test_a_refitted_engine_is_read_back_if_asked(fleet_of, node_of):
    fleet = fleet_of(readback="always")
    sharded, one = Sharded(fleet, "sharded"), single(fleet, "one")
    node = node_of(fleet, [sharded, one])
    node.wait_serving(0, WAIT_S)
    sharded.hurt = harmed_once(sharded, lambda record: record.version == 1)
    fleet.step()
    assert sorted(fleet.push().members) == ["one", "sharded"]
    fleet.wait(lambda: "sharded" in node.failures)
    assert "does not hold version 1" in node.failures["sharded"]
    assert sharded.gate.version is None
    assert node.wait_serving(1, WAIT_S, engine="one") == 1
    # One of its tensors goes through the loader, and has no way back: the record's one digest tells nothing of it.
    report = node._agents["one"].readback(WAIT_S)
    assert (report.compared_with, list(report.unread)) == ("", ["scale"])


def test_an_engine_that_holds_no_version_is_not_compared_with_one(fleet_of):
    fleet = fleet_of(restore_timeout_s=0.2)
    engine = Unknown(fleet, "sharded")
    fleet.refit.close()
    node = RolloutNode(engine, **fleet.addresses, observe=fleet.observe, specs=specs_of(fleet))
    try:
        with pytest.raises(RefusedError, match="engine sharded holds no version now"):
            node.readback(WAIT_S)
        assert node.failures == {}
    finally:
        node.close()
