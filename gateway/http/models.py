"""What clients send and what they are answered, as types: the OpenAPI document is made of these, and of `routes.py`.

Answers of the control calls are built here. Bodies of the calls that are carried to pods are only described: nobody
builds them here, the pod judges them. Bounds are those of a deployment that changes none; schemathesis sends what this
allows and what it does not (tests/fuzz), so a lie in here is a test that fails. Times are Unix seconds, as in every
OpenAI object; the row keeps milliseconds.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from typing_extensions import TypedDict

from contextcache.model import (
    DEFAULT_TTL_S,
    MAX_GENERATION,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_KEYS,
    MAX_METADATA_VALUE_CHARS,
    MAX_TTL_S,
    MIN_TTL_S,
    SESSION_ID_PATTERN,
    CacheSessionMetadata,
    SessionPage,
    TurnReceipt,
    UsageReport,
)
from gateway.deployment import DeploymentView
from gateway.kept import KeptConversation, KeptPage
from gateway.pods.sidecars import HolderState, KVState
from gateway.ports import EndpointState

_KEYS_SHOWN = 100

SESSION_ID_SCHEMA = {"pattern": f"^{SESSION_ID_PATTERN.pattern}$"}

_TTL_TEXT = r"^([6-9][0-9]|[1-9][0-9]{2,4}|[1-5][0-9]{5}|60[0-3][0-9]{3}|604[0-7][0-9]{2}|604800)s$"
"""The seconds from MIN_TTL_S to MAX_TTL_S and an `s`; a test holds the three together."""
Ttl = Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)] | Annotated[str, Field(pattern=_TTL_TEXT)]
Model = Annotated[str, Field(min_length=1, max_length=256)]
SessionId = Annotated[str, Field(json_schema_extra=SESSION_ID_SCHEMA)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**32 - 1)]], Field(min_length=1)]
Prompt = Text | TokenIds | Annotated[list[Text | TokenIds], Field(min_length=1, max_length=1)]
"""OpenAI's clients may send a list of prompts: a context has one."""
MetadataKey = Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY_CHARS)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)]


class Part(BaseModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    uuid: None = None


class Message(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None


Messages = Annotated[list[Message], Field(min_length=1)]


class _Answered(BaseModel):
    """What a request says of the answer it wants; null is as if a field were not there."""

    model: Model
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Maximum length of the answer. 0 on a create or turn: compute and keep the prompt, generate "
        "nothing.",
    )
    stream: bool | None = False


class _Termed(_Answered):
    """What a create says of the life of a context."""

    ttl: Ttl = Field(
        DEFAULT_TTL_S, description='Life in seconds, as `3600` or `"3600s"`. A value out of range is a 400.'
    )
    ttl_policy: Literal["fixed", "sliding"] | None = "fixed"
    mode: Literal["session", "prefix", "common_prefix"] | None = Field(
        "session", description="`common_prefix` is another name for `prefix`."
    )
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA_KEYS)


class _Create(_Termed):
    session_id: SessionId | None = Field(
        None, description="Name of the context, chosen by the client. Without it the server makes one."
    )


class CreateFromPrompt(_Create):
    """A context that begins with text or token ids."""

    prompt: Prompt
    messages: None = None


class CreateFromMessages(_Create):
    """A context that begins with messages."""

    messages: Messages
    prompt: None = None


class ContextPatch(TypedDict, total=False):
    """What is to change of a context; what is not there stays. null is as if a field were not there, but for `ttl`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # how pydantic is told so
    ttl: Annotated[Ttl, Field(description="New life from now, in seconds.")]
    ttl_policy: Literal["fixed", "sliding"] | None
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None,
        Field(max_length=MAX_METADATA_KEYS, description="Replaces all metadata of the context."),
    ]


class ContextFork(TypedDict, total=False):
    """What is another of the fork; what is not there is as of the context forked from."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # how pydantic is told so
    generation: Annotated[
        int | None,
        Field(ge=1, le=MAX_GENERATION, description="Generation at which the fork begins. Without it: the newest."),
    ]
    session_id: Annotated[
        SessionId | None, Field(description="Name of the fork, chosen by the client. Without it the server makes one.")
    ]
    ttl: Annotated[Ttl, Field(description="Life in seconds. A value out of range is a 400.")]
    ttl_policy: Literal["fixed", "sliding"] | None
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=MAX_METADATA_KEYS)]


