"""What clients resend, and what the engine must then see: each case by name, over the real manager and a toy engine.

`stored` is what the context holds. A case says what the client sends, what the engine must see and how many of the
stored tokens the prompt must begin with. The toy's template shows every character, so the ids tell what was rendered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from contextcache.identity import Identity, sign_identity
from contextcache.model import ContextMode, UsageFormat
from tests.kit.fake_vllm import FakeVllm, decode, encode
from tests.kit.turn_bench import SECRET, Pod

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "You are a patient helper who answers in whole sentences."}
NEW = {"role": "user", "content": "And what comes after all of that?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris","days":2}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@dataclass
class Stored:
    """A context made by turns that brought only what was new."""

    pod: Pod
    session_id: str
    messages: Messages

    async def tokens(self) -> tuple[int, ...]:
        _, segments = await self.pod.transcript(self.session_id)
        return tuple(token for segment in segments for token in segment.token_ids)

    async def send(self, messages: Messages, **body: Any) -> Seen:
        answer = await self.pod.chat(self.session_id, messages=messages, **body)
        assert answer.status == 200, answer.body
        given = self.pod.engine.generations()[-1]
        return Seen(given["messages"], given["kv_transfer_params"]["prompt_token_ids"], answer)


@dataclass
class Seen:
    """What the engine got."""

    messages: Messages
    ids: list[int]
    answer: Any

    @property
    def context(self) -> dict[str, Any]:
        return self.answer.json["usage"]["context"]


async def stored_chat(pod: Pod, turns: int = 20, *, head: Messages = [SYSTEM]) -> Stored:  # noqa: B006
    said = 0

    def answer(ids: list[int]) -> str:
        nonlocal said
        said += 1
        return f"Answer number {said} is given in one plain sentence."

    pod.engine.answer = answer
    messages = [*head, user("This is question number 1.")]
    session_id = (await pod.create(messages=messages)).json["session_id"]
    messages.append(assistant("Answer number 1 is given in one plain sentence."))
    for number in range(2, turns + 1):
        new = user(f"This is question number {number}.")
        answered = await pod.chat(session_id, messages=[new])
        messages += [new, assistant(answered.json["choices"][0]["message"]["content"])]
    return Stored(pod, session_id, messages)


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path, FakeVllm(max_model_len=1 << 20))


def edited(messages: Messages, at: int, **change: Any) -> Messages:
    return [*messages[:at], messages[at] | change, *messages[at + 1 :]]


CLOCK = SYSTEM | {"content": SYSTEM["content"] + " It is 18:31:07."}
SUMMARY = user("Summary of the conversation so far: questions were asked and answered.")
REMINDER = {"role": "system", "content": "Reminder: the plan is still empty."}
PARTS = [{"type": "text", "text": "This is question number 1.", "cache_control": {"type": "ephemeral"}}]

WHOLE_HISTORY_AGAIN: dict[str, tuple[Callable[[Messages], Messages], str | None]] = {
    # name: what is sent of T, why it diverged (None: all that is stored is reused)
    "1 whole history and a new turn": (lambda t: [*t, NEW], None),
    "4 system, the last 6, new": (lambda t: [t[0], *t[-6:], NEW], "trimmed"),
    "5 the last 6 and new, no system": (lambda t: [*t[-6:], NEW], "window"),
    "6 system, a summary, ok, new": (lambda t: [t[0], SUMMARY, assistant("ok"), NEW], "compacted"),
    "7 a clock in the system prompt": (lambda t: [CLOCK, *t[1:], NEW], "head_changed"),
    "8 first user message as parts with cache_control": (lambda t: [*edited(t, 1, content=PARTS), NEW], None),
    "9 a reminder after the system prompt": (lambda t: [t[0], REMINDER, *t[1:], NEW], "inserted"),
    "9 a reminder as a user message": (lambda t: [t[0], user("Reminder: nothing."), *t[1:], NEW], "inserted"),
    "17 the first prompt again": (lambda t: t[:2], "regenerated"),
    "18 one middle message edited": (lambda t: [*edited(t, 15, content="Otherwise."), NEW], "edited"),
    "18 one answer edited": (lambda t: [*edited(t, 16, content="Otherwise."), NEW], "edited"),
    "18 edited there and all after it gone": (lambda t: [*t[:15], user("Otherwise.")], "edited"),
    "19 without the last answer": (lambda t: t[:-1], "regenerated"),
    "one old question and a new one": (lambda t: [t[11], NEW], "window"),
    "a message left out": (lambda t: [*t[:5], *t[6:], NEW], "trimmed"),
}


@pytest.mark.parametrize("name", WHOLE_HISTORY_AGAIN)
async def test_the_engine_sees_exactly_what_was_resent(pod, name):
    stored = await stored_chat(pod)
    resend, why = WHOLE_HISTORY_AGAIN[name]
    sent, before = resend(stored.messages), await stored.tokens()

    seen = await stored.send(sent)

    after, _ = await pod.transcript(stored.session_id)
    rendered = pod.engine.render(sent, generate=True, open_end=False)
    shared = len(before) if why is None else common(seen.ids, before)
    assert seen.messages == sent
    assert decode(seen.ids) == decode(rendered)
    assert seen.answer.headers["x-context-mode"] == "replay"
    assert seen.context["context_tokens"] == shared
    assert seen.context.get("diverged", {}).get("why") == why
    assert after.generation == 21


def common(left: Any, right: Any) -> int:
    return next((at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(left))


async def test_the_receipt_says_at_which_message_and_token_a_resend_diverged(pod):
    stored = await stored_chat(pod)
    sent = [*edited(stored.messages, 15, content="Otherwise."), NEW]

    seen = await stored.send(sent)

    kept = pod.engine.render(sent[:15], generate=False, open_end=False)
    assert seen.context["match"] == "diverge"
    assert seen.context["diverged"] == {"message": 15, "token": len(kept + encode("<user>")), "why": "edited"}
    assert pod.counted("divergences", why="edited") == 1


async def test_the_conversation_is_committed_as_it_was_resent(pod):
    stored = await stored_chat(pod, 3)
    sent = [stored.messages[0], SUMMARY, assistant("ok"), NEW]
    await stored.send(sent)

    seen = await stored.send([user("Go on.")])

    assert [m["content"] for m in seen.messages[:-2]] == [m["content"] for m in sent]
    assert seen.answer.headers["x-context-mode"] == "append"


NEW_TURNS: dict[str, Messages] = {
    "2 only the new user message": [NEW],
    "20 a question that quotes the last answer": [
        user("You said: Answer number 20 is given in one plain sentence. Why?")
    ],
    "two new user messages": [user("First this."), user("Then that.")],
    "a prefill": [NEW, assistant("Sure, it is")],
}


@pytest.mark.parametrize("name", NEW_TURNS)
async def test_what_is_only_new_follows_all_that_is_stored(pod, name):
    stored = await stored_chat(pod)
    before = await stored.tokens()

    seen = await stored.send(NEW_TURNS[name])

    assert seen.messages == stored.messages + NEW_TURNS[name]
    assert seen.context["context_tokens"] == len(before)
    assert (seen.answer.headers["x-context-mode"], seen.context["match"]) == ("append", "append")
    assert "diverged" not in seen.context


async def after_a_tool_call(pod: Pod) -> Stored:
    pod.engine.calls, pod.engine.answer = (CALL,), lambda ids: ""
    first = [SYSTEM, user("What is the weather in Paris?")]
    session_id = (await pod.create(messages=first)).json["session_id"]
    pod.engine.calls, pod.engine.answer = (), lambda ids: "It is sunny."
    return Stored(pod, session_id, [*first, assistant(None, tool_calls=[CALL])])


async def test_3_results_of_open_calls_follow_what_is_stored(pod):
    stored = await after_a_tool_call(pod)
    before = await stored.tokens()

    seen = await stored.send([RESULT])

    assert seen.messages == [*stored.messages, RESULT]
    assert seen.context["context_tokens"] == len(before)


def function(**change: Any) -> dict[str, Any]:
    return CALL | {"function": CALL["function"] | change}


SAME_CALLS: dict[str, dict[str, Any]] = {
    "13 arguments written anew": assistant(None, tool_calls=[function(arguments='{"days": 2, "city": "Paris"}')]),
    "13 numbers written anew": assistant("", tool_calls=[function(arguments='{"city":"Paris","days":2.0}')]),
    "14 an index": assistant(None, tool_calls=[CALL | {"index": 0}]),
    "16 nulls and empty lists": assistant(None, tool_calls=[CALL], refusal=None, audio=None, annotations=[]),
}


@pytest.mark.parametrize("name", SAME_CALLS)
async def test_a_tool_call_that_means_the_same_is_reused(pod, name):
    stored = await after_a_tool_call(pod)
    before = await stored.tokens()
    sent = [*stored.messages[:-1], SAME_CALLS[name], RESULT]

    seen = await stored.send(sent)

    assert seen.messages == sent
    assert seen.context["match"] == "extend"
    assert seen.context["context_tokens"] == len(before)
    assert decode(seen.ids) == decode(pod.engine.render([*stored.messages, RESULT], generate=True, open_end=False))


SAME_ANSWERS: dict[str, dict[str, Any]] = {
    "10 text parts": assistant(None) | {"content": [{"type": "text", "text": "It is Paris.\n"}]},
    "10 several text parts": assistant(None) | {"content": [{"type": "text", "text": t} for t in ("It is ", "Paris.")]},
    "11 no trailing newline": assistant("It is Paris."),
    "12 reasoning": assistant("It is Paris.\n", reasoning="The capital is asked for."),
    "12 reasoning_content": assistant("It is Paris.\n", reasoning_content="The capital is asked for."),
    "15 cache_control": assistant(None)
    | {"content": [{"type": "text", "text": "It is Paris.\n", "cache_control": {"type": "ephemeral"}}]},
    "16 nulls and empty lists": assistant("It is Paris.\n", tool_calls=[], function_call=None, refusal=None, name=None),
    "a name an agent has given it": assistant("It is Paris.\n", name="geographer"),
}


@pytest.mark.parametrize("name", SAME_ANSWERS)
async def test_an_answer_that_means_the_same_is_reused(pod, name):
    pod.engine.answer = lambda ids: "It is Paris.\n"
    first = [SYSTEM, user("What is the capital of France?")]
    stored = Stored(pod, (await pod.create(messages=first)).json["session_id"], first)
    before = await stored.tokens()
    sent = [*first, SAME_ANSWERS[name], NEW]

    seen = await stored.send(sent)

    assert seen.messages == sent
    assert seen.context["match"] == "extend"
    assert seen.context["context_tokens"] == len(before)


async def test_15_a_cache_mark_that_moves_changes_nothing(pod):
    mark = {"cache_control": {"type": "ephemeral"}}
    first = [SYSTEM, user("This is question number 1.") | {"content": PARTS}]
    stored = Stored(pod, (await pod.create(messages=first)).json["session_id"], first)
    before = await stored.tokens()
    unmarked = [{"type": "text", "text": PARTS[0]["text"]}]
    sent = [SYSTEM, user("") | {"content": unmarked}, assistant("!"), NEW | mark]

    seen = await stored.send(sent)

    assert seen.messages == sent
    assert seen.context["context_tokens"] == len(before)


async def test_17_the_first_prompt_again_computes_one_token(pod):
    stored = await stored_chat(pod, 1)
    pod.engine.cached_tokens = 1000

    seen = await stored.send(stored.messages[:2])

    assert seen.answer.json["usage"]["context"]["computed_tokens"] == 1
    assert seen.context["diverged"] == {"message": 2, "token": len(seen.ids), "why": "regenerated"}


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
MORE_TOOLS = [*TOOLS, {"type": "function", "function": {"name": "clock", "parameters": {}}}]


@pytest.mark.parametrize("regenerates", [False, True], ids=["a new turn", "the first prompt again"])
@pytest.mark.parametrize(("before", "now"), [(TOOLS, MORE_TOOLS), (MORE_TOOLS, TOOLS), (TOOLS, None), (None, TOOLS)])
async def test_a_resend_with_other_tools_is_rendered_with_those(pod, before, now, regenerates):
    first = [SYSTEM, user("What is the weather?")]
    stored = Stored(pod, (await pod.create(messages=first, tools=before)).json["session_id"], first)
    sent = first if regenerates else [*first, assistant("!"), NEW]

    seen = await stored.send(sent, tools=now)

    assert decode(seen.ids) == decode(pod.engine.render(sent, generate=True, open_end=False, tools=now))
    assert seen.context["match"] == "diverge"
    assert (seen.context["diverged"]["message"], seen.context["diverged"]["why"]) == (0, "head_changed")
    assert pod.counted("divergences", why="head_changed") == 1


@pytest.mark.parametrize("head", [[], [SYSTEM]], ids=["no system prompt", "a system prompt"])
async def test_a_resend_with_the_same_tools_reuses_all(pod, head):
    first = [*head, user("What is the weather?")]
    stored = Stored(pod, (await pod.create(messages=first, tools=TOOLS)).json["session_id"], first)
    before = await stored.tokens()

    seen = await stored.send([*first, assistant("!"), NEW], tools=TOOLS)

    assert (seen.context["match"], seen.context["context_tokens"]) == ("extend", len(before))


@pytest.mark.parametrize("turns", [1, 2], ids=["the first prompt", "a later one"])
@pytest.mark.parametrize("before", [False, True], ids=["did not think", "thought"])
async def test_another_answer_is_thought_about_as_is_asked_now(pod, before, turns):
    """The generation prompt says it, and it is the end of the stored prompt."""
    first = [SYSTEM, user("What is the weather?")]
    created = await pod.create(messages=first, chat_template_kwargs={"enable_thinking": before})
    stored = Stored(pod, created.json["session_id"], first)
    if turns == 2:
        stored.messages = [*first, assistant("!"), NEW]
        await stored.send([NEW], chat_template_kwargs={"enable_thinking": before})
    after_answer = (await stored.tokens())[: -len(encode("!")) - 1]

    seen = await stored.send(stored.messages, chat_template_kwargs={"enable_thinking": not before})

    closed = "<think></think>"
    wanted = decode(after_answer).removesuffix(closed) + (closed if before else "")
    _, segments = await pod.transcript(stored.session_id)
    assert decode(seen.ids) == wanted
    assert seen.messages == stored.messages
    assert len(segments) == 2 * turns


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}),
        ({"documents": [{"text": "a"}]}, {"documents": [{"text": "a"}]}),
    ],
    ids=str,
)
async def test_a_chat_is_rendered_with_what_the_engine_makes_arguments_of_its_template(pod, fields, told):
    await pod.create(messages=[SYSTEM, NEW], **fields)

    asked = next(body for path, body in pod.engine.requests if path == "/tokenize")
    assert asked["chat_template_kwargs"] == fields.get("chat_template_kwargs", {}) | told


SPELLINGS = {
    "two parts": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}],
    "other parts": [{"type": "text", "text": "a"}, {"type": "text", "text": "bcd"}],
    "one part": [{"type": "text", "text": "abcd"}],
    "a string": "abcd",
}


@pytest.mark.parametrize("before", SPELLINGS)
@pytest.mark.parametrize("now", SPELLINGS)
async def test_what_the_template_shows_in_another_way_is_shown_as_it_was_sent(pod, before, now):
    first = [SYSTEM, user("") | {"content": SPELLINGS[before]}]
    stored = Stored(pod, (await pod.create(messages=first)).json["session_id"], first)
    sent = [SYSTEM, user("") | {"content": SPELLINGS[now]}, assistant("!"), NEW]

    seen = await stored.send(sent)

    assert decode(seen.ids) == decode(pod.engine.render(sent, generate=True, open_end=False))
    alike = before == now or {before, now} == {"one part", "a string"}
    assert seen.context.get("diverged", {}).get("why") == (None if alike else "respelled")


@pytest.mark.parametrize("at", [0, 1, 2, 3])
async def test_a_respelled_message_is_told_by_its_own_position(pod, at):
    """Seen to fail: the position of the first message that came in the same request."""
    first = [SYSTEM, user("One."), assistant("Two."), user("Three.")]
    stored = Stored(pod, (await pod.create(messages=first)).json["session_id"], first)
    sent = edited(first, at, content=[{"type": "text", "text": text} for text in (first[at]["content"], "")])

    seen = await stored.send([*sent, assistant("!"), NEW])

    assert (seen.context["diverged"]["message"], seen.context["diverged"]["why"]) == (at, "respelled")


async def test_a_call_of_a_name_that_came_before_is_answered_by_a_new_result(pod):
    """Names of calls come again where the engine counts them from nought."""
    stored = await after_a_tool_call(pod)
    pod.engine.calls = (CALL,)
    await stored.send([RESULT])
    before = await stored.tokens()

    seen = await stored.send([RESULT, NEW])

    assert seen.answer.headers["x-context-mode"] == "append"
    assert seen.context["context_tokens"] == len(before)


async def test_a_call_without_a_name_hides_no_message_that_comes_again(pod):
    """Seen failing: an ordinary message was taken for the result of that call, and appended a second time."""
    stored = await stored_chat(pod, 1)
    await stored.send([*stored.messages, assistant(None, tool_calls=[CALL | {"id": ""}]), NEW])

    seen = await stored.send([NEW, {"role": "user", "content": "And more?"}])

    assert seen.answer.headers["x-context-mode"] == "replay"


async def test_a_result_that_names_no_call_is_not_taken_for_one_that_was_given(pod):
    nameless = {"role": "tool", "content": "Sunny."}
    stored = await stored_chat(pod, 1)
    await stored.send([*stored.messages, nameless, NEW])

    answer = await pod.chat(stored.session_id, messages=[nameless | {"content": "Rain."}])

    assert answer.json["error"]["code"] == "history_ambiguous"


REFUSED: dict[str, tuple[Messages, dict[str, Any]]] = {
    "a head of its own beside nothing of the context": ([SYSTEM, NEW], {}),
    "a summary under a head of its own": ([SYSTEM, SUMMARY], {}),
    "a head alone": ([CLOCK], {}),
    "a system message among new ones": ([NEW, REMINDER], {}),
    "a result of a call nobody made": ([RESULT | {"tool_call_id": "call_7"}], {}),
    "append with a head of its own": ([SYSTEM, NEW], {"context_mode": "append"}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_could_be_either_is_refused_and_changes_nothing(pod, name):
    messages, body = REFUSED[name]
    stored = await stored_chat(pod, 2)

    answer = await pod.chat(stored.session_id, messages=messages, **body)

    error = answer.json["error"]
    session, segments = await pod.transcript(stored.session_id)
    assert (answer.status, error["code"]) == (400, "history_ambiguous")
    assert "context_mode" in error["message"]
    assert error["param"] in {"messages", "context_mode"}
    assert (session.generation, len(segments)) == (2, 4)


async def test_results_sent_again_are_a_resend(pod):
    stored = await after_a_tool_call(pod)
    await stored.send([RESULT])

    seen = await stored.send([RESULT])

    assert seen.messages == [RESULT]
    assert seen.answer.headers["x-context-mode"] == "replay"


@pytest.mark.parametrize("messages", [[SYSTEM, NEW], [SYSTEM, SUMMARY], [NEW, REMINDER]], ids=str)
async def test_replay_is_obeyed_whatever_is_sent(pod, messages):
    stored = await stored_chat(pod, 2)

    seen = await stored.send(messages, context_mode="replay")

    assert seen.messages == messages
    assert decode(seen.ids) == decode(pod.engine.render(messages, generate=True, open_end=False))


async def test_a_key_that_replays_is_asked_only_for_requests_that_say_nothing(pod):
    stored = await stored_chat(pod, 2)
    identity = Identity("demo", "req", pod.clock.now_ms() + 60_000, stored.session_id, ContextMode.REPLAY)
    body = {"model": "m", "session_id": stored.session_id, "messages": [NEW]}

    async def mode_of(**more: Any) -> str:
        answer = await pod.post("/v1/chat/completions", body | more, sign_identity(identity, SECRET))
        return answer.headers["x-context-mode"]

    assert await mode_of(context_mode="auto", context_commit=False) == "append"
    assert await mode_of(context_mode=None, context_commit=False) == "replay"
    assert await mode_of() == "replay"


@pytest.mark.parametrize(
    ("key", "header", "whole"),
    [
        (UsageFormat.OPENAI, b"", True),
        (UsageFormat.OPENAI, b"Context", False),
        (UsageFormat.OPENAI, b"other", True),
        (UsageFormat.CONTEXT, b"openai", True),
        (UsageFormat.CONTEXT, b"", False),
        (None, b"context", False),
        (None, b"", True),
    ],
)
async def test_a_key_says_how_usage_counts_for_requests_that_say_nothing(pod, key, header, whole):
    pod.engine.cached_tokens = 5
    stored = await stored_chat(pod, 2)
    identity = Identity("demo", "req", pod.clock.now_ms() + 60_000, stored.session_id, usage=key)
    body = {"model": "m", "session_id": stored.session_id, "messages": [NEW]}

    headers = [(b"x-usage-format", header)] if header else ()
    answer = await pod.post("/v1/chat/completions", body, sign_identity(identity, SECRET), headers)
    usage, sent = answer.json["usage"], pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"]

    assert usage["prompt_tokens_details"] == ({"cached_tokens": 5} if whole else None)
    assert usage["prompt_tokens"] == len(sent) - (0 if whole else 5)


async def test_append_is_obeyed_even_for_the_whole_history(pod):
    stored = await stored_chat(pod, 2, head=[])

    seen = await stored.send(stored.messages, context_mode="append")

    assert seen.messages == stored.messages * 2


async def test_messages_after_text_keep_the_text_whether_or_not_there_was_an_answer(pod):
    pod.engine.answer = lambda ids: " answered."
    session_id = (await pod.create(prompt="Some text")).json["session_id"]
    stored = Stored(pod, session_id, [])
    await stored.send([user("First.")], max_tokens=0)

    seen = await stored.send([user("Second.")])

    rendered = pod.engine.render([user("First."), user("Second.")], generate=True, open_end=False)
    assert decode(seen.ids) == "Some text answered." + decode(rendered)
    assert seen.messages == [user("First."), user("Second.")]


async def test_messages_with_an_answer_in_them_are_a_resend_on_a_context_of_text_too(pod):
    session_id = (await pod.create(prompt="Some text")).json["session_id"]
    sent = [user("First."), assistant("Answered."), NEW]

    seen = await Stored(pod, session_id, []).send(sent)

    assert decode(seen.ids) == decode(pod.engine.render(sent, generate=True, open_end=False))


async def test_a_question_without_an_answer_is_rendered_again_with_the_next_one(pod):
    stored = await stored_chat(pod, 2)
    await stored.send([user("First this.")], max_tokens=0)

    seen = await stored.send([NEW])

    sent = [*stored.messages, user("First this."), NEW]
    _, segments = await pod.transcript(stored.session_id)
    assert seen.messages == sent
    assert decode(seen.ids) == decode(pod.engine.render(sent, generate=True, open_end=False))
    assert len(segments) == 6


LAST = " and this is the last answer, which is a good deal longer than any window of sixty-four characters."


async def stored_text(pod: Pod, *, as_ids: bool = False) -> tuple[str, str]:
    pod.engine.answer = lambda ids: " and the first answer is short."
    prompt = "A story about a lighthouse begins here"
    session_id = (await pod.create(prompt=encode(prompt) if as_ids else prompt)).json["session_id"]
    pod.engine.answer = lambda ids: LAST
    await pod.ask(session_id, prompt=" then it goes on")
    return session_id, f"{prompt} and the first answer is short. then it goes on{LAST}"


TEXT: dict[str, tuple[Callable[[str], str], Callable[[str, str], str], str | None]] = {
    # name: what is sent, what the engine must see of T and X, why it diverged
    "21 the window's tail and new text": (lambda t: t[-len(LAST) - 20 :] + " more", lambda t, x: x, "window"),
    "21 exactly the last answer and new text": (lambda t: LAST + " more", lambda t, x: x, "window"),
    "22 new text": (lambda t: " what came next was", lambda t, x: t + x, None),
    "a piece of the last answer, quoted": (lambda t: LAST[-30:] + " why?", lambda t, x: t + x, None),
    "the last answer quoted later": (lambda t: f"You said{LAST} why?", lambda t, x: t + x, None),
    "all of it and new text": (lambda t: t + " more", lambda t, x: x, None),
    "all but the end": (lambda t: t[:-5] + "!", lambda t, x: x, "edited"),
    "the first prompt": (lambda t: "A story about a lighthouse begins here", lambda t, x: x, "regenerated"),
}


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "23 ids"])
@pytest.mark.parametrize("name", TEXT)
async def test_a_prompt_that_shows_the_history_is_taken_as_sent(pod, name, as_ids):
    send, must_see, why = TEXT[name]
    session_id, stored = await stored_text(pod, as_ids=as_ids)
    sent = send(stored)

    answer = await pod.ask(session_id, prompt=encode(sent) if as_ids else sent)

    assert decode(pod.engine.generations()[-1]["prompt"]) == must_see(stored, sent)
    assert answer.json["usage"]["context"].get("diverged", {}).get("why") == why


@pytest.mark.parametrize("text", ["", "!"])
async def test_the_first_prompt_again_never_has_tokens_that_nobody_saw(pod, text):
    """An answer of special tokens alone is no text: the prompt that is sent again ends where the prompt ended."""
    pod.engine.answer, pod.engine.invisible = lambda ids: text, 3
    session_id = (await pod.create(prompt="Hello")).json["session_id"]

    answer = await pod.ask(session_id, prompt="Hello")

    assert pod.engine.generations()[-1]["prompt"] == encode("Hello")
    assert answer.headers["x-context-mode"] == "replay"
    assert answer.json["usage"]["context"]["diverged"]["why"] == "regenerated"


async def test_a_message_that_is_deep_in_its_tool_arguments_is_compared_as_text(pod):
    deep = "[" * 100_000
    sent = [user("hi"), assistant(None, tool_calls=[function(arguments=deep)]), NEW]
    pod.engine.calls = ()
    stored = await stored_chat(pod, 1)
    pod.engine.render = lambda *args, **kwargs: encode("rendered")

    seen = await stored.send(sent)

    assert seen.messages == json.loads(json.dumps(sent))


@pytest.mark.parametrize(("num_repeated", "mode"), [(88, "replay"), (87, "append")])
async def test_four_fifths_of_the_context_make_a_replay(tmp_path, num_repeated, mode):
    pod = Pod(tmp_path, FakeVllm(answer=lambda _ids: "b" * 10))
    session_id = (await pod.create(prompt="a" * 100)).json["session_id"]

    answered = await pod.ask(session_id, prompt="a" * num_repeated)

    assert answered.headers["x-context-mode"] == mode
