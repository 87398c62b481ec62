"""Silent streams are kept open by comments, where their client asks for it, on a loop whose time does not take any.

Seen failing: without them no byte was sent before the first token.
"""

import asyncio
import json

import pytest

from contextcache.errors import ContextNotFound
from tests.kit.fake_vllm import FakeVllm, _json
from tests.kit.turn_bench import Pod
from vllm_plugin.turn.answer.keep_alive import KeepAlive

pytestmark = pytest.mark.looptime

COMMENT = b": keep-alive\n\n"
EVERY_10_S = [(b"x-keep-alive-comments", b"10")]
HI = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/context": {"prompt": "Hello"},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}
DIALECTS = pytest.mark.parametrize("path", PATHS)


class Slow(FakeVllm):
    """Is silent for a while before it generates; then it may refuse."""

    silence_s = 43
    refusal = ""

    async def _complete(self, scope, request, send):
        if not await self._is_refused(send):
            await super()._complete(scope, request, send)

    async def _respond(self, scope, request, send):
        if not await self._is_refused(send):
            await super()._respond(scope, request, send)

    async def _is_refused(self, send):
        await asyncio.sleep(self.silence_s)
        if self.refusal:
            await _json(send, 400, {"error": {"message": self.refusal, "type": "BadRequestError", "code": 400}})
        return bool(self.refusal)


@pytest.fixture
def engine():
    return Slow()


@pytest.fixture
def pod(tmp_path, engine):
    return Pod(tmp_path, engine, engine_timeout_s=100)


async def streamed(pod, path, *, headers=EVERY_10_S, **more):
    body = {"model": "m", "stream": True, "session_id": "mine", **PATHS[path], **more}
    body |= {} if path == "/v1/context" else {"context_create": "if_missing"}
    identity = pod.identity(None if path == "/v1/context" else "mine")
    return await pod.post(path, body, identity, headers=headers)


def error_of(path, body):
    """Return the error that ends a stream, as a client of the path's API reads it."""
    *_, event = (part for part in body.decode().split("\n\n") if part and part != "data: [DONE]")
    names = [line.removeprefix("event: ") for line in event.split("\n") if line.startswith("event: ")]
    (data,) = (json.loads(line[6:]) for line in event.split("\n") if line.startswith("data: "))
    if path in ("/v1/messages", "/v1/responses"):
        assert (names, data["type"]) == (["error"], "error")
        return data if path == "/v1/responses" else data["error"]
    assert body.endswith(b"data: [DONE]\n\n")
    return data["error"]


@DIALECTS
async def test_a_cold_stream_has_comments_from_the_start_and_then_its_events(pod, path):
    answer = await streamed(pod, path)

    assert (answer.status, answer.headers["content-type"][:17], answer.complete) == (200, "text/event-stream", True)
    assert answer.body.startswith(COMMENT * 4)
    assert answer.body.count(COMMENT) == 4
    assert (await pod.transcript("mine"))[0].generation == 1


@DIALECTS
async def test_without_the_header_no_byte_is_sent_before_the_first_event(pod, path):
    answer = await streamed(pod, path, headers=())

    assert answer.status == 200
    assert COMMENT not in answer.body
    assert "x-session-id" in answer.headers


@pytest.mark.parametrize("path", ["/v1/context", "/v1/completions"])
async def test_a_whole_answer_has_no_comments(pod, path):
    answer = await streamed(pod, path, stream=False)

    assert answer.json["session_id"] == "mine"


@DIALECTS
@pytest.mark.parametrize("fault", ["refusal", "silence"])
async def test_an_error_after_the_head_is_an_event_of_the_dialect_and_leaves_nothing(pod, engine, path, fault):
    engine.refusal = "temperature must be at most 2" if fault == "refusal" else ""
    engine.silence_s = 15 if fault == "refusal" else 10_000

    answer = await streamed(pod, path)

    said = error_of(path, answer.body)
    assert (answer.status, answer.complete) == (200, True)
    assert answer.body.startswith(COMMENT)
    assert said["code"] == ("invalid_request" if fault == "refusal" else "engine_error")
    assert "temperature" in said["message"] or fault != "refusal"
    with pytest.raises(ContextNotFound):
        await pod.transcript("mine")


