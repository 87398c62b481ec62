"""History that clients send again, in each dialect: the engine gets the prompt the client meant, and nothing twice.

Rows are what is sent again, columns are dialects. The toy's template shows every character, so the ids that the engine
received are compared with those of the conversation that the row says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from contextcache.model import NewSession, TurnCommit
from tests.kit.fake_vllm import FakeVllm, decode
from tests.kit.turn_bench import Pod

Message = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
NEW = {"role": "user", "content": "And what comes after all of that?"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: str) -> Message:
    called = [
        {"id": one, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Kiel"}'}}
        for one in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})


def result(call_id: str, text: str = "Rain.") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@dataclass
class Dialect:
    """One way to send messages, to a context called `mine`."""

    name: str
    pod: Pod
    continues: Callable[[], dict[str, Any]]
    generation: int = 0
    item_ids: dict[int, str] = field(default_factory=dict)
    """Of the last answer, by position in its output."""

    async def send(self, messages: list[Message], **more: Any) -> Any:
        path, body = _WRITTEN[self.name.split()[0]](messages, self.item_ids)
        where = self.continues() if self.generation else {}
        return await self.pod.post(path, {"model": "m"} | body | where | more, self.pod.identity("mine"))

    async def ask(self, messages: list[Message]) -> Any:
        """Send messages that must be taken, and return the answer."""
        first = {"context_create": "if_missing", "session_id": "mine"}
        answer = await self.send(messages, **({} if self.generation else first))
        assert answer.status == 200, answer.body
        self.generation += 1
        output = answer.json.get("output") or ()
        self.item_ids = {at: item["id"] for at, item in enumerate(output) if "id" in item}
        return answer


def _chat(messages: list[Message], _ids: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": messages, "tools": [TOOL]}


def _messages(messages: list[Message], _ids: Any) -> tuple[str, dict[str, Any]]:
    said: list[Message] = []
    for message in messages:
        blocks: list[Message] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        blocks += [
            {"type": "tool_use", "id": call["id"], "name": "weather", "input": {"city": "Kiel"}}
            for call in message.get("tool_calls", ())
        ]
        said.append({"role": "assistant" if message["role"] == "assistant" else "user", "content": blocks})
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}
    return "/v1/messages", {"messages": said, "max_tokens": 500, "tools": [tool]}


def _responses(messages: list[Message], ids: dict[int, str]) -> tuple[str, dict[str, Any]]:
    items: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            one = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            items.append(one)
            continue
        is_answer = message["role"] == "assistant"
        part = {"type": "output_text" if is_answer else "input_text", "text": message["content"]}
        if message["content"]:
            named = {"id": message["id"]} if "id" in message else {}
            items.append({"type": "message", "role": message["role"], "content": [part], **named})
        items += [
            {"type": "function_call", "call_id": call["id"], "name": "weather", "arguments": '{"city":"Kiel"}'}
            for call in message.get("tool_calls", ())
        ]
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    return "/v1/responses", {"input": items, "tools": [tool]}


_WRITTEN = {"chat": _chat, "messages": _messages, "responses": _responses}
_NAMED = ("chat by session_id", "messages by session_id", "responses by session_id")
_FOLLOWING = ("responses by previous_response_id", "responses by conversation")
DIALECTS = (*_NAMED, *_FOLLOWING)


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path, FakeVllm(max_model_len=1 << 20))


@pytest.fixture
def talk(pod, request):
    name = request.param
    talk = Dialect(name, pod, lambda: {"session_id": "mine"})
    if "previous_response_id" in name:
        talk.continues = lambda: {"previous_response_id": f"resp_{talk.generation}_mine"}
    elif "conversation" in name:
        talk.continues = lambda: {"conversation": "mine"}
    return talk


def say(pod: Pod, text: str, *calls: str) -> Message:
    """Have the engine answer with this from now on, and return the answer as a message."""
    answer = assistant(text or None, *calls)
    pod.engine.answer, pod.engine.calls = lambda _ids: text, tuple(answer.get("tool_calls", ()))
    return answer


async def converse(talk: Dialect, turns: int = 3) -> list[Message]:
    """Hold a conversation that brings only what is new, and return its messages."""
    history: list[Message] = []
    for number in range(1, turns + 1):
        answer = say(talk.pod, f"Answer number {number} is one plain sentence.")
        asked = user(f"This is question number {number}.")
        await talk.ask([asked])
        history += [asked, answer]
    return history


async def call_tools(talk: Dialect, *calls: str) -> list[Message]:
    asked = user("What is the weather?")
    answer = say(talk.pod, "", *calls)
    await talk.ask([asked])
    say(talk.pod, "It rains.")
    return [asked, answer]


def received(pod: Pod) -> str:
    return decode(pod.engine.generations()[-1]["kv_transfer_params"]["prompt_token_ids"])


def rendered(pod: Pod, messages: list[Message]) -> str:
    return decode(pod.engine.render(messages, generate=True, open_end=False, tools=[TOOL]))


everywhere = pytest.mark.parametrize("talk", DIALECTS, indirect=True)
where_a_name_says_nothing_more = pytest.mark.parametrize("talk", _NAMED, indirect=True)
where_an_answer_is_named = pytest.mark.parametrize("talk", _FOLLOWING, indirect=True)


@everywhere
async def test_a_full_resend_is_the_conversation_and_what_is_new(talk):
    """Seen to fail on responses that named what they go on from: the history stood there twice."""
    history = await converse(talk)

    answer = await talk.ask([*history, NEW])

    assert received(talk.pod) == rendered(talk.pod, [*history, NEW])
    assert answer.headers["x-context-mode"] == "replay"


@everywhere
async def test_a_full_resend_with_a_reminder_before_it_is_what_was_sent(talk):
    history = await converse(talk)
    sent = [user("Reminder: nothing."), *history, NEW]

    await talk.ask(sent)

    assert received(talk.pod) == rendered(talk.pod, sent)


@everywhere
async def test_a_full_resend_of_a_context_that_was_cut_is_what_was_sent(talk):
    """Then the context begins later than what is sent."""
    history = await converse(talk)
    talk.pod.engine.answer = lambda _ids: "Done."
    await talk.pod.chat("mine", messages=[*history[4:], NEW], context_mode="replay")
    talk.generation += 1

    await talk.ask([*history, NEW, assistant("Done."), user("More?")])

    assert received(talk.pod) == rendered(talk.pod, [*history, NEW, assistant("Done."), user("More?")])


@everywhere
async def test_a_full_resend_without_anything_new_is_answered_again(talk):
    history = await converse(talk)

    await talk.ask(history[:-1])

    assert received(talk.pod) == rendered(talk.pod, history[:-1])


@everywhere
@pytest.mark.parametrize("kept", [1, 2, 4])
async def test_a_trimmed_resend_is_all_that_was_sent_or_follows_what_was_named(talk, kept):
    """Seen to fail on responses that named what they go on from: 72 tokens in the place of 52, and committed."""
    history = await converse(talk)

    await talk.ask([*history[-kept:], NEW])

    meant = history if talk.name in _FOLLOWING else history[-kept:]
    assert received(talk.pod) == rendered(talk.pod, [*meant, NEW])


@everywhere
async def test_what_is_new_alone_follows_the_context(talk):
    history = await converse(talk)

    answer = await talk.ask([NEW])

    assert received(talk.pod) == rendered(talk.pod, [*history, NEW])
    assert answer.headers["x-context-mode"] == "append"


@where_an_answer_is_named
async def test_a_question_that_was_asked_before_is_new(talk):
    history = await converse(talk)

    await talk.ask([history[0]])

    assert received(talk.pod) == rendered(talk.pod, [*history, history[0]])


@everywhere
@pytest.mark.parametrize("is_whole", [False, True], ids=["the call", "all of it"])
async def test_a_tool_call_resent_before_its_result_is_there_once(talk, is_whole):
    """Seen to fail: the chat's engine saw no question before the call, that of responses saw the call twice."""
    history = await call_tools(talk, "call_1")

    await talk.ask([*(history if is_whole else history[-1:]), result("call_1")])

    assert received(talk.pod) == rendered(talk.pod, [*history, result("call_1")])


