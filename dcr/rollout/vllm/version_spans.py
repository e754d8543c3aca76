"""Which version of the weights made which tokens of an answer, as vLLM's own frontend records it.

The engine core stamps every step's outputs with the label it was given last, and the frontend notes at which token a
label begins.  A finished completion carries the spans; of one that still runs they are in the output processor's state.
"""

from dataclasses import dataclass
from typing import Any

from dcr.protocol.errors import RefusedError


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens ``start`` to ``end`` (exclusive) were sampled from this version."""

    version: int
    start: int
    end: int


def check_spans(processor: Any) -> None:
    """Raise RefusedError if this vLLM's output processor does not record versions where ``AnswerSpans`` looks."""
    missing = [name for name in ("request_states", "external_req_ids") if not hasattr(processor, name)]
    if missing:
        raise RefusedError(
            f"this vLLM's output processor has no {', '.join(missing)}: answers could not be labelled with the version "
            "that made them; use vLLM 0.32"
        )


class AnswerSpans:
    """The spans of one request's completions, brought forward output by output.

    Args:
        processor: vLLM's ``OutputProcessor``.
        request_id: as the request's caller named it.
        delta: outputs carry only new tokens.
    """

    def __init__(self, processor: Any, request_id: str, *, delta: bool) -> None:
        self._processor = processor
        self._request_id = request_id
        self._delta = delta
        self._tokens: dict[int, int] = {}
        self._spans: dict[int, tuple[VersionSpan, ...]] = {}

    def take(self, output: Any) -> dict[int, tuple[VersionSpan, ...]]:
        """The spans so far, by completion index, once this ``vllm.RequestOutput`` is out.

        Call it before anything else runs on the loop, so that the frontend still knows the request.
        """
        for completion in output.outputs:
            count = len(completion.token_ids)
            if self._delta:
                count += self._tokens.get(completion.index, 0)
            self._tokens[completion.index] = count
            if completion.weight_versions is not None:
                starts = [(span.version, span.start) for span in completion.weight_versions]
            else:
                starts = self._running(completion.index)
            self._spans[completion.index] = _spans(starts, count)
        return dict(self._spans)

    def _running(self, index: int) -> list[tuple[str, int]]:
        for internal in self._processor.external_req_ids.get(self._request_id, ()):
            state = self._processor.request_states.get(internal)
            if state is not None and state.request_index == index:
                return list(state.weight_version_starts)
        return []


def _spans(starts: list[tuple[str, int]], count: int) -> tuple[VersionSpan, ...]:
    ends = [start for _, start in starts[1:]] + [count]
    spans = zip(starts, ends, strict=True)
    return tuple(VersionSpan(int(v), start, min(end, count)) for (v, start), end in spans if start < count)
