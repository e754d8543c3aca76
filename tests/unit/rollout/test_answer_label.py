"""The middleware that labels HTTP answers, with apps that send whatever an app may send."""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.rollout.vllm.answer_label import AnswerLabelMiddleware, answer_label

START = {"type": "http.response.start", "status": 200}
EVENTS = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
PLAIN = {**START, "headers": [(b"content-type", b"application/json")]}


def sent(app, scope=None):
    """What the client of an app is sent."""
    out = []

    async def send(message):
        out.append(message)

    async def receive():
        return {"type": "http.request"}

    asyncio.run(AnswerLabelMiddleware(app)(scope or {"type": "http", "path": "/v1/completions"}, receive, send))
    return out


def body(data, *, more=False):
    return {"type": "http.response.body", "body": data, "more_body": more}


def app_of(*steps):
    """An app that takes these steps: a message to send, or a function of the answer's label."""

    async def app(scope, receive, send):
        for step in steps:
            if callable(step):
                step(answer_label.get())
            else:
                await send(step)

    return app


def made_by(*versions):
    def step(label):
        label.versions |= frozenset(versions)

    return step


def refuse(label):
    label.refused = "engine a: full"


def headers(message):
    return dict(message["headers"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    max_leaves=4,
)
objects = st.dictionaries(st.text().filter(lambda key: key != "dcr_versions"), json_values)


@settings(max_examples=40)
@given(st.lists(objects, min_size=1, max_size=4), st.sampled_from([b"", b"event: response.delta\n"]), st.booleans())
def test_every_event_says_the_versions_so_far_and_is_otherwise_the_same(events, name, together):
    raw = [name + b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    pieces = [b"".join(raw)] if together else raw
    steps = [
        EVENTS,
        made_by(4, 3),
        *(body(piece, more=True) for piece in pieces),
        body(b"data: [DONE]\n\n", more=True),
        body(b""),
    ]
    start, *rest = sent(app_of(*steps))
    assert headers(start)[b"x-dcr-version"] == b"3,4"
    lines = b"".join(message["body"] for message in rest).split(b"\n\n")
    assert lines[len(events) :] == [b"data: [DONE]", b""]
    for line, event in zip(lines, events, strict=False):
        assert line.startswith(name + b"data: ")
        assert json.loads(line.removeprefix(name + b"data: ")) == {**event, "dcr_versions": [3, 4]}


def test_a_label_grows_with_the_answer():
    event = b'data: {"a": 1}\n\n'
    steps = [EVENTS, made_by(1), body(event, more=True), made_by(2), body(event, more=True), body(b"")]
    start, first, second, _ = sent(app_of(*steps))
    assert headers(start)[b"x-dcr-version"] == b"1"
    assert first["body"] == b'data: {"a": 1,"dcr_versions":[1]}\n\n'
    assert second["body"] == b'data: {"a": 1,"dcr_versions":[1, 2]}\n\n'


def test_an_answer_in_one_piece_has_the_header_and_its_own_body():
    start, only = sent(app_of(PLAIN, made_by(7), body(b'{"a": 1}')))
    assert headers(start)[b"x-dcr-version"] == b"7"
    assert only["body"] == b'{"a": 1}'


def test_what_no_version_made_is_left_alone():
    other = {"type": "http.response.pathsend", "path": "x"}
    for steps in ([PLAIN, body(b"{}")], [EVENTS, body(b"data: {}\n\n", more=True), body(b"")], [PLAIN, other]):
        assert sent(app_of(*steps)) == steps
    lifespan = [{"type": "lifespan.startup.complete"}]
    assert sent(app_of(*lifespan), {"type": "lifespan"}) == lifespan


def test_a_refusal_is_a_503_whatever_the_app_has_begun():
    comment = body(b": keep-alive\n\n", more=True)
    error = body(b'data: {"error": 1}\n\n', more=True)
    for steps in ([EVENTS, comment, refuse, error, body(b"")], [refuse, {**PLAIN, "status": 500}, body(b"{}")]):
        start, only = sent(app_of(*steps))
        assert start["status"] == 503
        assert headers(start)[b"retry-after"] == b"1"
        assert int(headers(start)[b"content-length"]) == len(only["body"])
        assert json.loads(only["body"])["error"]["message"] == "engine a: full"


def test_answers_made_at_once_have_a_label_each():
    async def both():
        async def app(scope, receive, send):
            await send(PLAIN)
            await asyncio.sleep(0)
            answer_label.get().versions |= {scope["version"]}
            await asyncio.sleep(0)
            await send(body(b"{}"))

        async def one(version):
            out = []

            async def send(message):
                out.append(message)

            await AnswerLabelMiddleware(app)(
                {"type": "http", "path": "/v1/completions", "version": version}, None, send
            )
            return headers(out[0])[b"x-dcr-version"]

        return await asyncio.gather(*(one(version) for version in range(4)))

    assert asyncio.run(both()) == [b"0", b"1", b"2", b"3"]