class ContextRewind(TypedDict):
    """Where to go back to."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # how pydantic is told so
    generation: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_GENERATION,
            description="Generation as in `generation` or `X-Context-Generation` of an earlier answer.",
        ),
    ]


class Truncation(BaseModel):
    """What goes of a context that does not fit the model's window: the oldest, never its head or what is new."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["last_history_tokens", "rolling_tokens"]
    tokens: int = Field(
        ge=1,
        description="`last_history_tokens`: most history tokens to keep. `rolling_tokens`: fewest tokens to cut at "
        "once.",
    )


class _Turn(_Termed):
    session_id: SessionId | None = Field(
        None, description="Context to continue. The header X-Session-ID may name it instead."
    )
    context_mode: Literal["auto", "append", "replay"] | None = "auto"
    context_commit: bool | None = True
    truncation: Truncation | None = None
    context_create: Literal["if_missing"] | None = Field(
        None,
        description="Create the context if it does not exist, with ttl, ttl_policy, mode and metadata of this request.",
    )


class Completion(_Turn):
    """A prompt to complete; with `session_id`, a turn."""

    prompt: Prompt


class ChatCompletion(_Turn):
    """Messages to answer; with `session_id`, a turn."""

    messages: Messages


class AnthropicMessages(_Turn):
    """Anthropic's messages to answer; with `session_id`, a turn."""

    messages: Messages
    max_tokens: int = Field(gt=0)


class ConversationName(BaseModel):
    """A context's name, as OpenAI's clients give it."""

    id: SessionId


class NewResponse(_Turn):
    """A response to give; a turn with `previous_response_id`, `conversation` or `session_id`; a create with `store`."""

    input: str | Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    instructions: str | None = Field(None, description="Instructions for this request only.")
    previous_response_id: str | None = Field(
        None,
        pattern=r"^resp_[1-9][0-9]{0,14}_[A-Za-z0-9_.-]{1,128}$",
        description="Id of a stored response to continue.",
    )
    conversation: SessionId | ConversationName | None = Field(
        None, description="Name of the context to continue. If it does not exist, it is created."
    )
    store: bool | None = Field(None, description="true: store the response as a context. false: store nothing.")
    truncation: Truncation | Literal["disabled"] | None = None  # type: ignore[assignment]  # OpenAI's default


class Diverged(BaseModel):
    """Where a replay leaves the context, and why."""

    message: int | None = Field(..., description="Position in the request's messages. null for text and token ids.")
    token: int
    why: str


class ContextUsage(BaseModel):
    """What of a prompt was reused, and whether the turn is part of the context now."""

    computed_tokens: int = Field(..., ge=1, description="Prompt tokens that were computed.")
    cached_tokens: int = Field(..., ge=0, description="Prompt tokens that were read from the cache.")
    saved_tokens: int = Field(..., ge=0, description="Cached tokens that the context already had.")
    context_tokens: int = Field(..., ge=0)
    source: Literal["device", "host", "disk", "peer", "object", "recompute", "none"]
    restore_ms: float | None = Field(...)
    committed: bool
    saved_ms: int | None = Field(
        None, ge=0, description="Estimated milliseconds to compute the cached tokens, less `restore_ms`."
    )
    match: Literal["append", "exact", "extend", "diverge"] | None = Field(
        None, description="Relation of a turn's prompt to the context."
    )
    diverged: Diverged | None = None
    truncated_tokens: int | None = Field(None, ge=1, description="Tokens cut from the context so that the turn fits.")
    reason: str | None = Field(None, description="Reason why the turn was not committed, or else why no KV was reused.")


class Usage(BaseModel):
    """What a prompt and its answer cost."""

    prompt_tokens: int = Field(
        ...,
        ge=0,
        description="Tokens of the whole prompt on chats. On a context's completion: computed tokens. "
        "`X-Usage-Format` changes this.",
    )
    completion_tokens: int | None = Field(None, ge=0)
    total_tokens: int = Field(..., ge=0)
    prompt_tokens_details: dict[str, int | None] | None = None
    context: ContextUsage | None = Field(None, description="Reuse figures of a request with a context.")


class _Completed(BaseModel):
    """The engine's object, and what a context adds. The engine may say more in it."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: str
    model: str
    choices: list[dict[str, JsonValue]]


class Completed(_Completed):
    """What a completion, or a chat completion, answers."""

    usage: Usage | None = None
    session_id: str | None = Field(None, description="Context of the request. null: its create was not committed.")
    expires_at: int | None = None


class CreatedUsage(Usage):
    """The usage of a create."""

    context: ContextUsage = Field(...)


class Created(_Completed):
    """What a create answers: a completion, or a chat completion where it has messages."""

    usage: CreatedUsage
    session_id: str | None = Field(
        ..., description="Name of the new context. null: it was not committed; `usage.context.reason` tells why."
    )
    expires_at: int


class MessageUsage(BaseModel):
    """Anthropic's usage: the three kinds of input tokens are the whole prompt."""

    input_tokens: int = Field(..., ge=0)
    output_tokens: int = Field(..., ge=0)
    cache_creation_input_tokens: int | None = Field(None, ge=0)
    cache_read_input_tokens: int | None = Field(None, ge=0)
    context: ContextUsage | None = Field(None, description="Reuse figures of a request with a context.")


