"""The client by itself: what it sends, what it makes of answers, what it sends again; sync and async by one rule."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import httpx
import pytest

from contextcache.client import (
    ApiError,
    AsyncContextCache,
    BrokenStream,
    ConnectionFailed,
    Context,
    ContextCache,
    Divergence,
    Finished,
    TextDelta,
    ToolCallDelta,
    errors,
)
from contextcache.client.events import StreamReader
from contextcache.client.failures import api_error
from contextcache.client.retries import Retries
from tests.kit.until import until

ROOT = Path(__file__).parents[3]
URL, KEY = "http://gateway.test", "cc-right-key"
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "context": {
        "computed_tokens": 3,
        "cached_tokens": 7,
        "saved_tokens": 6,
        "context_tokens": 6,
        "source": "host",
        "restore_ms": 1.5,
        "committed": True,
    },
}
ANSWER = {"choices": [{"text": " yes", "finish_reason": "stop"}], "session_id": "ctx_1", "usage": USAGE}
INFO = {
    "object": "context",
    "session_id": "ctx_1",
    "model": "m",
    "mode": "session",
    "state": "ready",
    "created": 1,
    "expires_at": 3601,
    "ttl": 3600,
    "ttl_policy": "fixed",
    "turns": 1,
    "tokens": 8,
    "generation": 1,
    "metadata": {},
}


class Server:
    """Answers in turn what it was given: an exception, or status and JSON (and headers); the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, body, *headers = answer
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.Response(status, content=content, headers=headers[0] if headers else {})

    @property
    def bodies(self):
        return [json.loads(request.content or b"{}") for request in self.requests]


@pytest.fixture
def waits(monkeypatch):
    """Have waiting take no time, and remember it."""
    waited = []

    async def wait(seconds):
        waited.append(seconds)

    monkeypatch.setattr("contextcache.client._sync.transport.time.sleep", waited.append)
    monkeypatch.setattr("contextcache.client._async.transport.asyncio.sleep", wait)
    return waited


def client_of(server, **options):
    http = httpx.Client(transport=httpx.MockTransport(server))
    return ContextCache(URL, KEY, http=http, retries=Retries(draw=lambda: 1.0), **options)


def error(code, message="no", **more):
    return {"error": {"message": message, "type": "t", "code": code, "param": None} | more}


def test_importing_the_client_needs_httpx_and_nothing_of_a_server_s():
    blocked = [
        "grpc",
        "google",
        "pydantic",
        "msgspec",
        "opentelemetry",
        "fastapi",
        "redis",
        "numpy",
        "prometheus_client",
    ]
    program = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport contextcache.client\n"
    program += "print([name for name in sys.modules if name.startswith('contextcache.') and '.client' not in name])"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")


def test_a_keyword_that_no_call_has_is_a_type_error_that_names_the_nearest():
    """Seen to fail: `tll=5` was sent, and the context got the default life."""
    contexts = client_of(Server((200, ANSWER, {}))).contexts
    context = contexts.create("m", "Hello")
    for call, meant in (
        (lambda: contexts.create("m", "x", tll=5), "did you mean 'ttl'"),
        (lambda: contexts.create_stream("m", "x", sesion_id="a"), "did you mean 'session_id'"),
        (lambda: context.ask("x", temprature=0), "did you mean 'temperature'"),
        (lambda: context.chat("x", context_mod="append"), "did you mean 'context_mode'"),
        (lambda: context.ask_stream("x", guided_json={}), "own fields in extra="),
        (lambda: context.update(meta_data={}), "did you mean 'metadata'"),
    ):
        with pytest.raises(TypeError, match=meant):
            call()


