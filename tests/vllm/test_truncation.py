"""A cut context on a real engine and its own template: the answer is the one that what is left gets, sent directly."""

from random import Random

import httpx
import pytest

from tests.kit.stack import KEY, MODEL
from tests.kit.tiny_stack import MAX_MODEL_LEN, TinyStack
from tests.kit.vllm_answers import prompt_ids, tokens

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
ASKS = ["What is the capital of France?", "And of Spain?", "And of Italy?"]
NEW = {"role": "user", "content": "Which of them lies on the sea?"}


def of_user(text):
    return {"role": "user", "content": text}


def test_messages_that_are_cut_are_answered_as_what_is_left_of_them(client):
    messages = [SYSTEM, of_user(ASKS[0])]
    answer = client.create(messages=messages, max_tokens=24)
    session_id = answer["session_id"]
    for ask in ASKS[1:]:
        messages += [answer["choices"][0]["message"], of_user(ask)]
        answer = client.chat(messages=messages[-1:], session_id=session_id, max_tokens=24)
    messages.append(answer["choices"][0]["message"])
    said = [{name: message[name] for name in ("role", "content")} for message in messages]

    cut = client.chat(
        messages=[NEW],
        session_id=session_id,
        max_tokens=24,
        return_token_ids=True,
        truncation={"type": "last_history_tokens", "tokens": 60},
    )
    ids, fits = prompt_ids(cut), []
    for start in (index for index, message in enumerate(said) if message["role"] == "user"):
        direct = client.chat(messages=[SYSTEM, *said[start:], NEW], max_tokens=24, return_token_ids=True)
        if prompt_ids(direct) == ids:
            fits.append((start, direct))
    client.wait_sealed(session_id)
    client.forget_prefixes()
    left = [SYSTEM, *said[fits[0][0] :], NEW, {"role": "assistant", "content": cut["choices"][0]["message"]["content"]}]
    after = client.chat(messages=[of_user(ASKS[0])], session_id=session_id, max_tokens=16, return_token_ids=True)
    stateless = client.chat(messages=[*left, of_user(ASKS[0])], max_tokens=16, return_token_ids=True)

    ((start, direct),) = fits
    assert start > 1
    assert cut["usage"]["context"]["truncated_tokens"] > 0
    assert tokens(cut) == tokens(direct)
    assert cut["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    assert prompt_ids(after) == prompt_ids(stateless)
    assert tokens(after) == tokens(stateless)
    assert after["usage"]["context"]["source"] == "host"


def test_a_window_that_is_full_rolls_on_and_answers_as_what_is_left_does(tmp_path):
    random = Random(5)
    first, new = random.choices(range(400), k=MAX_MODEL_LEN - 150), random.choices(range(400), k=60)
    body = {"model": MODEL, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    with (
        TinyStack(tmp_path, patient=True) as stack,
        httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as http,
    ):

        def ask(path, **more):
            return http.post(path, json=body | more).json()

        created = ask("/v1/context", prompt=first)
        stored = [*first, *tokens(created)]
        turn = {"prompt": new, "session_id": created["session_id"], "context_mode": "append", "max_tokens": 100}
        refused = ask("/v1/completions", **turn | {"prompt": new * 3})
        rolled = ask("/v1/completions", **turn, truncation={"type": "rolling_tokens", "tokens": 500})
        direct = ask("/v1/completions", prompt=[*stored[500:], *new], max_tokens=100)
        after = ask("/v1/completions", **turn, truncation={"type": "rolling_tokens", "tokens": 500})

    assert refused["error"]["code"] == "context_length_exceeded"
    assert rolled["usage"]["context"]["truncated_tokens"] == 500
    assert tokens(rolled) == tokens(direct)
    assert "truncated_tokens" not in after["usage"]["context"]
    assert after["usage"]["context"]["cached_tokens"] == len(stored) - 500 + len(new) + 99
