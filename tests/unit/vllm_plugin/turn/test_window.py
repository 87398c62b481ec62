"""A prompt that cannot fit is refused by its beginning; one that fits is never refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import ContextLengthExceeded, ContextNotFound
from contextcache.items import pending_segment
from contextcache.model import TurnCommit
from tests.kit.fake_vllm import FakeVllm, encode
from tests.kit.turn_bench import Pod
from vllm_plugin.turn.prompt.composition import CHARS_PER_TOKEN, CUT_TOKENS, SHORT_TOKENS, refuse_too_long
from vllm_plugin.turn.prompt.request import read_turn

WINDOW = 2048
SIZE = 150_000
LONG = "word " * (SIZE // 5)
IDS = encode(LONG)
ROLLING = {"truncation": {"type": "rolling_tokens", "tokens": 100}}


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path, FakeVllm(max_model_len=WINDOW))


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def function(name, description):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


HI = said("user", "Hi")
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": LONG})}}
CHATS = {
    "one long message": {"messages": [said("user", LONG)]},
    "parts of a message": {"messages": [said("user", [{"type": "text", "text": LONG[:1000]}] * (SIZE // 1000))]},
    "many messages": {"messages": [said("user", LONG[:100])] * (SIZE // 100)},
    "a long system prompt": {"messages": [said("system", LONG), HI]},
    "another role": {"messages": [said("developer", LONG), HI]},
    "a long answer": {"messages": [HI, said("assistant", LONG), HI]},
    "a long call": {"messages": [HI, said("assistant", None, tool_calls=[CALL]), said("tool", "x", tool_call_id="c")]},
    "a long result": {"messages": [HI, said("tool", LONG, tool_call_id="c")]},
    "one long tool": {"messages": [HI], "tools": [function("read", LONG)]},
    "many tools": {"messages": [HI], "tools": [function("read", LONG[:100])] * (SIZE // 100)},
}
TEXTS = {"text": {"prompt": LONG}, "ids": {"prompt": IDS}}


async def check_refused(pod, answer):
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded"), answer.body[:300]
    assert pod.engine.num_tokenized <= 1.1 * CHARS_PER_TOKEN * WINDOW
    # Nothing was generated: the engine refused what it was asked, if it was.
    assert [body for body in pod.engine.generations() if "prompt" in body or "input" in body] == []


@pytest.mark.parametrize("body", [*TEXTS.values(), *CHATS.values()], ids=[*TEXTS, *CHATS])
async def test_a_create_that_cannot_fit_is_refused_by_its_beginning(pod, body):
    """Seen failing: all of it was tokenised, or all of its ids were turned into text."""
    answer = await pod.create(session_id="mine", **body)

    await check_refused(pod, answer)
    assert [path for path, _ in pod.engine.requests if path == "/detokenize"] == []
    with pytest.raises(ContextNotFound):
        await pod.transcript("mine")


@pytest.mark.parametrize("more", [{}, ROLLING], ids=["refused", "cut"])
@pytest.mark.parametrize("body", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("mode", ["append", "replay"])
async def test_a_turn_of_text_that_cannot_fit_is_refused_by_its_beginning(pod, body, mode, more):
    """New text is never cut, so `truncation` does not make it fit."""
    session_id = (await pod.create(prompt="word ")).json["session_id"]
    pod.engine.requests.clear()

    answer = await pod.ask(session_id, context_mode=mode, **body, **more)

    await check_refused(pod, answer)
    session, _ = await pod.transcript(session_id)
    assert session.generation == 1
    assert (await pod.ask(session_id, prompt=" more")).status == 200


@pytest.mark.parametrize("more", [{}, ROLLING], ids=["refused", "cut"])
@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("mode", ["append", "replay"])
async def test_a_turn_of_chat_that_cannot_fit_is_refused_by_its_beginning(pod, body, mode, more):
    session_id = (await pod.create(messages=[HI])).json["session_id"]
    pod.engine.requests.clear()
    if mode == "append":  # which brings no system prompt of its own
        roles = {"system": "user", "developer": "user"}
        messages = [one | {"role": roles.get(one["role"], one["role"])} for one in body["messages"]]
        body = body | {"messages": messages}

    answer = await pod.chat(session_id, context_mode=mode, **body, **more)

    await check_refused(pod, answer)
    session, _ = await pod.transcript(session_id)
    assert session.generation == 1
    assert (await pod.chat(session_id, messages=[HI], context_mode="append")).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [said("user", LONG)]}),
        ("/v1/messages", {"messages": [HI], "system": LONG}),
        ("/v1/messages", {"messages": [HI], "tools": [{"name": "a", "description": LONG, "input_schema": {}}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": "Hi", "instructions": LONG}),
        ("/v1/responses", {"input": "Hi", "tools": [function("a", LONG)["function"] | {"type": "function"}]}),
    ],
    ids=["messages", "system", "tools", "input", "instructions", "tools of a response"],
)
@pytest.mark.parametrize("is_turn", [False, True], ids=["create", "turn"])
async def test_each_dialect_refuses_a_prompt_that_cannot_fit_by_its_beginning(pod, path, body, is_turn):
    body = {"max_tokens": 9, **body} if path == "/v1/messages" else body
    more = {"context_create": "if_missing"}
    if is_turn:
        first = {"messages": [HI], "max_tokens": 9} if path == "/v1/messages" else {"input": "Hi"}
        assert (await pod.ask("mine", path=path, **first, **more)).status == 200
        pod.engine.requests.clear()

    answer = await pod.ask("mine", path=path, **body, **more)

    await check_refused(pod, answer)


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("more", [{}, ROLLING], ids=["refused", "cut"])
async def test_added_items_that_cannot_fit_are_refused_by_their_beginning(pod, num_batches, more):
    """Seen failing: the next turn tokenised all items that were added since the last one, megabytes at once."""
    session_id = (await pod.create(messages=[HI])).json["session_id"]
    for number in range(num_batches):
        begun = {"lease_id": f"change {number}", "lease_ttl_ms": 1000}
        session, segments = await pod.manager.begin_turn("demo", session_id, **begun)
        text = LONG[: SIZE // num_batches]
        await pod.manager.commit_turn(
            TurnCommit(
                tenant="demo",
                session_id=session_id,
                lease_id=begun["lease_id"],
                expected_generation=session.generation,
                keep_segments=len(segments),
                segments=pending_segment([said("user", text)]),
                cache_ref=session.cache_ref,
                holder=session.holder,
            )
        )
    pod.engine.requests.clear()

    answer = await pod.chat(session_id, messages=[HI], context_mode="append", **more)

    await check_refused(pod, answer)


async def test_a_kept_request_goes_to_the_engine_which_refuses_it_by_itself(pod):
    identity = pod.identity(kept="kept_1")

    answer = await pod.post("/v1/chat/completions", {"model": "m", "messages": [said("user", LONG)]}, identity)

    assert (answer.status, pod.engine.num_tokenized) == (400, 0)


class DropsThoughts(FakeVllm):
    """Its template leaves out what was thought before an answer, and tools."""

    def render(self, messages, *, tools=(), **more):
        shown = [
            one | {"content": one["content"].split("</think>")[-1]} if one["role"] == "assistant" else one
            for one in messages
        ]
        return super().render(shown, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [HI, said("assistant", f"<think>{LONG}</think>Hello"), HI]},
        {"messages": [HI], "tools": [function("read", LONG)]},
        {"messages": [said("user", " " * SIZE + "Hi")]},
    ],
    ids=["thoughts", "tools", "white space"],
)
async def test_what_the_template_leaves_out_does_not_count(tmp_path, more):
    class Trims(DropsThoughts):
        def render(self, messages, **options):
            return super().render([one | {"content": one["content"].strip()} for one in messages], **options)

    pod = Pod(tmp_path, Trims(max_model_len=WINDOW))

    assert (await pod.create(**more)).status == 200


@pytest.mark.parametrize("prompt", ["x" * (WINDOW - 1), encode("x" * (WINDOW - 1))], ids=["text", "ids"])
async def test_a_prompt_that_just_fits_is_taken(pod, prompt):
    assert (await pod.create(prompt=prompt)).status == 200


class Runs:
    """An engine whose tokens are runs of one letter, up to 128: a cut may part a token."""

    def __init__(self, window):
        self.max_model_len = window
        self.asked = 0

    def encode(self, text):
        ids = []
        for letter in text:
            if ids and ids[-1][0] == letter and len(ids[-1]) < 128:
                ids[-1] += letter
            else:
                ids.append(letter)
        return ids

    async def window(self, model):
        return self.max_model_len

    async def tokenize(self, model, text, *, add_special_tokens):
        self.asked += len(text)
        return tuple(map(len, self.encode(text)))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("ab \n\u00e9"), st.integers(1, 3000)), min_size=1, max_size=2500),
    st.integers(SHORT_TOKENS, 4000),
    st.integers(1, 40),
)
async def test_what_is_refused_has_more_tokens_than_the_window(runs, window, times):
    engine, text = Runs(window), "".join(letter * number for letter, number in runs)[:20_000] * times
    request = read_turn("/v1/completions", {"model": "m", "prompt": text}, {})
    try:
        await refuse_too_long(engine, request, request.prompt)
        refused = False
    except ContextLengthExceeded:
        refused = True

    num_tokens = len(engine.encode(text))
    assert not refused or num_tokens > window
    # A token has 128 letters at most, and a piece loses CUT_TOKENS: no text of that length fits.
    no_more_chars = 2 * 128 * (window + CUT_TOKENS)
    assert refused or len(text) <= no_more_chars or num_tokens < window + CUT_TOKENS
    assert engine.asked <= no_more_chars + CHARS_PER_TOKEN * window
