"""Contexts in the words of OpenAI's responses, over real vLLM: greedy and in float32, by OpenAI's own client.

What is resent whole goes to the same path without a context, by a tenant whose requests are not kept: it shares no
prefix cache with any context.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

import openai
import pytest

from tests.kit.stack import MODEL
from tests.kit.until import wait_until
from tests.vllm.conftest import http_front_too

pytestmark = pytest.mark.timeout(900)

ASKS = ["Name a river.", "And a lake?", "And a sea?", "Which of them is the largest?"]
TOOL = {"type": "function", "name": "depth", "description": "of a lake", "strict": False,
        "parameters": {"type": "object", "properties": {"lake": {"type": "string"}}}}  # fmt: skip


def said(role, text):
    return {"role": role, "content": text}


class Talk:
    """One conversation, by the ids of its responses and resent whole."""

    def __init__(self, caller, plain):
        self.client, self.plain = (
            openai.OpenAI(
                base_url=f"{str(one.http.base_url).rstrip('/')}/v1",
                api_key=one.http.headers["authorization"].split()[1],
                max_retries=0,
            )
            for one in (caller, plain)
        )
        rules = " ".join(f"Rule {i}: be brief and exact." for i in range(40))
        self.instructions = f"{secrets.token_hex(4)} You are a geographer. {rules}"
        self.whole = []
        self.last = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()
        self.plain.close()

    def ask(self, given, *, stream=False, **more):
        """Ask what is new alone and return the response; the first turn says that it is stored."""
        where = {"previous_response_id": self.last.id} if self.last else {"store": True}
        fields = self.fields(where | more)
        items = [said("user", given)] if isinstance(given, str) else given
        if stream:
            with self.client.responses.stream(input=items, **fields) as events:
                self.last = list(events)[-1].response  # an incomplete one has no `get_final_response`
        else:
            self.last = self.client.responses.create(input=items, **fields)
        self.whole += [*items, said("assistant", self.last.output_text)]
        return self.last

    def fields(self, more=None):
        return {"model": MODEL, "temperature": 0, "max_output_tokens": 16, "instructions": self.instructions} | (
            more or {}
        )

    def cold(self, **more):
        """Return what is said to the last question when all before it is sent again without a context."""
        return self.plain.responses.create(input=self.whole[:-1], **self.fields(more))


@pytest.fixture
def talk(client, other):
    with Talk(client, other) as talk:
        yield talk


def computed(response):
    return response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens


def new_tokens(response):
    return response.usage.input_tokens - response.usage.context["context_tokens"]


@pytest.mark.thorough
@http_front_too
def test_responses_that_go_on_by_their_ids_say_what_the_whole_conversation_says(client, talk):
    for number, ask in enumerate(ASKS):
        response = talk.ask(ask, stream=number % 2 == 1)
        cold = talk.cold()

        assert response.output_text == cold.output_text
        assert response.id.startswith(f"resp_{number + 1}_")
        assert response.usage.context["committed"]
        if number:
            assert computed(response) == new_tokens(response) + 1
            assert response.usage.context["match"] == "append"
        else:  # the first prompt is what vLLM renders of it
            assert response.usage.input_tokens == cold.usage.input_tokens

    session_id = response.session_id
    talk.whole, talk.last = talk.whole[:4], response.model_copy(update={"id": f"resp_2_{session_id}"})
    asked = talk.ask("And a mountain?")

    assert asked.output_text == talk.cold().output_text
    assert asked.session_id != session_id
    assert computed(asked) <= new_tokens(asked) + 1  # what it shares with the turn it stands beside is there too
    assert client.get(session_id)["generation"] == len(ASKS)


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True])
def test_items_that_are_sent_again_are_in_the_prompt_once(talk, stream):
    """Seen to fail: the engine saw the repeated items twice, and the doubled conversation was committed."""
    for ask in ASKS[:2]:
        talk.ask(ask, stream=stream)
    items = [item.model_dump(exclude_none=True) for item in talk.last.output]
    edited = items[0] | {"content": [{"type": "output_text", "text": "Other words.", "annotations": []}]}
    new, unseen = said("user", ASKS[2]), {"context_commit": False}
    fields = talk.fields({"previous_response_id": talk.last.id, "extra_body": unseen})

    answers = [
        talk.client.responses.create(input=given, **fields)
        for given in ([*items, new], [*talk.whole, new], [talk.whole[2], *items, new])
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        talk.client.responses.create(input=[edited, new], **fields)

    appended = talk.ask(ASKS[2])
    assert items[0]["id"].startswith("msg_")
    assert {answer.usage.input_tokens for answer in answers} == {appended.usage.input_tokens}
    assert {answer.output_text for answer in answers} == {appended.output_text}
    assert refused.value.code == "history_ambiguous"


@pytest.mark.thorough
def test_a_conversation_goes_on_from_disk_after_engine_and_sidecar_were_killed_in_the_middle_of_a_response(
    stack, client, talk
):
    for ask in ASKS[:2]:
        talk.ask(ask)
    session_id, generation = talk.last.session_id, talk.last.id
    client.wait_sealed(session_id)
    long = talk.fields({"previous_response_id": talk.last.id, "max_output_tokens": 400})
    events = []
    count = "Count from one to one hundred, in words."
    with suppress(Exception), talk.client.responses.create(input=count, stream=True, **long) as told:
        for event in told:
            if not events:
                stack.kill("engine")
                stack.kill("sidecar")
            events.append(event.type)
    assert events
    assert not {"response.completed", "response.incomplete"} & {*events}
    stack.mend()
    wait_until(lambda: client.get(session_id)["state"] == "ready", what="the lease of the dead turn has ended")

    assert talk.last.id == generation
    response = talk.ask(ASKS[2], stream=True)

    assert response.output_text == talk.cold().output_text
    assert response.usage.context["source"] == "disk"
    assert computed(response) == new_tokens(response) + 1


@pytest.mark.thorough
def test_tools_and_their_results_are_rendered_as_vllm_renders_them(talk):
    talk.ask(ASKS[1], tools=[TOOL], tool_choice="none")
    call = {"type": "function_call", "call_id": "c1", "name": "depth", "arguments": '{"lake": "Bodensee"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "251 m"}
    asked = [said("user", "How deep is it?"), call, result]

    response = talk.ask(asked, tools=[TOOL], tool_choice="none")
    cold = talk.cold(tools=[TOOL], tool_choice="none")

    assert response.output_text == cold.output_text
    assert response.usage.input_tokens == cold.usage.input_tokens
    assert computed(response) == new_tokens(response) + 1


def test_what_is_not_stored_and_what_is_nobody_s_is_told_to_openai_s_client(talk):
    talk.ask(ASKS[0])
    read_only = talk.client.responses.create(
        input="x", **talk.fields({"previous_response_id": talk.last.id, "store": False})
    )
    plain = talk.client.responses.create(input="x", **talk.fields())

    assert read_only.usage.context["committed"] is False
    assert talk.ask(ASKS[1]).id.startswith("resp_2_")
    assert not hasattr(plain, "session_id")
    for who, response_id in ((talk.plain, talk.last.id), (talk.client, plain.id), (talk.client, read_only.id)):
        with pytest.raises(openai.BadRequestError) as refused:
            who.responses.create(input="x", **talk.fields({"previous_response_id": response_id}))
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
