"""Turns on `/v1/responses`: vLLM reads the items, around the ordinary turn, over a real manager and a toy engine."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from contextcache.errors import EngineFailed, StoreUnavailable
from tests.kit.fake_vllm import EOS, FakeVllm, encode
from tests.kit.turn_bench import Pod
from tests.kit.vllm_words import responses_state
from vllm_plugin.turn.answer.responses import Responses

PATH = "/v1/responses"
STATE = responses_state()
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def engine():
    return FakeVllm(state=STATE)


@pytest.fixture
def pod(tmp_path, engine):
    return Pod(tmp_path, engine)


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
    assert (sent["input"], sent["store"]) == ("And", False)
    assert not {"previous_response_id", "conversation", "messages", "session_id"} & set(sent)


@pytest.mark.parametrize("chunk_bytes", [None, 7])
async def test_a_stream_tells_the_id_first_and_the_commit_last(pod, chunk_bytes):
    pod.engine.answer, pod.engine.chunk_bytes = lambda ids: "Hello", chunk_bytes
    answer = await begin(pod, stream=True)

    told = frames(answer)
    assert [event["type"] for event in told] == [
        "response.created", "response.in_progress", *["response.output_text.delta"] * 5, "response.completed",
    ]  # fmt: skip
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

    assert more.json["id"] == "resp_0123"
    assert more.json["usage"]["context"] | {"committed": False} == more.json["usage"]["context"]
    assert (await pod.transcript("mine"))[0].generation == 1


async def test_an_answer_that_the_engine_gave_up_is_not_told_as_whole_and_not_committed(pod):
    """vLLM says `completed` of it: only its last token tells."""
    await begin(pod)
    pod.engine.finish_reason = "abort"
    lost = await ask(pod, "And", previous_response_id="resp_1_mine")
    pod.engine.finish_reason = "length"
    long = await ask(pod, "And", previous_response_id="resp_1_mine")

    assert lost.status == 502
    assert (long.json["status"], long.json["id"]) == ("incomplete", "resp_2_mine")


async def test_a_response_whose_commit_was_refused_has_no_id_to_go_on_from(pod):
    await begin(pod)
    pod.manager.fault = ("commit_turn", StoreUnavailable("away", retry_after_s=1))
    lost = await ask(pod, "And", previous_response_id="resp_1_mine")

    assert (lost.status, lost.json["id"], lost.json["usage"]["context"]["committed"]) == (200, "resp_0123", False)


async def test_a_stream_that_breaks_off_commits_nothing(pod):
    await begin(pod)
    pod.engine.break_off_after = 3
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
        ({"conversation": "mine", "stop": ["."]}, "invalid_request", "stop"),
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


async def test_an_engine_without_vllms_words_carries_no_contexts_here(tmp_path):
    pod = Pod(tmp_path, FakeVllm(state=SimpleNamespace(openai_serving_responses=SimpleNamespace())))
    refused = await begin(pod)

    assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_request")


def reader(*, stream=True):
    """Return a reader of one turn's answer, without a pod."""
    dialect = asyncio.run(Responses.of({"app": SimpleNamespace(state=STATE)}))
    body = {"model": "m", "input": "Hi", "stream": stream, "conversation": "mine"}
    request = dialect.turn(SimpleNamespace(path=PATH, headers={}), body, json.dumps(body).encode(), "mine")
    session = SimpleNamespace(session_id="mine", generation=0)
    return dialect.answer(SimpleNamespace(request=request, session=session, save_ref="ref"))


def as_event(kind, **fields):
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **fields}).encode())


ENGINES = {"id": "resp_engine", "status": "failed", "output": [], "output_messages": [{"tokens": [7]}]}


def test_a_response_that_failed_has_the_fields_of_one_that_is_whole():
    """Seen to fail with the event passed as it came: it had the engine's id and the sampled ids."""
    told = reader().feed(as_event("response.failed", response=ENGINES | {"kv_transfer_params": {"a": 1}}))

    (event,) = [json.loads(frame.split(b"data: ")[1]) for frame in told.split(b"\n\n") if frame]
    assert event["response"]["id"] == "resp_1_mine"
    assert not {"output_messages", "kv_transfer_params"} & set(event["response"])


def test_an_error_before_a_failed_response_does_not_begin_the_stream_twice():
    """Seen to fail with the early events told before each of them."""
    answer = reader()
    stream = as_event("response.created", response=ENGINES | {"status": "in_progress"})
    stream += as_event("error", message="boom", code="500") + as_event("response.failed", response=ENGINES)

    assert answer.feed(stream).count(b"event: response.created") == 1
    assert answer.result.error


def test_half_a_surrogate_pair_passes_escaped_as_in_a_chat():
    """Seen to fail: the event was no UTF-8."""
    answer = reader()

    told = answer.feed(as_event("response.created", response=ENGINES | {"user": "\ud83d"}) + as_event("x"))

    assert b"\\ud83d" in told
    told.decode()


def test_early_events_without_an_end_are_an_engine_that_failed(monkeypatch):
    """Seen to fail with no bound on events that wait for the first token."""
    monkeypatch.setattr("vllm_plugin.turn.answer.chat._ANSWER_BYTES_MAX", 1000)

    with pytest.raises(EngineFailed, match="no end"):
        reader().feed(as_event("response.in_progress", response=ENGINES) * 20)


@pytest.mark.parametrize("stream", [True, False])
def test_the_report_of_the_engines_connector_is_read_as_in_a_chat(stream):
    """Seen to fail: with LMCache, a response's loads were not told."""
    usage = {"input_tokens": 5, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 4}}
    report = {"num_lmcache_extra_cached_tokens": 4}
    whole = ENGINES | {"status": "completed", "output_messages": [{"tokens": [EOS]}], "usage": usage}
    whole |= {"kv_transfer_params": report}
    answer = reader(stream=stream)

    answer.feed(as_event("response.completed", response=whole) if stream else json.dumps(whole).encode())
    answer.complete()

    assert answer.result.kv_transfer == report