def test_a_create_a_turn_and_their_usage():
    server = Server((200, ANSWER, {"X-Context-Generation": "1"}))
    context = client_of(server).contexts.create("m", "Hello", ttl=60, extra={"logprobs": 1})
    reply = context.ask([1, 2], if_match=1, max_tokens=4)

    assert (context.session_id, context.reply.text, context.generation) == ("ctx_1", " yes", 1)
    took = reply.usage.context
    assert (reply.usage.prompt_tokens, took.source, took.cached_tokens) == (3, "host", 7)
    assert (took.computed_tokens, took.saved_tokens) == (3, 6)
    create, turn = server.requests
    assert server.bodies[0] == {"model": "m", "prompt": "Hello", "ttl": 60, "logprobs": 1}
    assert server.bodies[1] == {"model": "m", "session_id": "ctx_1", "prompt": [1, 2], "max_tokens": 4}
    assert turn.headers["if-match"] == "1"
    assert create.headers["authorization"] == f"Bearer {KEY}"
    assert create.headers["idempotency-key"] != turn.headers["idempotency-key"]


async def test_the_async_client_does_the_same():
    server = Server((200, ANSWER, {"X-Context-Generation": "1"}))
    http = httpx.AsyncClient(transport=httpx.MockTransport(server))
    async with AsyncContextCache(URL, KEY, http=http) as client:
        context = await client.contexts.create("m", messages=[{"role": "user", "content": "Hello"}])
        reply = await context.chat("More")

    assert (reply.text, context.generation) == (" yes", 1)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "More"}]


@pytest.mark.parametrize(("prompt", "messages"), [(None, None), ("a", [{"role": "user", "content": "a"}])])
def test_a_create_has_a_prompt_or_messages(prompt, messages):
    with pytest.raises(ValueError, match="not both"):
        client_of(Server((200, ANSWER))).contexts.create("m", prompt, messages=messages)


def test_an_error_is_a_class_by_its_code_with_all_that_was_said():
    body = error("context_not_found", "no context has this session_id", param="session_id")
    server = Server((404, body, {"X-Request-ID": "req-7"}))

    with pytest.raises(errors.ContextNotFound) as raised:
        client_of(server).contexts.get("ctx_9")

    found = raised.value
    assert (found.status, found.param, found.request_id, found.body) == (404, "session_id", "req-7", body)
    assert str(found) == "no context has this session_id"
    assert len(server.requests) == 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_is_the_same_in_another_process(protocol):
    reply = client_of(Server((200, ANSWER))).contexts.create("m", "Hello").reply
    said = error("context_busy", "a turn is running", param="session_id")
    raised = [
        *(api_error(409, error(code), {}) for code in errors.BY_CODE),
        api_error(409, said, {"x-request-id": "req-7", "retry-after": "2"}),
        BrokenStream("it broke off", text="so far"),
        errors.NotCreated("it is not there", reply=reply),
        ConnectionFailed("nobody there"),
    ]

    there = [pickle.loads(pickle.dumps(one, protocol)) for one in raised]

    assert [(type(one), str(one), vars(one)) for one in there] == [(type(one), str(one), vars(one)) for one in raised]
    assert (there[-4].retry_after_s, there[-4].request_id, there[-4].body) == (2.0, "req-7", said)


@pytest.mark.parametrize(
    "answer", [(500, b"<html>"), (404, {"error": "what"}), (418, error("of_next_year")), (400, ["odd"])]
)
def test_an_error_of_any_shape_is_an_error_of_ours(answer):
    with pytest.raises(ApiError) as raised:
        client_of(Server(answer)).contexts.get("ctx_9")

    assert raised.value.status == answer[0]


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": 1}', b"null"])
def test_an_answer_of_something_else_is_said_to_be_that(body):
    with pytest.raises(errors.NotUnderstood, match="is not from context-cache"):
        client_of(Server((200, body))).contexts.get("ctx_9")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"status": "up", "object": "page"}'])
@pytest.mark.parametrize("call", ["contexts.delete", "usage", "deployment"])
def test_what_somebody_else_answers_is_no_success_and_no_usage(call, body):
    """Seen failing: a proxy's page of 200 was a delete, and a usage of nothing."""
    asked = attrgetter(call)(client_of(Server((200, body))))

    with pytest.raises(errors.NotUnderstood, match="is not from context-cache"):
        asked(*["ctx_1"][: call == "contexts.delete"])


