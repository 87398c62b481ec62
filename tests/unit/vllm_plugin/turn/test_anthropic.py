"""Turns on `/v1/messages`: the ordinary turn in Anthropic's words, over the real manager and a toy engine."""

import json

import pytest

from contextcache.claim import CONTAINERS_MAX
from contextcache.errors import ContextCacheError, error_body
from tests.kit.fake_vllm import EOS, FakeVllm, encode
from tests.kit.turn_bench import Pod
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.message_input import Template

PATH = "/v1/messages"
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
TOOL = {"name": "weather", "description": "tells it", "input_schema": {"type": "object", "properties": {}}}


def user(*said):
    return {"role": "user", "content": [{"type": "text", "text": text} for text in said]}


async def ask(pod, *messages, headers=(), **body):
    return await pod.ask(
        "mine", path=PATH, headers=headers, max_tokens=50, messages=list(messages), context_create="if_missing", **body
    )


def frames(answer):
    """Return (event, data) of a stream."""
    found = [frame.split("\n") for frame in answer.body.decode().split("\n\n") if frame]
    return [(lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))) for lines in found]


async def test_more_parts_than_a_body_may_have_are_refused_before_they_are_read(pod):
    refused = await ask(pod, {"role": "user", "content": [{}] * CONTAINERS_MAX})

    assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_request")
    assert f"more than {CONTAINERS_MAX} lists and objects" in refused.json["error"]["message"]


async def test_a_context_is_created_and_goes_on_with_new_messages_alone(pod):
    pod.engine.answer = lambda ids: "Hello"
    first = await ask(pod, user("Hi"), system=[{"type": "text", "text": "Be brief", "cache_control": {}}], ttl=120)
    pod.engine.cached_tokens = 30
    more = await ask(pod, user("And"))

    ids = pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"]
    session, segments = await pod.transcript("mine")
    assert (first.status, more.status) == (200, 200)
    assert ids == [
        *encode("<system>Be brief"), EOS, *encode("\n<user>Hi"), EOS, *encode("\n<assistant>Hello"), EOS,
        *encode("\n<user>And"), EOS, *encode("\n<assistant>"),
    ]  # fmt: skip
    assert more.json["content"] == [{"type": "text", "text": "Hello"}]
    assert (more.json["type"], more.json["role"], more.json["stop_reason"]) == ("message", "assistant", "end_turn")
    assert (more.json["session_id"], session.generation, len(segments)) == ("mine", 2, 4)
    assert more.headers["x-context-mode"] == "append"
    assert more.json["usage"] == {
        "input_tokens": len(ids) - 30,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 30,
        "output_tokens": len("Hello") + 1,
        "context": more.json["usage"]["context"],
    }
    assert more.json["usage"]["context"]["committed"]


async def test_the_usage_is_anthropics_whatever_format_is_asked_for(pod):
    pod.engine.cached_tokens = 4
    answer = await ask(pod, user("Hi"), headers=[(b"x-usage-format", b"context")])

    assert answer.json["usage"]["cache_read_input_tokens"] == 4
    assert (
        answer.json["usage"]["input_tokens"]
        == len(pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"]) - 4
    )


async def test_the_whole_conversation_again_with_thoughts_and_cache_marks_is_an_extension(pod):
    await ask(pod, user("Hi"), system="Be brief")
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "!", "cache_control": {}}]}

    more = await ask(pod, user("Hi"), said, user("And"), system="Be brief")

    assert more.json["usage"]["context"]["match"] == "extend"
    assert more.headers["x-context-mode"] == "replay"


