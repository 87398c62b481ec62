"""Cache diagnostics: our causes in OpenAI's and Anthropic's words, over the real manager and a toy engine.

The packages' own types check each answer: their unions know no other type and no other reason.
"""

import json
from typing import get_args

import pytest
from anthropic.types import Message
from anthropic.types.cache_miss_reason import CacheMissReason
from openai.types.responses.response import PromptCacheDiagnostics, PromptCacheDiagnosticsCacheMiss
from pydantic import TypeAdapter

from contextcache.errors import StoreUnavailable
from tests.kit.fake_vllm import FakeVllm
from vllm_plugin.turn.answer.diagnostics import (
    CAUSE_OF_WHY,
    Cause,
    Comparison,
    anthropic_diagnostics,
    openai_diagnostics,
)
from vllm_plugin.turn.prompt.matching import Why

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
RIVER = {"name": "river", "description": "names one", "input_schema": {"type": "object", "properties": {}}}
LAKE = RIVER | {"name": "lake"}
FUNCTION = {"type": "function", "name": "river", "parameters": {"type": "object", "properties": {}}}
SAID = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "Elbe"}]
FIRST, NEXT = SAID[:1], [*SAID, {"role": "user", "content": "And a lake?"}]


@pytest.fixture
def engine():
    engine = FakeVllm()
    engine.answer = lambda ids: "Elbe"
    return engine


async def message(pod, named, messages, *, compared="", tenant="demo", **body):
    """Ask on `/v1/messages`. `compared`: id of the earlier message; empty: no diagnostics."""
    body = {"model": "m", "max_tokens": 50, "session_id": named, "context_create": "if_missing", **body}
    asked = {} if compared == "" else {"diagnostics": {"previous_message_id": compared}}
    return await pod.post(MESSAGES, body | {"messages": messages} | asked, pod.identity(named, tenant))


async def response(pod, named, given, *, compared="", tenant="demo", **body):
    body = {"model": "m", "conversation": named, "input": given, **body}
    asked = {"prompt_cache_options": {"comparison_response_id": compared}} if compared else {}
    return await pod.post(RESPONSES, body | asked, pod.identity(named, tenant))


def told(answer):
    """Return a message's diagnostics, read by the package."""
    assert answer.status == 200, answer.body
    return Message.model_validate(answer.json).diagnostics.model_dump()["cache_miss_reason"]


def test_every_cause_has_words_that_both_packages_know():
    """Seen failing: without EFFORT in Anthropic's table, that cause was a KeyError."""
    for cause in Cause:
        found = Comparison(cause, prompt_tokens=90, compared_tokens=70, shared_tokens=30)
        TypeAdapter(PromptCacheDiagnostics).validate_python(openai_diagnostics(found, cached_tokens=5), strict=True)
        ours = anthropic_diagnostics(found)
        if ours is not None:
            TypeAdapter(CacheMissReason).validate_python(ours["cache_miss_reason"], strict=True)
    assert set(CAUSE_OF_WHY) == set(Why)
    assert set(CAUSE_OF_WHY.values()) <= set(Cause)


def test_counts_are_those_that_each_api_asks_for():
    found = Comparison(Cause.MESSAGES, prompt_tokens=90, compared_tokens=70, shared_tokens=30)

    assert openai_diagnostics(found, cached_tokens=0) == {
        "type": "cache_miss", "reason": "input_changed", "cache_missed_tokens": 60, "comparison_reusable_tokens": 30,
    }  # fmt: skip
    assert anthropic_diagnostics(found) == {
        "cache_miss_reason": {"type": "messages_changed", "cache_missed_input_tokens": 40}
    }


def test_equal_prompts_without_a_cached_token_are_no_hit():
    found = Comparison(Cause.NONE, 90, 70, 70)

    assert openai_diagnostics(found, cached_tokens=60) == {"type": "cache_hit"}
    assert openai_diagnostics(found, cached_tokens=0) == {"type": "unavailable"}
    assert anthropic_diagnostics(found) is None


def test_all_of_openais_reasons_are_ours_or_of_fields_that_change_no_prompt():
    theirs = set(get_args(PromptCacheDiagnosticsCacheMiss.model_fields["reason"].annotation))
    ours = {openai_diagnostics(Comparison(cause), cached_tokens=1).get("reason") for cause in Cause}

    assert theirs - ours == {
        "prompt_cache_key_changed", "text_format_changed", "verbosity_changed", "service_tier_changed",
    }  # fmt: skip


async def test_a_request_that_does_not_ask_has_no_diagnostics(pod):
    first = await message(pod, "mine", FIRST)
    other = await response(pod, "other", "Hi")

    assert "diagnostics" not in first.json
    assert "prompt_cache_diagnostics" not in other.json


