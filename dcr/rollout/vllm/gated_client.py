"""The engine client that vLLM's OpenAI server is given: requests pass the gate, and label the HTTP answer."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from dcr.protocol.errors import RefusedError
from dcr.rollout.async_gate import GateFullError
from dcr.rollout.gate import GateTimeoutError
from dcr.rollout.vllm.answer_label import answer_label
from dcr.rollout.vllm.async_engine import AsyncVllmEngine

_NOT_FOR_CLIENTS = frozenset(
    {
        *("pause_generation", "resume_generation", "sleep", "wake_up", "scale_elastic_ep", "release_kv_cache_memory"),
        *("init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "update_weights"),
        *("finish_weight_update", "update_weight_version", "checkpoint_prepare", "checkpoint_restore"),
        *("collective_rpc", "handle_fault"),
    }
)
"""What would open the gate, write to storage or change labels behind the node's back."""


class GatedClient:
    """Stands for a ``vllm.AsyncLLM``; whatever is not said here is the LLM's own.

    Args:
        llm: the LLM.
        engine: the same LLM, wrapped.
        before_shutdown: ends what calls the LLM from other threads; called before the LLM is shut down.
    """

    def __init__(self, llm: Any, engine: AsyncVllmEngine, before_shutdown: Callable[[], None]) -> None:
        self._llm = llm
        self._engine = engine
        self._before_shutdown = before_shutdown

    def shutdown(self, timeout: float | None = None) -> None:
        """Called by the server in a thread: a call that is under way ends while the LLM is still there to answer it."""
        self._before_shutdown()
        self._llm.shutdown(timeout=timeout)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """``AsyncLLM.generate`` behind the gate; a refusal is an error that vLLM's server turns into status 503."""
        from vllm.exceptions import GracefulHTTPError  # noqa: PLC0415  vLLM reads its environment when imported

        label = answer_label.get()
        try:
            async with aclosing(self._engine.generate(prompt, sampling_params, request_id, **options)) as answers:
                async for answer in answers:
                    if label is not None:
                        label.versions |= frozenset(answer.versions)
                    yield answer.output
        except (GateFullError, GateTimeoutError) as error:
            if label is not None:
                label.refused = str(error)
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    def encode(self, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        """Pooling requests are refused: nothing tells which version made their answer."""
        raise RefusedError(
            f"engine {self._engine.name}: pooling requests are not served: nothing would tell which version made "
            "their answers"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_FOR_CLIENTS:
            raise RefusedError(f"engine {self._engine.name}: {name} is the node's alone, not for clients of the server")
        return getattr(self._llm, name)
