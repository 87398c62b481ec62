"""The model of a conversation against the turn middleware's own rules, thousands of turns without an engine.

What tests/faults asks of a real stack in minutes is asked here of matching and composition alone, so that a difference
seen there is the stack's, and the model is known to tell right from wrong.
"""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from contextcache.model import ContextMode
from tests.kit.faults.conversation import Conversation, _ids, _text, rendered
from tests.kit.faults.reference import Answer, Difference
from tests.kit.seed import SEED
from vllm_plugin.turn.answer.chat import AnswerResult
from vllm_plugin.turn.prompt.composition import answer_segment, compose_first, compose_turn
from vllm_plugin.turn.prompt.matching import match
from vllm_plugin.turn.prompt.request import read_turn
from vllm_plugin.turn.prompt.transcript import Transcript

_END = 511


class Tokenizer:
    """The engine's tokenizer routes, for one token a byte."""

    max_model_len = None

    async def tokenize(self, model, text, *, add_special_tokens):
        return _ids(text)

    async def tokenize_chat(self, request, messages, *, continue_final_message=False):
        whole = rendered(messages)
        return whole[: -len(_ids("\n<assistant>"))] if continue_final_message else whole

    async def detokenize(self, model, token_ids):
        return "".join(_text([token]) if token < 94 else "�" for token in token_ids)


class Middleware:
    """One session as the turn middleware keeps it; answers are drawn, not computed."""

    def __init__(self, random, kind, mode):
        self.random, self.kind, self.mode = random, kind, mode
        self.transcript = Transcript()
        self.generation = 0
        self.last = []

    async def answer(self, request):
        asked = read_turn(request.path, json.loads(json.dumps(request.body)), request.headers)
        before = self.transcript
        if request.path == "/v1/context":
            prompt = await compose_first(Tokenizer(), asked)
        else:
            found = match(before, asked.prompt, mode=asked.context_mode or ContextMode.AUTO)
            prompt = await compose_turn(Tokenizer(), asked, before, found)
        commits = request.path == "/v1/context" or (asked.commit and self.mode == "session")
        result = self._draw(request.max_tokens)
        if commits:
            said = None if asked.prefill_only else await answer_segment(Tokenizer(), asked, result)
            segments = before.segments[: prompt.keep_segments] + prompt.segments + ((said,) if said else ())
            self.transcript, self.generation = Transcript(segments), self.generation + 1
        return self._answered(prompt, result, committed=commits)

    def _draw(self, count):
        highest = 510 if self.kind == "ids" else 93
        ids = [self.random.randint(0, highest) for _ in range(count)]
        stopped = count and self.kind == "ids" and self.random.random() < 0.2
        self.last = [*ids[:-1], _END] if stopped else ids
        text = "" if self.kind == "ids" else _text(self.last)
        return AnswerResult(self.last, text, finish_reason="stop" if stopped else "length")

    def _answered(self, prompt, result, *, committed):
        total, shared = len(prompt.token_ids), prompt.context_tokens
        cached = min(shared, total - 1)
        context = {
            "computed_tokens": total - cached,
            "cached_tokens": cached,
            "saved_tokens": cached,
            "context_tokens": shared,
            "source": "device" if cached else "none",
            "committed": committed,
        }
        spoken = len(self.last)
        usage = {"prompt_tokens": total - cached, "completion_tokens": spoken, "total_tokens": total - cached + spoken}
        usage["prompt_tokens_details"] = None
        headers = {"x-context-generation": str(self.generation), "x-context-mode": prompt.outcome.context_mode}
        ids, reason = list(prompt.token_ids), result.finish_reason
        return Answer(ids, list(self.last), [], "", reason, usage | {"context": context}, "ctx_1", headers)


def conversation_of(seed, kind, mode, tamper=lambda answer: answer):
    """Return a conversation whose answers come from the middleware's rules, through `tamper`."""
    middleware = Middleware(Random(seed), kind, mode)

    def send(request):
        return tamper(asyncio.run(middleware.answer(request)))

    def cold(prompt_ids, **_):
        return Answer(prompt_ids, list(middleware.last), [], "", "", {})

    return Conversation(Random(seed), send, cold, kind, "demo", mode)


@pytest.mark.parametrize("mode", ["session", "prefix"])
@pytest.mark.parametrize("kind", ["text", "chat", "ids"])
def test_the_model_and_the_middleware_agree_on_every_prompt_and_transcript(kind, mode):
    turns = 0
    for number in range(40):
        conversation = conversation_of(f"{SEED}/{number}", kind, mode)
        conversation.create()
        for _ in range(8):
            if conversation.is_long:
                break
            conversation.take_turn()
            turns += 1
        conversation.probe()
    assert turns > 120


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": [1, 2, 3]},
        {"token_ids": [1]},
        {"headers": {"x-context-generation": "77", "x-context-mode": "append"}},
        {"headers": {"x-context-generation": "1", "x-context-mode": "replay"}},
        {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}},
        {"session_id": ""},
    ],
    ids=["prompt", "answer", "generation", "mode", "usage", "session"],
)
def test_whatever_is_not_as_it_must_be_is_a_difference(change):
    def tamper(answer):
        fields = {name: getattr(answer, name) for name in answer.__slots__}
        if "usage" in change:
            change["usage"]["context"] = answer.usage["context"]
        return Answer(**{**fields, **change})

    with pytest.raises(Difference):
        conversation_of(1, "text", "session", tamper).create()
