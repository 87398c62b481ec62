"""Context that a request continues: by `session_id`, by OpenAI's response or conversation, or by a label. Pure.

The id of a response names a context and the generation that it committed, so continuing from it needs no other record.
`conversation` names a context, as `session_id` does. `store` says whether the answer is committed. A label is an
`X-Session-ID` without the prefix `ctx_` that equals the name of a context (ADR 0094).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from contextcache.claim import RESPONSES_PATH, Claims, claimed_session, label_of
from contextcache.clock import Clock
from contextcache.errors import (
    ContextCacheError,
    ContextExpired,
    ContextNotFound,
    GenerationGone,
    InvalidRequest,
    PreviousResponseNotFound,
    StoreUnavailable,
)
from contextcache.fields import HANDLE_FIELDS, refuse_misspelt
from contextcache.items import messages_json
from contextcache.model import CacheSessionMetadata, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, SESSION_ID_PATTERN, SESSION_ID_RULE

log = logging.getLogger(__name__)

RESPONSE_FIELDS = frozenset({"previous_response_id", "conversation", "store"})
"""Fields of a response that choose its context."""
LOOK_UP_S = 0.5
"""Maximum wait of a plain request for the look-up of its label, which takes a millisecond or two. Agents send labels
with plain requests too."""
PAUSE_MS = 1_000
"""Pause without look-ups after the store did not answer. A longer one would run more turns without their context."""
REPEATED: Mapping[str, Any] = (
    dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id"))
    | dict.fromkeys(("reasoning", "temperature", "text", "top_logprobs", "top_p", "user"))
    | {"parallel_tool_calls": True, "service_tier": "auto", "tool_choice": "auto", "tools": []}
)
"""Fields of the request that a response repeats, with their values where the request has none."""
_RESPONSE_HANDLES = HANDLE_FIELDS | RESPONSE_FIELDS
_SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,160}", re.ASCII)
"""Ids that an error may repeat."""
_ANSWER_ID = re.compile(r"(resp|msg)_([1-9]\d{0,14})_(.{1,128})", re.ASCII)
_COMPACTION = re.compile(r"cmp_([0-9a-f]{32})_(.{1,128})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Continued:
    """Context of a request."""

    session_id: SessionId | None
    """None: a new context."""
    generation: int | None = None
    """Generation to continue from; None: the newest."""
    creates: bool = False
    """True: a missing context is created."""
    commits: bool = True
    """True: the answer is committed."""
    said: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Fields that named it, as the client wrote them: `previous_response_id`, `conversation`, or `compaction`."""


def response_id(session_id: SessionId, generation: int) -> str:
    """Return the id of the response that committed this generation."""
    return f"resp_{generation}_{session_id}"


def message_id(session_id: SessionId, generation: int) -> str:
    """Return the id of the Anthropic message that committed this generation."""
    return f"msg_{generation}_{session_id}"


def compaction_content(session_id: SessionId, summary: Mapping[str, Any]) -> str:
    """Return the content of the compaction item that stands for `summary`, a message of this context."""
    return f"cmp_{summary_digest(summary)}_{session_id}"


def compaction_named(content: str) -> tuple[SessionId, str] | None:
    """Return the context and the digest of the summary that a compaction item names; None: it names none."""
    found = _COMPACTION.fullmatch(content)
    return (found[2], found[1]) if found and SESSION_ID_PATTERN.fullmatch(found[2]) else None


def summary_digest(message: Mapping[str, Any]) -> str:
    """Return the digest by which a compaction item names a message."""
    said = messages_json([{"role": message["role"], "content": message.get("content")}])
    return hashlib.blake2b(said.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def generation_named(answer_id: str) -> tuple[SessionId, int] | None:
    """Return the context and the generation that the id of a response or message names; None: it names none."""
    found = _ANSWER_ID.fullmatch(answer_id)
    if found is None or not SESSION_ID_PATTERN.fullmatch(found[3]):
        return None
    return found[3], int(found[2])


def response_object(  # fields of a response, by name
    response: str,
    *,
    said: Mapping[str, Any],
    status: str,
    created_at: int,
    model: str,
    output: Iterable[Mapping[str, Any]],
    conversation: SessionId | None,
) -> dict[str, Any]:
    """Return a response in OpenAI's format, without usage. `said`: fields of its request."""
    repeated = {key: said.get(key, default) for key, default in REPEATED.items()}
    if conversation is not None:
        repeated["conversation"] = {"id": conversation}
    return {
        "id": response,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        **repeated,
        "model": model,
        "output": [*output],
        "truncation": "disabled",
        "usage": None,
    }


def usage_of_response(
    given: int, cached: int, answered: int, *, written: int = 0, reasoning: int = 0
) -> dict[str, Any]:
    """Return a response's usage from tokens of the prompt, of it those cached and written, and of the answer."""
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": given + answered,
    }


