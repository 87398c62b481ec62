"""Turns on `/v1/messages`: the chat's turns, told in Anthropic's words. Imports nothing of vLLM's.

Events are those of Anthropic's API (https://platform.claude.com/docs/en/build-with-claude/streaming; types of its
package `anthropic` 2.14). Their blocks are those of vLLM 0.32 entrypoints/anthropic/serving.py.
`tests/unit/vllm_plugin/turn/test_anthropic_beside_vllm.py` compares requests and answers, and lists the differences.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from typing_extensions import override

from contextcache.errors import EngineFailed, error_object
from contextcache.fields import OUR_FIELDS
from contextcache.model import SessionId, UsageFormat
from contextcache.responses import message_id
from vllm_plugin.turn.answer.chat import AnswerResult, Dialect, JsonAnswer, SseAnswer, compact_json
from vllm_plugin.turn.answer.diagnostics import anthropic_diagnostics
from vllm_plugin.turn.answer.events import Event
from vllm_plugin.turn.engine import Engine
from vllm_plugin.turn.prompt.message_input import NAMES, Template, chat_of
from vllm_plugin.turn.prompt.request import CHAT_PATH, TurnRequest, read_compared, read_turn
from vllm_plugin.turn.refusals import engine_error
from vllm_plugin.turn.turn import Client, Turn

_Json = dict[str, Any]


class Anthropic(Dialect):
    """Anthropic's dialect in front of one engine. The first turn asks for the engine's template."""

    names = NAMES

    def __init__(self) -> None:
        """Know nothing of the engine's template yet."""
        self._template: Template | None = None

    @override
    async def prepare(self, engine: Engine) -> None:
        self._template = self._template or await Template.of(engine)

    @override
    def turn(self, client: Client, body: _Json, raw: bytes, named: SessionId | None) -> TurnRequest:
        """Check a turn, a chat's from here on. Raises InvalidRequest."""
        assert self._template is not None
        chat = chat_of(body, self._template) | {key: body[key] for key in OUR_FIELDS if key in body}
        # Anthropic's usage has read and computed tokens, which are the whole prompt.
        return replace(
            read_turn(CHAT_PATH, chat, client.headers),
            usage=UsageFormat.OPENAI,
            compared_with=read_compared(body, "diagnostics", "previous_message_id"),
        )

    @override
    def answer(self, turn: Turn) -> JsonAnswer | SseAnswer:
        """Return a reader of the chat's answer that writes Anthropic's."""
        return _MessageStream(turn) if turn.request.stream else _WholeMessage(turn)


class _WholeMessage(JsonAnswer):
    """A whole answer."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.request)
        self._turn = turn
        self._message: _Json = {}

    @override
    def read(self) -> None:
        """Read the answer and tell it anew: nothing is committed that cannot be told."""
        super().read()
        blocks: list[_Json] = []
        if thought := self._answer["choices"][0]["message"].get("reasoning"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": secrets.token_hex(16)})
        # Clients read the first block, so that an empty answer has one.
        if self.result.text or not (blocks or self.result.tool_calls):
            blocks.append({"type": "text", "text": self.result.text})
        for call in self.result.tool_calls:
            function = call["function"]
            given = msgspec.convert(json.loads(function["arguments"]), _Json)
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
        self._message = {**_head(self._turn, self._answer), "content": blocks, **_stop(self.result)}

    @override
    def closing(self, usage: _Json, session: _Json) -> bytes:
        """Return the message with the turn's usage and session fields."""
        told = {**self._message, **session, "usage": _usage(usage, self._answer["usage"])}
        return compact_json(told if usage["context"]["committed"] else {**told, "id": self._answer["id"]})


