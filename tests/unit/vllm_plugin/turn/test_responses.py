"""Turns on `/v1/responses`, told as turns of the chat and back, over a real manager and a toy engine."""

import json
import re
from types import SimpleNamespace

import pytest

from contextcache.errors import StoreUnavailable
from tests.kit.fake_vllm import EOS, encode
from vllm_plugin.turn.answer.responses import Responses

PATH = "/v1/responses"
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


async def ask(pod, given, *, headers=(), named="mine", **body):
    """Ask as a gateway routes it: the identity says which context it is."""
    whole = {"model": "m", "input": given, **body}
    return await pod.post(PATH, whole, pod.identity(named), headers=headers)


async def begin(pod, given="Hi", **body):
    return await ask(pod, given, conversation="mine", **body)


def prompt(pod):
    return pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"]


def frames(answer):
    found = [frame.split("\n") for frame in answer.body.decode().split("\n\n") if frame]
    return [json.loads(lines[1].removeprefix("data: ")) for lines in found]


async def test_a_response_is_created_and_goes_on_by_its_id(pod):
    pod.engine.answer = lambda ids: "Hello"
    first = await begin(pod, instructions="Be brief", metadata={"of": "mine"}, ttl=120)
    pod.engine.cached_tokens = 30
    more = await ask(pod, "And", previous_response_id=first.json["id"], instructions="Be brief")

    session, segments = await pod.transcript("mine")
    assert (first.status, more.status) == (200, 200), (first.body, more.body)
    assert prompt(pod) == [
        *encode("<system>Be brief"), EOS, *encode("\n<user>Hi"), EOS, *encode("\n<assistant>Hello"), EOS,
        *encode("\n<user>And"), EOS, *encode("\n<assistant>"),
    ]  # fmt: skip
    assert [one.json["id"] for one in (first, more)] == ["resp_1_mine", "resp_2_mine"]
    assert more.json["previous_response_id"] == "resp_1_mine"
    assert first.json["conversation"] == {"id": "mine"}
    assert more.json["output"][0]["content"][0]["text"] == "Hello"
    assert (session.generation, len(segments), session.metadata) == (2, 4, {"of": "mine"})
    assert more.headers["x-context-mode"] == "append"
    assert more.json["usage"]["input_tokens"] == len(prompt(pod))
    assert more.json["usage"]["input_tokens_details"]["cached_tokens"] == 30
    assert more.json["usage"]["context"]["committed"]
    assert not {"kv_transfer_params", "input_messages", "output_messages"} & set(more.json)
    sent = pod.engine.generations()[-1]
    assert sent["messages"][-1] == {"role": "user", "content": "And"}
    assert not {"previous_response_id", "conversation", "input", "instructions", "session_id"} & set(sent)


@pytest.mark.parametrize("chunk_bytes", [None, 7])
async def test_a_stream_tells_the_id_first_and_the_commit_last(pod, chunk_bytes):
    pod.engine.answer, pod.engine.chunk_bytes = lambda ids: "Hello", chunk_bytes
    answer = await begin(pod, stream=True)

    told = frames(answer)
    assert [event["type"] for event in told] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * 5, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in told] == [*range(len(told))]
    assert [event["response"]["id"] for event in (*told[:2], told[-1])] == ["resp_1_mine"] * 3
    assert told[-1]["response"]["usage"]["context"]["committed"]
    assert told[-1]["response"]["session_id"] == "mine"
    assert answer.headers["x-context-generation"] == "1"
    assert b"[DONE]" not in answer.body
    assert (await pod.transcript("mine"))[0].generation == 1


async def test_a_response_goes_on_in_the_context_that_the_gateway_found_by_its_label(pod):
    await begin(pod)
    more = await ask(pod, "And", headers=[(b"x-session-id", b"mine")])

    assert (more.status, more.json["id"]) == (200, "resp_2_mine"), more.body


@pytest.mark.parametrize(("name", "meant"), [("conversation_id", "conversation"), ("tll", "ttl"), ("stroe", "store")])
async def test_a_misspelt_field_of_a_response_is_refused(pod, name, meant):
    await begin(pod)
    answer = await ask(pod, "And", session_id="mine", **{name: "x"})

    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body
    assert f"did you mean `{meant}`" in answer.json["error"]["message"]


async def test_instructions_stand_for_one_request(pod):
    await begin(pod, instructions="Be brief")
    other = await ask(pod, "And", previous_response_id="resp_1_mine", instructions="Be long")
    changed = prompt(pod)
    none = await ask(pod, "More", previous_response_id="resp_2_mine")

    assert changed[:16] == [*encode("<system>Be long"), EOS]
    assert other.json["usage"]["context"]["match"] == "diverge"
    assert none.status == 200
    assert prompt(pod)[:8] == encode("<user>Hi")
    assert encode("Be long") not in [prompt(pod)[at : at + 7] for at in range(len(prompt(pod)))]


