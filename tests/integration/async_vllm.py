"""A real AsyncLLM on a loop of its own, and requests whose tokens are seen as they come."""

import asyncio
import itertools
import threading
import time
from contextlib import contextmanager

import pytest
import vllm_support as support

from demo.vllm_twin import ENGINE_ARGUMENTS

WAIT_S = 200.0  # a bound; nothing takes a second on a quiet machine
TRIES = 8  # a busy machine may keep a thread waiting until the request that it is to catch is over

_ids = itertools.count()


@contextmanager
def running_loop():
    """An asyncio loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)


def on(loop, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(WAIT_S)


@contextmanager
def async_llm(loop, checkpoint, **arguments):
    """A real ``vllm.AsyncLLM`` on the loop; yields it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in support.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # the tests send functions to the worker
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        async def start():
            return AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoint), **{**ENGINE_ARGUMENTS, **arguments}))

        llm = on(loop, start())
        try:
            yield llm
        finally:
            on(loop, asyncio.to_thread(llm.shutdown))
            # An import above has kept this frame alive: what it names would be deleted at the interpreter's end, where
            # vLLM's __del__ fails.
            del llm


def closed_on(loop, engine, start, in_time):
    """Close the gate, open at version 0, on a request while it runs.

    Args:
        loop: of the engine.
        engine: behind its gate.
        start: starts a request.
        in_time: whether it was; otherwise there is another one.
    """
    for _ in range(TRIES):
        request = start()
        request.wait_tokens(8)
        engine.close_gate(WAIT_S)
        on(loop, asyncio.sleep(0.05))  # what was made before is read by then
        if in_time(request):
            return request
        open_again(engine, request)
    pytest.fail(f"{TRIES} requests were over before the gate was closed")


def open_again(engine, *requests):
    """After a try that came too late."""
    engine.close_gate(WAIT_S)
    engine.reset_caches()
    engine.open_gate(0)
    for request in requests:
        request.result()


def places(worker):
    """Run in a worker: where every parameter and buffer lies, and how; what a captured graph would hold."""
    model = worker.model_runner.get_model()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (t.data_ptr(), tuple(t.shape), t.stride(), str(t.dtype)) for name, t in named}


class Request:
    """A request under way, started at once; what came so far can be read at any time."""

    def __init__(self, loop, engine, prompt, max_tokens=support.TOKENS, *, delta=False, **sampling):
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        kind = RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE
        greedy = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        self._parameters = SamplingParams(**{**greedy, **sampling}, output_kind=kind)
        self._delta, self._prompt, self._engine = delta, prompt, engine
        self.tokens, self.chunks = [], []
        self._future = asyncio.run_coroutine_threadsafe(self._run(), loop)

    async def _run(self):
        prompt = {"prompt_token_ids": list(self._prompt)}
        async for answer in self._engine.generate(prompt, self._parameters, f"request-{next(_ids)}"):
            made = list(answer.output.outputs[0].token_ids)
            self.tokens = self.tokens + made if self._delta else made
            self.chunks.append((len(self.tokens), answer))

    def wait_tokens(self, count):
        deadline = time.monotonic() + WAIT_S
        while len(self.tokens) < count:
            assert not self._future.done(), self._future.result()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def result(self, timeout_s=WAIT_S):
        """The last labelled output."""
        self._future.result(timeout_s)
        return self.chunks[-1][1]

    def spans(self):
        return [(span.version, span.start, span.end) for span in self.result().spans[0]]

    def cancel(self):
        self._future.cancel()

    @property
    def done(self):
        return self._future.done()