async def test_a_message_names_the_generation_that_it_committed(pod):
    first = await message(pod, "mine", FIRST, compared=None)
    more = await message(pod, "mine", NEXT, compared=first.json["id"])
    unkept = await message(pod, "mine", [NEXT[-1]], compared=more.json["id"], context_commit=False)

    assert [first.json["id"], more.json["id"]] == ["msg_1_mine", "msg_2_mine"]
    assert not unkept.json["id"].startswith("msg_")
    assert [answer.json["diagnostics"] for answer in (first, more, unkept)] == [None] * 3


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"messages": [{"role": "user", "content": "Name a sea!!!"}, *NEXT[1:]]}, "messages_changed"),
        ({"system": "Be long."}, "system_changed"),
        ({"tools": [LAKE]}, "tools_changed"),
        ({"tools": [LAKE], "system": "Be long."}, "tools_changed"),
    ],
)
@pytest.mark.parametrize("named", ["mine", "other"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_changed_message_is_told_the_first_change(pod, changed, reason, named, stream):
    """In its context and in another. Seen failing: without the stored digest every change was `tools_changed`."""
    fixed = {"system": "Be brief.", "tools": [RIVER]}
    first = await message(pod, "mine", FIRST, **fixed)

    body = {"messages": NEXT, **fixed, **changed, "stream": stream}
    answer = await message(pod, named, compared=first.json["id"], **body)

    if stream:
        events = [json.loads(line[6:]) for line in answer.body.decode().split("\n") if line.startswith("data: ")]
        found = Message.model_validate(events[0]["message"]).diagnostics.model_dump()["cache_miss_reason"]
    else:
        found = told(answer)
    assert found["type"] == reason
    assert found["cache_missed_input_tokens"] > 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"given": [{"role": "user", "content": "Name a sea!!!"}, *NEXT[1:]]}, "input_changed"),
        ({"instructions": "Be long."}, "input_changed"),
        ({"tools": [FUNCTION | {"name": "lake"}]}, "tools_changed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_changed_response_is_told_the_first_change(pod, changed, reason, stream):
    fixed = {"instructions": "Be brief.", "tools": [FUNCTION]}
    first = await response(pod, "mine", FIRST, **fixed)

    answer = await response(
        pod, "other", compared=first.json["id"], **{"given": NEXT, **fixed, "stream": stream, **changed}
    )

    whole = answer.json if not stream else json.loads(answer.body.decode().rstrip().split("data: ")[-1])["response"]
    found = TypeAdapter(PromptCacheDiagnostics).validate_python(whole["prompt_cache_diagnostics"])
    assert (found.type, found.reason) == ("cache_miss", reason)
    assert found.cache_missed_tokens + found.comparison_reusable_tokens == whole["usage"]["input_tokens"]


async def test_a_model_that_changed_shares_nothing(pod):
    first = await response(pod, "mine", FIRST)
    answer = await response(pod, "other", NEXT, compared=first.json["id"], model="n")

    found = answer.json["prompt_cache_diagnostics"]
    assert (found["reason"], found["comparison_reusable_tokens"]) == ("model_changed", 0)


async def test_a_prompt_that_goes_on_is_a_hit_if_the_engine_had_tokens_of_it(pod):
    first = await response(pod, "mine", FIRST)
    pod.engine.cached_tokens = 9
    more = await response(pod, "mine", "And a lake?", compared=first.json["id"])
    pod.engine.cached_tokens = 0
    lost = await response(pod, "mine", "And a sea?", compared=more.json["id"])

    assert more.json["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert lost.json["prompt_cache_diagnostics"] == {"type": "unavailable"}


@pytest.mark.parametrize(
    "compared", ["resp_1_nowhere", "resp_9_mine", "resp_0_mine", "nonsense", "resp_1_" + "x" * 500]
)
async def test_an_id_that_names_no_answer_is_not_found(pod, compared):
    await response(pod, "mine", FIRST)
    answer = await response(pod, "mine", "And", compared=compared)
    other = await message(pod, "mine", [NEXT[-1]], compared=compared)

    assert answer.json["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    assert told(other) == {"type": "previous_message_not_found"}


async def test_another_tenants_answer_is_not_found(pod):
    """Seen failing: a comparison that read the context under the tenant `demo` told its token counts."""
    first = await response(pod, "mine", FIRST)
    foreign = await response(pod, "yours", FIRST, compared=first.json["id"], tenant="other")
    absent = await response(pod, "yours", NEXT, compared="resp_1_nowhere", tenant="other")

    assert foreign.json["prompt_cache_diagnostics"] == absent.json["prompt_cache_diagnostics"]
    assert absent.json["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


async def test_an_older_generation_is_compared_as_it_was(pod):
    """Seen failing: beside the newest transcript the whole history was longer, and the hit a `cache_miss`."""
    first = await response(pod, "mine", FIRST)
    await response(pod, "mine", "And a lake?")
    pod.engine.cached_tokens = 9
    same = await response(pod, "other", FIRST, compared=first.json["id"])
    edited = await response(pod, "third", [{"role": "user", "content": "Name a sea!"}], compared=first.json["id"])

    assert same.json["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert edited.json["prompt_cache_diagnostics"]["reason"] == "input_changed"


async def test_a_generation_that_was_replaced_is_not_found(pod):
    await response(pod, "mine", FIRST)
    second = await response(pod, "mine", "And a lake?")
    await pod.manager.rewind("demo", "mine", generation=1)
    answer = await response(pod, "mine", "And a sea?", compared=second.json["id"])

    assert answer.json["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


async def test_a_comparison_that_cannot_be_read_costs_no_answer(pod):
    first = await response(pod, "mine", FIRST)
    pod.manager.fault = ("read_transcript", StoreUnavailable("away"))
    answer = await response(pod, "other", NEXT, compared=first.json["id"])

    assert answer.status == 200
    assert answer.json["prompt_cache_diagnostics"] == {"type": "unavailable"}


async def test_the_stored_digest_of_tools_reaches_no_template(pod):
    await message(pod, "mine", FIRST, tools=[RIVER])
    await message(pod, "mine", [NEXT[-1]], tools=[RIVER])

    _, segments = await pod.transcript("mine")
    assert "shown_with" in segments[1].messages_json
    assert [sorted(one) for one in pod.engine.generations()[-1]["messages"]] == [["content", "role"]] * 3


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("diagnostics", 5, "diagnostics"),
        ("diagnostics", {"previous_message_id": 5}, "diagnostics.previous_message_id"),
    ],
)
async def test_a_field_of_another_type_is_refused(pod, field, value, param):
    refused = await message(pod, "mine", FIRST, **{field: value})

    assert (refused.status, refused.json["error"]["param"]) == (400, param)
