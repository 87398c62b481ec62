"""Random conversations, resent in every way clients have: nothing is doubled, nothing is lost, nothing is guessed.

Matching and composition alone, with a tokenizer that has one token a character, so that the ids tell all that was
rendered. `python -m tests.unit.vllm_plugin.turn.test_resend_properties 20000` asks more of it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import HistoryAmbiguous
from contextcache.items import messages_json
from contextcache.model import ContextMode, Segment, SegmentKind
from tests.kit.fake_vllm import EOS, FakeVllm, encode
from vllm_plugin.turn.prompt.composition import compose_first, compose_turn
from vllm_plugin.turn.prompt.matching import find_new, match
from vllm_plugin.turn.prompt.meaning import meanings
from vllm_plugin.turn.prompt.request import CHAT_PATH, read_turn
from vllm_plugin.turn.prompt.transcript import Transcript

Messages = list[dict[str, Any]]
SMALL_TALK = ("continue", "yes", "ok", "thanks, go on", "why?")


class Tokenizer:
    """The engine's tokenizer routes."""

    def __init__(self) -> None:
        self.rendered = FakeVllm().render

    async def tokenize_chat(self, request, messages, *, continue_final_message=False):
        return tuple(self.rendered(messages, generate=not continue_final_message, open_end=continue_final_message))

    async def tokenize(self, model, text, *, add_special_tokens):
        return tuple(encode(text))