class AnsweredMessage(BaseModel):
    """What Anthropic's messages are answered with, and what a context adds. The engine may say more in it."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, JsonValue]]
    usage: MessageUsage
    session_id: str | None = Field(None, description="Context of the request. null: its create was not committed.")
    expires_at: int | None = None


class ResponseTokens(BaseModel):
    """How many of a prompt's tokens were reused."""

    cached_tokens: int = Field(..., ge=0)


class ResponseUsage(BaseModel):
    """OpenAI's usage of a response: the whole prompt is counted."""

    input_tokens: int = Field(..., ge=0)
    input_tokens_details: ResponseTokens
    output_tokens: int = Field(..., ge=0)
    total_tokens: int = Field(..., ge=0)
    context: ContextUsage | None = Field(None, description="Reuse figures of a request with a context.")


class Answered(BaseModel):
    """A response, and what a context adds. The engine may say more in it."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(
        ...,
        description="Id of the response. If stored, the next request continues from it: `resp_`, the generation, "
        "`_`, the context.",
    )
    status: str
    model: str
    output: list[dict[str, JsonValue]]
    usage: ResponseUsage | None = Field(...)
    conversation: ConversationName | None = None
    session_id: str | None = Field(None, description="Context of the request. null: its create was not committed.")
    expires_at: int | None = None


class ErrorInfo(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    code: str
    param: str | None = Field(...)


class Error(BaseModel):
    """Every error of ours."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "error",
                "error": {
                    "message": "no context has this session_id",
                    "type": "invalid_request_error",
                    "code": "context_not_found",
                    "param": "session_id",
                },
                "detail": "no context has this session_id",
            }
        }
    )

    type: Literal["error"] = Field(description="Field of Anthropic's error format.")
    error: ErrorInfo
    detail: str = Field(description="The same text as `error.message`.")


class Holder(TypedDict):
    """Where the KV of the newest generation is."""

    endpoint: str
    state: HolderState
    reason: NotRequired[str]
    """Why there is no KV of the newest generation, where the sidecar knows."""


class ForkedFrom(TypedDict):
    """What a context was forked from, which may be gone."""

    session_id: str
    generation: int


class TurnObject(TypedDict):
    """What a committed turn took and reused, as its receipt said; times in milliseconds."""

    generation: int
    at: int
    computed_tokens: int
    cached_tokens: int
    context_tokens: int
    completion_tokens: int
    source: str
    match: str | None
    """None: the create."""
    reason: str | None
    restore_ms: int | None
    first_token_ms: int | None
    """Of a stream."""
    took_ms: int


class ContextSummary(TypedDict):
    """One context as its row says it, without asking a sidecar."""

    object: Literal["context"]
    session_id: str
    model: str
    mode: str
    state: str
    created: int
    expires_at: int
    ttl: int
    ttl_policy: str
    turns: int
    tokens: int
    generation: int
    metadata: dict[str, str]
    forked_from: ForkedFrom | None


class HolderName(TypedDict):
    """Where the KV of the newest generation was saved: what the row says."""

    endpoint: str


class ListedContext(ContextSummary):
    """One context as the list shows it."""

    holder: HolderName


class ContextObject(ContextSummary):
    """One context, with what its holder's sidecar says about the KV."""

    bytes: int | None
    tiers: list[str]
    holder: Holder


class ReadContext(ContextObject):
    """One context that is read, with its last turns."""

    recent_turns: list[TurnObject]
    """At most 32, the oldest first; a fork begins without."""


class ContextList(TypedDict):
    """One page of contexts, newest first."""

    object: Literal["list"]
    data: list[ListedContext]
    has_more: bool
    last_id: str | None


class KeptMissObject(TypedDict):
    """The last prompt that did not begin with what was kept of its conversation."""

    matched: int
    of: int
    diverged_at_token: int
    at: int


class KeptObject(TypedDict):
    """What is kept of plain requests that seem to be one conversation."""

    object: Literal["kept"]
    id: str
    tokens: int
    bytes: int
    last_used: int | None
    """None: before its sidecar started."""
    expires_at: int
    pods: list[str]
    last_miss: KeptMissObject | None
    unreachable: NotRequired[list[str]]
    """Pods that did not say."""