class _MessageStream(SseAnswer):
    """An answer as Anthropic's events. The last two, `message_delta` with the usage and `message_stop`, wait."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.request)
        self._turn = turn
        self._has_begun = False
        self._open: _Json = {}
        """The block that is being told; empty: none."""
        self._num_stopped = 0
        """Blocks before it."""
        self._call_index = 0
        """The chat's index of the latest call."""
        self._after_call = ""
        """Text that came while a call was open. It gets a block of its own after the call."""
        self._last = b""
        self._counted: _Json = {}
        """The engine's usage."""

    @override
    def passing(self, event: Event, answer: _Json) -> bytes:
        """Return Anthropic's events of a chat's event."""
        return b"".join(map(_event, self._told(answer)))

    @override
    def failing(self, error: Event) -> bytes:
        """Return an engine's error as Anthropic's."""
        failure = engine_error(500, error.data or b"")  # in a stream its own status has gone already
        return _event({"type": "error", "error": error_object(failure)})

    @override
    def complete(self) -> None:
        """Check that the stream came to its end, and tell that anew: nothing is committed that cannot be told."""
        super().complete()
        chunks = self.held_events()
        told = [one for chunk in chunks for one in self._told(chunk)]
        self._last = b"".join(map(_event, (*told, *self._stopped())))
        self._counted = chunks[-1]["usage"]

    @override
    def closing(self, usage: _Json, session: _Json) -> bytes:
        """Return the last events, of which `message_delta` has the usage and session fields."""
        ours = {**session, "usage": _usage(usage, self._counted)}
        delta = {"type": "message_delta", "delta": _stop(self.result), **ours}
        return self._last + _event(delta) + _event({"type": "message_stop"})

    def _told(self, chunk: _Json) -> Iterator[_Json]:
        if not self._has_begun:
            self._has_begun = True
            usage = chunk.get("usage") or {}
            empty: _Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage, usage)}
            yield {"type": "message_start", "message": {**_head(self._turn, chunk), **empty}}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning"):
                yield from self._in_block({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking_delta", thinking=thought)
            if text := delta.get("content"):
                if self._open.get("type") == "tool_use":
                    self._after_call += text
                else:
                    yield from self._text(text)
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)

    def _in_block(self, block: _Json) -> Iterator[_Json]:
        """Go on in a block, or begin it."""
        if self._open == block:
            return
        yield from self._stopped()
        self._open = block
        yield {"type": "content_block_start", "index": self._num_stopped, "content_block": block}

    def _stopped(self) -> Iterator[_Json]:
        """End the block, if one is open."""
        if not self._open:
            return
        if self._open["type"] == "thinking":
            yield self._delta("signature_delta", signature=secrets.token_hex(16))
        yield {"type": "content_block_stop", "index": self._num_stopped}
        self._num_stopped += 1
        text, self._after_call, self._open = self._after_call, "", {}
        if text:
            yield from self._text(text)
            yield from self._stopped()

    def _text(self, text: str) -> Iterator[_Json]:
        yield from self._in_block({"type": "text", "text": ""})
        yield self._delta("text_delta", text=text)

    def _call(self, call: _Json) -> Iterator[_Json]:
        function, index = call.get("function") or {}, call.get("index", 0)
        if call.get("id") and function.get("name"):
            yield from self._in_block({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
            self._call_index = index
        if arguments := function.get("arguments"):
            if self._open.get("type") != "tool_use" or index != self._call_index:
                raise EngineFailed("the engine's events do not form a message")
            yield self._delta("input_json_delta", partial_json=arguments)

    def _delta(self, kind: str, **part: str) -> _Json:
        return {"type": "content_block_delta", "index": self._num_stopped, "delta": {"type": kind, **part}}


def _event(told: _Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (told["type"].encode(), compact_json(told))


def _head(turn: Turn, chat: _Json) -> _Json:
    """Return the fields that are known before the answer's text. The id names the generation that the turn commits."""
    head: _Json = {"id": chat["id"], "type": "message", "role": "assistant", "model": chat["model"]}
    if turn.save_ref is not None:
        head["id"] = message_id(turn.session.session_id, turn.session.generation + 1)
    if turn.request.compared_with is not None:
        head["diagnostics"] = anthropic_diagnostics(turn.comparison)
    return head


def _stop(result: AnswerResult) -> _Json:
    """Return the reason. A call that a stop text has cut must not run, and one that is whole must."""
    reason, matched = None, None
    if result.finish_reason == "length":
        reason = "max_tokens"
    elif result.finish_reason in ("stop", "tool_calls"):
        calls = result.tool_calls
        is_whole = bool(calls) and _is_json(calls[-1]["function"]["arguments"])
        if isinstance(result.stop_reason, str) and not is_whole:
            reason, matched = "stop_sequence", result.stop_reason
        else:
            reason = "tool_use" if calls or result.finish_reason == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": matched}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _usage(usage: _Json, engine: _Json) -> _Json:
    """Return Anthropic's usage: the three kinds of input tokens are the whole prompt, those read were not computed.

    `created_cache_tokens`, those of the computed ones that the engine keeps in its own cache, is vLLM's count.
    """
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    computed = usage.get("prompt_tokens", 0) - cached
    created = min((engine.get("prompt_tokens_details") or {}).get("created_cache_tokens") or 0, computed)
    told = {
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.get("completion_tokens") or 0,
    }
    return told | ({"context": usage["context"]} if "context" in usage else {})
