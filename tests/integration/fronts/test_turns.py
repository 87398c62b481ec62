"""Contexts from the client to the committed transcript: front, real manager, real turn middleware, a toy engine."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.tenants.keys import hash_key
from tests.kit.fake_vllm import encode
from tests.kit.fronts import code_of, envoy_too, only_envoy, only_http, running_front
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import settings_for
from tests.kit.turn_pod import MODEL, running_turn_pod

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def pod(tmp_path, manager):
    async with running_turn_pod(tmp_path, manager_port=manager.port) as pod:
        yield pod


async def asked(front, path, *, headers=None, **body):
    async with front.post(path, {"model": MODEL, **body}, headers=headers) as answer:
        assert answer.status == 200, await answer.read()
        return await answer.json()


async def created(front, **body) -> str:
    return (await asked(front, "/v1/context", **({"prompt": "Hello"} | body)))["session_id"]


def events_of(raw: bytes) -> list:
    frames = [frame.removeprefix(b"data: ") for frame in raw.split(b"\n\n") if frame]

    assert frames[-1] == b"[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


async def test_a_context_is_created_continued_read_and_deleted(front, pod):
    session_id = await created(front)
    by_body = await asked(front, "/v1/completions", prompt=" more", session_id=session_id)
    by_header = await asked(front, "/v1/completions", prompt=" again", headers={"X-Session-ID": session_id})
    async with front.get(f"/v1/context/{session_id}") as answer:
        one = await answer.json()
    async with front.delete(f"/v1/context/{session_id}") as answer:
        assert answer.status == 200
    async with front.post("/v1/completions", {"model": MODEL, "prompt": "x", "session_id": session_id}) as answer:
        assert await code_of(answer) == (404, "context_not_found")

    assert (by_body["session_id"], by_header["session_id"]) == (session_id, session_id)
    assert (one["generation"], one["holder"]["endpoint"]) == (3, "pod-a")
    assert [body["prompt"] for body in pod.engine.generations()] == [
        encode("Hello"),
        encode("Hello! more"),
        encode("Hello! more! again"),
    ]


@envoy_too
@pytest.mark.parametrize("name", ["_", "-x", "--help", "__proto__", "_..a"])
async def test_a_context_of_any_name_goes_through_every_call(front, name):
    """Seen to fail: 400 for the first `_` or `-`."""
    assert await created(front, session_id=name) == name
    await asked(front, "/v1/completions", prompt=" more", session_id=name)
    async with front.get(f"/v1/context/{name}") as answer:
        assert (await answer.json())["generation"] == 2
    async with front.request("PATCH", f"/v1/context/{name}", data=b'{"ttl": 120}') as answer:
        assert (await answer.json())["ttl"] == 120
    async with front.post(f"/v1/context/{name}/fork", {"session_id": f"{name}-2"}) as answer:
        assert (answer.status, (await answer.json())["session_id"]) == (201, f"{name}-2")
    async with front.post(f"/v1/context/{name}/rewind", {"generation": 1}, headers={"If-Match": 'W/"2"'}) as answer:
        assert (answer.status, (await answer.json())["generation"]) == (200, 3)
    async with front.get(f"/v1/context?limit=1&after={name}-2") as answer:
        assert [one["session_id"] for one in (await answer.json())["data"]] == [name]
    for one in (name, f"{name}-2"):
        async with front.delete(f"/v1/context/{one}") as answer:
            assert answer.status == 200


@envoy_too
async def test_a_streamed_create_and_turn_end_with_usage_session_and_done(front):
    async with front.post("/v1/context", {"model": MODEL, "prompt": "Hello", "stream": True}) as answer:
        first = events_of(await answer.content.read())
        session_id = answer.headers["x-session-id"]
    ask = {"model": MODEL, "prompt": " more", "stream": True, "stream_options": {"include_usage": True}}
    async with front.post("/v1/completions", {**ask, "session_id": session_id}) as answer:
        second = events_of(await answer.content.read())
        receipt = answer.headers

    assert first[-1]["session_id"] == second[-1]["session_id"] == session_id
    assert second[-1]["usage"]["context"]["committed"]
    assert (receipt["x-context-mode"], receipt["content-type"]) == ("append", "text/event-stream")


@envoy_too
@pytest.mark.parametrize("kept", [False, True], ids=["turn", "kept"])
async def test_a_silent_stream_begins_with_a_comment_where_its_client_asks_for_it(
    front_kind, tmp_path, pod, manager, kept
):
    settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
    settings.api_keys_file.write_text(
        json.dumps({"keys": [{"sha256": hash_key(KEY), "tenant": "demo", "plain": "keep"}]})
    )
    answering, complete = asyncio.Event(), pod.engine._complete

    async def silent(*arguments):
        await answering.wait()
        await complete(*arguments)

    async with running_front(front_kind, settings, num_ready=1) as front:
        context = {} if kept else {"session_id": await created(front)}
        pod.engine._complete = silent
        body = {"model": MODEL, "prompt": " more", "stream": True, **context}
        async with front.post("/v1/completions", body, headers={"X-Keep-Alive-Comments": "1"}) as answer:
            head = await answer.content.readuntil(b"\n\n")
            answering.set()
            events = events_of(await answer.read())

    assert (answer.status, answer.headers["content-type"][:17], head) == (200, "text/event-stream", b": keep-alive\n\n")
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == "!"


@envoy_too
async def test_a_turn_named_by_its_header_with_a_body_that_is_none_is_refused(front, pod):
    session_id = await created(front)
    num_asked = len(pod.engine.generations())
    for body in (b"", b"{", b"[]", b'{"model": "toy-model"}', b'\xff\xfe{"a": 1}'):
        async with front.post("/v1/completions", body, headers={"X-Session-ID": session_id}) as answer:
            assert await code_of(answer) == (400, "invalid_request"), body

    assert len(pod.engine.generations()) == num_asked


@envoy_too
async def test_bodies_of_20_mib_get_the_engines_own_typed_answer(front):
    session_id = await created(front)
    text = "x" * (20 << 20)
    for path, body, headers in (
        ("/v1/context", {"prompt": text}, {}),
        ("/v1/completions", {"prompt": text, "session_id": session_id}, {}),
        ("/v1/completions", {"prompt": text}, {"X-Session-ID": session_id}),
    ):
        async with front.post(path, {"model": MODEL, **body}, headers=headers) as answer:
            assert await code_of(answer) == (400, "context_length_exceeded")


@only_http
async def test_while_the_first_token_of_a_turn_has_come_another_turn_and_a_rewind_are_told_to_wait(front, pod):
    session_id = await created(front)
    pod.engine.pause = asyncio.Event()
    pod.engine.answer = lambda ids: "abcdef"
    body = {"model": MODEL, "prompt": " more", "session_id": session_id, "stream": True}
    async with front.post("/v1/completions", body) as running:
        first = await running.content.readuntil(b"\n\n")
        for call in (
            front.post("/v1/completions", {**body, "stream": False}),
            front.post(f"/v1/context/{session_id}/rewind", {"generation": 1}),
        ):
            async with call as second:
                assert await code_of(second) == (409, "context_busy")
                assert second.headers["retry-after"]
        pod.engine.pause.set()
        rest = await running.content.read()

    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "a"
    assert rest.endswith(b"data: [DONE]\n\n")


@only_envoy
async def test_without_a_plugin_the_pod_refuses_what_claims_a_context_and_serves_the_rest(front, pod):
    session_id = await created(front)
    await front.end_gateway()
    num_asked = len(pod.engine.generations())
    escaped = session_id.replace("c", "\\u0063", 1)
    for body in (
        {"model": MODEL, "prompt": "x", "session_id": session_id},
        f'{{"model": "{MODEL}", "prompt": "x", "session\\u005fid": "{escaped}"}}'.encode(),
    ):
        async with front.post("/v1/completions", body) as answer:
            assert await code_of(answer) == (503, "gateway_unavailable"), body
            assert answer.headers["retry-after"]
    wide = f'{{"model": "{MODEL}", "prompt": "x", "session_id": "{session_id}"}}'.encode("utf-16")
    async with front.post("/v1/completions", wide) as answer:
        assert await code_of(answer) == (400, "invalid_request")
    assert len(pod.engine.generations()) == num_asked
    forged = {"cache_salt": "theirs", "kv_transfer_params": {"context_cache": "forged"}}
    plain = await asked(front, "/v1/completions", prompt="x", **forged)

    assert plain["choices"][0]["text"] == "!"
    assert all(pod.engine.generations()[-1].get(key) is None for key in forged)


@envoy_too
async def test_a_key_says_how_its_usage_counts_and_a_header_says_otherwise(front_kind, tmp_path, pod, manager):
    settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
    keys = {"keys": [{"sha256": hash_key(KEY), "tenant": "demo", "usage": "openai", "context_mode": "replay"}]}
    settings.api_keys_file.write_text(json.dumps(keys))
    pod.engine.cached_tokens = 4
    said = {"X-Usage-Format": "context"}
    async with running_front(front_kind, settings, num_ready=1) as front:
        session_id = await created(front)
        by_key = await asked(front, "/v1/completions", prompt="Hello! more", session_id=session_id)
        by_header = await asked(
            front, "/v1/completions", prompt=" again", session_id=session_id, context_mode="append", headers=said
        )

    assert [body["prompt"] for body in pod.engine.generations()[1:]] == [
        encode("Hello! more"),
        encode("Hello! more! again"),
    ]
    assert by_key["usage"]["prompt_tokens"] == len("Hello! more")
    assert by_key["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert by_header["usage"]["prompt_tokens"] == len("Hello! more! again") - 4


@envoy_too
async def test_a_turn_that_does_not_fit_is_cut_where_it_says_so(front, pod):
    pod.engine.max_model_len = 40
    session_id = await created(front, prompt="x" * 30)
    ask = {"model": MODEL, "prompt": "y" * 20, "session_id": session_id}
    async with front.post("/v1/completions", ask) as answer:
        assert await code_of(answer) == (400, "context_length_exceeded")
    async with front.post("/v1/completions", ask | {"truncation": "auto"}) as answer:
        assert await code_of(answer) == (400, "invalid_request")
    cut = await asked(
        front,
        "/v1/completions",
        prompt="y" * 20,
        headers={"X-Session-ID": session_id},
        truncation={"type": "last_history_tokens", "tokens": 5},
    )
    async with front.get(f"/v1/context/{session_id}") as answer:
        one = await answer.json()

    assert "truncation" not in pod.engine.generations()[-1]
    assert pod.engine.generations()[-1]["prompt"] == encode("xxxx!" + "y" * 20)
    assert cut["usage"]["context"]["truncated_tokens"] == 26
    assert (one["generation"], one["tokens"]) == (2, 26)


@envoy_too
async def test_a_context_takes_no_image_however_it_is_spelled(front, pod):
    """Token ids alone do not say which image was computed. Seen to fail: a part without a type reached the engine."""
    session_id = (await asked(front, "/v1/context", messages=CHAT))["session_id"]
    pod.engine.requests.clear()
    image = {"image_url": {"url": "data:image/png;base64,AA=="}}
    for part in (image | {"type": "image_url"}, image, image | {"type": "text", "text": "this", "uuid": "one"}):
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        for path, more, headers in (
            ("/v1/context", {}, {}),
            ("/v1/chat/completions", {"session_id": session_id}, {}),
            ("/v1/chat/completions", {}, {"X-Session-ID": session_id}),
            ("/v1/chat/completions", {"session_id": "new", "context_create": "if_missing"}, {}),
        ):
            async with front.post(path, {"model": MODEL, "messages": messages, **more}, headers=headers) as answer:
                assert await code_of(answer) == (400, "invalid_request")
                assert (await answer.json())["error"]["param"] == "messages[0].content"

    assert {path for path, _ in pod.engine.requests} <= {"/metrics/"}