class KeptList(TypedDict):
    """One page of kept conversations, what was used last first."""

    object: Literal["list"]
    data: list[KeptObject]
    has_more: bool
    last_id: str | None
    unreachable: list[str]


class ByteHours(TypedDict):
    """Bytes held, times hours, by tier."""

    memory: int
    disk: int
    store: int


class Used(TypedDict):
    """What was used."""

    contexts: int
    """Created, forks included."""
    turns: int
    """Answered, creates included."""
    computed_tokens: int
    """Of prompts."""
    cached_tokens: int
    completion_tokens: int
    saved_seconds: float
    """What the cached tokens would have taken to compute, less what bringing them back took."""
    byte_hours: ByteHours


class UsedByKey(Used):
    """What was used under one API key."""

    key: str
    """Its name; empty: nobody's, such as bytes held."""


class DayOfUsage(TypedDict):
    """One day, UTC."""

    day: str
    keys: list[UsedByKey]


class UsageOfTenant(TypedDict):
    """What a tenant used."""

    object: Literal["usage"]
    tenant: str
    operator: bool
    """Whether the key that asks is an operator's: it may ask for other tenants, and for the deployment."""
    contexts_now: int
    total: Used
    days: list[DayOfUsage]
    """Those with any usage, the oldest first."""


class EngineObject(TypedDict):
    """What a pod's engine said at the last probe."""

    running: int
    """Requests."""
    waiting: int
    kv_usage: float
    """Share of its KV blocks in use, 0 to 1."""


class PodObject(TypedDict):
    """A pod, as this gateway sees it."""

    name: str
    state: Literal["ready", "draining", "not_ready"]
    models: list[str]
    engine: EngineObject
    carried: int
    """Requests this gateway is carrying there; behind Envoy 0."""
    tiers: dict[str, float]
    """Where its sidecar keeps KV, with the share of each limit that is taken."""
    fingerprint: str
    """Of its KV: pods of another one cannot use it. Empty: not known."""


class TenantObject(TypedDict):
    """A tenant that has a key."""

    tenant: str
    keys: list[str]
    """Names of its first hundred keys."""
    num_keys: int
    requests_in_hand: int
    """Of it that this gateway is answering, as far as there is a limit."""
    bytes_in_hand: int


class TenantLimitsObject(TypedDict):
    """What each tenant may, of one gateway; 0: no limit."""

    requests_per_second: float
    burst: int
    requests_in_hand: int
    bytes_in_hand: int


class DeploymentObject(TypedDict):
    """A deployment, as one gateway sees it."""

    object: Literal["deployment"]
    pods: list[PodObject]
    limits: TenantLimitsObject
    tenants: list[TenantObject]
    has_more: bool
    """Whether there are more tenants, after `last_tenant`."""
    last_tenant: str | None


class ModelObject(TypedDict):
    """A model, as OpenAI's clients know it."""

    id: str
    object: Literal["model"]
    created: int
    """The time of the answer, as in the engine's own list."""
    owned_by: str


class ContextDeleted(TypedDict):
    """What is left of a context, or of a kept conversation."""

    session_id: str
    status: Literal["success", "partial"]
    unreachable: NotRequired[list[str]]
    """Of a kept conversation: pods where it goes by its TTL."""


def deployment_object(view: DeploymentView) -> DeploymentObject:
    """Return a deployment as an operator sees it."""
    requests_max, bytes_max = view.limits.limits
    return {
        "object": "deployment",
        "pods": [_pod(state) for state in view.pods],
        "limits": {
            "requests_per_second": view.limits.rate_per_s,
            "burst": view.limits.burst,
            "requests_in_hand": requests_max,
            "bytes_in_hand": bytes_max,
        },
        "tenants": [
            {
                "tenant": one.tenant,
                "keys": list(one.key_names[:_KEYS_SHOWN]),
                "num_keys": len(one.key_names),
                "requests_in_hand": one.requests,
                "bytes_in_hand": one.size_bytes,
            }
            for one in view.tenants
        ],
        "has_more": view.has_more,
        "last_tenant": view.tenants[-1].tenant if view.tenants else None,
    }


def _pod(state: EndpointState) -> PodObject:
    load, is_draining = state.load, state.endpoint.draining
    return {
        "name": state.endpoint.name,
        "state": "not_ready" if not state.ready else "draining" if is_draining else "ready",
        "models": sorted(state.models),
        "engine": {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage},
        "carried": state.in_flight,
        "tiers": dict(state.tiers),
        "fingerprint": state.fingerprint,
    }


