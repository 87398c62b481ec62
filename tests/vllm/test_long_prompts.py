"""Prompts that cannot fit, over a real engine and its real tokenizer: refused by their beginning, and never wrongly."""

from __future__ import annotations

import threading
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deploy.local.model import prepare_model
from tests.kit.stack import MODEL
from vllm_plugin.turn.prompt.composition import CUT_TOKENS

pytestmark = pytest.mark.timeout(900)

SIZE = 8_000_000
SENTENCE = "The river stood seven metres high at the old bridge in the year 1901. "
LONG = SENTENCE * (SIZE // len(SENTENCE))
HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "read", "description": LONG, "parameters": {}}}
CASES = {
    "text": {"prompt": LONG},
    "ids": {"prompt": list(range(300, 900)) * 2000},
    "one message": {"messages": [{"role": "user", "content": LONG}]},
    "many messages": {"messages": [{"role": "user", "content": SENTENCE * 10}] * (SIZE // len(SENTENCE * 10))},
    "a system prompt": {"messages": [{"role": "system", "content": LONG}, HI]},
    "an answer": {"messages": [HI, {"role": "assistant", "content": LONG}, HI]},
}


@pytest.mark.parametrize(
    "name", ["text", *(pytest.param(name, marks=pytest.mark.thorough) for name in CASES if name != "text")]
)
def test_a_prompt_of_megabytes_is_refused_as_without_a_context(client, name):
    """Seen before: a create with 8 MB of text took 11 s, and another tenant's request waited for most of a second."""
    waits, done = [], threading.Event()

    def ask_meanwhile():
        while not done.is_set():
            begun_s = time.perf_counter()
            client.engine.post("/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 1})
            waits.append(time.perf_counter() - begun_s)

    other = threading.Thread(target=ask_meanwhile)
    other.start()
    try:
        begun_s = time.perf_counter()
        answer = client.http.post("/v1/context", json={"model": MODEL, "max_tokens": 4, **CASES[name]})
        took_s = time.perf_counter() - begun_s
    finally:
        done.set()
        other.join()
    print(f"{name}: answered after {took_s:.2f} s, another request waited {max(waits):.2f} s at most")
    path = "/v1/completions" if "prompt" in CASES[name] else "/v1/chat/completions"
    stateless = client.engine.post(path, json={"model": MODEL, "max_tokens": 4, **CASES[name]})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert stateless.status_code == 400


def test_tools_that_the_template_leaves_out_do_not_count(client):
    created = client.create(messages=[HI], tools=[TOOL], max_tokens=4)

    assert created["usage"]["prompt_tokens"] < 100
    client.delete(created["session_id"])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(prepare_model() / "tokenizer.json"))


PIECES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [" ", "\n", "-", "=", "a", "xy", "0", "é", "漢", "🏳️‍🌈", "<|im_start|>", "<|im_end|>", "\r\n", "\u200d"]
    ),
    st.sampled_from(SENTENCE.split()),
)


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PIECES, st.integers(1, 200)), max_size=12), st.data())
def test_a_cut_adds_few_tokens(pieces, data):
    text = "".join(piece * times for piece, times in pieces)
    cut = data.draw(st.integers(0, len(text)))

    one, other, whole = (
        len(tokenizer().encode(part, add_special_tokens=False).ids) for part in (text[:cut], text[cut:], text)
    )

    assert one + other < whole + CUT_TOKENS
