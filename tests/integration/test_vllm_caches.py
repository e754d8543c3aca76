"""KV caches outside the engine, which hold what older weights computed: emptied, or the engine is refused."""

from types import MethodType, SimpleNamespace

import pytest
import vllm_support as support

from dcr.protocol.errors import RefusedError
from dcr.rollout.vllm.engine import CacheResetError, VllmEngine

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in support.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def config_of(connector):
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    transfer = connector and KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, nnodes=1, world_size=1, worker_extension_cls="x"),
        model_config=SimpleNamespace(model="x", skip_tokenizer_init=False, get_vocab_size=lambda: 256),
        weight_transfer_config=None,
        kv_transfer_config=transfer,
        ec_transfer_config=None,
    )


class Connector:
    """What an engine offloads KV blocks to."""

    def __init__(self, *, can=True):
        self.can, self.blocks = can, ["of older weights"]

    def reset_cache(self):
        if self.can:
            self.blocks.clear()
        return self.can


def engine_with(connector):
    """vLLM's own scheduler decides what a reset reaches; there is no model."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    cache = SimpleNamespace(reset_prefix_cache=lambda: True)
    scheduler = SimpleNamespace(kv_cache_manager=cache, connector=connector, aux_output_connector=None, log_stats=False)
    scheduler.reset_connector_cache = MethodType(Scheduler.reset_connector_cache, scheduler)
    core = SimpleNamespace(vllm_config=config_of(None), reset_encoder_cache=lambda: None)
    llm = SimpleNamespace(llm_engine=core, reset_prefix_cache=MethodType(Scheduler.reset_prefix_cache, scheduler))
    return VllmEngine(llm, name="a")


def test_blocks_that_were_offloaded_do_not_outlive_a_refit():
    connector = Connector()
    engine = engine_with(connector)
    engine.reset_caches()
    assert connector.blocks == []
    engine.shutdown()
    engine_with(None).reset_caches()


def test_an_engine_that_cannot_empty_them_does_not_serve():
    with pytest.raises(CacheResetError, match="engine a: vLLM could not reset its prefix cache"):
        engine_with(Connector(can=False)).reset_caches()


@pytest.mark.parametrize("connector", ["ExampleConnector", "NixlConnector", "MultiConnector"])
def test_a_connector_that_cannot_be_emptied_is_refused_before_anything_is_served(connector):
    """vLLM takes it for emptied: ``reset_cache`` of the base class says nothing, and does nothing."""
    core = SimpleNamespace(vllm_config=config_of(connector))
    with pytest.raises(RefusedError, match=f"engine a: its KV connector {connector} keeps what older weights computed"):
        VllmEngine(SimpleNamespace(llm_engine=core), name="a")


@pytest.mark.parametrize("connector", ["OffloadingConnector", None])
def test_others_are_not(connector):
    core = SimpleNamespace(vllm_config=config_of(connector))
    VllmEngine(SimpleNamespace(llm_engine=core), name="a").shutdown()


@pytest.mark.parametrize("connector", ["ECExampleConnector", "ECCPUConnector", "ECMooncakeConnector"])
def test_encoder_outputs_kept_outside_the_engine_are_refused(connector):
    """They are found by the input alone, whichever weights encoded it, and no reset of vLLM's reaches them."""
    from vllm.config import ECTransferConfig  # noqa: PLC0415
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase  # noqa: PLC0415

    config = config_of(None)
    config.ec_transfer_config = ECTransferConfig(ec_connector=connector, ec_role="ec_both")
    with pytest.raises(RefusedError, match=f"engine a: its encoder-cache connector {connector} keeps what older"):
        VllmEngine(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)), name="a")
    assert not [name for name in dir(ECConnectorBase) if "reset" in name]


def test_a_reset_of_encoder_caches_leaves_what_a_connector_keeps(tmp_path):
    """vLLM's own scheduler and connector: why engines with one are refused."""
    from vllm.config import ECTransferConfig  # noqa: PLC0415
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole  # noqa: PLC0415
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415

    config = config_of(None)
    where = {"shared_storage_path": str(tmp_path)}
    config.ec_transfer_config = ECTransferConfig(
        ec_connector="ECExampleConnector", ec_role="ec_both", ec_connector_extra_config=where
    )
    connector = ECExampleConnector(config, ECConnectorRole.SCHEDULER)
    assert not connector.has_cache_item("image")
    (tmp_path / "image" / "encoder_cache.safetensors").touch()  # as older weights encoded it
    own = SimpleNamespace(reset=lambda: None)
    scheduler = SimpleNamespace(encoder_cache_manager=own, ec_connector=connector)
    MethodType(Scheduler.reset_encoder_cache, scheduler)()
    assert connector.has_cache_item("image")
