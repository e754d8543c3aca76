"""An AsyncLLM of two ranks with a node and a real trainer: a request kept over a refit, and fresh engines beside it."""

import asyncio
import threading

import pytest
from async_vllm import TRIES, WAIT_S, Request, async_llm, on, running_loop
from vllm_fleet import Fleet
from vllm_support import LONG_PROMPT, PROMPTS, TOKENS

import dcr
from dcr.rollout.vllm.async_engine import AsyncVllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

PROMPT = PROMPTS[0]
MANY = 120  # tokens; the context holds 128


@pytest.mark.parametrize("on_close", ["keep", "wait"])
def test_two_ranks_follow_the_trainer_under_a_running_request(tmp_path, twin, on_close):
    fleet = Fleet(tmp_path, "qwen3-moe")
    with running_loop() as loop, async_llm(loop, fleet.checkpoint(0), tensor_parallel_size=2) as llm:

        async def wrap():
            return AsyncVllmEngine(llm, name="node-a", on_close=on_close)

        engine = on(loop, wrap())
        assert engine.ranks == ("0", "1")
        node = dcr.RolloutNode(engine, **fleet.addresses)
        try:
            for version in range(1, TRIES):
                fleet.change(0.05)
                request = None
                if version > 1:
                    request = Request(loop, engine, PROMPT, MANY)
                    request.wait_tokens(8)
                pushed = threading.Thread(target=fleet.push)
                pushed.start()
                pushed.join(WAIT_S)
                node.wait_serving(version, WAIT_S)
                said = twin.ask(fleet.checkpoint(version), [LONG_PROMPT], tensor_parallel_size=2)
                assert engine.resident_digests() == said["digests"]
                after = Request(loop, engine, LONG_PROMPT)
                assert after.result().versions == (version,)
                assert after.tokens == said["tokens"][0]
                if request is not None and (on_close == "wait" or len(request.spans()) > 1):
                    break  # on a busy machine it may be over before the refit that it is to span
            spans = request.spans()
            assert len(request.tokens) == MANY
            if on_close == "wait":
                assert spans == [(1, 0, MANY)]
                return
            (_, _, at), (last, _, end) = spans
            assert (spans[0][0], last, end) == (version - 1, version, MANY)
            goes_on = twin.ask(fleet.checkpoint(version), [[*PROMPT, *request.tokens[:at]]], tensor_parallel_size=2)
            kept = request.tokens[at : at + TOKENS]
            assert kept == goes_on["tokens"][0][: len(kept)]
        finally:
            on(loop, asyncio.sleep(0))
            node.close()
            fleet.close()