async def test_a_context_of_the_chat_keeps_its_system_message_by_session_id(pod):
    await pod.create(messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
                     session_id="mine")  # fmt: skip
    more = await ask(pod, "And", session_id="mine")

    assert (more.status, more.headers["x-context-mode"]) == (200, "append")
    assert prompt(pod)[:17] == [*encode("<system>Be brief"), EOS]


async def test_a_conversation_that_is_sent_again_beside_its_instructions_is_an_extension(pod):
    """Seen to fail: 200 without the instructions, everything computed anew."""
    await begin(pod, "Hi", instructions="Be brief")
    again = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "!"},
        {"role": "user", "content": "And"},
    ]
    more = await ask(pod, again, session_id="mine", instructions="Be brief")
    new = await ask(pod, "More", session_id="mine", instructions="Be brief")

    assert more.json["usage"]["context"]["match"] == "extend", more.body
    assert new.json["usage"]["context"]["match"] == "append", new.body
    assert prompt(pod)[:17] == [*encode("<system>Be brief"), EOS]
    assert (await pod.transcript("mine"))[0].generation == 3


async def test_a_turn_that_is_refused_by_its_messages_leaves_no_lease(pod):
    """Seen to fail: 409 context_busy until the lease ended."""
    await begin(pod, "Hi", instructions="Be brief")
    odd = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    refused = await ask(pod, odd, session_id="mine", instructions="Be brief")
    after = await ask(pod, "And", previous_response_id="resp_1_mine", instructions="Be brief")

    assert (refused.status, refused.json["error"]["code"]) == (400, "history_ambiguous")
    assert refused.json["error"]["param"] == "input"
    assert after.status == 200


async def test_a_tool_is_called_and_its_result_goes_on(pod):
    pod.engine.answer, pod.engine.calls = lambda ids: "", (CALL,)
    asked = await begin(pod, "Weather?", tools=[TOOL])
    pod.engine.answer, pod.engine.calls = lambda ids: "Rain", ()
    result = {"type": "function_call_output", "call_id": "c1", "output": "wet"}
    told = await ask(pod, [result], previous_response_id="resp_1_mine", tools=[TOOL])

    assert asked.json["output"][0]["call_id"] == "c1"
    assert (told.json["output"][0]["content"][0]["text"], told.headers["x-context-mode"]) == ("Rain", "append")
    _, segments = await pod.transcript("mine")
    assert json.loads(segments[1].messages_json)[0]["tool_calls"][0]["id"] == "c1"
    assert json.loads(segments[2].messages_json) == [{"role": "tool", "content": "wet", "tool_call_id": "c1"}]


async def test_what_is_not_stored_changes_nothing(pod):
    await begin(pod)
    more = await ask(pod, "And", previous_response_id="resp_1_mine", store=False)

    assert re.fullmatch("resp_[0-9a-f]{32}", more.json["id"])
    assert more.json["usage"]["context"] | {"committed": False} == more.json["usage"]["context"]
    assert (await pod.transcript("mine"))[0].generation == 1


