"""Engines of several ranks, refitted by a real trainer through real nodes, against engines that never were."""

import pytest
import torch
import vllm_support as support
from vllm_fleet import WAIT_S, Canonical, Fleet, check

from dcr import RolloutNode
from dcr.rollout.torch.engine import TorchEngine
from dcr.rollout.vllm.engine import EngineCallError, VllmEngine
from dcr.runtime.rank_messages import decode_answer
from demo.vllm_twin import ENGINE_ARGUMENTS
from tests.faults.models import stored_bits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TP2 = {"tensor_parallel_size": 2}
LAYOUTS = {
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe TP2 EP2": ("qwen3-moe", {**TP2, "enable_expert_parallel": True}),
    "qwen3-tied": ("qwen3-tied", {}),
    "qwen3-tied TP2": ("qwen3-tied", TP2),
    "qwen3-untied TP2": ("qwen3-untied", TP2),
    "qwen3-padded TP2": ("qwen3-padded", TP2),
    "nemotron-h": ("nemotron-h", {}),
    "nemotron-h TP2": ("nemotron-h", TP2),
    "nemotron-h 1 group": ("nemotron-h-1-group", {}),
    "nemotron-h 1 group TP2": ("nemotron-h-1-group", TP2),
    "nemotron-h MoE": ("nemotron-h-moe", {}),
}


@pytest.fixture
def fleet_of(tmp_path):
    fleets = []

    def make(*args, **kwargs):
        fleets.append(Fleet(tmp_path, *args, **kwargs))
        return fleets[0]

    yield make
    for fleet in fleets:
        fleet.close()


def refits(fleet, engine, twin, prompts=support.BATCH):
    """Two refits in a row that change all and some elements, and one to special values, of which no text is made."""
    engine.wait_serving(0)
    fleet.change(1.0)
    fleet.push()
    check(fleet, engine, twin, prompts)
    fleet.change_to_special()
    fleet.push()
    check(fleet, engine, twin, [])
    fleet.change(0.03)
    fleet.push()
    check(fleet, engine, twin, [])


def test_two_ranks_are_refitted_and_one_that_dies_takes_its_engine_with_it_and_nothing_else(fleet_of, twin):
    """Qwen3-MoE: two refits in a row, then a rank is killed in the middle of its writes."""
    fleet = fleet_of("qwen3-moe")
    engine = fleet.engine("vllm", kill_at=3, **TP2)
    torch_model = Canonical(fleet.checkpoint(0))
    torch_engine = TorchEngine(torch_model, name="torch", checkpoint=fleet.checkpoint(0))
    node = RolloutNode(torch_engine, **fleet.addresses)
    engine.wait_serving(0)
    node.wait_serving(0, WAIT_S)
    fleet.change(0.03)
    report = fleet.push()
    assert sorted(report.members) == ["torch", "vllm"]
    fleet.change(1.0)
    fleet.push()
    check(fleet, engine, twin)
    status = engine.ask("status")

    fleet.change(0.5)
    fleet.change_to_special()
    report = fleet.push()
    assert list(report.members) == ["torch"]
    assert any("vllm was lost" in failure for failure in report.failures)
    assert node.wait_serving(3, WAIT_S) == 3
    assert stored_bits(torch_model) == stored_bits(fleet.policy)
    lost = engine.ask("status")
    assert status["version"] == 2
    assert lost["version"] is None
    assert "lost with a rank of it" in lost["failure"]
    engine.kill()

    again = fleet.engine("vllm", **TP2)
    check(fleet, again, twin, [])  # text of special values is no text
    fleet.change(0.03)
    assert sorted(fleet.push().members) == ["torch", "vllm"]
    again.wait_serving(4)
    node.wait_serving(4, WAIT_S)
    again.close()
    node.close()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_equals_a_fresh_engine(fleet_of, twin, layout):
    model, arguments = LAYOUTS[layout]
    fleet = fleet_of(model)
    engine = fleet.engine("vllm", **arguments)
    # vLLM's Mamba layers fail on a CPU at a prompt of several chunks in a batch, refitted or not.
    refits(fleet, engine, twin, support.PROMPTS if "nemotron" in model else support.BATCH)
    engine.close()


@pytest.mark.long
def test_every_pipeline_stage_equals_a_fresh_engine(fleet_of, twin):
    """Bits alone: vLLM 0.32 loads and holds two stages on a CPU, but fails at the first request, refitted or not."""
    fleet = fleet_of("qwen3-moe")
    engine = fleet.engine("vllm", pipeline_parallel_size=2)
    refits(fleet, engine, twin, prompts=[])
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("held", ["bfloat16", "float32"])
def test_an_fp32_checkpoint(fleet_of, twin, held):
    """Held as it is, or narrowed by the loader."""
    fleet = fleet_of("qwen3-untied", torch.float32)
    engine = fleet.engine("vllm", dtype=held, **TP2)
    refits(fleet, engine, twin)
    engine.close()


def fail_on_the_first_rank(worker):
    """Run in a worker."""
    if worker.rank == 0:
        raise ValueError("not today")
    return "an answer that nobody fetches"


@pytest.mark.long
def test_answers_to_another_call_lose_the_engine(tmp_path, monkeypatch):
    """Of a call that fails on one rank vLLM 0.32 gives the other's answer to the next call, and so on for ever."""
    for name, value in support.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the test sends a function to the workers
    from vllm import LLM  # noqa: PLC0415

    checkpoint = support.write_checkpoint(tmp_path / "s0", 0, "qwen3-tied")
    llm = LLM(model=str(checkpoint), **{**ENGINE_ARGUMENTS, **TP2})
    engine = VllmEngine(llm, name="a", call_timeout_s=60)
    try:
        assert engine.ranks == ("0", "1")
        refused = [decode_answer(answer).refused for answer in engine.call_ranks(b"")]
        assert all("no request of this version of dcr" in why for why in refused)
        with pytest.raises(Exception, match="not today"):
            llm.collective_rpc(fail_on_the_first_rank)
        with pytest.raises(EngineCallError, match="engine a: ranks answered another call than the last: restart"):
            engine.call_ranks(b"")
    finally:
        engine.shutdown()
        llm.llm_engine.engine_core.shutdown()
