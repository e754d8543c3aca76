"""The gate of requests on a loop, with no engine."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.protocol.errors import RefusedError
from dcr.rollout.async_gate import AsyncGate, GateFullError
from dcr.rollout.gate import GateTimeoutError

LONG_S = 30.0


@given(st.lists(st.sampled_from(["open", "close", "come", "leave"]), max_size=30), st.integers(1, 3))
def test_requests_enter_if_and_only_if_it_is_open_and_no_more_are_held_than_may_be(steps, most):
    async def play():
        gate = AsyncGate("a", LONG_S, most)
        version, held = None, []
        for step in steps:
            if step == "open":
                version = 0 if version is None else version
                gate.open(version)
            elif step == "close":
                version = None
                gate.close()
            elif step == "come":
                request = asyncio.ensure_future(gate.enter())
                await asyncio.sleep(0)
                if version is None and len(held) < most:
                    assert not request.done()
                    held.append(request)
                elif version is None:
                    with pytest.raises(GateFullError, match=f"engine a: its gate is closed and holds {most} requests"):
                        request.result()
                else:
                    assert request.done()
                    assert request.result() is None
            elif held:
                held.pop().cancel()
            for _ in range(6):
                await asyncio.sleep(0)
            if version is not None:
                assert all(request.done() and request.exception() is None for request in held)
                held = []
            assert gate.held == len(held)
            assert gate.version == version
        gate.open(version or 0)
        await asyncio.gather(*held)

    asyncio.run(play())


def test_a_gate_that_opens_and_closes_at_once_holds_on():
    async def play():
        gate = AsyncGate("a", 0.05, 5)
        request = asyncio.ensure_future(gate.enter())
        await asyncio.sleep(0)
        gate.open(3)
        gate.close()
        with pytest.raises(GateTimeoutError, match=r"engine a: a request waited 0\.05 s at the closed gate"):
            await request
        assert gate.held == 0

    asyncio.run(play())


def test_open_at_another_version_is_refused():
    async def play():
        gate = AsyncGate("a", LONG_S, 1)
        gate.open(3)
        gate.open(3)
        with pytest.raises(RefusedError, match="open at version 3, cannot be opened at 4"):
            gate.open(4)
        assert gate.version == 3

    asyncio.run(play())