def test_a_turn_is_sent_again_under_one_key_as_long_as_it_was_asked_to_wait(waits):
    server = Server((503, error("store_unavailable"), {"Retry-After": "2"}), httpx.ReadTimeout("slow"), (200, ANSWER))

    assert client_of(server).contexts.create("m", "Hello").session_id == "ctx_1"
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1
    assert len(server.requests) == 3
    assert waits == [2.0, 0.5]


async def test_the_async_client_waits_and_sends_again_too(waits):
    server = Server((409, error("context_busy"), {"Retry-After": "1"}), (200, ANSWER))
    http = httpx.AsyncClient(transport=httpx.MockTransport(server))
    async with AsyncContextCache(URL, KEY, http=http) as client:
        await client.contexts.create("m", "Hello")

    assert waits == [1.0]


def test_an_answer_that_was_cut_in_its_body_is_asked_for_again(waits):
    class Cut(httpx.SyncByteStream):
        def __iter__(self):
            yield b'{"choices": '
            raise httpx.RemoteProtocolError("peer closed connection")

    sent = []

    def server(request):
        sent.append(request.headers["idempotency-key"])
        return httpx.Response(200, stream=Cut()) if len(sent) == 1 else httpx.Response(200, json=ANSWER)

    assert client_of(server).contexts.create("m", "Hello").session_id == "ctx_1"
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        ((400, error("invalid_request")), 1),
        ((429, error("context_quota_exceeded")), 1),
        ((422, error("idempotency_key_reused")), 1),
        ((503, error("no_ready_endpoint"), {"Retry-After": "3600"}), 1),
        ((503, error("no_ready_endpoint")), 5),
        (httpx.ConnectError("refused"), 5),
    ],
)
def test_what_cannot_help_is_not_repeated_and_what_can_only_so_often(waits, answer, times):
    server = Server(answer)

    with pytest.raises(errors.ClientError):
        client_of(server).contexts.create("m", "Hello")

    assert len(server.requests) == times


@pytest.mark.parametrize(
    ("change", "said"), [("compact", {}), ("fork", {}), ("rewind", {"generation": 3, "if_match": 7})]
)
def test_what_may_not_happen_twice_is_not_sent_again_when_nobody_knows_what_became_of_it(waits, change, said):
    """Seen failing: a rewind sent again was refused by the generation that it had made, or took a turn of another's."""
    lost, refused = Server(httpx.ReadTimeout("slow")), Server((503, error("no_ready_endpoint")), (201, INFO))

    with pytest.raises(ConnectionFailed):
        getattr(client_of(lost).contexts, change)("ctx_1", **said)

    assert len(lost.requests) == 1
    assert getattr(client_of(refused).contexts, change)("ctx_1", **said).session_id == "ctx_1"


def test_a_delete_whose_answer_was_lost_is_done_when_the_repeat_finds_nothing(waits):
    server = Server(httpx.ReadTimeout("slow"), (404, error("context_not_found")))
    client_of(server).contexts.delete("ctx_1")

    with pytest.raises(errors.ContextNotFound):
        client_of(Server((404, error("context_not_found")))).contexts.delete("ctx_1")


def test_a_list_of_many_pages_is_read_as_it_is_needed():
    page = {"data": [INFO, INFO], "has_more": True, "last_id": "ctx_1"}
    server = Server((200, page), (200, {**page, "last_id": "ctx_2"}), (200, {**page, "has_more": False}))
    listed = client_of(server).contexts.list(model="m")

    assert [next(listed).session_id for _ in range(3)] == ["ctx_1"] * 3
    assert len(server.requests) == 2
    assert sum(1 for _ in listed) == 3
    assert [request.url.params.get("after") for request in server.requests] == [None, "ctx_1", "ctx_2"]