@everywhere
async def test_calls_of_one_answer_that_are_resent_one_by_one_are_there_once(talk):
    history = await call_tools(talk, "call_1", "call_2")
    one_by_one = [assistant(None, "call_1"), result("call_1"), assistant(None, "call_2"), result("call_2", "Snow.")]

    await talk.ask(one_by_one)

    assert received(talk.pod) == rendered(talk.pod, [*history, result("call_1"), result("call_2", "Snow.")])


@everywhere
async def test_a_result_of_a_call_that_nobody_made_is_not_taken_for_that_of_an_open_one(talk):
    history = await call_tools(talk, "call_1")

    answer = await talk.send([history[-1], result("call_9")])

    if talk.name not in _FOLLOWING:  # these name the answer that a synthetic call may follow
        assert (answer.status, answer.json["error"]["code"]) == (400, "history_ambiguous")
    else:
        assert received(talk.pod) == rendered(talk.pod, [*history, result("call_9")])


@everywhere
async def test_a_tool_call_and_its_result_are_resent_whole_after_they_were_answered(talk):
    history = await call_tools(talk, "call_1")
    await talk.ask([result("call_1")])
    history += [result("call_1"), assistant("It rains.")]

    await talk.ask([*history, NEW])

    assert received(talk.pod) == rendered(talk.pod, [*history, NEW])