def continued_by(
    path: str, claims: Claims | None, header: str | None, *, label: SessionId | None = None
) -> Continued | None:
    """Return the context that a call continues, or creates; None: none. `header` is `X-Session-ID`.

    `label`: the label in the header, if a context has that name. Raises InvalidRequest, also for a misspelt field;
    PreviousResponseNotFound for an id that no response of a context can have.
    """
    if claims is not None:
        refuse_misspelt(claims.names, _RESPONSE_HANDLES if path == RESPONSES_PATH else HANDLE_FIELDS)
    named = claimed_session(claims, header) or label
    if claims is None or path != RESPONSES_PATH:
        creates = claims is not None and claims.creates_if_missing()
        return None if named is None else Continued(named, creates=creates)
    previous, said, store = map(claims.value, ("previous_response_id", "conversation", "store"))
    compaction = claims.compaction
    if store is not None and not isinstance(store, bool):
        raise InvalidRequest("store must be true or false", param="store")
    if previous is not None and said is not None:
        raise InvalidRequest("give either previous_response_id or conversation, not both", param="conversation")
    generation: int | None = None
    other: SessionId | None = None
    if previous is not None:
        other, generation = previous_named(previous)
    elif said is not None:
        other = _conversation(said)
    elif compaction is not None:
        other = _compacted(compaction)
    if named is not None and other not in (None, named):
        raise InvalidRequest(
            "session_id names a different context than previous_response_id, conversation or a compaction item",
            param="session_id",
        )
    named, commits = named or other, store is not False
    if named is None:
        return Continued(None, creates=True) if store else None
    creates = generation is None and ((said is not None and commits) or claims.creates_if_missing())
    written = {"previous_response_id": previous, "conversation": said, "compaction": compaction}
    return Continued(named, generation, creates=creates, commits=commits, said=written)


@contextmanager
def telling_what_is_missing(said: Mapping[str, Any]) -> Iterator[None]:
    """Raise OpenAI's error if the response, conversation or compaction that `said` names is not found.

    Agents recover from it: they send the whole conversation again.
    """
    try:
        yield
    except (ContextNotFound, ContextExpired, GenerationGone) as exc:
        previous, named = said.get("previous_response_id"), said.get("conversation")
        if previous is not None:
            raise _no_response(previous) from exc
        if named is not None:
            name = named.get("id") if isinstance(named, dict) else named
            raise ContextNotFound(f"Conversation with id '{name}' not found.", param="conversation") from exc
        if said.get("compaction") is not None:
            raise _no_compaction(exc) from exc
        raise


def _no_response(response: str) -> PreviousResponseNotFound:
    """Return the error in OpenAI's words, because some clients match them."""
    shown = response if _SHOWN.fullmatch(response) else "…"
    return PreviousResponseNotFound(f"Previous response with id '{shown}' not found.", param="previous_response_id")


def _no_compaction(exc: Exception | None = None) -> ContextCacheError:
    kind, fate = (ContextExpired, "expired") if isinstance(exc, ContextExpired) else (ContextNotFound, "not found")
    return kind(f"The compaction item in `input` is {fate}: send the conversation without it.", param="input")


def _compacted(content: str) -> SessionId:
    found = compaction_named(content)
    if found is None:
        raise _no_compaction()
    return found[0]


def previous_named(said: Any) -> tuple[SessionId, int]:
    """Return context and generation of a `previous_response_id`. Raises InvalidRequest, PreviousResponseNotFound."""
    if not isinstance(said, str):
        raise InvalidRequest("previous_response_id must be a string", param="previous_response_id")
    found = generation_named(said) if said.startswith("resp_") else None
    if found is None:
        raise _no_response(said)
    return found


def _conversation(said: Any) -> SessionId:
    name = said.get("id") if isinstance(said, dict) else said
    if not isinstance(name, str) or not SESSION_ID_PATTERN.fullmatch(name) or name.startswith(KEPT_PREFIX):
        told = f"conversation must be a name, or an object with an `id`: {SESSION_ID_RULE}"
        raise InvalidRequest(told, param="conversation")
    return name


class Labels:
    """Finds the context that a request continues, by its body and its label."""

    def __init__(self, locate: Callable[[TenantId, SessionId], Awaitable[CacheSessionMetadata]], clock: Clock) -> None:
        """`locate` raises ContextNotFound or ContextExpired if there is no such context."""
        self._locate = locate
        self._clock = clock
        self._paused_until_ms = 0

    async def continued_by(
        self, tenant: TenantId, path: str, claims: Claims | None, header: str | None
    ) -> Continued | None:
        """Return the result of `continued_by`; a label that equals a context of the tenant names that context.

        An expired context counts too, so that the client gets a 410. A failed look-up never fails the request.
        """
        asked = continued_by(path, claims, header)
        label = label_of(header)
        if claims is None or label is None or (asked is not None and asked.session_id is not None):
            return asked
        return continued_by(path, claims, header, label=label) if await self._is_context(tenant, label) else asked

    async def _is_context(self, tenant: TenantId, label: SessionId) -> bool:
        try:
            return await self.find(tenant, label) is not None
        except ContextExpired:
            return True

    async def find(self, tenant: TenantId, label: SessionId) -> CacheSessionMetadata | None:
        """Return the context of this name; None: there is none, or the store did not answer. Raises ContextExpired."""
        if 0 < self._paused_until_ms - self._clock.now_ms() <= PAUSE_MS:
            return None
        try:
            async with asyncio.timeout(LOOK_UP_S):
                return await self._locate(tenant, label)
        except ContextNotFound:
            return None
        except ContextExpired:
            raise
        except (StoreUnavailable, TimeoutError):
            self._paused_until_ms = self._clock.now_ms() + PAUSE_MS
            log.warning("label look-ups paused for a second: no answer from the context manager")
            return None
        except ContextCacheError as exc:  # A fault of one context: look-ups of others go on.
            log.warning("label look-up failed", extra={"code": exc.code})
            return None
