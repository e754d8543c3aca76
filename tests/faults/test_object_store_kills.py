"""Over an object store, somebody is killed in the middle of a transfer: no half object, and a commit or a named end."""

import multiprocessing as mp
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dcr import PushError, RolloutNode, TrainerRefit
from dcr.delivery.address import open_delivery
from dcr.rollout.torch.engine import TorchEngine
from tests.faults.engine_process import EngineProcess
from tests.faults.models import dense
from tests.faults.thread_fleet import Fleet

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "dcr.trainer.torch.refit"])
WAIT_S = 60.0
BOUNDS = {
    "delivery_timeout_s": 45.0,
    "prepare_timeout_s": 60.0,
    "ack_timeout_s": 90.0,
    "fold_timeout_s": 60.0,
    "restore_timeout_s": 90.0,
    "owners_timeout_s": 5.0,
    "push_timeout_s": 250.0,
}


class Wide(nn.Module):
    """One tensor of random bits, which makes a payload of more than one part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        bits = torch.randint(-(2**15), 2**15, (1700, 1700), generator=torch.Generator().manual_seed(seed))
        self.w = nn.Parameter(bits.to(torch.int16).view(torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        with torch.no_grad():
            for name, weight in weights:
                assert name == "w"
                self.w.copy_(weight)
        return {"w"}

    @property
    def bits(self) -> torch.Tensor:
        return self.w.detach().view(torch.int16)


def _push(addresses, environment, pipe) -> None:
    """A trainer that pushes other weights as soon as it is told to."""
    os.environ.update(environment)
    policy = Wide(0)
    refit = TrainerRefit(policy, **addresses)
    pipe.send("made")
    pipe.recv()
    policy.load_state_dict(Wide(1).state_dict())
    refit.push()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_owner_killed_while_it_uploads_in_parts_leaves_nothing_to_be_seen(tmp_path, bucket, network, running_store):
    addresses = {
        "control": f"sqlite://{tmp_path}/record.db",
        "delivery": f"s3://{bucket}/p?endpoint={network.endpoint}&part_bytes=5242880&upload_age_max_s=1",
        "settings": {**BOUNDS, "bucket_bytes": 128 << 20, "record_poll_s": 0.1},
    }
    save_file(Wide(0).state_dict(), tmp_path / "model.safetensors")
    ours, theirs = _context.Pipe()
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    trainer = _context.Process(target=_push, args=(addresses, aws, theirs), daemon=True)
    trainer.start()
    assert ours.poll(WAIT_S)
    assert ours.recv() == "made"

    killed = threading.Event()

    def kill(request):
        if killed.is_set() or "partNumber=2" not in request.path:
            return False
        killed.set()
        os.kill(trainer.pid, signal.SIGKILL)
        return True

    network.once("reset", kill)
    served = Wide(7)
    served.load_weights(Wide(0).state_dict().items())
    engine = TorchEngine(served, name="a", checkpoint=tmp_path)
    node = RolloutNode(engine, **addresses)
    store = open_delivery(addresses["delivery"])
    try:
        node.wait_serving(0, WAIT_S)
        ours.send("push")
        trainer.join(WAIT_S)
        assert trainer.exitcode == -signal.SIGKILL
        assert any(r.path.endswith("?uploads") for r in network.seen("POST"))
        assert [key for key in store.keys("default/") if key.endswith(".payload")] == []
        assert torch.equal(served.bits, Wide(0).bits)

        def uploads():
            return running_store.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])

        assert len(uploads()) == 1
        time.sleep(1.1)  # until they are old enough to be swept
        policy = Wide(0)
        with TrainerRefit(policy, **addresses) as refit:
            for version, seed in ((1, 2), (2, 3)):
                policy.load_state_dict(Wide(seed).state_dict())
                assert refit.push().version == version
                assert node.wait_serving(version, WAIT_S) == version
                assert torch.equal(served.bits, Wide(seed).bits)
            deadline = time.monotonic() + WAIT_S
            while uploads():
                assert time.monotonic() < deadline, "the dead owner's parts are still there"
                time.sleep(0.05)
    finally:
        trainer.kill()
        store.close()
        node.close()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_killed_while_it_downloads_is_done_without_and_comes_back(tmp_path, bucket, network):
    fleet = Fleet(tmp_path, {**BOUNDS, "fetch_ahead": 1}, delivery=f"s3://{bucket}/p?endpoint={network.endpoint}")
    started = []
    try:
        survivor = fleet.engine("survivor")
        started.append(EngineProcess("victim", tmp_path, fleet.checkpoint, fleet.addresses))
        victim = started[0]
        assert victim.wait_serving(0) == 0
        fleet.check(survivor)
        killed = threading.Event()

        def kill(request):
            if killed.is_set() or request.method != "GET" or not request.key.endswith("2.payload"):
                return False
            killed.set()
            os.kill(victim.pid, signal.SIGKILL)
            return True

        network.slow_s = 0.2
        network.once("slow", kill)
        fleet.step()
        report = fleet.push()
        victim.wait_killed()
        assert report.members == ("survivor",)
        assert report.attempts == 2
        assert any("victim" in failure for failure in report.failures)
        fleet.check(survivor)
        started.append(EngineProcess("victim", tmp_path, fleet.checkpoint, fleet.addresses))
        assert started[1].wait_serving(1) == 1  # it loaded version 0, and caught up
        fleet.step()
        assert sorted(fleet.push().members) == ["survivor", "victim"]
        assert started[1].wait_serving(2) == 2
        assert started[1].call("bits") == dense(fleet.states[2])
        fleet.check(survivor)
    finally:
        for process in started:
            process.kill()
        fleet.close()


@pytest.mark.timeout(300)
def test_a_store_that_is_killed_and_stays_away_is_a_named_end_in_time_and_a_push_goes_on_when_it_is_back(
    tmp_path, bucket, running_store
):
    address = f"s3://{bucket}/p?endpoint={running_store.endpoint}&retry_timeout_s=2&connect_timeout_s=1"
    fleet = Fleet(tmp_path, {**BOUNDS, "attempts_max": 2}, delivery=address)
    try:
        engine = fleet.engine("a")
        fleet.check(engine)
        fleet.step()
        fleet.once("OpenAttempt", lambda _step: running_store.kill())
        began = time.monotonic()
        # Whichever side finds it first.
        named = r"delivery store s3://.*: (storing|reading) default/.*unreachable, after \d+ tries"
        with pytest.raises(PushError, match=named):
            fleet.push()
        assert time.monotonic() - began < 60
        assert engine.node.version is None or engine.node.version == 0
        running_store.start()
        report = fleet.push()  # the same weights again
        assert report.version == 1
        fleet.check(engine)
    finally:
        running_store.start()
        fleet.close()
