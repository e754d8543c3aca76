"""Nodes of several engines and engines of several ranks, with real trainers, stores and shared memory."""

import threading
import time
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dcr import PushError, RolloutNode, TrainerRefit
from dcr.data_plane.placement.placement import Placement
from dcr.protocol.errors import RefusedError
from dcr.protocol.messages import OpenApply
from dcr.protocol.receiver import PrepareRank
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.gate import Gate
from dcr.rollout.tied import tied_names
from dcr.rollout.torch.engine import TorchEngine
from dcr.runtime.rank_host import RankHost
from dcr.runtime.rank_messages import Answer, decode_request, encode
from dcr.runtime.ranks import RankLostError
from dcr.runtime.serving_wait import NodeError
from tests.faults.models import BF16, Policy, Served, stored_bits
from tests.faults.thread_fleet import WAIT_S, unsealed

ROWS = {"embed": 64, "q": 24, "k": 12, "gate": 40, "up": 40}


class Shard(nn.Module):
    """One of two ranks: half of the rows of every matrix; ``scale`` is the second rank's alone."""

    def __init__(self, rank, lacks=()):
        super().__init__()
        self._rank, self._lacks, self.mood = rank, lacks, []
        for name, rows in ROWS.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(rows // 2, 24, dtype=BF16), requires_grad=False))
        if rank == 1:
            self.scale = nn.Parameter(torch.zeros(24), requires_grad=False)

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if name in self._lacks or (name == "scale" and self._rank == 0):
                continue
            if self.mood:
                raise self.mood.pop()
            if name == "scale":
                self.scale.data.copy_(tensor)
            else:
                half = ROWS[name] // 2
                getattr(self, name).data.copy_(tensor.narrow(0, half * self._rank, half))
            loaded.add(name)
        return loaded


LEARNED = partial(Placement, sharded=True)


class Moody(Placement):
    """Learned placement that fails where the shard's loader would: boxes do not call it."""

    def __init__(self, shard, load_weights, specs):
        super().__init__(shard, load_weights, specs, sharded=True)
        self._shard = shard

    def apply(self, items):
        if self._shard.mood:
            raise self._shard.mood.pop()
        return super().apply(items)


class Sharded:
    """An engine of two ranks in this process."""

    def __init__(self, fleet, name, lacks=(), way=LEARNED, incarnation=100):
        self.name = name
        self.ranks = ("0", "1")
        self.shards = [Shard(rank, lacks) for rank in range(2)]
        self.checkpoint = fleet.checkpoint
        for shard in self.shards:
            shard.load_weights(fleet.states[0].items())
        self._hosts = [
            RankHost(
                lambda specs, shard=shard: way(shard, shard.load_weights, specs),
                state_incarnation=incarnation + rank,
                observe=fleet.observe,
                tied=lambda skipped, loaded, shard=shard: tied_names(shard, skipped, loaded),
            )
            for rank, shard in enumerate(self.shards)
        ]
        self.runtime = self
        self.gate = Gate(name, 0.05)
        self.close_gate, self.open_gate = self.gate.close, self.gate.open
        self.hurt = lambda _request: None

    def checkpoint_tensors(self):
        return read_checkpoint(self.checkpoint)

    def call_ranks(self, request):
        self.hurt(request)
        with torch.no_grad():
            return [host.call(request) for host in self._hosts]

    def reset_caches(self):
        pass

    def bits(self):
        return [stored_bits(shard) for shard in self.shards]


def fresh(fleet, version, lacks=()):
    """Shards that loaded the version densely, and nothing else."""
    shards = [Shard(rank, lacks) for rank in range(2)]
    for shard in shards:
        shard.load_weights(fleet.states[version].items())
    return [stored_bits(shard) for shard in shards]


def single(fleet, name):
    model = Served()
    model.load_weights(fleet.states[0].items())
    return TorchEngine(model, name=name, checkpoint=fleet.checkpoint, observe=fleet.observe, gate_wait_s=0.05)


def served(fleet, version):
    model = Served()
    model.load_weights(fleet.states[version].items())
    return stored_bits(model)


@pytest.mark.parametrize("gate_mode", ["sync", "async"])
def test_a_node_receives_once_for_all_ranks_of_all_its_engines(fleet_of, node_of, gate_mode):
    fleet = fleet_of(gate_mode=gate_mode)
    sharded, one, two = Sharded(fleet, "sharded"), single(fleet, "one"), single(fleet, "two")
    node = node_of(fleet, [sharded, one, two])
    assert node.wait_serving(0, WAIT_S) == 0
    assert node.incarnations["sharded"] == 101
    for version in (1, 2):
        before = node.received
        fleet.step()
        report = fleet.push()
        assert sorted(report.members) == ["one", "sharded", "two"]
        assert node.wait_serving(version, WAIT_S) == version
        assert node.versions == {"sharded": version, "one": version, "two": version}
        assert sharded.bits() == fresh(fleet, version)
        assert stored_bits(one.model) == stored_bits(two.model) == served(fleet, version)
        sent = [*fleet.objects(fleet.record().committed.epoch), fleet.manifest(fleet.record().committed.epoch)]
        assert len(sent) >= 4
        assert node.received == (before[0] + len(sent), before[1] + sum(len(unsealed(p)) for p in sent))
    folder = node._reception._memory.folder
    fleet.wait(lambda: list(folder.iterdir()) == [])
    node.close()
    assert not folder.exists()


def test_engines_of_a_node_catch_up_by_payloads_that_the_node_receives_once(fleet_of, node_of):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    for _ in range(2):
        fleet.step()
        fleet.push()
    sharded, one = Sharded(fleet, "sharded"), single(fleet, "one")
    node = node_of(fleet, [sharded, one])
    assert node.wait_serving(2, WAIT_S) == 2
    assert sharded.bits() == fresh(fleet, 2)
    assert stored_bits(one.model) == served(fleet, 2)
    assert not any(s.action == "OpenRestore" for s in fleet.steps)
    sent = [p for s in fleet.steps if s.action == "Commit" for p in (*fleet.objects(s.epoch), fleet.manifest(s.epoch))]
    assert node.received == (len(sent), sum(len(unsealed(p)) for p in sent))
    folder = node._reception._memory.folder
    fleet.wait(lambda: list(folder.iterdir()) == [])


def test_a_rank_that_fails_while_its_engine_catches_up_has_it_restored(fleet_of, node_of, caplog):
    fleet = fleet_of()
    fleet.check(fleet.engine("a"))
    for _ in range(2):
        fleet.step()
        fleet.push()
    sharded = Sharded(fleet, "sharded", way=Moody)
    fleet.once("EndWrite", lambda _: sharded.shards[1].mood.append(ValueError("out of luck")))
    node = node_of(fleet, [sharded])
    assert node.wait_serving(2, WAIT_S) == 2
    assert sharded.bits() == fresh(fleet, 2)
    assert "engine sharded could not catch up, so it is restored: rank 1: payload rank-0/0" in caplog.text
    assert [s.action for s in fleet.steps].count("OpenRestore") == 1


def test_a_rank_that_fails_fails_its_engine_by_name_and_a_retry_repairs_it(fleet_of, node_of):
    fleet = fleet_of()
    sharded, one = Sharded(fleet, "sharded", way=Moody), single(fleet, "one")
    node = node_of(fleet, [sharded, one])
    node.wait_serving(0, WAIT_S)
    sharded.shards[1].mood.append(ValueError("out of luck"))
    fleet.step()
    report = fleet.push()
    assert any("sharded rank 1: payload rank-0/0" in f and "out of luck" in f for f in report.failures)
    assert sorted(report.members) == ["one", "sharded"]
    node.wait_serving(1, WAIT_S)
    assert sharded.bits() == fresh(fleet, 1)
    assert stored_bits(one.model) == served(fleet, 1)


@pytest.mark.parametrize("kind", [PrepareRank, OpenApply])
def test_a_rank_that_refuses_an_order_fails_the_attempt_at_once(fleet_of, node_of, kind):
    """The leader would else wait until ``prepare_timeout_s`` or ``ack_timeout_s`` is over."""
    fleet = fleet_of(prepare_timeout_s=4 * WAIT_S, ack_timeout_s=4 * WAIT_S, push_timeout_s=9 * WAIT_S)
    sharded = Sharded(fleet, "sharded")
    node = node_of(fleet, [sharded])
    node.wait_serving(0, WAIT_S)
    whole, refused = sharded.call_ranks, []

    def call(request):
        first, second = whole(request)
        if isinstance(decode_request(request), kind) and not refused:
            refused.append(kind)
            second = encode(Answer((), sharded._hosts[1]._state, refused="RefusedError: not in the mood"))
        return [first, second]

    sharded.call_ranks = call
    fleet.step()
    started = time.monotonic()
    report = fleet.push()
    assert time.monotonic() - started < 3 * WAIT_S
    assert refused
    assert any("rank 1: RefusedError: not in the mood" in f for f in report.failures)
    assert node.wait_serving(1, WAIT_S) == 1
    assert sharded.bits() == fresh(fleet, 1)


def lose(engine, how):
    """From now on the engine's ranks cannot be reached, or one of them answers that it is broken."""

    def hurt(_request):
        raise RankLostError("two ranks did not answer within 5 s")

    if how == "silent":
        engine.hurt = hurt
    else:
        whole = engine.call_ranks
        state = encode(Answer((), engine._hosts[1]._state, broken="MemoryError: none left"))
        engine.call_ranks = lambda request: [whole(request)[0], state]


@pytest.mark.parametrize("how", ["silent", "broken"])
def test_an_engine_that_loses_a_rank_is_out_and_the_others_of_its_node_go_on(fleet_of, node_of, how):
    fleet = fleet_of()
    sharded, one = Sharded(fleet, "sharded"), single(fleet, "one")
    node = node_of(fleet, [sharded, one])
    node.wait_serving(0, WAIT_S)
    fleet.once("BeginWrite", lambda _: lose(sharded, how))
    fleet.step()
    report = fleet.push()
    assert list(report.members) == ["one"]
    assert any("sharded was lost" in f for f in report.failures)
    assert node.wait_serving(1, WAIT_S, engine="one") == 1
    assert stored_bits(one.model) == served(fleet, 1)
    fleet.wait(lambda: "sharded" in node.failures)
    what = {"silent": "two ranks did not answer within 5 s", "broken": "rank 1 failed: MemoryError: none left"}[how]
    assert what in node.failures["sharded"]
    assert (node.versions, sharded.gate.version) == ({"sharded": node.versions["sharded"], "one": 1}, None)
    with pytest.raises(NodeError, match=r"engine sharded: lost with a rank of it: .*start the engine anew"):
        node.wait_serving(1, WAIT_S, engine="sharded")
    assert node.version is None
    fleet.step()
    fleet.push()
    assert node.wait_serving(2, WAIT_S, engine="one") == 2
    assert stored_bits(one.model) == served(fleet, 2)

    again = Sharded(fleet, "sharded", incarnation=200)
    other = node_of(fleet, again)
    assert other.wait_serving(2, WAIT_S) == 2
    assert again.bits() == fresh(fleet, 2)


def test_a_slow_engine_holds_up_no_other_beyond_its_time(fleet_of, node_of):
    """It is evicted by name after ``ack_timeout_s``, although one shared object is all that there is room for."""
    fleet = fleet_of(ack_timeout_s=3.0, receive_bytes_max=2500, prepare_timeout_s=3.0, delivery_timeout_s=0.5)
    sharded, one = Sharded(fleet, "sharded"), single(fleet, "one")
    node = node_of(fleet, [sharded, one])
    node.wait_serving(0, WAIT_S)
    go = threading.Event()
    fleet.once("OpenApply", lambda _: setattr(sharded, "hurt", lambda _request: go.wait(WAIT_S)))
    fleet.step()
    started = time.monotonic()
    report = fleet.push()
    assert time.monotonic() - started < WAIT_S
    assert list(report.members) == ["one"]
    assert node.wait_serving(1, WAIT_S, engine="one") == 1
    assert stored_bits(one.model) == served(fleet, 1)
    go.set()
    sharded.hurt = lambda _request: None
    assert node.wait_serving(1, 2 * WAIT_S) == 1
    assert sharded.bits() == fresh(fleet, 1)


def test_a_tensor_that_no_rank_holds_may_not_change(fleet_of, node_of):
    fleet = fleet_of(attempts_max=2)
    sharded = Sharded(fleet, "sharded", lacks=("k", "up"))
    node = node_of(fleet, [sharded])
    node.wait_serving(0, WAIT_S)
    fleet.policy.step(1)
    with pytest.raises(PushError, match=r"sharded rank 0: tensor '(k|up)' (and 1 more )?has changed, but no rank"):
        fleet.refit.push()
    fleet.refit.abandon()
    with torch.no_grad():
        for name in ("k", "up"):
            fleet.policy.state_dict()[name].copy_(fleet.states[0][name])
    fleet.push()
    assert node.wait_serving(1, WAIT_S) == 1
    assert sharded.bits() == fresh(fleet, 1, ("k", "up"))


class Tied(nn.Module):
    """``head`` is ``embed`` by another name; the loader takes only the latter."""

    def __init__(self, sign=1):
        super().__init__()
        self._sign = sign  # -1: the loader computes what it writes, and there is no way back
        self.embed = nn.Parameter(torch.zeros(64, 24, dtype=BF16), requires_grad=False)
        self.head = self.embed
        self.alike = nn.Parameter(torch.zeros(64, 24, dtype=BF16), requires_grad=False)
        self.rows = nn.Parameter(self.embed.data[:32], requires_grad=False)

    def load_weights(self, weights):
        loaded = [(name, tensor) for name, tensor in weights if name == "embed"]
        for _, tensor in loaded:
            self.embed.data.copy_(tensor if self._sign == 1 else -tensor)
        return {name for name, _ in loaded}


def test_a_tied_name_is_known_by_its_memory_and_by_nothing_less():
    model = Tied()
    assert tied_names(model, ["head", "alike", "rows", "absent"], ["embed"]) == {"head": "embed"}
    assert tied_names(model, ["head"], []) == {}
    assert tied_names(model, ["head"], ["alike"]) == {}


@pytest.mark.parametrize("skipped", ["head", "alike"])
def test_a_tied_tensor_may_change_and_one_that_is_only_skipped_may_not(tmp_path, skipped):
    policy = nn.Module()
    policy.embed = nn.Parameter(torch.randn(64, 24).to(BF16), requires_grad=False)
    policy.register_parameter(skipped, nn.Parameter(policy.embed.detach().clone(), requires_grad=False))
    save_file({n: t.detach() for n, t in policy.state_dict().items()}, tmp_path / "model.safetensors")
    model = Tied()
    model.load_weights(read_checkpoint(tmp_path))
    addresses = {"control": f"sqlite://{tmp_path}/record.db", "delivery": f"file://{tmp_path}/payloads"}
    settings = {"attempts_max": 1, "push_timeout_s": 60.0}

    refit = TrainerRefit(policy, **addresses, settings=settings)
    node = RolloutNode(TorchEngine(model, name="a", checkpoint=tmp_path), **addresses, settings=settings)
    try:
        node.wait_serving(0, WAIT_S)
        policy.embed.add_(1)
        getattr(policy, skipped).add_(1)
        if skipped == "head":
            refit.push()
            assert node.wait_serving(1, WAIT_S) == 1
            assert torch.equal(model.embed.view(torch.int16), policy.embed.view(torch.int16))
            assert model.head is model.embed
        else:
            with pytest.raises(PushError, match="tensor 'alike' has changed, but no rank of this engine holds it"):
                refit.push()
    finally:
        node.close()
        refit.close()


@pytest.mark.parametrize("sign", [1, -1], ids=["box", "transforming"])
def test_tied_tensors_that_change_each_in_its_own_way_are_refused_by_name(tmp_path, sign):
    policy = nn.Module()
    policy.embed = nn.Parameter(torch.randn(64, 24).to(BF16), requires_grad=False)
    policy.head = nn.Parameter(policy.embed.detach().clone(), requires_grad=False)
    save_file({n: t.detach() for n, t in policy.state_dict().items()}, tmp_path / "model.safetensors")
    model = Tied(sign)
    model.load_weights(read_checkpoint(tmp_path))
    addresses = {"control": f"sqlite://{tmp_path}/record.db", "delivery": f"file://{tmp_path}/payloads"}
    # Payloads so small that the same change of both tensors is cut at other places.
    settings = {"attempts_max": 1, "push_timeout_s": 60.0, "bucket_bytes": 900}
    refit = TrainerRefit(policy, **addresses, settings=settings)
    node = RolloutNode(TorchEngine(model, name="a", checkpoint=tmp_path), **addresses, settings=settings)
    try:
        node.wait_serving(0, WAIT_S)
        with torch.no_grad():
            policy.embed[::2].add_(1)
            policy.head[::2].add_(1)
        refit.push()  # the same change under both names
        assert node.wait_serving(1, WAIT_S) == 1
        held = model.embed.detach() * sign
        assert torch.equal(held.view(torch.int16), policy.embed.view(torch.int16))
        with torch.no_grad():
            policy.embed[3].add_(1)
            policy.head[3].add_(2)
        with pytest.raises(PushError, match=r"head shares its memory with embed here, .* changed in different ways"):
            refit.push()
        assert node.version is None
    finally:
        node.close()
        refit.close()


def test_engines_of_one_node_need_names_of_their_own(fleet_of):
    fleet = fleet_of()
    with pytest.raises(RefusedError, match=r"each with a name of its own, not \['a', 'a'\]"):
        RolloutNode([single(fleet, "a"), single(fleet, "a")], **fleet.addresses)
    with pytest.raises(RefusedError, match="one engine or several"):
        RolloutNode([], **fleet.addresses)


def test_ranks_decode_and_hold_only_what_is_theirs(fleet_of, node_of):
    """The second rank alone holds ``scale``: the first one takes the attempt without it."""
    fleet = fleet_of()
    sharded = Sharded(fleet, "sharded")
    node = node_of(fleet, sharded)
    node.wait_serving(0, WAIT_S)
    with torch.no_grad():
        fleet.policy.scale.add_(1)
    fleet.push()
    node.wait_serving(1, WAIT_S)
    assert sharded.bits() == fresh(fleet, 1)
    assert sharded.bits() != fresh(fleet, 0)
    assert Policy().scale.shape == (24,)