@DIALECTS
async def test_an_error_before_the_engine_is_asked_keeps_its_status(pod, path):
    answer = await streamed(pod, path, ttl=1)

    assert (answer.status, answer.json["error"]["code"]) == (400, "ttl_out_of_range")


@pytest.mark.parametrize("said", ["0", "61", "-1", "1.5", "on", "", "9" * 5000])
async def test_other_than_seconds_of_a_minute_are_refused(pod, said):
    answer = await streamed(pod, "/v1/completions", headers=[(b"x-keep-alive-comments", said.encode())])

    assert (answer.status, answer.json["error"]["param"]) == (400, "x-keep-alive-comments")


@pytest.mark.parametrize("kept", ["", "kept_1"], ids=["plain", "kept"])
@pytest.mark.parametrize("refusal", ["", "temperature must be at most 2"], ids=["answered", "refused"])
async def test_a_request_without_a_context_has_them_too(pod, engine, kept, refusal):
    engine.refusal = refusal
    body = {"model": "m", "prompt": "Hello", "stream": True}

    answer = await pod.post("/v1/completions", body, pod.identity(kept=kept), headers=EVERY_10_S)

    assert answer.body.startswith(COMMENT * 4)
    assert answer.complete
    if refusal:
        assert error_of("/v1/completions", answer.body)["message"] == refusal
    else:
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_silence_between_two_events_is_filled_and_one_within_an_event_is_not():
    sent = []

    async def send(message):
        sent.append(message.get("body"))

    def body(data, *, more=True):
        return {"type": "http.response.body", "body": data, "more_body": more}

    keep_alive = KeepAlive(send, "/v1/completions", 10)
    begun_s = asyncio.get_running_loop().time()
    async with keep_alive.filling(stream=True):
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        await keep_alive(head)
        await asyncio.sleep(15)
        for data in (b"data: 1\n\nda", b"ta: 2\n\n"):
            await keep_alive(body(data))
            await asyncio.sleep(25)
        await keep_alive(body(b"data: [DONE]\n\n", more=False))
        await asyncio.sleep(25)

    assert asyncio.get_running_loop().time() - begun_s == 15 + 3 * 25
    assert sent[1:] == [COMMENT, b"data: 1\n\nda", b"ta: 2\n\n", COMMENT, COMMENT, b"data: [DONE]\n\n"]


async def test_an_answer_that_is_no_stream_is_left_alone():
    sent = []

    async def send(message):
        sent.append(message)

    keep_alive = KeepAlive(send, "/v1/completions", 10)
    async with keep_alive.filling(stream=True):
        await keep_alive({"type": "http.response.start", "status": 500, "headers": []})
        await asyncio.sleep(25)
        await keep_alive({"type": "http.response.body", "body": b"{}"})

    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_head_on_its_way_is_sent_before_the_answer_s_end_is_told():
    """Seen failing: the head was cancelled on its way, and the error went out without one."""
    sent = []

    async def send(message):
        await asyncio.sleep(0.2)
        sent.append(message.get("status") or message["body"])

    keep_alive = KeepAlive(send, "/v1/completions", 10)
    async with keep_alive.filling(stream=True):
        await asyncio.sleep(10.1)
    await keep_alive({"type": "http.response.start", "status": 503, "headers": []})
    await keep_alive({"type": "http.response.body", "body": b'{"error": {"message": "busy"}}'})

    assert sent == [200, COMMENT, b'data: {"error": {"message": "busy"}}\n\ndata: [DONE]\n\n']


async def test_an_answer_that_ends_when_a_comment_is_due_gets_none():
    sent = []

    async def send(message):
        sent.append(message)

    async with KeepAlive(send, "/v1/completions", 10).filling(stream=True):
        await asyncio.sleep(10)

    assert sent == []


async def test_a_client_that_reads_nothing_holds_up_no_end():
    async def send(message):
        await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(20):
        async with KeepAlive(send, "/v1/completions", 10).filling(stream=True):
            await asyncio.sleep(15)