class Chat:
    """A context and the client's own list of messages."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.said = 0
        self.transcript = Transcript()
        self.messages: Messages = []

    def begin(self) -> None:
        head = [{"role": "system", "content": self.words("You help.")}] if self.random.random() < 0.8 else []
        first = [*head, self.user()]
        prompt = asyncio.run(compose_first(Tokenizer(), asked(first)))
        self.answer(first, (), prompt.segments)

    def ask(self, messages: Messages, mode: str = "auto") -> Any:
        """Have a prompt composed. Raises HistoryAmbiguous."""
        request = asked(messages)
        found = match(self.transcript, request.prompt, mode=ContextMode(mode))
        return asyncio.run(compose_turn(Tokenizer(), request, self.transcript, found))

    def take(self, prompt: Any) -> None:
        """Commit a turn with an answer."""
        self.answer([*prompt.messages], self.transcript.segments[: prompt.keep_segments], prompt.segments)

    def answer(self, messages: Messages, kept: tuple[Segment, ...], added: tuple[Segment, ...]) -> None:
        text = self.words("An answer") + self.random.choice(("", "", "\n"))
        message = {"role": "assistant", "content": text}
        ids = (*encode(text), EOS)
        self.transcript = Transcript(
            (*kept, *added, Segment(SegmentKind.ANSWER, ids, messages_json=messages_json((message,))))
        )
        self.messages = [*messages, message]

    def words(self, what: str) -> str:
        self.said += 1
        return f"{what} ({self.said})" + " and so on" * self.random.randint(0, 3)

    def user(self) -> dict[str, Any]:
        if self.messages and self.random.random() < 0.2:
            return {"role": "user", "content": self.random.choice(SMALL_TALK)}
        return {"role": "user", "content": self.words("A question")}

    def unheard(self) -> dict[str, Any]:
        return {"role": "user", "content": self.words("Something new")}

    def spelled(self, message: dict[str, Any]) -> dict[str, Any]:
        """Write a message as another SDK would."""
        content, choice = message["content"], self.random.randrange(6)
        if isinstance(content, list):
            return message | {"content": content[0]["text"]}
        mark = {"cache_control": {"type": "ephemeral"}} if self.random.random() < 0.5 else {}
        if choice == 0:
            return message | {"content": [{"type": "text", "text": content, **mark}]}
        if choice == 1 and message["role"] == "assistant":
            return message | {"content": content.strip(), "reasoning": "It was asked for."}
        if choice == 2:
            return message | {"tool_calls": [], "refusal": None, "annotations": None}
        return message


def asked(messages: Messages) -> Any:
    return read_turn(CHAT_PATH, {"model": "m", "messages": messages}, {})


# Ways to resend: all of them return a history and a new message that was never said.


def _head(messages: Messages) -> int:
    return next(at for at, message in enumerate(messages) if message["role"] != "system")


def whole(chat: Chat) -> Messages:
    return [*chat.messages, chat.unheard()]


def respelled(chat: Chat) -> Messages:
    return [*map(chat.spelled, chat.messages), chat.unheard()]


def regenerated(chat: Chat) -> Messages:
    return chat.messages[:-1]


def trimmed(chat: Chat) -> Messages:
    head = _head(chat.messages)
    kept = chat.messages[head:][-chat.random.randint(1, len(chat.messages)) :]
    return [*chat.messages[:head], *kept, chat.unheard()]


def window(chat: Chat) -> Messages:
    return [*chat.messages[-chat.random.randint(1, len(chat.messages)) :], chat.unheard()]


def compacted(chat: Chat) -> Messages:
    head = chat.messages[: _head(chat.messages)]
    summary = [{"role": "user", "content": chat.words("Summary")}]
    if not head or chat.random.random() < 0.5:
        summary.append({"role": "assistant", "content": "ok"})
    return [*head, *summary, chat.unheard()]


def edited(chat: Chat) -> Messages:
    at = chat.random.randrange(len(chat.messages))
    changed = chat.messages[at] | {"content": chat.words("Edited")}
    # The first message edited and all else gone is no history: nobody could tell it from two new messages.
    after = chat.messages[at + 1 :] if at == 0 or chat.random.random() < 0.5 else []
    history = [*chat.messages[:at], changed, *after]
    return history if history[-1]["role"] == "user" and len(history) > 1 else [*history, chat.unheard()]


def inserted(chat: Chat) -> Messages:
    at = chat.random.randint(0, len(chat.messages))
    new = {"role": chat.random.choice(("system", "user", "developer")), "content": chat.words("Reminder")}
    return [*chat.messages[:at], new, *chat.messages[at:], chat.unheard()]


def clock(chat: Chat) -> Messages:
    head = {"role": "system", "content": chat.words("You help. It is now")}
    return [head, *chat.messages[_head(chat.messages) :], chat.unheard()]


def headless(chat: Chat) -> Messages:
    return [*chat.messages[_head(chat.messages) :], chat.unheard()]


WAYS: tuple[Callable[[Chat], Messages], ...] = (
    whole, respelled, regenerated, trimmed, window, compacted, edited, inserted, clock, headless,
)  # fmt: skip


def check_resend(chat: Chat, sent: Messages) -> str:
    """The engine is given what was sent, or the client is asked; what is reused says the same."""
    try:
        prompt = chat.ask(sent)
    except HistoryAmbiguous:
        prompt = chat.ask(sent, mode="replay")
    kept = chat.transcript.segments[: prompt.keep_segments]
    said = [message for segment in (*kept, *prompt.segments) for message in Transcript((segment,)).messages]
    assert list(prompt.messages) == sent
    assert prompt.outcome.context_mode == "replay"
    assert meanings(said) == meanings(sent)
    assert prompt.token_ids == sum((segment.token_ids for segment in (*kept, *prompt.segments)), ())
    # What is kept of the context is rendered as the context has it; all else as it was sent.
    num_kept = len(Transcript(kept).messages)
    spelled = [*Transcript(kept).messages, *sent[num_kept:]]
    assert prompt.token_ids == tuple(FakeVllm().render(spelled, generate=True, open_end=False))
    chat.take(prompt)
    return prompt.outcome.value


def check_new_turn(chat: Chat) -> str:
    """What is only new follows all that is stored."""
    new = [chat.unheard() for _ in range(chat.random.choice((1, 1, 1, 2)))]
    stored = chat.transcript
    prompt = chat.ask(new)

    assert prompt.messages == (*stored.messages, *new)
    assert meanings(prompt.messages) == meanings((*chat.messages, *new))
    assert prompt.keep_segments == len(stored.segments)
    assert prompt.token_ids[: len(stored.token_ids)] == stored.token_ids
    chat.take(prompt)
    return prompt.outcome.value


def take_steps(random: Random, num_steps: int) -> Counter[str]:
    chat, seen = Chat(random), Counter[str]()
    chat.begin()
    for _ in range(num_steps):
        if random.random() < 0.5:
            seen[f"new turn: {check_new_turn(chat)}"] += 1
            continue
        way = random.choice(WAYS)
        seen[f"{way.__name__}: {check_resend(chat, way(chat))}"] += 1
    return seen


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_the_engine_sees_what_was_sent_however_a_conversation_is_resent(random, num_steps):
    take_steps(random, num_steps)


def _message(random: Random, number: int) -> Messages:
    """Return the messages of one exchange: a question, now and then calls and their results, an answer."""
    calls = [
        {"id": f"call_{number}_{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for at in range(random.choice((0, 0, 1, 2)))
    ]
    asked = [{"role": "user", "content": random.choice(SMALL_TALK)}]
    if calls:
        asked.append({"role": "assistant", "content": None, "tool_calls": calls})
        asked += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
    return [*asked, {"role": "assistant", "content": f"Answer {number}"}]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_is_sent_after_a_named_answer_no_answer_call_or_result_is_there_twice(random):
    """Seen to fail with an append of everything, as it was for responses that named what they go on from."""
    whole = [message for number in range(random.randint(1, 4)) for message in _message(random, number)]
    ends = [at + 1 for at, message in enumerate(whole) if message["role"] == "assistant"]
    stored = whole[: random.choice(ends)]
    new = [{"role": "user", "content": "Something new"}, {"role": "tool", "tool_call_id": "other", "content": "x"}]
    pool = [*whole, *new]
    start = random.randrange(len(whole))
    sent = random.choice([random.sample(pool, random.randint(1, len(pool))), [*whole[start:], new[0]]])
    told = meanings(sent)
    known = meanings(stored)

    try:
        added = find_new(known, told, is_chat=True, follows=True)
    except HistoryAmbiguous:
        return
    seen = told if added is None else (*known, *(told[at] for at in added))

    said = [message for message in seen if message.role == "assistant" and message.text]
    calls = [call.id for message in seen for call in message.calls]
    results = [message.answers for message in seen if message.answers]
    for one_kind in (said, calls, results):
        assert len(one_kind) == len(set(one_kind)), (stored, sent)


if __name__ == "__main__":
    total: Counter[str] = Counter()
    for seed in range(int(sys.argv[1]) // 10):
        total += take_steps(Random(seed), 10)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(total.items())), total.total(), sep="\n")
