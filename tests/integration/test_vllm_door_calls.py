"""vLLM's own door, called in any order: the weight-transfer engine of one rank over a small model, without a worker."""

import time
from types import SimpleNamespace

import pytest
import torch
import vllm_support as support
from safetensors.torch import save_file

from dcr.protocol.errors import RefusedError
from tests.faults.models import Policy, Served, stored_bits

pytestmark = pytest.mark.vllm


def served():
    """The layout of a model without what no loader writes, which an engine of vLLM would be refused for."""
    model = Served()
    del model.table
    return model


def fresh(policy):
    """Of a model that was never refitted."""
    model = served()
    model.load_weights(policy.state_dict().items())
    return stored_bits(model)


class Door:
    """An engine that was loaded, and the client that a trainer is given; both are one."""

    def __init__(self, folder):
        from dcr.rollout.vllm.transfer import DcrTransferEngine  # noqa: PLC0415

        self.policy, self.model = Policy(), served()
        folder.mkdir()
        save_file({n: t.clone() for n, t in self.policy.state_dict().items()}, folder / "model.safetensors")
        self.model.load_weights(self.policy.state_dict().items())
        config = SimpleNamespace(
            load_config="auto",
            additional_config={},
            model_config=SimpleNamespace(model=str(folder), quantization=None),
            parallel_config=SimpleNamespace(rank=0, world_size=1, enable_expert_parallel=False),
            kv_transfer_config=None,
            ec_transfer_config=None,
        )
        self.engine = DcrTransferEngine(SimpleNamespace(), config, torch.device("cpu"), self.model)
        self.start_weight_update = self.engine.start_weight_update
        self.sent = {}

    def init_weight_transfer_engine(self, given):
        self.engine.init_transfer_engine(self.engine.init_info_cls(**given, delivery_timeout_s=60.0))

    def update_weights(self, update):
        self.sent = update
        self.engine.update_weights(update)

    def finish_weight_update(self, version=None):
        self.engine.finish_weight_update()


@pytest.fixture
def door(tmp_path, monkeypatch):
    for name, value in support.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return Door(tmp_path / "checkpoint")


@pytest.fixture
def sender_of(tmp_path):
    senders = []

    def make(door, set_only=("scale",)):
        from dcr.trainer.torch.transfer import DcrTrainerInitInfo, DcrTransferSender  # noqa: PLC0415

        init = DcrTrainerInitInfo(door.policy, f"file://{tmp_path}/payloads", rank=0, set_only=set_only)
        senders.append(DcrTransferSender.trainer_init(init, client=door))
        return senders[-1]

    yield make
    for sender in senders:
        sender.shutdown()


def test_an_update_that_is_sent_again_is_acknowledged_again(door, sender_of):
    """As a client does whose answer was lost: what storage holds already is said at once, and may be finished."""
    sender = sender_of(door)
    door.policy.step(1)
    sender.send_weights()
    expected = fresh(door.policy)
    assert stored_bits(door.model) == expected
    door.start_weight_update()
    started = time.monotonic()
    door.update_weights(door.sent)
    assert time.monotonic() - started < 30  # of 60
    door.finish_weight_update()
    assert stored_bits(door.model) == expected
    older = door.sent
    door.policy.step(2)
    sender.send_weights()
    with pytest.raises(RefusedError, match="the fence is at"):
        door.update_weights(older)
    assert stored_bits(door.model) == fresh(door.policy)


def test_another_attempt_of_the_same_epoch_is_refused(door, sender_of):
    sender = sender_of(door)
    door.policy.step(1)
    sender.send_weights()
    held = stored_bits(door.model)
    door.start_weight_update()
    with pytest.raises(RefusedError, match="two different prepare orders"):
        door.update_weights({**door.sent, "attempt": {**door.sent["attempt"], "target": 2}})
    with pytest.raises(RefusedError, match="without an update that was applied whole"):
        door.finish_weight_update()
    assert stored_bits(door.model) == held


def test_an_update_to_an_engine_that_was_not_initialised_is_refused_by_name(door, sender_of, tmp_path):
    with pytest.raises(RefusedError, match="name them in set_only"):
        sender_of(door, set_only=())
    sender = sender_of(Door(tmp_path / "other"), set_only=("scale",))
    held = stored_bits(door.model)
    attempt = sender._emit()
    update = {"delivery": sender._init.delivery, "attempt": attempt.plain()}
    for call in (door.start_weight_update, lambda: door.update_weights(update)):
        with pytest.raises(RefusedError, match="before init_weight_transfer_engine: call that first"):
            call()
    assert stored_bits(door.model) == held
