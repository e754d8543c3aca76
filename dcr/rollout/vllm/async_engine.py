"""One ``vllm.AsyncLLM`` as the node agent sees it: its ranks, its gate, its caches, and requests that pass the gate."""

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch

from dcr.protocol.errors import DcrError, RefusedError
from dcr.rollout.async_gate import AsyncGate
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.gate import GateTimeoutError
from dcr.rollout.vllm.engine import CacheResetError
from dcr.rollout.vllm.prompts import PromptCheck
from dcr.rollout.vllm.rank_calls import EngineCallError, RankCalls
from dcr.rollout.vllm.version_spans import AnswerSpans, VersionSpan, check_spans
from dcr.runtime.seconds import seconds

_T = TypeVar("_T")

OnClose = Literal["wait", "keep", "abort"]
"""What becomes of running requests when the gate closes (DESIGN D18).

``wait``: they finish, within ``drain_timeout_s``.  ``keep``: they freeze, and go on when the gate opens, with the KV
cache of prompt and tokens computed anew.  ``abort``: they end at once, short.
"""


@dataclass(frozen=True)
class LabelledOutput:
    """What vLLM gave out, and which versions made the answer up to here."""

    output: Any
    """``vllm.RequestOutput``."""
    spans: dict[int, tuple[VersionSpan, ...]]
    """By completion index: which tokens, from the answer's first, were sampled from which version."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that made the answer so far, ascending; empty if it has no token yet."""
        return tuple(sorted({span.version for spans in self.spans.values() for span in spans}))


