"""Contexts in Anthropic's words, over real vLLM: greedy and in float32, beside the same conversation resent whole.

What is resent whole goes to the same path without a context, by a tenant whose requests are not kept: it shares no
prefix cache with any context.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress

import httpx
import pytest

from tests.kit.stack import MODEL
from tests.kit.until import wait_until
from tests.vllm.conftest import http_front_too

pytestmark = pytest.mark.timeout(900)

PATH = "/v1/messages"
ASKS = ["Name a river.", "And a lake?", "And a sea?", "Which of them is the largest?"]


def said(role, text):
    return {"role": role, "content": [{"type": "text", "text": text}]}


class Talk:
    """One conversation, in a context and resent whole."""

    def __init__(self, caller, plain):
        self.caller = caller
        self.plain = plain
        self.name = f"talk-{secrets.token_hex(4)}"
        rules = " ".join(f"Rule {i}: be brief and exact." for i in range(40))
        self.system = [{"type": "text", "text": f"{self.name} You are a geographer. {rules}"}]
        self.whole = []

    def body(self, **more):
        return {"model": MODEL, "temperature": 0, "max_tokens": 16} | more

    def turn(self, ask, *, stream=False, **more):
        """Ask what is new alone, and return the text, the usage and the headers; the first turn brings the system."""
        head = {} if self.whole else {"system": self.system}
        body = self.body(
            session_id=self.name, context_create="if_missing", messages=[said("user", ask)], **head, **more
        )
        text, usage, headers = streamed(self.caller, body) if stream else answered(self.caller, body)
        self.whole += [said("user", ask), said("assistant", text)]
        return text, usage, headers

    def cold(self):
        """Return what the same path says to the last question when all before it is sent again without a context."""
        text, _, _ = answered(self.plain, self.body(system=self.system, messages=self.whole[:-1]))
        return text


def answered(caller, body, **headers):
    response = caller.http.post(PATH, json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["content"][0]["text"], answer["usage"], response.headers


def streamed(caller, body):
    with caller.http.stream("POST", PATH, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        told = events(response.iter_lines())
    assert [told[0][0], *(event for event, _ in told[-2:])] == ["message_start", "message_delta", "message_stop"]
    text = "".join(data["delta"]["text"] for event, data in told if event == "content_block_delta")
    return text, told[-2][1]["usage"], response.headers


def events(lines):
    found = [line for line in lines if line]
    pairs = zip(found[::2], found[1::2], strict=True)
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in pairs]


def lines_until_killed(stack, caller, body):
    """Return what comes of a stream whose engine and sidecar are killed after its first event."""
    lines = []
    with suppress(httpx.HTTPError), caller.http.stream("POST", PATH, json=body) as response:
        for line in response.iter_lines():
            if not lines:
                stack.kill("engine")
                stack.kill("sidecar")
            lines.append(line)
    assert lines[0] == "event: message_start"
    return lines


def computed(usage):
    return usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)


def new_tokens(usage):
    return computed(usage) + usage["cache_read_input_tokens"] - usage["context"]["context_tokens"]


@http_front_too
def test_a_conversation_of_new_messages_alone_says_what_it_says_when_it_is_resent_whole(client, other):
    talk = Talk(client, other)
    for number, ask in enumerate(ASKS):
        text, usage, headers = talk.turn(ask, stream=number % 2 == 1)

        assert text == talk.cold()
        assert headers["x-context-generation"] == str(number + 1)
        assert usage["context"]["committed"]
        if number:
            assert computed(usage) == new_tokens(usage) + 1
            assert usage["context"]["match"] == "append"
            assert headers["x-context-cache"] == "hit"
    _, usage, headers = answered(
        client, talk.body(session_id=talk.name, system=talk.system, messages=[*talk.whole, said("user", "Thanks.")])
    )
    assert usage["context"]["match"] == "extend"
    assert computed(usage) == new_tokens(usage) + 1


@pytest.mark.thorough
def test_a_conversation_goes_on_from_disk_after_engine_and_sidecar_were_killed_in_the_middle_of_a_turn(
    stack, client, other
):
    talk = Talk(client, other)
    for ask in ASKS[:2]:
        talk.turn(ask)
    client.wait_sealed(talk.name)
    count = said("user", "Count from one to one hundred, in words.")
    long = talk.body(session_id=talk.name, messages=[count], stream=True, max_tokens=400)
    assert "event: message_stop" not in lines_until_killed(stack, client, long)
    stack.mend()
    wait_until(lambda: client.get(talk.name)["state"] == "ready", what="the lease of the dead turn has ended")

    text, usage, headers = talk.turn(ASKS[2], stream=True)

    assert text == talk.cold()
    assert headers["x-context-generation"] == "3"
    assert usage["context"]["source"] == "disk"
    assert computed(usage) == new_tokens(usage) + 1


@http_front_too
def test_what_is_refused_is_told_in_anthropics_shape_and_nobody_else_s_context_is_there(client, other):
    talk = Talk(client, other)
    talk.turn(ASKS[0])
    foreign = other.http.post(PATH, json=talk.body(session_id=talk.name, messages=[said("user", "x")]))
    absent = client.http.post(PATH, json=talk.body(session_id="ctx_none", messages=[said("user", "x")]))
    either = client.http.post(
        PATH, json=talk.body(session_id=talk.name, system=talk.system, messages=[said("user", "x")])
    )
    wrong = client.http.post(PATH, json=talk.body(session_id=talk.name, messages=[said("judge", "x")]))
    long = talk.body(session_id=talk.name, messages=[said("user", "x")], stream=True, ignore_eos=True)
    # An answer may be over before the second request comes through a busy machine; a longer one is not.
    for max_tokens in (400, 3200):
        with client.http.stream("POST", "/v1/chat/completions", json=long | {"max_tokens": max_tokens}) as running:
            assert running.status_code == 200
            lines = running.iter_lines()  # dropped, it would close the connection
            next(lines)
            busy = client.http.post(PATH, json=talk.body(session_id=talk.name, messages=[said("user", "x")]))
        if busy.status_code != 200:
            break

    assert foreign.content == absent.content
    for answer, status, code in (
        (absent, 404, "context_not_found"),
        (either, 400, "history_ambiguous"),
        (wrong, 400, "invalid_request"),
        (busy, 409, "context_busy"),
    ):
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["code"]) == (status, "error", code), told
        assert told["error"]["message"]
    assert busy.headers["retry-after"]


@pytest.mark.thorough
def test_a_tool_s_result_goes_on_and_a_tool_list_stays_as_it_was(client, other):
    talk = Talk(client, other)
    tool = {"name": "depth", "description": "of a lake", "input_schema": {"type": "object", "properties": {}}}
    tools = {"tools": [tool], "tool_choice": {"type": "none"}}
    talk.turn(ASKS[1], **tools)
    used = {"type": "tool_use", "id": "toolu_1", "name": "depth", "input": {"lake": "Bodensee"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "251 m"}]}
    asked = [
        said("user", "How deep is it?"),
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    whole = talk.body(system=talk.system, messages=[*talk.whole, *asked], **tools)

    text, usage, _ = answered(client, whole | {"session_id": talk.name})
    cold, _, _ = answered(other, whole)

    assert text == cold
    assert usage["context"]["match"] == "extend"
    assert computed(usage) == new_tokens(usage) + 1
