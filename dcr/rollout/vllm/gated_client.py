"""The engine client that vLLM's OpenAI server is given: requests pass the gate, and label the HTTP answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from dcr.protocol.errors import RefusedError
from dcr.rollout.async_gate import GateFullError
from dcr.rollout.gate import GateTimeoutError
from dcr.rollout.node import RolloutNode
from dcr.rollout.vllm.answer_label import answer_label
from dcr.rollout.vllm.async_engine import AsyncVllmEngine
from dcr.runtime.progress import EngineStatus

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
        node: the engine's node; it calls the LLM from a thread of its own, and is closed before the LLM is shut down.
    """

    def __init__(self, llm: Any, engine: AsyncVllmEngine, node: RolloutNode) -> None:
        self._llm = llm
        self._engine = engine
        self._node = node

    @property
    def dcr_status(self) -> EngineStatus:
        """What the engine does now, and why it does not serve if it does not."""
        return self._node.statuses[self._engine.name]

    async def check_health(self) -> None:
        """As the LLM's own; also an EngineDeadError once the node has given the engine up."""
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415  vLLM reads its environment when imported

        await self._llm.check_health()
        if self.dcr_status.failed:
            raise EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """Called by the server in a thread: a call that is under way ends while the LLM is still there to answer it."""
        self._node.close()
        self._llm.shutdown(timeout=timeout)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """``AsyncLLM.generate`` behind the gate; a refusal is an error that vLLM's server turns into status 503.

        Raises:
            RefusedError: what would be answered is no HTTP answer, so that nothing could say which version made it.
        """
        from vllm.exceptions import GracefulHTTPError  # noqa: PLC0415  vLLM reads its environment when imported

        label = answer_label.get()
        if label is None:
            raise RefusedError(f"engine {self._engine.name}: request {request_id} belongs to no HTTP answer to label")
        try:
            async with aclosing(self._engine.generate(prompt, sampling_params, request_id, **options)) as answers:
                async for answer in answers:
                    label.versions |= frozenset(answer.versions)
                    yield answer.output
        except (GateFullError, GateTimeoutError) as error:
            reason = self.dcr_status.reason
            label.refused = f"{error}: {reason}" if reason else str(error)
            raise GracefulHTTPError(label.refused, HTTPStatus.SERVICE_UNAVAILABLE) from error

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
