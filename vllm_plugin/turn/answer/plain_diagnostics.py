"""Cache diagnostics of plain requests, by digests of the parts of those that asked.

The engine answers a plain request, so no transcript has its prompt. A request that asks for diagnostics leaves digests
of its parts here under the id of its answer, as it does at the hosted APIs. They are gone with the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from contextcache.beginning import without_marks
from contextcache.claim import RESPONSES_PATH, read_object
from contextcache.errors import ContextCacheError, EngineFailed
from contextcache.model import TenantId
from vllm_plugin.turn.answer.chat import UNREADABLE, compact_json
from vllm_plugin.turn.answer.diagnostics import Cause, Comparison, anthropic_diagnostics, openai_diagnostics
from vllm_plugin.turn.answer.events import Event, EventSplitter, begins_stream
from vllm_plugin.turn.engine import Message, Send
from vllm_plugin.turn.prompt.request import MESSAGES_PATH, read_compared

_ASKS = {
    MESSAGES_PATH: ("diagnostics", "previous_message_id"),
    RESPONSES_PATH: ("prompt_cache_options", "comparison_response_id"),
}
_CACHED_HEADER = b"x-context-cached-tokens"
_TOLD_IN = (b'"message_start"', b'"response.completed"', b'"response.incomplete"')
"""Events of a stream that may have diagnostics."""
_TENANTS_MAX, _ANSWERS_MAX = 1024, 64
"""Tenants, and answers of each, that are remembered. An answer takes half a kilobyte."""
_BYTES_PER_TOKEN = 4
"""Bytes of JSON per token, as in English text."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Digests of a request's parts, in the order in which a prompt has them."""

    fields: Mapping[Cause, bytes]
    num_messages: int
    messages: bytes
    num_tokens: int
    """Estimate."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that asks for diagnostics."""

    is_anthropic: bool
    compared_with: str
    """Id of an earlier answer; empty: none."""
    parts: Parts
    chain: tuple[bytes, ...]
    """Digest of no messages, of the first, of the first two, and so on."""


def read_asked(path: str, raw: bytes) -> Asked | None:
    """Read a plain request; None: it asks for no diagnostics, or is invalid."""
    name, key = _ASKS.get(path, ("", ""))
    if not name or b'"%b"' % name.encode() not in raw:
        return None
    try:
        body = read_object(raw)
        compared_with = read_compared(body, name, key)
        return None if compared_with is None else _asked(body, compared_with, is_anthropic=path == MESSAGES_PATH)
    except (ContextCacheError, *UNREADABLE):
        return None  # the engine tells what is wrong