@pytest.mark.parametrize("names", [["ctx_1"], [""], ["ctx_1", "ctx_2", "ctx_1"]])
async def test_a_list_whose_pages_go_round_in_a_circle_ends_in_an_error(names):
    pages = [(200, {"data": [], "has_more": True, "last_id": name}) for name in names]
    server = Server(*pages)
    own = AsyncContextCache(URL, KEY, http=httpx.AsyncClient(transport=httpx.MockTransport(Server(*pages))))

    for listed in (client_of(server).contexts.list, client_of(server).contexts.list_kept):
        with pytest.raises(errors.NotUnderstood, match="repeats itself"):
            next(listed())
    with pytest.raises(errors.NotUnderstood, match="repeats itself"):
        await anext(own.contexts.list())


def test_a_list_that_goes_on_and_says_not_where_is_not_taken_for_whole():
    server = Server((200, {"data": [INFO], "has_more": True, "last_id": None}))

    with pytest.raises(errors.NotUnderstood, match="is not from context-cache"):
        list(client_of(server).contexts.list())


def test_a_name_is_one_part_of_a_path_whatever_is_in_it():
    server = Server((200, INFO))
    client_of(server).contexts.get("a/../b?c")

    assert server.requests[0].url.raw_path == b"/v1/context/a%2F..%2Fb%3Fc"


def test_a_context_that_was_created_so_is_deleted_at_the_end_of_its_block():
    server = Server((200, ANSWER), (200, {"status": "success"}))
    with client_of(server).contexts.create("m", "Hello", delete_at_end=True):
        pass

    assert [request.method for request in server.requests] == ["POST", "DELETE"]


def chunk(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


STREAM = (
    chunk(choices=[{"delta": {"content": "Hé"}}])
    + chunk(
        choices=[{"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{"}}]}}]
    )
    + chunk(
        choices=[{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "finish_reason": "stop"}]
    )
    + chunk(choices=[], usage=USAGE, session_id="ctx_1", expires_at=9)
    + b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_a_stream_is_the_same_events_however_it_is_cut(size):
    reader = StreamReader({"x-context-generation": "2"})
    events = [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])]
    reader.end()

    *pieces, last = events
    assert [type(piece) for piece in pieces] == [TextDelta, ToolCallDelta, ToolCallDelta]
    assert isinstance(last, Finished)
    assert (last.reply.text, last.reply.generation, last.reply.expires_at) == ("Hé", 2, 9)
    assert last.reply.tool_calls[0]["function"] == {"name": "f", "arguments": "{}"}
    assert last.reply.usage.context.cached_tokens == 7


def test_a_streamed_turn_gives_its_events_and_leaves_its_answer():
    server = Server((200, STREAM, {"X-Session-ID": "ctx_1"}))
    with client_of(server).contexts.create_stream("m", "Hello") as stream:
        first = next(iter(stream))
        session_id = stream.context.session_id
        reply = stream.reply()

    assert (first, session_id, reply.text) == (TextDelta("Hé"), "ctx_1", "Hé")
    assert stream.context.reply is reply
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_a_streamed_create_that_left_no_context_names_none():
    """Seen failing: a context that is not there, at the generation that the head of the answer had planned."""
    usage = {**USAGE, "context": {**USAGE["context"], "committed": False, "reason": "store_unavailable"}}
    body = chunk(choices=[{"text": "Hé"}]) + chunk(choices=[], usage=usage, session_id=None) + b"data: [DONE]\n\n"
    head = {"X-Session-ID": "ctx_1", "X-Context-Generation": "1"}
    stream = client_of(Server((200, body, head))).contexts.create_stream("m", "Hello")

    with pytest.raises(errors.NotCreated) as raised:
        list(stream)

    reply = raised.value.reply
    assert (stream.context, reply.text, reply.session_id, reply.generation) == (None, "Hé", "ctx_1", None)


