"""A real AsyncLLM behind its gate: kept, drained and aborted requests, against fresh engines on each version."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import vllm_support as support
from async_vllm import TRIES, WAIT_S, Request, async_llm, closed_on, on, open_again, places, running_loop
from vllm_support import LONG_PROMPT, PROMPTS, TOKENS

from dcr.data_plane.item import Operation
from dcr.protocol.errors import RefusedError
from dcr.rollout.async_gate import GateFullError
from dcr.rollout.gate import GateTimeoutError
from dcr.rollout.vllm.async_engine import AsyncVllmEngine
from dcr.rollout.vllm.engine import CacheResetError, EngineCallError

pytestmark = pytest.mark.vllm

PROMPT = PROMPTS[0]
MANY = 120  # tokens of a request that is to be caught while it runs; the context holds 128


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return [support.write_checkpoint(root / f"s{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def fresh(checkpoints, twin):
    """What a fresh engine on each checkpoint answers."""
    return [twin.ask(checkpoint, [PROMPT, LONG_PROMPT], alone=True)["tokens"] for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def loop():
    with running_loop() as loop:
        yield loop


@pytest.fixture(scope="module")
def llm(loop, checkpoints, twin):
    with async_llm(loop, checkpoints[0]) as llm:
        yield llm


@pytest.fixture
def make(llm, loop, checkpoints):
    """Makes the engine's adapter, its gate open at version 0; whatever a test did is undone by a dense load."""
    made = []

    def make(on_close, **settings):
        engine = AsyncVllmEngine(llm, name="node-a", on_close=on_close, loop=loop, **settings)
        made.append(engine)
        engine.close_gate(WAIT_S)
        engine.reset_caches()
        engine.open_gate(0)
        return engine

    yield make
    for engine in made:
        engine.close_gate(WAIT_S)
    on(loop, llm.collective_rpc(support.load_dense, args=(str(checkpoints[0]),)))
    on(loop, llm.reset_prefix_cache(reset_running_requests=True))
    on(loop, llm.resume_generation())


@pytest.fixture
def refit(llm, loop, checkpoints):
    """Brings the engine's storage from the first checkpoint to the second."""

    def refit():
        before = on(loop, llm.collective_rpc(places))
        (changed,) = on(loop, llm.collective_rpc(support.refit, args=(*map(str, checkpoints), Operation.ADD)))
        assert changed > 100_000
        assert on(loop, llm.collective_rpc(places)) == before  # what graphs and compiled code hold
        assert len(before[0]) > 20

    return refit


@pytest.fixture
def continuation(checkpoints, twin):
    """What a fresh engine on the second checkpoint says after the prompt and these tokens."""
    return lambda kept: twin.ask(checkpoints[1], [[*PROMPT, *kept]])["tokens"][0]


def begun(request):
    """Whether a kept request still has the tokens to make that are compared."""
    return not request.done and len(request.tokens) < MANY - TOKENS


def test_kept_request_goes_on_as_a_fresh_engine_with_the_new_weights_would(make, refit, loop, continuation, fresh):
    engine = make("keep")
    request = closed_on(loop, engine, lambda: Request(loop, engine, PROMPT, MANY), begun)
    kept = list(request.tokens)
    refit()
    time.sleep(0.2)
    assert request.tokens == kept  # frozen
    assert not request.done
    engine.reset_caches()
    engine.open_gate(1)
    request.result()
    at = len(kept)
    assert 8 <= at < MANY - TOKENS
    assert request.tokens[:at] == kept
    assert request.tokens[:TOKENS][:at] == fresh[0][0][:at]
    assert request.tokens[at : at + TOKENS] == continuation(kept)
    assert request.spans() == [(0, 0, at), (1, at, MANY)]
    assert request.result().versions == (0, 1)
    for count, answer in request.chunks:
        assert answer.versions == ((0,) if count <= at else (0, 1))
    later = Request(loop, engine, PROMPT)
    later.result()
    assert later.tokens == fresh[1][0]
    assert later.spans() == [(1, 0, TOKENS)]


def test_the_old_cache_would_have_shown(make, refit, loop, continuation):
    """The control of the test above: without the reset a kept request goes on otherwise."""
    engine = make("keep")
    request = closed_on(loop, engine, lambda: Request(loop, engine, PROMPT, MANY), begun)
    kept = list(request.tokens)
    refit()
    engine.open_gate(1)
    request.result()
    at = len(kept)
    assert request.tokens[at : at + TOKENS] != continuation(kept)