@where_an_answer_is_named
@pytest.mark.parametrize("sent", ["result", "call and result", "old answer", "edited question", "answer in the middle"])
async def test_a_piece_of_the_history_that_is_not_its_end_is_refused(talk, sent):
    """Seen to fail: 200, and the piece stood there twice."""
    history = await call_tools(talk, "call_1")
    await talk.ask([result("call_1")])
    history += [result("call_1"), assistant("It rains.")]
    say(talk.pod, "Quite.")
    await talk.ask([user("Really?")])
    pieces = {
        "result": [history[2], NEW],
        "call and result": [*history[1:3], NEW],
        "old answer": [history[3], NEW],
        "edited question": [user("What is the weather in Bonn?"), *history[1:], NEW],
        "answer in the middle": [NEW, assistant("Quite.")],
    }

    refused = await talk.send(pieces[sent])

    assert (refused.status, refused.json["error"]["code"]) == (400, "history_ambiguous"), refused.body
    assert refused.json["error"]["param"] == "input"
    assert (await talk.pod.transcript("mine"))[0].generation == 3


@where_an_answer_is_named
async def test_items_with_their_ids_are_history_and_edited_ones_are_refused(talk):
    """Seen to fail: 200, and the answer stood there twice, once in other words."""
    history = await converse(talk, 1)
    answer = history[-1] | {"id": talk.item_ids[0]}
    edited = answer | {"content": "Other words."}

    refused = await talk.send([edited, NEW])
    of_nobody = await talk.send([edited | {"id": "msg_of_nobody"}, NEW], context_commit=False)
    meant = received(talk.pod)
    await talk.ask([answer, NEW])

    assert (refused.status, refused.json["error"]["code"]) == (400, "history_ambiguous"), refused.body
    assert of_nobody.status == 200, of_nobody.body
    assert meant == rendered(talk.pod, [*history, assistant("Other words."), NEW])
    assert received(talk.pod) == rendered(talk.pod, [*history, NEW])


async def test_ids_of_items_are_kept_with_the_answer_and_shown_to_no_template(pod):
    talk = Dialect("responses", pod, lambda: {"conversation": "mine"})
    await converse(talk, 2)

    _, segments = await pod.transcript("mine")
    (kept,) = json.loads(segments[1].messages_json)[0]["item_ids"]
    assert kept.startswith("msg_")
    shown = [message for path, body in pod.engine.requests if path == "/tokenize" for message in body["messages"]]
    assert not any("item_ids" in message for message in shown)


async def fork(pod: Pod, generation: int) -> None:
    """Put in the place of `mine` a fork of it, made at that generation."""
    await pod.manager.reserve(NewSession("demo", "fork", "m"), lease_id="f", lease_ttl_ms=1000)
    commit = TurnCommit("demo", "fork", "f", 0, 0, (), "", "")
    await pod.manager.fork("mine", generation=generation, commit=commit)


@everywhere
@pytest.mark.parametrize("how", ["fork", "rewind"])
async def test_a_resend_after_a_fork_or_a_rewind_is_what_was_sent(talk, how):
    """What the branch does not have, such as later turns of the context that it left, is sent once and seen once."""
    history = await converse(talk)
    if how == "rewind":
        await talk.pod.manager.rewind("demo", "mine", generation=1)
        talk.generation = 4
        named = {}
    else:
        await fork(talk.pod, 1)
        talk.generation = 1
        session = {"previous_response_id": "resp_1_fork", "conversation": "fork", "session_id": "fork"}
        named = {key: value for key, value in session.items() if talk.name.endswith(key)}
        talk.pod.identity = lambda _name, identity=talk.pod.identity: identity("fork")

    await talk.send([*history[:2], NEW], context_commit=False, **named)
    of_the_branch = received(talk.pod)
    answer = await talk.send([*history, NEW], **named)

    assert answer.status == 200, answer.body
    assert of_the_branch == rendered(talk.pod, [*history[:2], NEW])
    assert received(talk.pod) == rendered(talk.pod, [*history, NEW])


TEXTS: dict[str, tuple[Callable[[str], str], Callable[[str, str], str]]] = {
    "full resend": (lambda told: told + " more", lambda told, sent: sent),
    "trimmed resend": (lambda told: told[-80:] + " more", lambda told, sent: sent),
    "the answer again": (lambda told: told[told.index(" It rains") :] + " more", lambda told, sent: sent),
    "what is new": (lambda told: " more", lambda told, sent: told + sent),
}


@pytest.mark.parametrize("how", ["", "fork", "rewind"])
@pytest.mark.parametrize("name", TEXTS)
async def test_text_that_is_resent_reaches_the_engine_once(pod, name, how):
    pod.engine.answer = lambda _ids: " It rains today, and it will rain tomorrow, and the day after, says the man."
    first = await pod.create(prompt="What is the weather?", session_id="mine")
    told = "What is the weather?" + first.json["choices"][0]["text"]
    if how:
        await pod.ask("mine", prompt=" And on Sunday?")
        await (fork(pod, 1) if how == "fork" else pod.manager.rewind("demo", "mine", generation=1))
    send, meant = TEXTS[name]

    answer = await pod.ask("fork" if how == "fork" else "mine", prompt=send(told))

    assert answer.status == 200, answer.body
    assert decode(pod.engine.generations()[-1]["prompt"]) == meant(told, send(told))