@pytest.mark.parametrize(("reason", "generation"), [("lease_lost", None), ("read_only", 2)])
def test_the_generation_of_a_turn_whose_commit_was_refused_is_not_known(reason, generation):
    usage = {**USAGE, "context": {**USAGE["context"], "committed": False, "reason": reason}}
    context = client_of(Server((200, {**ANSWER, "usage": usage}, {"X-Context-Generation": "2"})))

    assert context.contexts.create("m", "Hello").reply.generation == generation


class Opened(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream without end, that says whether it was closed."""

    is_closed = False

    def __iter__(self):
        while True:
            yield chunk(choices=[{"text": "x"}])

    async def __aiter__(self):
        for piece in self:
            yield piece

    def close(self):
        self.is_closed = True

    async def aclose(self):
        self.is_closed = True


@pytest.fixture
def opened():
    """Give a stream that nobody collects: what ends it is that it was left."""
    gc.disable()
    yield Opened()
    gc.enable()


def test_a_stream_that_is_left_is_closed(opened):
    """Seen failing: connection and turn stayed open until the garbage was collected."""
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, stream=opened))
    stream = ContextCache(URL, KEY, http=httpx.Client(transport=transport)).contexts.create_stream("m", "Hello")
    for _ in stream:
        break

    assert opened.is_closed
    with pytest.raises(ValueError, match="closed before the answer ended"):
        stream.reply()


async def test_an_async_stream_that_is_left_is_closed(opened):
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, stream=opened))
    async with AsyncContextCache(URL, KEY, http=httpx.AsyncClient(transport=transport)) as client:
        async for _ in client.contexts.create_stream("m", "Hello"):
            break

        await until(lambda: opened.is_closed, what="the answer is closed")


@pytest.mark.parametrize("end", [100, len(STREAM) - 20])
def test_a_stream_that_breaks_off_is_never_a_short_answer(end):
    stream = client_of(Server((200, STREAM[:end]))).contexts.create_stream("m", "Hello")

    with pytest.raises(BrokenStream) as raised:
        stream.reply()

    assert raised.value.text == "Hé"


def test_what_comes_after_the_end_of_a_stream_is_none_of_it():
    """Seen failing: a second end, and an answer that was whole was a broken one where the connection broke then."""
    body = STREAM + chunk(choices=[{"delta": {"content": "more"}}]) + b"data: [DONE]\n\n"
    events = list(client_of(Server((200, body))).contexts.create_stream("m", "Hello"))

    assert [type(event) for event in events].count(Finished) == 1
    assert events[-1].reply.text == "Hé"


@pytest.mark.parametrize(
    "said",
    [{"choices": 5}, {"choices": [{"text": 7}]}, {"choices": [{"delta": "x"}]}, {"usage": 7}, {"usage": {"a": {}}}],
)
def test_a_stream_of_something_else_is_a_broken_one(said):
    with pytest.raises(errors.ClientError):
        client_of(Server((200, chunk(**said) + b"data: [DONE]\n\n"))).contexts.create_stream("m", "Hello").reply()


@pytest.mark.parametrize("body", [{"data": 5}, b"[" * 200_000])
def test_an_answer_of_wrong_types_is_an_error_of_ours(body):
    with pytest.raises(errors.ClientError):
        client_of(Server((200, body))).models()


def test_an_answer_that_has_no_end_is_not_read_to_it():
    class Endless(httpx.SyncByteStream):
        def __iter__(self):
            while True:
                yield bytes(1 << 20)

    transport = httpx.MockTransport(lambda _request: httpx.Response(200, stream=Endless()))
    with pytest.raises(errors.NotUnderstood, match="64 MiB"):
        ContextCache(URL, KEY, http=httpx.Client(transport=transport)).models()


def test_a_delete_that_was_only_told_to_wait_has_not_deleted_what_is_not_there(waits):
    server = Server((429, error("rate_limit_exceeded")), (404, error("context_not_found")))

    with pytest.raises(errors.ContextNotFound):
        client_of(server).contexts.delete("ctx_1")


def test_an_error_in_the_middle_of_a_stream_is_raised_as_one():
    body = chunk(choices=[{"delta": {"content": "a"}}]) + chunk(**error("engine_error"))

    with pytest.raises(errors.EngineError):
        client_of(Server((200, body))).contexts.create_stream("m", "Hello").reply()


async def test_an_async_stream_gives_the_same_events():
    http = httpx.AsyncClient(transport=httpx.MockTransport(Server((200, STREAM, {"X-Session-ID": "ctx_1"}))))
    async with AsyncContextCache(URL, KEY, http=http) as client:
        stream = await asyncio.wait_for(_events(client), 10)

    assert [type(event).__name__ for event in stream] == ["TextDelta", "ToolCallDelta", "ToolCallDelta", "Finished"]


async def _events(client):
    async with client.contexts.create_stream("m", "Hello") as stream:
        return [event async for event in stream]


def test_the_key_is_in_no_error_and_in_no_repr():
    client = client_of(Server(httpx.ConnectError("refused")), timeout_s=1)
    client.transport._retries = Retries(times=0)

    with pytest.raises(ConnectionFailed) as raised:
        client.models()

    assert KEY not in repr(raised.value) + repr(client.transport.place) + str(raised.value.__cause__)


@pytest.mark.parametrize(("url", "key"), [("", KEY), ("gateway:8000", KEY), (URL, ""), (URL, "a\nb"), (URL, "ключ")])
def test_a_client_without_a_place_or_a_key_says_what_is_missing(monkeypatch, url, key):
    monkeypatch.delenv("CONTEXT_CACHE_URL", raising=False)
    monkeypatch.delenv("CONTEXT_CACHE_API_KEY", raising=False)

    with pytest.raises(ValueError, match=r"no server URL|must begin with http|no API key"):
        ContextCache(url, key)


def test_place_and_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("CONTEXT_CACHE_URL", URL + "/v1/")
    monkeypatch.setenv("CONTEXT_CACHE_API_KEY", KEY)

    with ContextCache() as client:
        assert client.transport.place.base_url == URL


def test_an_openai_client_carries_the_context():
    context = client_of(Server((200, ANSWER))).contexts.create("m", "Hello")
    openai_client = context.openai(max_retries=0)

    assert str(openai_client.base_url) == f"{URL}/v1/"
    assert openai_client.default_headers["X-Session-ID"] == "ctx_1"


def test_a_name_that_no_header_can_carry_is_said_to_be_one():
    context = client_of(Server((200, {**ANSWER, "session_id": "chat-7"}))).contexts.create("m", "Hello")

    with pytest.raises(ValueError, match="extra_body"):
        context.openai()


def test_what_a_replay_left_and_the_time_it_saved_are_typed():
    context = {**USAGE["context"], "saved_ms": 68000, "match": "diverge"}
    context["diverged"] = {"message": 3, "token": 41, "why": "edited"}
    usage = (
        client_of(Server((200, {**ANSWER, "usage": {**USAGE, "context": context}})))
        .contexts.create("m", "a")
        .reply.usage
    )

    assert (usage.context.saved_ms, usage.context.diverged) == (68000, Divergence(3, 41, "edited"))


def test_an_answer_without_usage_reads_as_a_turn_that_is_not_committed():
    usage = client_of(Server((200, {**ANSWER, "usage": None}))).contexts.create("m", "a").reply.usage

    assert (usage.total_tokens, usage.context.cached_tokens, usage.context.committed) == (0, 0, False)


def test_a_context_that_answered_nothing_has_no_reply():
    with pytest.raises(ValueError, match="ask or chat first"):
        _ = Context(client_of(Server()), "ctx_1", "m").reply


def test_openai_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("contextcache.client.retries.find_spec", lambda _: None)

    with pytest.raises(ImportError, match=r"pip install 'context-cache\[openai\]'"):
        Context(client_of(Server()), "ctx_1", "m").openai()