async def test_an_answer_that_the_engine_gave_up_is_not_told_as_whole_and_not_committed(pod):
    await begin(pod)
    pod.engine.finish_reason = "abort"
    lost = await ask(pod, "And", previous_response_id="resp_1_mine")
    pod.engine.finish_reason = "length"
    long = await ask(pod, "And", previous_response_id="resp_1_mine")

    assert lost.status == 502
    assert (long.json["status"], long.json["id"]) == ("incomplete", "resp_2_mine")
    assert long.json["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_whose_commit_was_refused_has_no_id_to_go_on_from(pod, stream):
    """Seen failing: the last event of a stream had the id of the next response of the context."""
    await begin(pod)
    pod.manager.fault = ("commit_turn", StoreUnavailable("away", retry_after_s=1))
    lost = await ask(pod, "And", previous_response_id="resp_1_mine", stream=stream)
    told = frames(lost)[-1]["response"] if stream else lost.json

    assert (lost.status, told["usage"]["context"]["committed"]) == (200, False)
    assert not told["id"].endswith("_mine")


async def test_a_stream_that_breaks_off_commits_nothing(pod):
    await begin(pod)
    pod.engine.break_off_after = 2
    lost = await ask(pod, "And", previous_response_id="resp_1_mine", stream=True)

    assert not lost.complete
    assert b"response.completed" not in lost.body
    assert (await pod.transcript("mine"))[0].generation == 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"conversation": "mine", "previous_response_id": "resp_1_mine"}, "invalid_request", "conversation"),
        ({"conversation": {"name": "mine"}}, "invalid_request", "conversation"),
        ({"conversation": "mine", "session_id": "other"}, "invalid_request", "session_id"),
        ({"previous_response_id": "resp_0123"}, "previous_response_not_found", "previous_response_id"),
        ({"previous_response_id": 1}, "invalid_request", "previous_response_id"),
        ({"conversation": "mine", "store": "yes"}, "invalid_request", "store"),
        ({"conversation": "mine", "background": True}, "invalid_request", "background"),
        ({"conversation": "mine", "enable_response_messages": True}, "invalid_request", "enable_response_messages"),
        ({"conversation": "mine", "truncation": "auto"}, "invalid_request", "truncation"),
        ({"conversation": "mine", "input": [{"type": "message", "role": "user", "content": [
            {"type": "input_image", "image_url": "http://x/y.png", "detail": "auto"}]}]}, "invalid_request",
         "input[0]"),
        ({"conversation": "mine", "input": [{}] * 5000}, "invalid_request", None),
        ({"conversation": "mine", "input": "x", "tools": [{}] * 5000}, "invalid_request", None),
        ({"conversation": "mine", "input": [{"role": "user", "content": ""}] * 8193}, "invalid_request", "input"),
        ({"conversation": "mine", "input": [{"role": "user", "content": "x"}], "tools": [{"type": "web_search"}]},
         "invalid_request", "tools[0]"),
        ({"conversation": "mine", "input": [{"type": "item_reference", "id": "x"}]}, "invalid_request", "input[0]"),
        ({"conversation": "mine", "input": [{"role": "judge", "content": "x"}]}, "invalid_request", None),
        ({"conversation": "mine", "input": 5}, "invalid_request", None),
        ({"conversation": "mine", "tools": [{"type": "\ud83d"}]}, "invalid_request", None),
        ({"conversation": "mine", "reasoning": {"\ud83d": 1}}, "invalid_request", None),
        ({"previous_response_id": "resp_7_mine"}, "previous_response_not_found", "previous_response_id"),
        ({"conversation": "mine", "store": False}, "context_not_found", "conversation"),
        ({"conversation": {"id": "mine"}, "store": False}, "context_not_found", "conversation"),
        ({"previous_response_id": "resp_1_other"}, "invalid_request", "session_id"),
        ({}, "invalid_request", "session_id"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name_before_the_engine_is_asked(pod, body, code, param):
    refused = await ask(pod, "Hi", **body) if "input" not in body else await ask(pod, body["input"], **{
        key: value for key, value in body.items() if key != "input"})  # fmt: skip

    assert refused.json["error"]["code"] == code, refused.body
    assert param is None or refused.json["error"]["param"] == param
    assert not pod.engine.generations()


async def test_a_response_that_another_turn_followed_is_told_so(pod):
    await begin(pod)
    await ask(pod, "And", previous_response_id="resp_1_mine")
    late = await ask(pod, "Or", previous_response_id="resp_1_mine")

    assert (late.status, late.json["error"]["code"]) == (409, "generation_mismatch")


async def test_a_stop_text_ends_an_answer_as_in_a_chat(pod):
    """Seen to fail: a 400, because of vLLM's own route."""
    pod.engine.answer, pod.engine.stop_reason = lambda ids: "Hello", "o"
    told = await begin(pod, stop=["o"])

    assert (told.status, pod.engine.generations()[-1]["stop"]) == (200, ["o"])
    assert (await pod.transcript("mine"))[1][1].token_ids == tuple(encode("Hello"))


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_text_and_calls_are_items_of_their_own(pod, stream):
    pod.engine.reasoning, pod.engine.answer = "Hm", lambda ids: "Hello"
    patch = {"name": "patch", "arguments": '{"input": "+a", "more": 1}'}
    find = {"name": "maps__find", "arguments": "{}"}
    pod.engine.calls = (CALL, CALL | {"id": "c2", "function": find}, CALL | {"id": "c3", "function": patch})
    space = {"type": "namespace", "name": "maps", "description": "", "tools": [TOOL | {"name": "find"}]}
    tools = [TOOL, space, {"type": "custom", "name": "patch"}]
    answer = await begin(pod, tools=tools, stream=stream)
    told = frames(answer)[-1]["response"] if stream else answer.json

    reasoning, message, *calls = told["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert message["content"][0]["text"] == "Hello"
    assert [(call["type"], call["call_id"], call.get("namespace"), call["name"]) for call in calls] == [
        ("function_call", "c1", None, "weather"),
        ("function_call", "c2", "maps", "find"),
        ("custom_tool_call", "c3", None, "patch"),
    ]
    assert [call.get("arguments", call.get("input")) for call in calls] == ['{"city": "Kiel"}', "{}", "+a"]
    assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    _, segments = await pod.transcript("mine")
    (stored,) = json.loads(segments[1].messages_json)
    assert stored["item_ids"] == [item["id"] for item in told["output"]]
    assert [call["function"]["name"] for call in stored["tool_calls"]] == ["weather", "maps__find", "patch"]

    pod.engine.reasoning, pod.engine.calls = "", ()
    results = [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "wet"} for call in calls]
    kinds = {"previous_response_id": "resp_1_mine", "tools": tools}
    more = await ask(pod, [*told["output"], *results], **kinds)

    assert (more.status, more.headers["x-context-mode"]) == (200, "append"), more.body
    assert len((await pod.transcript("mine"))[1]) == 4


async def test_a_prompt_alone_is_computed_and_kept(pod):
    answers = [await begin(pod, "Hi", max_output_tokens=0, stream=True), await ask(pod, "And", session_id="mine")]

    last = frames(answers[0])[-1]
    assert (last["type"], last["response"]["output"]) == ("response.incomplete", [])
    assert last["response"]["usage"]["context"]["committed"]
    assert answers[1].headers["x-context-mode"] == "append"


@pytest.mark.parametrize(
    ("named", "told"),
    [("messages[3].content", "input"), ("max_completion_tokens", "max_output_tokens"), ("temperature", "temperature"),
     ("response_format.json_schema.name", "text.format"), ("reasoning_effort", "reasoning.effort")],
)  # fmt: skip
def test_an_error_of_a_translated_field_names_the_clients(named, told):
    assert Responses().client_field(named) == told


def reader(*, stream=True, **said):
    """Return a reader of one turn's answer, without a pod."""
    dialect = Responses()
    body = {"model": "m", "input": "Hi", "stream": stream, "conversation": "mine", **said}
    request = dialect.turn(SimpleNamespace(path=PATH, headers={}), body, json.dumps(body).encode(), "mine")
    session = SimpleNamespace(session_id="mine", generation=0)
    return dialect.answer(
        SimpleNamespace(request=request, session=session, save_ref="ref", started_ms=1000, comparison=None)
    )


def chunk(finish_reason=None, *, logprobs=None, **delta):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "token_ids": [7], "logprobs": logprobs}
    return b"data: %b\n\n" % json.dumps({"choices": [choice], "prompt_token_ids": [1]}).encode()