async def test_a_tool_is_called_and_its_result_goes_on(pod):
    pod.engine.answer, pod.engine.calls, pod.engine.finish_reason = lambda ids: "", (CALL,), "tool_calls"
    asked = await ask(pod, user("Weather?"), tools=[TOOL])
    pod.engine.answer, pod.engine.calls, pod.engine.finish_reason = lambda ids: "Rain", (), "stop"
    told = await ask(
        pod, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "wet"}]}, tools=[TOOL]
    )

    assert asked.json["content"] == [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Kiel"}}]
    assert asked.json["stop_reason"] == "tool_use"
    assert (told.json["content"][0]["text"], told.headers["x-context-mode"]) == ("Rain", "append")
    _, segments = await pod.transcript("mine")
    assert json.loads(segments[1].messages_json)[0]["tool_calls"][0]["id"] == "c1"


@pytest.mark.parametrize("chunk_bytes", [None, 7])
async def test_a_stream_has_anthropics_events_and_its_last_but_one_tells_the_commit(pod, chunk_bytes):
    pod.engine.answer, pod.engine.chunk_bytes = lambda ids: "Hello", chunk_bytes
    await ask(pod, user("Hi"))
    answer = await ask(pod, user("And"), stream=True)

    told = frames(answer)
    assert [event for event, _ in told] == [
        "message_start", "content_block_start", *["content_block_delta"] * 5,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(data["delta"]["text"] for event, data in told if event == "content_block_delta") == "Hello"
    assert told[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2][1]["usage"]["context"]["committed"]
    assert (told[-2][1]["session_id"], answer.headers["x-context-generation"]) == ("mine", "2")
    assert told[-2][1]["usage"]["output_tokens"] == 6
    assert all(data["type"] == event for event, data in told)
    assert (await pod.transcript("mine"))[0].generation == 2


async def test_a_stream_that_breaks_off_ends_without_its_end_and_commits_nothing(pod):
    await ask(pod, user("Hi"))
    pod.engine.answer, pod.engine.break_off_after = lambda ids: "Hello", 3
    answer = await ask(pod, user("And"), stream=True)

    assert [event for event, _ in frames(answer)][-1] == "content_block_delta"
    assert not answer.complete
    assert (await pod.transcript("mine"))[0].generation == 1


async def test_an_engines_error_in_a_stream_is_anthropics_and_commits_nothing(pod):
    await ask(pod, user("Hi"))
    pod.engine.answer, pod.engine.fail_after = lambda ids: "Hello", 3
    told = frames(await ask(pod, user("And"), stream=True))

    assert told[-1][0] == "error"
    assert (told[-1][1]["type"], told[-1][1]["error"]["message"]) == ("error", "boom")
    assert (await pod.transcript("mine"))[0].generation == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_under_an_idempotency_key_is_given_again_to_the_byte(pod, stream):
    key = [(b"idempotency-key", b"k1")]
    first = await ask(pod, user("Hi"), headers=key, stream=stream)
    again = await ask(pod, user("Hi"), headers=key, stream=stream)

    assert again.body == first.body
    assert again.headers["idempotent-replayed"] == "true"
    assert len([path for path, _ in pod.engine.requests if path == "/v1/chat/completions"]) == 1


async def test_an_answer_that_cannot_be_told_is_not_committed(pod):
    """Seen to fail where it was told after the commit: generation 2, and no answer."""
    spoilt = {**CALL, "function": {"name": "weather", "arguments": "{"}}
    await ask(pod, user("Hi"))
    original = pod.engine._complete

    async def complete(scope, request, send):
        async def spoiled(message):
            if message["type"] == "http.response.body":
                body = json.loads(message["body"])
                body["choices"][0]["message"]["tool_calls"] = [spoilt]
                message = {**message, "body": json.dumps(body).encode()}
            await send(message)

        await original(scope, request, spoiled)

    pod.engine._complete = complete
    answer = await ask(pod, user("And"))

    assert (answer.status, answer.json["error"]["code"]) == (502, "engine_error")
    assert (await pod.transcript("mine"))[0].generation == 1


ODD = {"type": "image", "source": "x"}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"context_mode": "guess"}, "context_mode"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [user("Hi"), {"role": "user", "content": [{**RESULT, "content": [ODD]}]}]},
            "messages[1].content[0].content[0]",
        ),
        ({"messages": [1] * 70_000}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [1] * 70_000}]}]},
            "messages[0].content[0].content[0]",
        ),
    ],
)
async def test_what_cannot_be_right_is_refused_in_both_dialects_at_once(pod, body, param):
    answer = await pod.ask("mine", path=PATH, **{"max_tokens": 5, "messages": [user("Hi")]} | body)

    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "invalid_request", param)
    assert (answer.json["type"], error["type"]) == ("error", "invalid_request_error")
    assert pod.engine.generations() == []


class Templates(FakeVllm):
    """Shows efforts and refuses messages as `chat_template` says, and counts what it renders."""

    num_rendered = 0
    refuses_later_system = refuses_none = shows_efforts = False

    async def _tokenize(self, scope, request, send):
        self.num_rendered += 1
        said = request.get("chat_template_kwargs") or {}
        effort = said.get("reasoning_effort") if self.shows_efforts else None
        later = any(message["role"] == "system" for message in request.get("messages", [])[1:])
        if (later and self.refuses_later_system) or (said.get("reasoning_effort") == "none" and self.refuses_none):
            body = json.dumps({"error": {"message": "System message must be at the beginning.", "code": 400}}).encode()
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": body})
            return
        if effort:
            request = {**request, "messages": [*request["messages"], {"role": "effort", "content": effort}]}
        await super()._tokenize(scope, {**request, "chat_template_kwargs": {}}, send)


