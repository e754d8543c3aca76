"""vLLM's own weight-transfer interface with the backend ``dcr``, against fresh engines that never were refitted."""

import tomllib
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
import vllm_support as support
from transformers import Qwen3MoeForCausalLM
from vllm_support import BATCH, TOKENS

from dcr.protocol.errors import RefusedError
from demo.vllm_twin import ENGINE_ARGUMENTS, greedy

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return support.write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "v0", 0)


@contextmanager
def started(checkpoint, **more):
    """A stock ``vllm.LLM`` that was given nothing of dcr but the name of a backend."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in support.ENVIRONMENT.items():
            patch.setenv(name, value)
            from vllm import LLM  # noqa: PLC0415

        arguments = {**ENGINE_ARGUMENTS, "worker_extension_cls": "door_extension.DoorExtension", **more}
        llm = LLM(model=str(checkpoint), weight_transfer_config={"backend": "dcr"}, **arguments)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def llm(checkpoint, twin):
    with started(checkpoint) as llm:
        yield llm


class Client:
    """vLLM's four calls, as a trainer's script makes them; can be told to lose or repeat one."""

    def __init__(self, llm):
        self._llm = llm
        self.updates = []
        self.before_update = lambda _: None

    def init_weight_transfer_engine(self, init_info):
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self):
        self._llm.start_weight_update()

    def update_weights(self, update_info):
        self.updates.append(update_info)
        self.before_update(update_info)
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self._llm.finish_weight_update(weight_version)
        assert self._llm.reset_prefix_cache()


@pytest.fixture
def client(llm):
    return Client(llm)


class Trainer:
    def __init__(self, checkpoint, run, client):
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: PLC0415

        from dcr.rollout.vllm.register import register  # noqa: PLC0415
        from dcr.trainer.torch.transfer import DcrTrainerInitInfo  # noqa: PLC0415

        register()
        register()
        self._run = run
        self.steps = 0
        self._model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self.payloads = run / "payloads"
        init = DcrTrainerInitInfo(self._model, f"file://{self.payloads}", rank=0)
        self.sender = WeightTransferTrainerFactory.trainer_init(init, client=client)

    def step(self):
        """Another random change, the same for every trainer; returns a checkpoint of what it came to."""
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        with torch.no_grad():
            for _, weight in sorted(self._model.named_parameters()):
                noise = 0.1 * torch.randn(weight.shape, generator=generator)
                where = torch.rand(weight.shape, generator=generator) < 0.3
                weight.add_(torch.where(where, noise, 0.0).to(weight.dtype))
        checkpoint = self._run / f"step{self.steps}"
        self._model.save_pretrained(checkpoint)
        return checkpoint


@pytest.fixture(scope="module")
def fresh(twin):
    """What a fresh engine on the checkpoint of so many steps holds and answers."""
    known = {}

    def fresh(trainer, checkpoint):
        if trainer.steps not in known:
            known[trainer.steps] = twin.ask(checkpoint, BATCH)
        return known[trainer.steps]

    return fresh


@pytest.fixture
def trainer(llm, client, checkpoint, tmp_path, fresh):
    """A trainer and an engine at the same version, whatever an earlier test left behind."""
    trainer = Trainer(checkpoint, tmp_path, client)
    trainer.sender._dense = True
    trainer.sender.send_weights()
    assert resident(llm) == fresh(trainer, checkpoint)["digests"]
    yield trainer
    trainer.sender.shutdown()


def resident(llm):
    (digests,) = llm.collective_rpc("dcr_resident_digests")
    return digests


def test_engine_follows_bit_for_bit_and_is_labelled(llm, trainer, fresh):
    said = []
    for _ in range(2):
        checkpoint = trainer.step()
        trainer.sender.send_weights()
        expected = fresh(trainer, checkpoint)
        assert resident(llm) == expected["digests"]
        assert greedy(llm, BATCH, TOKENS)["tokens"] == expected["tokens"]
        said.append(expected["tokens"])
        assert llm.get_weight_version() == str(trainer.sender.version)
    assert said[0] != said[1]
    assert trainer.sender.version == 3  # the fixture's was the first


def test_a_payload_that_went_bad_fails_by_name_and_the_next_is_dense(llm, client, trainer, fresh):
    def spoil(_):
        payload = max(trainer.payloads.rglob("*.payload"))  # of the newest epoch
        data = bytearray(payload.read_bytes())
        data[len(data) // 2] ^= 1
        payload.chmod(0o644)
        payload.write_bytes(data)

    from dcr.trainer.torch.transfer import SendError  # noqa: PLC0415

    before = resident(llm)
    trainer.step()
    client.before_update = spoil
    with pytest.raises(SendError, match=r"the next one is dense") as error:
        trainer.sender.send_weights()
    assert "failed here: CorruptPayloadError" in str(error.value)
    assert resident(llm) == before  # the only payload never was written
    client.before_update = lambda _: None
    checkpoint = trainer.step()
    trainer.sender.send_weights()
    assert client.updates[-1]["attempt"]["base"]["kind"] == "dense"
    assert resident(llm) == fresh(trainer, checkpoint)["digests"]


def test_what_is_fenced_foreign_or_incomplete_writes_nothing(llm, client, trainer, fresh):
    trainer.step()
    trainer.sender.send_weights()
    held = resident(llm)
    good = client.updates[-1]

    def refused(said, **changes):
        llm.start_weight_update()
        info = {**good, "attempt": {**good["attempt"], **changes}}
        with pytest.raises(Exception, match=said):
            llm.update_weights({"update_info": info})
        assert resident(llm) == held

    epoch = good["attempt"]["epoch"]
    refused("the fence is at", epoch=epoch - 1)
    refused("this engine obeys 'default'", record_id="other")
    refused("no attempt that this version of dcr can read", owners="rank-0")
    later = {"epoch": epoch + 1, "target": 4, "base": {**good["attempt"]["base"], "version": 3}}
    refused("a relative payload against version 3 was refused: storage holds version 2", **later)
    llm.start_weight_update()
    with pytest.raises(Exception, match="without an update that was applied whole"):
        llm.finish_weight_update("9")
    assert llm.get_weight_version() == "2"
    checkpoint = trainer.step()
    trainer.sender.send_weights()  # in the session that was left open
    assert resident(llm) == fresh(trainer, checkpoint)["digests"]


def test_a_finish_that_was_lost_leaves_storage_for_a_dense_attempt_only(llm, client, trainer, fresh, monkeypatch):
    from dcr.trainer.torch.transfer import SendError  # noqa: PLC0415

    trainer.step()

    def lost(_):
        raise TimeoutError("lost")

    monkeypatch.setattr(client, "finish_weight_update", lost)
    with pytest.raises(SendError, match="TimeoutError: lost"):
        trainer.sender.send_weights()
    monkeypatch.undo()
    trainer.sender._dense = False  # a caller that does not know better
    trainer.step()
    with pytest.raises(
        SendError, match=r"a relative payload against version 1 was refused: storage holds version 1, torn by"
    ):
        trainer.sender.send_weights()
    checkpoint = trainer.step()
    trainer.sender.send_weights()
    assert resident(llm) == fresh(trainer, checkpoint)["digests"]


def test_a_source_is_refused_and_the_entry_point_is_there(llm, client, trainer):
    from dcr.rollout.vllm.register import register  # noqa: PLC0415
    from dcr.trainer.torch.transfer import DcrTransferSender  # noqa: PLC0415

    with pytest.raises(RefusedError, match="leave source out"):
        DcrTransferSender.trainer_init(trainer.sender._init, client=client, source=[])
    project = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["dcr"].split(":")
    assert getattr(import_module(module), name) is register
    assert Path(import_module(module).__file__).is_relative_to(support.ROOT)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_ranks_follow_bit_for_bit_and_are_fenced_together(checkpoint, tmp_path, twin):
    from dcr.trainer.torch.transfer import SendError  # noqa: PLC0415

    with started(checkpoint, tensor_parallel_size=2) as llm:
        client = Client(llm)
        trainer = Trainer(checkpoint, tmp_path, client)

        def check(changed):
            expected = twin.ask(changed, BATCH, tensor_parallel_size=2)
            ranks = llm.collective_rpc("dcr_resident_digests")
            if ranks[1] is None:  # its answer to the call before that: vLLM reads one behind since a call failed
                ranks = llm.collective_rpc("dcr_resident_digests")
            held = {f"{rank}/{name}": digest for rank, digests in enumerate(ranks) for name, digest in digests.items()}
            assert held == expected["digests"]
            assert len({name.partition("/")[0] for name in held}) == 2
            assert greedy(llm, BATCH, TOKENS)["tokens"] == expected["tokens"]

        for _ in range(2):
            changed = trainer.step()
            trainer.sender.send_weights()
            check(changed)
        assert client.updates[-1]["attempt"]["base"]["kind"] == "relative"

        llm.collective_rpc("door_break", args=(1,))  # the last rank fails, and the first one must say so
        trainer.step()
        with pytest.raises(SendError, match=r"another rank failed: rank 1: broken by the test") as failed:
            trainer.sender.send_weights()
        assert "the next one is dense" in str(failed.value)
        with pytest.raises(
            Exception, match="broken by the test"
        ):  # the last rank's answer to the call before, left unread
            llm.collective_rpc("door_mend", args=(1,))
        changed = trainer.step()
        trainer.sender.send_weights()
        assert client.updates[-1]["attempt"]["base"]["kind"] == "dense"
        check(changed)
        trainer.sender.shutdown()
