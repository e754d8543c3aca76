"""One vLLM engine as the node agent sees it: its ranks, its gate, its caches, and requests that pass the gate."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dcr.protocol.errors import DcrError
from dcr.rollout.checkpoint import read_checkpoint
from dcr.rollout.gate import Gate
from dcr.rollout.vllm.caller import Caller
from dcr.rollout.vllm.prompts import PromptCheck
from dcr.rollout.vllm.rank_calls import EngineCallError, RankCalls
from dcr.runtime.seconds import seconds

_T = TypeVar("_T")


class CacheResetError(DcrError):
    """The engine could not drop what it had computed with older weights, so it must not serve."""


@dataclass(frozen=True)
class Generation:
    """Finished requests, and the version of the weights that made every token of them."""

    version: int
    outputs: list[Any]
    """``vllm.RequestOutput``, in the order of the prompts."""


class VllmEngine:
    """Wraps an offline ``vllm.LLM`` of one rank or several, its engine core in this process or in another.

    Ranks may be tensor-parallel, expert-parallel and pipeline-parallel; all of them run on this host.  One call into
    vLLM reaches all of them, and when one dies vLLM ends the others: an engine is lost as a whole (DESIGN D9).

    ``vllm.LLM`` is not safe to use from several threads.  Every call into it, each single step of generation included,
    is a job of one thread that takes jobs in order: requests of several threads are batched together, and a call of the
    node agent waits for one step, not for the requests running.  Once wrapped, use the LLM through this object only.

    The gate starts closed: nothing is served before ``open_gate``.

    Args:
        llm: a ``vllm.LLM`` with ``worker_extension_cls`` a ``DcrWorkerExtension``.
        name: names the engine in errors.
        gate_wait_s: how long a request waits at the closed gate.
        call_timeout_s: how long any one call into vLLM may take.

    Raises:
        RefusedError: see ``RankCalls``.

    Attributes:
        name: as given.
        ranks: vLLM's ranks, from 0: pipeline stage by stage, tensor-parallel ranks within each.
    """

    def __init__(self, llm: Any, *, name: str, gate_wait_s: float = 60.0, call_timeout_s: float = 600.0) -> None:
        config = llm.llm_engine.vllm_config
        self.name = name
        self._llm = llm
        self._ranks = RankCalls(name, config, self._rpc)
        self.ranks = self._ranks.names
        self._checkpoint = config.model_config.model
        self._check_ids = PromptCheck(name, config).check_ids
        self._call_timeout_s = seconds(call_timeout_s, f"engine {name}: call_timeout_s")
        self._gate = Gate(name, gate_wait_s)
        self._caller = Caller(f"vllm-{name}")
        self._finished: dict[str, Any] = {}  # by request id; touched only by the caller thread

    @property
    def version(self) -> int | None:
        """The version being served, None while the gate is closed."""
        return self._gate.version

    @property
    def runtime(self) -> object:
        """The LLM: see ``RolloutEngine.runtime``."""
        return self._llm

    def call_ranks(self, request: bytes) -> list[bytes]:
        """Send one request to the host of every rank, in one call; their answers in the order of ``ranks``.

        Raises:
            EngineCallError: the call failed in vLLM, or did not return in time.
        """
        return self._ranks.call(request)

    def resident_digests(self) -> dict[str, str]:
        """Digest of the stored bits of every parameter and buffer, by name; by ``RANK/name`` if there are several."""
        return self._ranks.resident_digests()

    def layout_reports(self) -> list[dict[str, Any]]:
        """The fields of each rank's ``LayoutReport``, for an operator who wants to know why an engine is refused."""
        return self._ranks.layout_reports()

    def checkpoint_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Canonical name and tensor of everything that the engine's loader was fed when it started (DESIGN D2)."""
        return read_checkpoint(self._checkpoint)

    def close_gate(self, drain_timeout_s: float) -> None:
        """Close the gate and drain; after it returns no request touches storage (DESIGN D18).

        Raises:
            GateTimeoutError: requests are still running; see ``Gate.close``.
        """
        self._gate.close(drain_timeout_s)

    def reset_caches(self) -> None:
        """Drop what was computed with older weights: prefix cache, offloaded blocks and encoder cache (DESIGN D12).

        Raises:
            RefusedError: the gate is not closed and drained.
            CacheResetError: the engine says that it could not.
        """
        self._gate.check_drained("resetting caches")
        if not self._call("reset_prefix_cache", lambda: self._llm.reset_prefix_cache(reset_connector=True)):
            raise CacheResetError(f"engine {self.name}: vLLM could not reset its prefix cache: restart the engine")
        self._call("reset_encoder_cache", self._llm.llm_engine.reset_encoder_cache)

    def open_gate(self, version: int) -> None:
        """Serve requests with this version; RefusedError if the gate is open at another."""
        self._gate.open(version)

    def generate(self, prompts_token_ids: Sequence[Sequence[int]], sampling_params: Any) -> Generation:
        """Generate for a batch of prompts, all with one version; any number of threads may call this at once.

        Args:
            prompts_token_ids: token ids, one sequence a prompt.
            sampling_params: ``vllm.SamplingParams``, for all of them.

        Raises:
            GateTimeoutError: the gate stayed closed for ``gate_wait_s``.
            EngineCallError: the engine failed; the requests were aborted.
            RefusedError: a prompt is no sequence of token ids of the model, which would end vLLM's engine core; nothing
                was asked.
        """
        for n, prompt in enumerate(prompts_token_ids):
            self._check_ids(f"prompt {n}", prompt)
        prompts = [{"prompt_token_ids": list(ids)} for ids in prompts_token_ids]
        with self._gate.request() as version:
            ids: list[str] = []
            try:
                self._call("enqueue", lambda: ids.extend(self._enqueue(prompts, sampling_params)))
                while (outputs := self._call("step", lambda: self._step(ids))) is None:
                    pass
            except BaseException:  # an interrupt too: what no one waits for must not run on behind a closed gate
                # It comes after the call that was interrupted, which names them.
                self._caller.submit(lambda: self._abort(ids))
                raise
        return Generation(version, outputs)

    def shutdown(self) -> None:
        """End the thread that calls vLLM, after the call it is in; the LLM itself is its maker's to shut down.

        Raises:
            EngineCallError: that call has not returned in ``call_timeout_s``; the process may end without it.
        """
        if not self._caller.shutdown(self._call_timeout_s):
            raise EngineCallError(
                f"engine {self.name}: shutting down, a call into vLLM has not returned for {self._call_timeout_s} s: a "
                "rank hangs; end its processes"
            )

    def _enqueue(self, prompts: list[dict[str, list[int]]], sampling_params: Any) -> list[str]:
        """Request ids as outputs carry them: vLLM's internal ones have a random suffix after a dash."""
        internal = self._llm.enqueue(prompts, sampling_params, use_tqdm=False)
        return [name.partition("-")[0] for name in internal]

    def _abort(self, ids: list[str]) -> None:
        self._llm.llm_engine.abort_request(ids)
        for request in ids:
            self._finished.pop(request, None)

    def _step(self, ids: list[str]) -> list[Any] | None:
        """One step of the engine for whatever is running; the outputs of these requests if all have finished."""
        if not all(request in self._finished for request in ids):
            for output in self._llm.llm_engine.step():
                if output.finished:
                    self._finished[output.request_id] = output
        if all(request in self._finished for request in ids):
            return [self._finished.pop(request) for request in ids]
        return None

    def _rpc(self, method: str, args: tuple[object, ...]) -> list[Any]:
        return list(self._call(method, lambda: self._llm.collective_rpc(method, args=args)))

    def _call(self, stage: str, job: Callable[[], _T]) -> _T:
        try:
            return self._caller.submit(job).result(self._call_timeout_s)
        except DcrError:
            raise
        except FutureTimeoutError as error:
            which = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(self.ranks)}"
            raise EngineCallError(
                f"engine {self.name}, {which}: {stage} did not return within {self._call_timeout_s} s"
            ) from error
        except Exception as error:
            raise EngineCallError(f"engine {self.name}: {stage} failed in vLLM: {error!r}") from error
