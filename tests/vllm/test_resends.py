"""What chat clients resend, on a real engine and its own template: the answer is the one a stateless request gets.

Greedy and in float32; a stateless request shares no prefix cache with a context. Each case is asked without a commit,
so that all of them begin with the same stored conversation.
"""

import pytest

from tests.kit.stack import MODEL
from tests.kit.vllm_answers import prompt_ids, tokens

pytestmark = pytest.mark.timeout(900)

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
ASKS = ["What is the capital of France?", "And of Spain?", "And of Italy?", "Which one is the largest?"]
NEW = {"role": "user", "content": "Which of them lies on the sea?"}
CLOCK = SYSTEM | {"content": SYSTEM["content"] + " It is 18:31:07."}
PARTS = [{"type": "text", "text": ASKS[0], "cache_control": {"type": "ephemeral"}}]
SUMMARY = {"role": "user", "content": "Summary: three capitals were named."}
REMINDER = {"role": "user", "content": "Reminder: be brief."}

CASES = {
    # what is sent of the stored messages, and whether all that is stored is reused
    "1 whole history and a new turn": (lambda t: [*t, NEW], True),
    "4 system, the last 6, new": (lambda t: [t[0], *t[-6:], NEW], False),
    "5 the last 6, new": (lambda t: [*t[-6:], NEW], False),
    "6 system, a summary, ok, new": (lambda t: [t[0], SUMMARY, {"role": "assistant", "content": "ok"}, NEW], False),
    "7 a clock in the system prompt": (lambda t: [CLOCK, *t[1:], NEW], False),
    "8 text as parts with cache_control": (lambda t: [t[0], t[1] | {"content": PARTS}, *t[2:], NEW], True),
    "9 a reminder after the system prompt": (lambda t: [t[0], REMINDER, *t[1:], NEW], False),
    "17 the first prompt again": (lambda t: t[:2], False),
    "18 a middle message edited": (lambda t: [*t[:5], t[5] | {"content": "And of Norway?"}, *t[6:], NEW], False),
    "19 without the last answer": (lambda t: t[:-1], False),
}

QUICK = ("1 whole history and a new turn",)
"""All are decided by code that tests/unit/vllm_plugin/turn/test_resends.py has; here a real template has its say."""


@pytest.fixture(scope="module")
def conversation(stack):
    """Ids and messages of contexts by session, made by turns that bring only what is new."""
    return {}


def stored(client, conversation):
    if not conversation:
        messages = [SYSTEM, {"role": "user", "content": ASKS[0]}]
        answer = client.create(messages=messages, max_tokens=24)
        session_id = answer["session_id"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        for ask in ASKS[1:]:
            new = {"role": "user", "content": ask}
            answer = client.chat(messages=[new], session_id=session_id, max_tokens=24)
            messages += [new, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        conversation |= {"session_id": session_id, "messages": messages}
    return conversation["session_id"], conversation["messages"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_a_resent_conversation_is_answered_as_without_a_context(client, conversation, name):
    session_id, messages = stored(client, conversation)
    resend, reuses_all = CASES[name]
    sent = resend(messages)

    response = client.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": sent, "session_id": session_id, "context_commit": False}
        | {"temperature": 0, "max_tokens": 24, "return_token_ids": True},
    )
    stateless = client.chat(messages=sent, max_tokens=24, return_token_ids=True)

    answer = response.json()
    context = answer["usage"]["context"]
    assert response.headers["x-context-mode"] == "replay"
    assert answer["usage"]["prompt_tokens"] == stateless["usage"]["prompt_tokens"]
    assert prompt_ids(answer) == prompt_ids(stateless)
    assert tokens(answer) == tokens(stateless)
    assert answer["choices"][0]["message"]["content"] == stateless["choices"][0]["message"]["content"]
    assert ("diverged" in context) is not reuses_all
    if reuses_all:
        assert context["context_tokens"] == client.get(session_id)["tokens"]


@pytest.mark.thorough
def test_a_trimmed_conversation_is_the_context_from_then_on(client):
    first = [SYSTEM, {"role": "user", "content": ASKS[0]}]
    session_id = client.create(messages=first, max_tokens=16)["session_id"]
    for ask in ASKS[1:3]:
        client.chat(messages=[{"role": "user", "content": ask}], session_id=session_id, max_tokens=16)
    trimmed = [SYSTEM, SUMMARY, {"role": "assistant", "content": "ok"}, NEW]
    answer = client.chat(messages=trimmed, session_id=session_id, max_tokens=16)
    client.wait_sealed(session_id)
    client.forget_prefixes()

    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    appended = client.chat(messages=[REMINDER], session_id=session_id, max_tokens=16, return_token_ids=True)
    stateless = client.chat(messages=[*trimmed, said, REMINDER], max_tokens=16, return_token_ids=True)

    assert prompt_ids(appended) == prompt_ids(stateless)
    assert tokens(appended) == tokens(stateless)
    assert appended["usage"]["context"]["source"] == "host"


@pytest.mark.thorough
def test_an_answer_nobody_can_see_is_not_part_of_the_first_prompt_sent_again(client):
    """Special tokens have no text: what is sent again says nothing of them, and is answered as a first prompt is."""
    prompt = "Say this is a test"
    silent = {"logit_bias": {"0": 100}, "max_tokens": 4, "ignore_eos": True}
    first = client.create(prompt=prompt, return_token_ids=True, **silent)

    again = client.complete(prompt=prompt, session_id=first["session_id"], return_token_ids=True)
    cold = client.complete(prompt=prompt, return_token_ids=True)

    assert (first["choices"][0]["text"], tokens(first)) == ("", [0, 0, 0, 0])
    assert prompt_ids(again) == prompt_ids(cold)
    assert tokens(again) == tokens(cold)