class AsyncVllmEngine:
    """Wraps a ``vllm.AsyncLLM`` of one rank or several; requests run on its loop, the node agent calls from its thread.

    ::

        engine = AsyncVllmEngine(llm, name="node-a", on_close="keep")             # on the loop
        node = await asyncio.to_thread(dcr.RolloutNode, engine, control=..., delivery=...)
        async for answer in engine.generate(prompt, sampling_params, "request-1"):
            answer.output, answer.versions

    The gate starts closed: nothing is served before ``open_gate``.  A closed gate is two things: requests are held
    before they reach vLLM, and vLLM's scheduler is paused, so that what reached it runs no step.  Nobody else may pause
    or resume the LLM; whether it is paused is asked again before caches are reset.

    Args:
        llm: a ``vllm.AsyncLLM`` with ``worker_extension_cls`` a ``DcrWorkerExtension``.
        name: names the engine in errors.
        on_close: what becomes of running requests when the gate closes: see ``OnClose``.
        gate_wait_s: how long a request is held at the closed gate, seconds.
        held_requests_max: how many requests are held there at once.
        call_timeout_s: how long any one call into vLLM may take, seconds.
        loop: the loop that the LLM and its requests are on; the running one by default.

    Raises:
        RefusedError: see ``RankCalls``, or ``on_close`` is not one of its values.

    Attributes:
        name: as given.
        ranks: vLLM's ranks, as for ``VllmEngine``.
    """

    def __init__(
        self,
        llm: Any,
        *,
        name: str,
        on_close: OnClose = "wait",
        gate_wait_s: float = 60.0,
        held_requests_max: int = 256,
        call_timeout_s: float = 600.0,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if on_close not in get_args(OnClose):
            raise RefusedError(f"engine {name}: on_close={on_close!r} is not one of {', '.join(get_args(OnClose))}")
        self._ranks = RankCalls(name, llm.vllm_config, self._rpc)
        check_spans(llm.output_processor)
        self.name = name
        self.ranks = self._ranks.names
        self._llm = llm
        self._on_close = on_close
        self._check_prompt = PromptCheck(name, llm.vllm_config).check
        self._checkpoint = llm.vllm_config.model_config.model
        self._call_timeout_s = seconds(call_timeout_s, f"engine {name}: call_timeout_s")
        self._loop = loop or asyncio.get_running_loop()
        self._gate = AsyncGate(name, gate_wait_s, held_requests_max)
        self._frozen = False  # the scheduler has confirmed that no request runs; changed on the loop only

    # ------------------------------------------------------------ for users

    @property
    def version(self) -> int | None:
        """The version being served, None while the gate is closed."""
        return self._gate.version

    @property
    def held_requests(self) -> int:
        """How many requests wait at the closed gate."""
        return self._gate.held

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[LabelledOutput, None]:
        """``AsyncLLM.generate`` behind the gate, each output labelled; run it on the engine's loop.

        Args:
            prompt: as ``AsyncLLM.generate`` takes it.
            sampling_params: ``vllm.SamplingParams``.
            request_id: unique among running requests.
            **options: passed on to ``AsyncLLM.generate``.

        Raises:
            GateFullError: too many requests are held at the closed gate already.
            GateTimeoutError: the gate stayed closed for ``gate_wait_s``.
            RefusedError: a token id is none of the model's, which would end vLLM's engine core; nothing was asked.
        """
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415  vLLM reads its environment when imported

        self._check_prompt(prompt)
        await self._gate.enter()
        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        spans = AnswerSpans(self._llm.output_processor, request_id, delta=delta)
        # Closed with this generator: what no one waits for is aborted and must not run on.
        async with aclosing(self._llm.generate(prompt, sampling_params, request_id, **options)) as outputs:
            async for output in outputs:
                yield LabelledOutput(output, spans.take(output))

    def resident_digests(self) -> dict[str, str]:
        """Digest of the stored bits of every parameter and buffer, by name; by ``RANK/name`` if there are several."""
        return self._ranks.resident_digests()

    def layout_reports(self) -> list[dict[str, Any]]:
        """The fields of each rank's ``LayoutReport``, for an operator who wants to know why an engine is refused."""
        return self._ranks.layout_reports()

    # ------------------------------------------------------------ for the node agent

    @property
    def runtime(self) -> object:
        """The LLM: see ``RolloutEngine.runtime``."""
        return self._llm

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Canonical name and tensor of everything that the engine's loader was fed when it started (DESIGN D2)."""
        return read_checkpoint(self._checkpoint)

    def call_ranks(self, request: bytes) -> list[bytes]:
        """Send one request to the host of every rank, in one call; their answers in the order of ``ranks``.

        Raises:
            EngineCallError: the call failed in vLLM, or did not return in time.
        """
        return self._ranks.call(request)

    def close_gate(self, drain_timeout_s: float) -> None:
        """Close the gate; after it returns no request runs a step (DESIGN D18).

        Raises:
            GateTimeoutError: requests still run after ``drain_timeout_s``.  The gate stays closed to new ones, and
                storage must not be written: close it again with a longer time, or open it at the version it served.
            EngineCallError: vLLM failed.
        """
        self._on_loop(self._freeze(drain_timeout_s), "closing the gate", drain_timeout_s + self._call_timeout_s)

    def reset_caches(self) -> None:
        """Drop what was computed with older weights: prefix, encoder and multi-modal caches (DESIGN D12).

        Kept requests lose their KV cache too: when they go on, it is computed anew from prompt and tokens.

        Raises:
            RefusedError: the gate is not closed, or vLLM is not paused any more.
            CacheResetError: the engine says that it could not.
        """
        self._on_loop(self._reset(), "resetting caches", self._call_timeout_s)

    def open_gate(self, version: int) -> None:
        """Serve requests with this version; RefusedError if the gate is open at another."""
        self._on_loop(self._thaw(version), "opening the gate", self._call_timeout_s)

    # ------------------------------------------------------------ on the loop

    async def _freeze(self, drain_timeout_s: float) -> None:
        self._gate.close()
        if self._frozen and await self._llm.is_paused():
            return
        self._frozen = False  # not yet, or somebody has resumed it
        try:
            async with asyncio.timeout(drain_timeout_s):
                # Caches are reset after the write, and then the answer is looked at.
                await self._llm.pause_generation(mode=self._on_close, clear_cache=False)
        except TimeoutError:
            raise GateTimeoutError(
                f"engine {self.name}: closing the gate with on_close={self._on_close!r}, requests still running after "
                f"{drain_timeout_s} s"
            ) from None
        self._frozen = True

    async def _reset(self) -> None:
        if not (self._frozen and await self._llm.is_paused()):
            raise RefusedError(
                f"engine {self.name}: resetting caches needs a closed gate and a paused engine, but "
                f"{'something else has resumed it' if self._frozen else 'the gate was not closed'}: close the gate, "
                "and leave pausing and resuming to dcr"
            )
        try:
            await self._llm.reset_mm_cache()
            keep = self._on_close == "keep"
            done = await self._llm.reset_prefix_cache(reset_running_requests=keep, reset_connector=True)
            await self._llm.reset_encoder_cache()
        except Exception as error:
            raise CacheResetError(f"engine {self.name}: vLLM could not reset its caches: {error!r}") from error
        if not done:
            raise CacheResetError(
                f"engine {self.name}: vLLM could not reset its prefix cache, something holds blocks of it: restart the "
                "engine"
            )

    async def _thaw(self, version: int) -> None:
        self._gate.check(version)
        if self._gate.version is not None:
            return
        await self._llm.update_weight_version(str(version))
        # Before the first step that may run: a call that fails half-way must not leave the engine taken for frozen.
        self._frozen = False
        await self._llm.resume_generation()
        self._gate.open(version)

    # ------------------------------------------------------------ between threads

    def _rpc(self, method: str, args: tuple[object, ...]) -> list[Any]:
        return list(self._on_loop(self._llm.collective_rpc(method, args=args), method, self._call_timeout_s))

    def _on_loop(self, job: Coroutine[Any, Any, _T], stage: str, timeout_s: float) -> _T:
        """Run a coroutine on the engine's loop and wait for it here, in another thread."""
        try:
            waiting = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            waiting = False
        if waiting:
            job.close()
            raise RefusedError(
                f"engine {self.name}: {stage} was called on the loop that the engine runs on, and would wait for "
                "itself: call it from another thread (await asyncio.to_thread(...))"
            )
        try:
            future = asyncio.run_coroutine_threadsafe(job, self._loop)
        except RuntimeError as error:
            job.close()
            raise EngineCallError(f"engine {self.name}: {stage}: its loop is closed: {error}") from error
        try:
            return future.result(timeout_s)
        except DcrError:
            raise
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise EngineCallError(f"engine {self.name}: {stage} did not return within {timeout_s} s") from error
        except Exception as error:
            raise EngineCallError(f"engine {self.name}: {stage} failed in vLLM: {error!r}") from error
