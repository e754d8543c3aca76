"""Which version made an HTTP answer: told to the client of vLLM's OpenAI server.

The label of an answer travels beside vLLM's own code in a context variable: the middleware sets an empty one for each
request, the engine's client fills it as tokens come, and the middleware reads it when the answer goes out.

- Every answer that tokens were made for has the header ``x-dcr-version``: the versions that made it, ascending, joined
  by commas.  Of a streamed answer it names those of its first event.
- Every JSON event of a streamed answer has the field ``dcr_versions``, a list: the versions that made the answer up to
  there.  Clients of the OpenAI interface pass over fields that they do not know.
- A request that the gate refused is answered with status 503 and ``Retry-After``, streamed or not: the start of an
  answer is held back until its first event.
- What comes over a web socket is refused: nothing would label it.

It also tells operators what the engine does: ``/dcr/status`` is an ``EngineStatus`` as JSON, and so is the body of
vLLM's own ``/health``, whose status code is vLLM's.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

RETRY_AFTER_S = 1
"""A gate is closed for seconds at most while its engine is well."""
_STATUS, _HEALTH = "/dcr/status", ("/health", "/ping")
_POLICY_VIOLATION = 1008


@dataclass
class AnswerLabel:
    """Of one HTTP answer."""

    versions: frozenset[int] = frozenset()
    refused: str = ""
    """Why the gate did not let a request of it in."""


answer_label: ContextVar[AnswerLabel | None] = ContextVar("dcr_answer_label", default=None)
"""The label of the HTTP answer that is being made in this context."""


class AnswerLabelMiddleware:
    """ASGI middleware, for ``--middleware``: labels every answer of the app."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        """One request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "answers would be unlabelled"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == _STATUS:
            await _send_json(send, HTTPStatus.OK, _status(scope))
            return
        if scope["path"] in _HEALTH:
            await self._app(scope, receive, _Health(scope, send).send)
            return
        label = AnswerLabel()
        token = answer_label.set(label)
        try:
            await self._app(scope, receive, _Outgoing(label, send).send)
        finally:
            answer_label.reset(token)


class _Outgoing:
    """Holds back the start of one answer until its first event."""

    def __init__(self, label: AnswerLabel, send: Send) -> None:
        self._label = label
        self._send = send
        self._start: Message | None = None
        self._events = False
        self._refused = False

    async def send(self, message: Message) -> None:
        """What the app sends."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            self._start = message
            self._events = _is_event_stream(message)
            return
        if self._start is not None:
            if self._says_nothing(message):
                return
            if self._label.refused:
                await self._refuse()
                return
            await self._begin(self._start)
        if self._events and self._label.versions and "body" in message:
            message = {**message, "body": _labelled(message["body"], sorted(self._label.versions))}
        await self._send(message)

    def _says_nothing(self, message: Message) -> bool:
        """A comment that keeps a stream's connection alive is no reason to begin the answer."""
        body = message.get("body", b"")
        return self._events and bool(message.get("more_body")) and (not body or body.startswith(b":"))

    async def _begin(self, start: Message) -> None:
        self._start = None
        if self._label.versions:
            versions = ",".join(map(str, sorted(self._label.versions)))
            start = {**start, "headers": [*start.get("headers", ()), (b"x-dcr-version", versions.encode())]}
        await self._send(start)

    async def _refuse(self) -> None:
        self._refused = True
        error = {"message": self._label.refused, "type": "ServiceUnavailableError", "param": None, "code": 503}
        body = json.dumps({"error": error}).encode()
        await _send_json(
            self._send, HTTPStatus.SERVICE_UNAVAILABLE, body, (b"retry-after", str(RETRY_AFTER_S).encode())
        )


class _Health:
    """Gives vLLM's answer to a question for its health, which is empty, a body."""

    def __init__(self, scope: Message, send: Send) -> None:
        self._scope = scope
        self._send = send

    async def send(self, message: Message) -> None:
        """What the app sends."""
        if message["type"] == "http.response.start":
            await _send_json(self._send, message["status"], _status(self._scope))


def _status(scope: Message) -> bytes:
    return msgspec.json.encode(scope["app"].state.engine_client.dcr_status)


async def _send_json(send: Send, status: int, body: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def _labelled(body: bytes, versions: list[int]) -> bytes:
    """Add the field to every whole JSON object among these events; anything else is left alone."""
    field = b'"dcr_versions":' + json.dumps(versions).encode() + b"}"

    def labelled(event: bytes) -> bytes:
        is_object = event.endswith(b"}") and (event.startswith(b"data: {") or b"\ndata: {" in event)
        if not is_object:
            return event
        return event[:-1] + (b"" if event.endswith(b"data: {}") else b",") + field

    return b"\n\n".join(map(labelled, body.split(b"\n\n")))