FAULT = b'data: {"error": {"message": "boom", "code": 500}}\n\n'
END = b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2,
         "prompt_tokens_details": {"cached_tokens": 0}, "context": {"committed": True}}  # fmt: skip


@pytest.mark.parametrize("begun", [b"", chunk(content="He")])
def test_a_response_that_failed_is_told_once_with_its_id_after_the_beginning(begun):
    answer = reader()
    passed = answer.feed(begun + FAULT + chunk(content="more")) + answer.failing(answer.error)
    told = [json.loads(one.split(b"data: ")[1]) for one in passed.split(b"\n\n") if one]

    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in told].count("response.created") == 1
    failed = told[-1]["response"]
    assert (failed["id"], failed["status"], failed["error"]["code"]) == ("resp_1_mine", "failed", "server_error")
    assert "token_ids" not in json.dumps(told)


def test_half_a_surrogate_pair_passes_escaped_as_in_a_chat():
    """Seen to fail: the event was no UTF-8."""
    told = reader().feed(chunk(content="\ud83d"))

    assert b"\\ud83d" in told
    told.decode()


def test_log_probabilities_are_told_with_the_text_that_they_are_of():
    entry = {"token": "He", "logprob": -0.5, "bytes": [72, 101], "top_logprobs": []}
    answer = reader(include=["message.output_text.logprobs"], top_logprobs=2)
    told = answer.feed(chunk(content="He", logprobs={"content": [entry]}) + chunk("stop") + END)
    answer.complete()
    whole = json.loads(answer.closing(USAGE, {}).split(b"data: ")[-1])["response"]

    assert answer._request.engine_fields | {"logprobs": True, "top_logprobs": 2} == answer._request.engine_fields
    assert told.count(b'"logprobs":[{"token":"He"') == 1
    assert whole["output"][0]["content"][0]["logprobs"] == [entry]
    assert whole["top_logprobs"] == 2


def test_the_report_of_the_engines_connector_is_read_as_in_a_chat():
    """Seen to fail: with LMCache, a response's loads were not told."""
    report = {"num_lmcache_extra_cached_tokens": 4}
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "token_ids": [7, EOS]}
    whole = {"choices": [choice], "usage": {"completion_tokens": 2}, "kv_transfer_params": report}
    answer = reader(stream=False)

    answer.feed(json.dumps(whole).encode())
    answer.complete()

    assert answer.result.kv_transfer == report
