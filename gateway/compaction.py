"""Compaction: a short context that continues a long one, and whose first turn is warm. Read this first.

1. The client gives the short conversation, or the model writes a summary: one answer on the old context, not committed.
2. A new context is created from it with no answer. The pod computes its KV in the background and seals it. The old
   context is its parent: it does not change, and serves turns meanwhile.

Both are requests to pods like a client's (`Ask`), so they are routed, retried and limited by the same rules. A
compaction that ends early leaves nothing, or a context that expires.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from contextcache.claim import RESPONSES_PATH
from contextcache.errors import ContextBusy, ContextQuotaExceeded, EngineFailed, InvalidRequest, StoreUnavailable
from contextcache.input_items import COMPACTION
from contextcache.items import ITEM_IDS, RESPONSE, instructions_of, messages_of, stored_messages
from contextcache.model import CacheSessionMetadata, Segment, SessionId, TenantId
from contextcache.responses import compaction_content, previous_named, telling_what_is_missing, usage_of_response
from contextcache.terms import read_session_id, read_terms, whole
from gateway.contexts import Contexts, check_id
from gateway.conversations import TTL_S, Conversations
from gateway.parts import Parts
from gateway.paths import CONTEXT_PATH
from gateway.pods.sidecars import KVState

SUMMARY_TOKENS = 1024
"""Default length limit of a summary."""
_SHARED = ("model", "instructions", "tools", "reasoning", "chat_template_kwargs")
"""Fields of a compaction that the template shows, so the next request has them too."""
_OF_SUMMARY = ("instructions", "max_tokens")
"""Fields of a compaction that say how the model summarises."""
_HEAD_ROLES = ("system", "developer")
_REQUEST = (
    "Summarise this conversation for the assistant that continues it. Keep the task, decisions, names, numbers, file "
    "paths, results and open steps. Answer with the summary alone."
)
_SUMMARY = "Summary of the conversation so far:\n\n"

Json = dict[str, Any]
Ask = Callable[[str, Json, SessionId], Awaitable[Json]]
"""Sends a background request to a pod: path, body, parent context or nothing. Returns its answer, raises its error."""


class Compactions:
    """Makes compacted contexts."""

    def __init__(self, parts: Parts, contexts: Contexts, conversations: Conversations) -> None:
        self._manager, self._contexts, self._conversations = parts.manager, contexts, conversations

    async def compact(
        self, tenant: TenantId, session_id: SessionId, said: Mapping[str, Any], ask: Ask
    ) -> tuple[CacheSessionMetadata, KVState]:
        """Create a context from `messages` or `prompt`, or from a summary by the model.

        Fields that are not set are those of the old context. Raises InvalidRequest, and as a create.
        """
        check_id(session_id)
        given = {key: said[key] for key in ("messages", "prompt") if said.get(key) is not None}
        if given and (field := next((key for key in _OF_SUMMARY if said.get(key) is not None), None)):
            raise InvalidRequest(f"{field} is for a summary: leave it out with messages or prompt", param=field)
        read_terms(said)
        read_session_id(said.get("session_id"))
        source = await self._manager.get_session_metadata(tenant, session_id)
        if not source.generation:
            raise ContextBusy("the context is being created", retry_after_s=1)
        if not source.model_id:
            raise InvalidRequest("the conversation has no response yet", param="session_id")
        given = given or {"messages": await self._summarised(source, said, ask)}
        terms = {"ttl": source.ttl_s, "ttl_policy": source.ttl_policy.value, "metadata": dict(source.metadata)}
        asked = {key: value for key, value in said.items() if value is not None and key not in _OF_SUMMARY}
        body = terms | asked | given | {"model": source.model_id, "max_tokens": 0}
        made = _committed(await ask(CONTEXT_PATH, body, session_id))
        session, kv, _ = await self._contexts.read(tenant, made)
        return session, kv

    async def compact_response(self, tenant: TenantId, said: Mapping[str, Any], ask: Ask) -> Json:
        """Return a compacted response in OpenAI's format: the messages of others, and an item for those of the model.

        The item names a context that begins with instructions, these messages and a summary. Raises InvalidRequest,
        PreviousResponseNotFound, and as a create.
        """
        previous, given = said.get("previous_response_id"), said.get("input") or []
        new = [_message(given)] if isinstance(given, str) else given
        if not isinstance(new, list) or (previous is None and not new):
            raise InvalidRequest("give input or previous_response_id", param="input")
        shared = {key: said[key] for key in _SHARED if said.get(key) is not None}
        kept, parent = list[Json](), ""
        if previous is not None:
            kept, parent, instructions = await self._stored(tenant, said)
            if instructions is not None:
                shared.setdefault("instructions", instructions)
        length = _length(said, "max_output_tokens")
        request = {"input": [*new, _message(_REQUEST)], "store": False, "max_output_tokens": length}
        if "tools" in shared:
            request["tool_choice"] = "none"
        if previous is not None:
            request |= {"previous_response_id": previous, "truncation": _rolling(length)}
        answer = await ask(RESPONSES_PATH, shared | request, "")
        summary = _text("".join(map(_text_of, answer["output"])))
        kept += _kept(new)
        last = _message(_SUMMARY + summary)
        begun = {"input": [*kept, last], "store": True, "max_output_tokens": 0}
        terms = {"ttl": TTL_S, "ttl_policy": "sliding"}
        created = await ask(RESPONSES_PATH, shared | begun | terms, parent)
        item = {
            "type": COMPACTION,
            "id": f"cmp_{secrets.token_hex(16)}",
            "encrypted_content": compaction_content(_committed(created), *messages_of([last])),
        }
        return {
            "id": created["id"],
            "object": "response.compaction",
            "created_at": created["created_at"],
            "output": [*kept, item],
            "usage": _usage(answer["usage"]),
        }

    async def _stored(self, tenant: TenantId, said: Mapping[str, Any]) -> tuple[list[Json], SessionId, str | None]:
        """Return messages to keep, context and instructions of the previous response, and hold no transcript."""
        previous_named(said["previous_response_id"])
        with telling_what_is_missing(said):
            session, segments, placed, _ = await self._conversations.stored_response(
                tenant, said["previous_response_id"]
            )
        return _kept(one.item for one in placed), session.session_id, instructions_of(segments)

    async def _summarised(self, source: CacheSessionMetadata, said: Mapping[str, Any], ask: Ask) -> list[Json]:
        """Return the messages at the head of a context, and a summary of it by the model."""
        length = _length(said, "max_tokens")
        told = said.get("instructions")
        if told is not None and not isinstance(told, str):
            raise InvalidRequest("instructions must be a string", param="instructions")
        head = await self._conversations.reading(source.tenant, source.session_id, _head)
        request = {
            "model": source.model_id,
            "session_id": source.session_id,
            "messages": [{"role": "user", "content": f"{_REQUEST}\n\n{told}" if told else _REQUEST}],
            "context_mode": "append",
            "context_commit": False,
            "max_tokens": length,
            "truncation": _rolling(length),
        }
        answer = await ask("/v1/chat/completions", request, "")
        summary = _text(answer["choices"][0]["message"].get("content"))
        return [*head, {"role": "user", "content": _SUMMARY + summary}]


def _head(segments: Sequence[Segment]) -> list[Json]:
    """Return the system messages that a chat begins with. Raises InvalidRequest for a context of text."""
    if not segments or not segments[0].messages_json:
        raise InvalidRequest("a context of text has no summary: send the compacted `prompt`", param="prompt")
    messages = stored_messages(segments[0])
    first = next((at for at, message in enumerate(messages) if message["role"] not in _HEAD_ROLES), len(messages))
    return [{key: value for key, value in one.items() if key not in (ITEM_IDS, RESPONSE)} for one in messages[:first]]


def _length(said: Mapping[str, Any], field: str) -> int:
    length = whole(SUMMARY_TOKENS if said.get(field) is None else said[field])
    if length is None or length < 1:
        raise InvalidRequest(f"{field} must be a whole number from 1", param=field)
    return length


def _rolling(length: int) -> Json:
    """Return the truncation that makes room for a summary where the window is full."""
    return {"type": "rolling_tokens", "tokens": length}


def _message(content: Any, *, role: str = "user") -> Json:
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"type": "message", "role": role, "content": parts}


def _kept(items: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Return the messages that are not the model's, without earlier summaries: the new summary replaces them."""
    given = (item for item in items if _is_message(item) and item["role"] != "assistant")
    messages = (_message(item["content"], role=item["role"]) for item in given)
    return [message for message in messages if not _text_of(message).startswith(_SUMMARY)]