def usage_of_tenant(tenant: str, report: UsageReport, *, operator: bool) -> UsageOfTenant:
    """Return what a tenant used as a client sees it, and whether its key is an operator's."""
    total = Counter[str]()
    for usage in report.days.values():
        for one in usage:
            total.update(one.counts)
    days: list[DayOfUsage] = [
        {
            "day": (dt.date(1970, 1, 1) + dt.timedelta(day)).isoformat(),
            "keys": [{"key": one.key, **_used(one.counts)} for one in usage],
        }
        for day, usage in report.days.items()
    ]
    return {
        "object": "usage",
        "tenant": tenant,
        "operator": operator,
        "contexts_now": report.num_contexts,
        "total": _used(total),
        "days": days,
    }


def _used(counts: Mapping[str, int]) -> Used:
    hours = {tier: round(counts.get(f"{tier}_kib_s", 0) * 1024 / 3600) for tier in ("memory", "disk", "store")}
    return {
        "contexts": counts.get("contexts", 0),
        "turns": counts.get("turns", 0),
        "computed_tokens": counts.get("computed_tokens", 0),
        "cached_tokens": counts.get("cached_tokens", 0),
        "completion_tokens": counts.get("completion_tokens", 0),
        "saved_seconds": counts.get("saved_ms", 0) / 1000,
        "byte_hours": {"memory": hours["memory"], "disk": hours["disk"], "store": hours["store"]},
    }


def kept_object(kept: KeptConversation) -> KeptObject:
    """Return a kept conversation as a client sees it."""
    miss = kept.last_miss
    return {
        "object": "kept",
        "id": kept.group,
        "tokens": kept.num_tokens,
        "bytes": kept.size_bytes,
        "last_used": kept.used_at_ms // 1000 or None,
        "expires_at": kept.expires_at_ms // 1000,
        "pods": list(kept.pods),
        "last_miss": None
        if miss is None
        else {
            "matched": miss.matched,
            "of": miss.of,
            "diverged_at_token": miss.matched,
            "at": miss.at_ms // 1000,
        },
    }


def kept_list(page: KeptPage) -> KeptList:
    """Return a page as a client sees it."""
    data = [kept_object(kept) for kept in page.conversations]
    return {
        "object": "list",
        "data": data,
        "has_more": page.has_more,
        "last_id": data[-1]["id"] if data else None,
        "unreachable": list(page.unreachable),
    }


def context_summary(session: CacheSessionMetadata) -> ContextSummary:
    """Return the row as a client sees it."""
    return {
        "object": "context",
        "session_id": session.session_id,
        "model": session.model_id,
        "mode": session.mode.value,
        "state": session.state.value,
        "created": session.created_at_ms // 1000,
        "expires_at": session.expires_at_ms // 1000,
        "ttl": session.ttl_s,
        "ttl_policy": session.ttl_policy.value,
        "turns": session.num_turns,
        "tokens": session.num_tokens,
        "generation": session.generation,
        "metadata": dict(session.metadata),
        "forked_from": session.forked_from
        and {"session_id": session.forked_from[0], "generation": session.forked_from[1]},
    }


def context_object(session: CacheSessionMetadata, kv: KVState) -> ContextObject:
    """Return row and KV as a client sees them."""
    holder: Holder = {"endpoint": session.holder, "state": kv.state}
    if kv.reason:
        holder["reason"] = kv.reason
    return {
        **context_summary(session),
        "bytes": kv.size_bytes,
        "tiers": [kv.tier] if kv.tier else [],
        "holder": holder,
    }


def context_read(session: CacheSessionMetadata, kv: KVState, turns: Sequence[TurnReceipt]) -> ReadContext:
    """Return a context and its last turns as a client sees them."""
    return {**context_object(session, kv), "recent_turns": list(map(_turn_object, turns))}


def _turn_object(turn: TurnReceipt) -> TurnObject:
    return {
        "generation": turn.generation,
        "at": turn.at_ms // 1000,
        "computed_tokens": turn.computed_tokens,
        "cached_tokens": turn.cached_tokens,
        "context_tokens": turn.context_tokens,
        "completion_tokens": turn.completion_tokens,
        "source": turn.source,
        "match": turn.match or None,
        "reason": turn.reason or None,
        "restore_ms": turn.restore_ms,
        "first_token_ms": turn.first_token_ms,
        "took_ms": turn.took_ms,
    }


def context_list(page: SessionPage) -> ContextList:
    """Return a page as a client sees it; a short or empty one says where to go on too."""
    return {
        "object": "list",
        "data": [{**context_summary(session), "holder": {"endpoint": session.holder}} for session in page.sessions],
        "has_more": page.has_more,
        "last_id": page.last_id or None,
    }