def test_waiting_close_drains_with_the_old_weights(make, refit, loop, fresh):
    engine = make("wait")
    request = Request(loop, engine, PROMPT, MANY)
    request.wait_tokens(8)
    engine.close_gate(WAIT_S)
    refit()
    engine.reset_caches()
    engine.open_gate(1)
    request.result()
    assert request.tokens[:TOKENS] == fresh[0][0]
    assert request.spans() == [(0, 0, MANY)]


def test_aborting_close_returns_what_there_is_labelled(make, refit, loop, fresh):
    def ended(request):
        return request.result().output.outputs[0].finish_reason == "abort"

    engine = make("abort")
    request = closed_on(loop, engine, lambda: Request(loop, engine, PROMPT, MANY, delta=True), ended)
    at = len(request.tokens)
    assert 8 <= at < MANY
    assert request.tokens[:TOKENS][:at] == fresh[0][0][:at]
    assert request.spans() == [(0, 0, at)]
    refit()
    engine.reset_caches()
    engine.open_gate(1)
    later = Request(loop, engine, PROMPT)
    later.result()
    assert later.tokens == fresh[1][0]


def test_drain_time_out_is_named_and_the_request_finishes(make, loop, fresh):
    engine = make("wait")
    for _ in range(TRIES):
        request = Request(loop, engine, PROMPT, MANY)
        request.wait_tokens(8)
        try:
            engine.close_gate(0.001)
        except GateTimeoutError as e:
            error = str(e)
            break
        open_again(engine, request)
    assert "engine node-a: closing the gate with on_close='wait'" in error
    assert engine.version is None
    with pytest.raises(RefusedError, match="the gate was not closed"):
        engine.reset_caches()
    engine.open_gate(0)
    request.result()
    assert request.tokens[:TOKENS] == fresh[0][0]
    assert len(request.tokens) == MANY
    assert request.spans() == [(0, 0, MANY)]


@pytest.mark.parametrize("on_close", ["wait", "keep", "abort"])
def test_held_requests_are_bounded_and_answered_by_the_next_version(make, refit, loop, fresh, on_close):
    engine = make(on_close, held_requests_max=2)
    engine.close_gate(WAIT_S)
    held = [Request(loop, engine, PROMPT), Request(loop, engine, LONG_PROMPT)]
    deadline = time.monotonic() + WAIT_S
    while engine.held_requests < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(GateFullError, match=r"engine node-a: its gate is closed and holds 2 requests"):
        Request(loop, engine, PROMPT).result()
    refit()
    engine.reset_caches()
    assert not any(request.tokens for request in held)
    engine.open_gate(1)
    for request in held:
        request.result()
        assert request.spans() == [(1, 0, TOKENS)]
    assert engine.held_requests == 0
    alone = Request(loop, engine, LONG_PROMPT)
    alone.result()
    assert alone.tokens == fresh[1][1]


def test_request_that_waits_too_long_is_refused_and_a_cancelled_one_leaves(make, loop):
    engine = make("keep", gate_wait_s=0.2)
    engine.close_gate(WAIT_S)
    with pytest.raises(GateTimeoutError, match=r"engine node-a: a request waited 0\.2 s at the closed gate"):
        Request(loop, engine, PROMPT).result()
    patient = make("keep")
    patient.close_gate(WAIT_S)
    request = Request(loop, patient, PROMPT)
    while patient.held_requests == 0:
        time.sleep(0.001)
    request.cancel()
    on(loop, asyncio.sleep(0))
    assert patient.held_requests == 0


@pytest.mark.parametrize("on_close", ["wait", "keep", "abort"])
def test_a_client_that_goes_away_at_a_closing_gate_leaves_nothing_behind(  # noqa: PLR0917 - fixtures
    make, refit, loop, fresh, llm, on_close
):
    engine = make(on_close)
    for _ in range(TRIES):
        going, staying = (Request(loop, engine, PROMPT, MANY) for _ in range(2))
        for request in (going, staying):
            request.wait_tokens(8)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(engine.close_gate, WAIT_S)
            while engine.version is not None:
                time.sleep(0.0005)
            going.cancel()  # in the middle of its stream, while the gate drains or freezes
            closing.result(WAIT_S)
        if len(going.tokens) < MANY:
            break
        open_again(engine, staying)
    assert len(going.tokens) < MANY
    refit()
    engine.reset_caches()
    engine.open_gate(1)
    later = Request(loop, engine, PROMPT)
    later.result()
    assert later.tokens == fresh[1][0]
    staying.result()
    assert staying.tokens[:8] == fresh[0][0][:8]
    if on_close == "wait":
        assert staying.tokens[:TOKENS] == fresh[0][0]
        assert staying.spans() == [(0, 0, MANY)]
    assert not llm.output_processor.has_unfinished_requests()
    assert engine.held_requests == 0
    assert engine.version == 1