def _is_message(item: Mapping[str, Any]) -> bool:
    return item.get("type") in (None, "message") and "role" in item


def _text_of(item: Mapping[str, Any]) -> str:
    parts = item["content"] if _is_message(item) else ()
    return "".join(part.get("text", "") for part in parts)


def _text(summary: Any) -> str:
    if not isinstance(summary, str) or not summary.strip():
        raise EngineFailed("the model wrote no summary: send the compacted messages, or allow more tokens")
    return summary.strip()


def _usage(told: Mapping[str, Any]) -> Json:
    """Return the usage of a summary without fields of our own or of the engine."""
    read, written = (told.get(key) or {} for key in ("input_tokens_details", "output_tokens_details"))
    cached, reasoning = read.get("cached_tokens", 0), written.get("reasoning_tokens", 0)
    return usage_of_response(told["input_tokens"], cached, told["output_tokens"], reasoning=reasoning)


def _committed(created: Mapping[str, Any]) -> SessionId:
    """Return the context that a create made. Raises ContextQuotaExceeded or StoreUnavailable without a commit."""
    made = created.get("session_id")
    if not isinstance(made, str):
        if created["usage"]["context"].get("reason") == ContextQuotaExceeded.code:
            raise ContextQuotaExceeded("the compacted context exceeds the tenant's limit of bytes: delete contexts")
        raise StoreUnavailable("the compacted context could not be stored", retry_after_s=1)
    return made