def engine_of(**template):
    app = Templates()
    for name, value in template.items():
        setattr(app, name, value)
    return Engine(app, {"type": "http", "headers": []})


@pytest.mark.parametrize(
    ("template", "merges_system", "no_thinking"),
    [
        ({}, False, "low"),
        ({"shows_efforts": True}, False, "none"),
        ({"shows_efforts": True, "refuses_none": True}, False, "low"),
        ({"refuses_later_system": True}, True, "low"),
    ],
)
async def test_a_template_is_asked_how_it_takes_system_messages_and_no_thinking(template, merges_system, no_thinking):
    assert await Template.of(engine_of(**template)) == Template(merges_system, no_thinking)


async def test_a_template_is_asked_once(tmp_path):
    """Seen to fail: seven calls before each turn."""
    pod = Pod(tmp_path, Templates())
    rendered = []
    for text in ("Hi", "And", "Then"):
        await ask(pod, user(text))
        rendered.append(pod.engine.num_rendered)

    assert rendered[2] - rendered[1] == rendered[1] - rendered[0] < rendered[0]


async def test_a_later_system_message_is_merged_where_the_template_wants_that(tmp_path):
    pod = Pod(tmp_path, Templates())
    pod.engine.refuses_later_system = True
    said = [user("Hi"), {"role": "system", "content": "It rains"}, user("And")]
    answer = await ask(pod, *said, system="Be brief. ")

    ids = pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"]
    assert answer.status == 200
    assert ids[: len("<system>Be brief. It rains")] == encode("<system>Be brief. It rains")


@pytest.mark.parametrize(("its", "param"), [("stop", "stop_sequences"), ("temperature", "temperature")])
async def test_a_field_that_the_engine_refuses_has_the_clients_name(pod, its, param):
    """Seen to fail: `stop`, which the client never sent."""

    async def refuse(scope, request, send):
        body = json.dumps({"error": {"message": "too many", "param": its, "code": 400}}).encode()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": body})

    pod.engine._complete = refuse
    answer = await ask(pod, user("Hi"), stop_sequences=["a"] * 5)

    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_a_context_that_is_not_there_is_not_found(pod):
    answer = await pod.ask("mine", path=PATH, max_tokens=5, messages=[user("Hi")])

    assert (answer.status, answer.json["type"], answer.json["error"]["code"]) == (404, "error", "context_not_found")


async def test_a_system_prompt_beside_what_is_new_alone_could_be_either(pod):
    await ask(pod, user("Hi"), system="Be brief")

    answer = await ask(pod, user("And"), system="Be brief")

    assert (answer.status, answer.json["error"]["code"]) == (400, "history_ambiguous")


async def test_a_turn_that_reads_only_commits_nothing(pod):
    await ask(pod, user("Hi"))

    answer = await ask(pod, user("And"), context_commit=False)

    assert answer.json["usage"]["context"]["reason"] == "read_only"
    assert (await pod.transcript("mine"))[0].generation == 1


async def test_a_chat_goes_on_in_anthropics_words_and_back(pod):
    session_id = (await pod.create(messages=[{"role": "user", "content": "Hi"}])).json["session_id"]
    for path in (PATH, "/v1/chat/completions", PATH):
        answer = await pod.ask(session_id, path=path, max_tokens=5, messages=[{"role": "user", "content": "And"}])
        assert answer.headers["x-context-mode"] == "append"

    assert (await pod.transcript(session_id))[0].generation == 4


def test_an_error_has_the_shape_of_either_dialect():
    body = json.loads(error_body(ContextCacheError("x", param="p")))

    assert body == {
        "type": "error",
        "error": {"message": "x", "type": "server_error", "code": "internal_error", "param": "p"},
        "detail": "x",
    }


@pytest.mark.parametrize(("name", "meant"), [("tll", "ttl"), ("sesion_id", "session_id"), ("meta_data", "metadata")])
async def test_a_misspelt_field_of_a_context_is_refused(pod, name, meant):
    """Seen to fail: 200 and the default life."""
    answer = await ask(pod, user("Hi"), **{name: 90})

    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body
    assert f"did you mean `{meant}`" in answer.json["error"]["message"]