def test_prefix_cache_never_answers_for_the_old_policy(make, refit, loop, fresh):
    engine = make("keep")
    for cached in (0, 64):
        request = Request(loop, engine, LONG_PROMPT)
        assert request.result().output.num_cached_tokens == cached
        assert request.tokens == fresh[0][1]
    engine.close_gate(WAIT_S)
    refit()
    engine.reset_caches()
    engine.open_gate(1)
    request = Request(loop, engine, LONG_PROMPT)
    assert request.result().output.num_cached_tokens == 0
    assert request.tokens == fresh[1][1]


def test_reset_that_vllm_cannot_do_is_an_error(make, loop, llm):
    """A request that came past the gate holds blocks: a waiting close does not take them from it."""
    engine = make("wait")
    engine.close_gate(WAIT_S)
    for _ in range(TRIES):
        on(loop, llm.resume_generation())
        request = Request(loop, RawEngine(llm), PROMPT, MANY)
        request.wait_tokens(8)
        on(loop, llm.pause_generation(mode="keep", clear_cache=False))
        on(loop, asyncio.sleep(0.05))  # what was made before is read by then
        if not request.done and len(request.tokens) < MANY:
            break
    with pytest.raises(CacheResetError, match=r"engine node-a: vLLM could not reset its prefix cache"):
        engine.reset_caches()
    assert engine.version is None
    engine.open_gate(0)
    request.result()


class RawEngine:
    """The LLM without its gate."""

    def __init__(self, llm):
        self._llm = llm

    async def generate(self, *arguments):
        from dcr.rollout.vllm.async_engine import LabelledOutput  # noqa: PLC0415

        async for output in self._llm.generate(*arguments):
            yield LabelledOutput(output, {})


def test_an_engine_that_someone_resumes_does_not_serve_and_is_paused_again(make, loop, llm):
    engine = make("keep")
    engine.close_gate(WAIT_S)
    on(loop, llm.resume_generation())
    with pytest.raises(RefusedError, match="something else has resumed it"):
        engine.reset_caches()
    assert engine.version is None
    engine.close_gate(WAIT_S)
    assert on(loop, llm.is_paused())
    engine.reset_caches()


def test_several_completions_of_a_kept_request_are_labelled_each(make, refit, loop):
    engine = make("keep")
    request = closed_on(loop, engine, lambda: Request(loop, engine, PROMPT, MANY, n=2, temperature=1.0, seed=3), begun)
    refit()
    engine.reset_caches()
    engine.open_gate(1)
    answer = request.result()
    assert set(answer.spans) == {0, 1}
    for spans in answer.spans.values():
        (first, second) = spans
        assert (first.version, second.version) == (0, 1)
        assert (first.start, first.end, second.end) == (0, second.start, MANY)


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_id_that_the_model_does_not_have_ends_no_engine(make, loop, token):
    engine = make("wait")
    with pytest.raises(RefusedError, match=f"engine node-a: the prompt holds token id {token}, and the model has"):
        Request(loop, engine, [5, token]).result()
    Request(loop, engine, PROMPT).result()


def test_calls_on_its_own_loop_and_wrong_settings_are_refused(make, loop, llm):
    engine = make("keep")

    async def call():
        engine.close_gate(WAIT_S)

    with pytest.raises(RefusedError, match="called on the loop that the engine runs on"):
        on(loop, call())
    with pytest.raises(RefusedError, match=r"open at version 0, cannot be opened at 4"):
        engine.open_gate(4)
    with pytest.raises(RefusedError, match="on_close='drop' is not one of wait, keep, abort"):
        AsyncVllmEngine(llm, name="x", on_close="drop", loop=loop)
    with pytest.raises(EngineCallError, match="engine node-a: dcr_nonsense failed in vLLM"):
        engine._rpc("dcr_nonsense", ())


def test_closing_and_opening_under_load_loses_no_request(make, loop, fresh):
    engine = make("keep")
    requests = [Request(loop, engine, PROMPT, MANY) for _ in range(3)]
    for version in range(1, 6):
        engine.close_gate(WAIT_S)
        engine.reset_caches()
        engine.open_gate(version)
        requests.append(Request(loop, engine, PROMPT, MANY))
    for request in requests:
        spans = request.result().spans[0]
        assert len(request.tokens) == MANY
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert [span.version for span in spans] == sorted({span.version for span in spans})
        assert spans[-1].end == MANY
