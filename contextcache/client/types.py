"""Typed answers. `raw` holds the JSON of each, with fields that a newer server adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypedDict, TypeVar

T = TypeVar("T")
TtlPolicy = Literal["fixed", "sliding"]
Message = Mapping[str, Any]
"""A chat message, as OpenAI has it."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


class TurnFields(TypedDict, total=False):
    """Options of a turn. Fields of the engine go into `extra`."""

    max_tokens: int
    """0 on a create: compute and keep the prompt, generate nothing."""
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int
    tools: Sequence[Mapping[str, Any]]
    context_mode: Literal["auto", "append", "replay"]
    context_commit: bool
    truncation: Mapping[str, Any]
    kv_hints: Mapping[str, Any]
    """Lifetimes and placements of the KV; `usage.context.hints` of the reply has the answers."""
    if_match: int
    """Run only on this generation."""
    idempotency_key: str
    """Your own name of the request. Default: a random one, so that a retry runs once."""
    extra: Mapping[str, Any]
    """More fields of the body."""


class Terms(TypedDict, total=False):
    """Terms of a context."""

    ttl: int
    """Seconds."""
    ttl_policy: TtlPolicy
    metadata: Mapping[str, str]


class Changes(Terms, total=False):
    """Options of an update."""

    kv_hints: Mapping[str, Any]
    """Lifetimes and placements of the KV; `raw["hints"]` of the context has the answers."""


class CompactFields(Terms, total=False):
    """Options of a compaction."""

    instructions: str
    """Further instructions for the summary."""
    max_tokens: int
    """Length limit of the summary."""
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]


class CreateFields(TurnFields, Terms, total=False):
    """Options of a create, beside those of a turn."""

    mode: Literal["session", "prefix"]
    session_id: str
    """Your own name of the context."""


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
    """The cached tokens."""
    context_tokens: int
    """Prompt tokens that the context already had."""
    source: str
    """`device`, `host`, `disk`, `peer`, `object`, `recompute` or `none`."""
    committed: bool
    """Whether the turn is part of the context now."""
    restore_ms: float | None = None
    """Milliseconds to bring the KV back; None if none was brought."""
    saved_share: float | None = None
    """Cached tokens as a share of the prompt, 0 to 1; None: the server is of an older release."""
    saved_ms: int | None = None
    """Estimated milliseconds to compute the cached tokens, less `restore_ms`; None without an estimate."""
    match: str | None = None
    diverged: Divergence | None = None
    """None unless `match` is `diverge`."""
    reason: str | None = None
    truncated_tokens: int = 0
    resumed: Sequence[Mapping[str, Any]] = ()
    """Continuations of the answer by other engines: `at_token`, `from`, `to`, `paused_ms`."""
    hints: Sequence[Mapping[str, Any]] = ()
    """Answers to `kv_hints`: `action_id`, `action_type`, `outcome`, and `until` or `bytes`, `tier` and `reason`."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer."""

    prompt_tokens: int
    """Computed tokens on completions, the whole prompt on chat, unless the key or `X-Usage-Format` says otherwise."""
    completion_tokens: int
    total_tokens: int
    context: ContextUsage
    """An answer without a context counts as a turn that reused nothing and is not committed."""
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
    """Generation of the context after this turn. None without a receipt, or if the commit was refused."""
    headers: Mapping[str, str] = field(repr=False)
    """Headers of the answer, names in lower case: receipts, `x-request-id`."""
    raw: Mapping[str, Any] = field(repr=False)
    """The JSON object; for a streamed answer its last chunk."""

    @property
    def replayed(self) -> bool:
        """Whether the server had answered this request before."""
        return self.headers.get("idempotent-replayed") == "true"


@dataclass(frozen=True, slots=True)
class TurnInfo:
    """Receipt of a committed turn. Times are in milliseconds."""

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
    """Time to the first token of a stream; None if the turn did not stream."""
    took_ms: float
    saved_share: float | None = None
    """Cached tokens as a share of the prompt, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextInfo:
    """A context, as a read or a list shows it. A list omits `size_bytes`, `tiers` and `recent_turns`."""

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
    metadata: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int | None
    tiers: Sequence[str] = ()
    holder: Mapping[str, Any] | None = None
    forked_from: Mapping[str, Any] | None = None
    """`session_id` and `generation` of the context that it was forked from."""
    parent: str | None = None
    """Parent: the context of the agent that started this one's agent."""
    computed_tokens: int = 0
    """Prompt tokens that its committed turns computed."""
    cached_tokens: int = 0
    """Prompt tokens that these turns did not compute."""
    saved_share: float | None = None
    """Cached tokens as a share of both, 0 to 1; None without a turn."""
    saved_seconds: float = 0.0
    """Estimated seconds that this saved."""
    recent_turns: Sequence[TurnInfo]
    """The last turns, the oldest first."""
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInfo:
    """KV that is kept of requests without a context."""

    id: str
    tokens: int
    size_bytes: int
    last_used: float
    expires_at: float
    pods: Sequence[str]
    last_miss: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(repr=False)


def context_info(raw: Mapping[str, Any]) -> ContextInfo:
    """Parse the JSON of a context."""
    turns = tuple(_read(TurnInfo, turn) for turn in raw.get("recent_turns") or ())
    return _read(ContextInfo, raw, size_bytes=raw.get("bytes"), recent_turns=turns, raw=raw)


def kept_info(raw: Mapping[str, Any]) -> KeptInfo:
    """Parse the JSON of kept KV."""
    return _read(KeptInfo, raw, size_bytes=raw["bytes"], raw=raw)


def usage(raw: Mapping[str, Any] | None) -> Usage:
    """Parse the usage of an answer."""
    raw = {} if raw is None else raw
    prompt_tokens = raw["prompt_tokens"] if raw else 0
    said = raw.get("context")
    if said is None:
        context = ContextUsage(prompt_tokens, 0, 0, 0, "none", committed=False)
    else:
        left = said.get("diverged")
        context = _read(ContextUsage, said, diverged=None if left is None else _read(Divergence, left), raw=said)
    return Usage(prompt_tokens, raw.get("completion_tokens") or 0, raw["total_tokens"] if raw else 0, context, raw)


def reply(raw: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    """Parse a whole answer, of a completion or of a chat."""
    choice = (raw.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    generation = headers.get("x-context-generation", "")
    took = usage(raw.get("usage"))
    if took.context.raw and not took.context.committed and took.context.reason != "read_only":
        generation = ""  # the head of a stream holds the planned generation
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


def _read(cls: type[T], said: Mapping[str, Any], **given: Any) -> T:
    """Return a dataclass filled by name. A missing or null value gets the field's default. Raises KeyError."""
    found = dict(given)
    for one in fields(cls):  # type: ignore[arg-type]  # each `cls` is a dataclass
        has_default = one.default is not MISSING or one.default_factory is not MISSING
        if one.name not in found and not (has_default and said.get(one.name) is None):
            found[one.name] = said[one.name]
    return cls(**found)
