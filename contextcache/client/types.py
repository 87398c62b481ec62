"""What answers hold, typed. Each keeps the JSON it was read from in `raw`: a newer server's fields are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NotRequired, TypedDict

TtlPolicy = Literal["fixed", "sliding"]
Message = Mapping[str, Any]
"""A chat message, as OpenAI has it."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


class TurnFields(TypedDict, total=False):
    """What any turn may say beside its text; whatever else the engine takes goes into `extra`."""

    max_tokens: int
    """0 on a create: compute and keep the prompt, answer nothing."""
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int
    tools: Sequence[Mapping[str, Any]]
    context_mode: Literal["auto", "append", "replay"]
    context_commit: bool
    truncation: Mapping[str, Any]
    if_match: int
    """Run only on this generation."""
    idempotency_key: str
    """Your own name for the request; without one it gets one, so that it can be sent again."""
    extra: Mapping[str, Any]
    """Fields of the body."""


class CreateFields(TurnFields, total=False):
    """What a create may say beside."""

    ttl: int
    """Seconds."""
    ttl_policy: TtlPolicy
    mode: Literal["session", "prefix"]
    session_id: str
    """Your own name for it."""
    metadata: Mapping[str, str]


class Changes(TypedDict):
    """What an update, or a fork, may change."""

    ttl: NotRequired[int]
    ttl_policy: NotRequired[TtlPolicy]
    metadata: NotRequired[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Place where a replay leaves the context."""

    message: int | None
    """Position in the request's messages; None for text and token ids."""
    token: int
    """First token that differs from the context's."""
    why: str
    """`regenerated`, `head_changed`, `inserted`, `trimmed`, `edited`, `compacted`, `window`, `respelled` or `other`."""


@dataclass(frozen=True, slots=True)
class ContextUsage:
    """`usage.context`: tokens that the context saved."""

    computed_tokens: int
    """Prompt tokens that were computed."""
    cached_tokens: int
    """Prompt tokens that were not computed."""
    saved_tokens: int
    """Cached tokens that the context already had."""
    context_tokens: int
    """Prompt tokens that the context already had."""
    source: str
    """`device`, `host`, `disk`, `peer`, `object`, `recompute` or `none`."""
    committed: bool
    """Whether the turn is part of the context now."""
    restore_ms: float | None = None
    """Milliseconds that bringing the KV back took; None if none was brought."""
    saved_ms: int | None = None
    """Estimated milliseconds to compute the cached tokens, less `restore_ms`; None without an estimate."""
    match: str | None = None
    diverged: Divergence | None = None
    """None unless `match` is `diverge`."""
    reason: str | None = None
    truncated_tokens: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt_tokens: int
    """Computed tokens on completions, the whole prompt on chat, unless the key or `X-Usage-Format` says otherwise."""
    completion_tokens: int
    total_tokens: int
    context: ContextUsage
    """For an answer without a context, a turn that reused nothing and is not committed."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """One whole answer."""

    text: str
    finish_reason: str | None
    tool_calls: Sequence[Mapping[str, Any]]
    usage: Usage
    """Zeros if the server sent none."""
    session_id: str
    expires_at: float | None
    """Unix seconds."""
    generation: int | None
    """Of the context after this turn, as the receipt says; None where it does not, or the commit was refused."""
    headers: Mapping[str, str] = field(repr=False)
    """The answer's, names in lower case: receipts, `x-request-id`."""
    raw: Mapping[str, Any] = field(repr=False)
    """The JSON object; of a streamed answer its last chunk."""

    @property
    def replayed(self) -> bool:
        """Whether the server had answered this request before."""
        return self.headers.get("idempotent-replayed") == "true"


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """What a committed turn took and reused, as its receipt said; times in milliseconds."""

    generation: int
    at: float
    """Unix seconds."""
    computed_tokens: int
    cached_tokens: int
    context_tokens: int
    completion_tokens: int
    source: str
    match: str | None
    """None: the create."""
    reason: str | None
    restore_ms: float | None
    first_token_ms: float | None
    """Of a stream."""
    took_ms: float


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A context as a read or a list shows it; a list leaves `bytes` and `tiers` out."""

    session_id: str
    model: str
    mode: str
    state: str
    created: float
    expires_at: float
    ttl: int
    ttl_policy: str
    turns: int
    tokens: int
    generation: int
    metadata: Mapping[str, str]
    size_bytes: int | None
    tiers: Sequence[str]
    holder: Mapping[str, Any] | None
    forked_from: Mapping[str, Any] | None
    """`session_id` and `generation` of what it was forked from."""
    recent_turns: Sequence[TurnInfo]
    """The last ones, the oldest first; of a read alone."""
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeptInfo:
    """KV kept of requests without a context."""

    id: str
    tokens: int
    size_bytes: int
    last_used: float
    expires_at: float
    pods: Sequence[str]
    last_miss: Mapping[str, Any] | None
    raw: Mapping[str, Any] = field(repr=False)


def context_info(raw: Mapping[str, Any]) -> ContextInfo:
    """Read a context's JSON."""
    return ContextInfo(
        session_id=raw["session_id"],
        model=raw["model"],
        mode=raw["mode"],
        state=raw["state"],
        created=raw["created"],
        expires_at=raw["expires_at"],
        ttl=raw["ttl"],
        ttl_policy=raw["ttl_policy"],
        turns=raw["turns"],
        tokens=raw["tokens"],
        generation=raw["generation"],
        metadata=raw.get("metadata") or {},
        size_bytes=raw.get("bytes"),
        tiers=raw.get("tiers") or (),
        holder=raw.get("holder"),
        forked_from=raw.get("forked_from"),
        recent_turns=tuple(map(_turn_info, raw.get("recent_turns") or ())),
        raw=raw,
    )


def _turn_info(raw: Mapping[str, Any]) -> TurnInfo:
    return TurnInfo(**{one.name: raw[one.name] for one in fields(TurnInfo)})


def kept_info(raw: Mapping[str, Any]) -> KeptInfo:
    """Read the JSON of something kept."""
    return KeptInfo(
        id=raw["id"],
        tokens=raw["tokens"],
        size_bytes=raw["bytes"],
        last_used=raw["last_used"],
        expires_at=raw["expires_at"],
        pods=raw["pods"],
        last_miss=raw.get("last_miss"),
        raw=raw,
    )


def usage(raw: Mapping[str, Any] | None) -> Usage:
    """Read an answer's usage."""
    raw = {} if raw is None else raw
    prompt_tokens = raw["prompt_tokens"] if raw else 0
    said = raw.get("context")
    context = ContextUsage(prompt_tokens, 0, 0, 0, "none", committed=False) if said is None else _context_usage(said)
    return Usage(prompt_tokens, raw.get("completion_tokens") or 0, raw["total_tokens"] if raw else 0, context, raw)


def _context_usage(said: Mapping[str, Any]) -> ContextUsage:
    left = said.get("diverged")
    return ContextUsage(
        computed_tokens=said["computed_tokens"],
        cached_tokens=said["cached_tokens"],
        saved_tokens=said["saved_tokens"],
        context_tokens=said["context_tokens"],
        source=said["source"],
        committed=said["committed"],
        restore_ms=said.get("restore_ms"),
        saved_ms=said.get("saved_ms"),
        match=said.get("match"),
        diverged=None if left is None else Divergence(left["message"], left["token"], left["why"]),
        reason=said.get("reason"),
        truncated_tokens=said.get("truncated_tokens") or 0,
        raw=said,
    )


def reply(raw: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Read a whole answer: a completion's or a chat's."""
    choice = (raw.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    generation = headers.get("x-context-generation", "")
    took = usage(raw.get("usage"))
    if took.context.raw and not took.context.committed and took.context.reason != "read_only":
        generation = ""  # a stream's head said what was planned
    return Reply(
        text=choice.get("text") if "text" in choice else message.get("content") or "",
        finish_reason=choice.get("finish_reason"),
        tool_calls=message.get("tool_calls") or (),
        usage=took,
        session_id=raw.get("session_id") or headers.get("x-session-id", ""),
        expires_at=raw.get("expires_at"),
        generation=int(generation) if generation.isascii() and generation.isdigit() else None,
        headers=headers,
        raw=raw,
    )