def _asked(body: Mapping[str, Any], compared_with: str, *, is_anthropic: bool) -> Asked:
    fields = {
        Cause.MODEL: body.get("model"),
        Cause.TOOLS: body.get("tools"),
        Cause.EFFORT: [body.get(name) for name in ("reasoning", "thinking", "output_config")],
        Cause.SYSTEM: body.get("system") or body.get("instructions"),
    }
    spelled = {cause: compact_json(without_marks(value)) for cause, value in fields.items()}
    said = body.get("messages") if is_anthropic else body.get("input")
    chain, size_bytes = [b""], sum(map(len, spelled.values()))
    for message in said if isinstance(said, list) else [said]:
        text = compact_json(without_marks(message))
        chain.append(_digest(chain[-1] + text))
        size_bytes += len(text)
    digests = {cause: _digest(text) for cause, text in spelled.items()}
    parts = Parts(digests, len(chain) - 1, chain[-1], size_bytes // _BYTES_PER_TOKEN)
    return Asked(is_anthropic, compared_with, parts, tuple(chain))


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def _id_digest(answer_id: str) -> bytes:
    return _digest(answer_id.encode(errors="surrogatepass"))


@dataclass
class PlainDiagnostics:
    """Parts of the latest answers of each tenant that asked. One per turn process."""

    _answers: dict[TenantId, dict[bytes, Parts]] = field(default_factory=dict)
    """By a digest of the answer's id: vLLM lets a client choose the id of a response, of any length."""

    def compare(self, tenant: TenantId, asked: Asked, cached_tokens: int) -> Comparison | None:
        """Compare a request with that of the earlier answer; None: it names none."""
        if not asked.compared_with:
            return None
        earlier = self._answers.get(tenant, {}).get(_id_digest(asked.compared_with))
        if earlier is None:
            return Comparison(Cause.NOT_FOUND)
        now = asked.parts
        causes = [cause for cause, digest in earlier.fields.items() if now.fields[cause] != digest]
        if asked.chain[earlier.num_messages : earlier.num_messages + 1] != (earlier.messages,):
            causes.append(Cause.MESSAGES)
        shared = 0 if Cause.MODEL in causes else min(cached_tokens, now.num_tokens, earlier.num_tokens)
        return Comparison((*causes, Cause.NONE)[0], now.num_tokens, earlier.num_tokens, shared)

    def remember(self, tenant: TenantId, answer_id: str, parts: Parts) -> None:
        """Keep the parts of an answered request in place of the tenant's oldest."""
        answers = self._answers[tenant] = self._answers.pop(tenant, {})
        answers[_id_digest(answer_id)] = parts
        if len(answers) > _ANSWERS_MAX:
            del answers[next(iter(answers))]
        if len(self._answers) > _TENANTS_MAX:
            del self._answers[next(iter(self._answers))]


@dataclass
class Diagnosed:
    """A `send` that adds the diagnostics to an answer: to the whole of it, or to the event that its API has them in."""

    known: PlainDiagnostics
    tenant: TenantId
    asked: Asked
    send: Send
    _head: Message = field(default_factory=dict)
    _body: bytes = b""
    _events: EventSplitter = field(default_factory=EventSplitter)

    async def __call__(self, message: Message) -> None:
        """Pass a message on. The head of a whole answer waits for its body, whose length changes."""
        is_body, is_last = message["type"] == "http.response.body", not message.get("more_body")
        if message["type"] == "http.response.start":
            self._head = message
        is_stream = begins_stream(self._head)
        if self._head.get("status") != 200 or (is_stream and not is_body):  # OK
            await self.send(message)
        elif is_body and is_stream:
            await self.send({**message, "body": b"".join(self._passing(message.get("body", b""), is_last=is_last))})
        elif is_body:
            self._body += message.get("body", b"")
            if is_last:
                told = self._told(self._body)
                others = [pair for pair in self._head["headers"] if pair[0].lower() != b"content-length"]
                await self.send({**self._head, "headers": [*others, (b"content-length", b"%d" % len(told))]})
                await self.send({**message, "body": told})

    def _passing(self, chunk: bytes, *, is_last: bool) -> Iterator[bytes]:
        try:
            yield from map(self._event, self._events.feed(chunk))
        except EngineFailed:  # an event too large to hold passes, as all after it
            self._head, is_last = {}, True
        if is_last:
            yield self._events.rest()

    def _event(self, event: Event) -> bytes:
        if event.data is None or not any(kind in event.data for kind in _TOLD_IN):
            return event.raw
        told = self._told(event.data)
        return event.raw if told == event.data else event.with_data(told)

    def _told(self, data: bytes) -> bytes:
        """Return an answer, or the event that has it, with its diagnostics; data of another shape stays."""
        try:
            whole = json.loads(data)
            answer = whole.get("message" if whole.get("type") == "message_start" else "response", whole)
            usage = answer.get("usage") or {}
            header = dict(self._head["headers"]).get(_CACHED_HEADER, b"0")
            cached_tokens = (usage.get("input_tokens_details") or {}).get("cached_tokens") or int(header)
            found = self.known.compare(self.tenant, self.asked, cached_tokens)
            self.known.remember(self.tenant, answer["id"], self.asked.parts)
            if self.asked.is_anthropic:
                answer["diagnostics"] = anthropic_diagnostics(found)
            elif found is None:
                return data
            else:
                answer["prompt_cache_diagnostics"] = openai_diagnostics(found, cached_tokens=cached_tokens)
            return compact_json(whole)
        except UNREADABLE:
            return data
