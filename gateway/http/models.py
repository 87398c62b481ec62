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
    MAX_TTL_S,
    MIN_TTL_S,
    CacheSessionMetadata,
    SessionPage,
    TurnReceipt,
    UsageReport,
)
from contextcache.names import (
    MAX_GENERATION,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_KEYS,
    MAX_METADATA_VALUE_CHARS,
    SESSION_ID_PATTERN,
)
from gateway.deployment import DeploymentView
from gateway.kept import KeptConversation, KeptPage
from gateway.pods.sidecars import HolderState, KVState
from gateway.pods.state import EndpointState

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
    """Fields of a request about its answer. null counts as absent."""

    model: Model = Field(..., description="Model that a pod serves. A context belongs to its model.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Maximum length of the answer. 0 on a create or turn: compute and keep the prompt, generate "
        "nothing.",
    )
    stream: bool | None = Field(False, description="Answer as a stream of events.")


class _Termed(_Answered):
    """Fields of a create about the life of the context."""

    ttl: Ttl = Field(
        DEFAULT_TTL_S, description='Life in seconds, as `3600` or `"3600s"`. A value out of range is a 400.'
    )
    ttl_policy: Literal["fixed", "sliding"] | None = Field(
        "fixed",
        description="`fixed`: the life ends `ttl` seconds after the creation, even while a request runs. "
        "That request gets its full answer, but its turn is not stored. `sliding`: it ends "
        "`ttl` seconds after the last turn, never while one runs.",
    )
    mode: Literal["session", "prefix", "common_prefix"] | None = Field(
        "session",
        description="`session`: turns extend the context, one at a time. `prefix`: turns only read it, and may run in "
        "parallel. `common_prefix` is another name for `prefix`.",
    )
    metadata: dict[MetadataKey, MetadataValue] | None = Field(
        None,
        max_length=MAX_METADATA_KEYS,
        description="Up to 16 names of up to 64 characters, with values of up to 512 characters.",
    )


class _Create(_Termed):
    session_id: SessionId | None = Field(
        None, description="Name of the context, chosen by the client. Without it the server makes one."
    )


class CreateFromPrompt(_Create):
    """A context that begins with text or token ids."""

    prompt: Prompt = Field(..., description="Text, or one list of token ids; each also as a list of one.")
    messages: None = None


class CreateFromMessages(_Create):
    """A context that begins with messages."""

    messages: Messages = Field(..., description="Chat messages with text content.")
    prompt: None = None


class ContextPatch(TypedDict, total=False):
    """Fields of a context to change. Absent fields stay, and null counts as absent except for `ttl`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # how pydantic is told so
    ttl: Annotated[Ttl, Field(description="New life from now, in seconds.")]
    ttl_policy: Literal["fixed", "sliding"] | None
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None,
        Field(max_length=MAX_METADATA_KEYS, description="Replaces all metadata of the context."),
    ]


class ContextFork(TypedDict, total=False):
    """Fields of a fork that differ from its source. Absent fields are those of the source."""

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
    """Generation to rewind to."""

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
    """Rule for cutting a context that does not fit the model's window.

    The oldest tokens are cut first. The head and the new text stay.
    """

    model_config = ConfigDict(extra="forbid")

    type: Literal["last_history_tokens", "rolling_tokens"] = Field(
        ...,
        description="`last_history_tokens`: keep the last tokens of the history. `rolling_tokens`: keep all"
        " until the window is full, then cut the oldest.",
    )
    tokens: int = Field(
        ge=1,
        description="`last_history_tokens`: most history tokens to keep. `rolling_tokens`: fewest tokens to cut at "
        "once.",
    )


class _Turn(_Termed):
    session_id: SessionId | None = Field(
        None, description="Context to continue. The header X-Session-ID may name it instead."
    )
    context_mode: Literal["auto", "append", "replay"] | None = Field(
        "auto",
        description="`append`: the prompt is new text. `replay`: the prompt is the whole conversation "
        "again, and its shared beginning is not computed again. `auto`: inferred from the "
        "prompt.",
    )
    context_commit: bool | None = Field(
        True, description="`false`: answer without extending the context, and without a lease."
    )
    truncation: Truncation | None = Field(
        None,
        description="Tokens to drop when the turn does not fit the model's window. Without it such a turn is a 400.",
    )
    context_create: Literal["if_missing"] | None = Field(
        None,
        description="Create the context if it does not exist, with ttl, ttl_policy, mode and metadata of this request.",
    )


class Completion(_Turn):
    """A prompt to complete. With `session_id` it is a turn of a context."""

    prompt: Prompt = Field(..., description="Text, or one list of token ids; each also as a list of one.")


class ChatCompletion(_Turn):
    """Messages to answer. With `session_id` they are a turn of a context."""

    messages: Messages = Field(..., description="Chat messages. With a context they have text content only.")


class AnthropicMessages(_Turn):
    """Anthropic's messages to answer. With `session_id` they are a turn of a context."""

    messages: Messages = Field(..., description="Anthropic's messages. With a context they have text content only.")
    max_tokens: int = Field(gt=0, description="Maximum length of the answer.")


class ConversationName(BaseModel):
    """Name of a context in the form of OpenAI's clients."""

    id: SessionId


class NewResponse(_Turn):
    """A request of the Responses API.

    `previous_response_id`, `conversation` or `session_id` makes it a turn. `store` makes it a create.
    """

    input: str | Annotated[list[dict[str, JsonValue]], Field(min_length=1)] = Field(
        description="New items, or the conversation again. With a context: text, calls of functions and "
        "custom tools, and their results."
    )
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
    """First difference between a replay and the context, with its reason."""

    message: int | None = Field(..., description="Position in the request's messages. null for text and token ids.")
    token: int = Field(..., description="First token that differs from the context's.")
    why: str = Field(
        ...,
        description="`regenerated`, `head_changed`, `inserted`, `trimmed`, `edited`, `compacted`, `window`,"
        " `respelled` or `other`.",
    )


class ContextUsage(BaseModel):
    """Reuse figures of a prompt, and whether the turn was committed."""

    computed_tokens: int = Field(..., ge=1, description="Prompt tokens that were computed.")
    cached_tokens: int = Field(..., ge=0, description="Prompt tokens that were read from the cache.")
    saved_tokens: int = Field(..., ge=0, description="Cached tokens that the context already had.")
    context_tokens: int = Field(..., ge=0, description="Prompt tokens that the context already had.")
    source: Literal["device", "host", "disk", "peer", "object", "recompute", "none"] = Field(
        ...,
        description="Source of most cached tokens. `device`: the engine's own cache. `host`, `disk`: the "
        "pod's sidecar. `peer`: another pod's sidecar. `object`: the shared store. `recompute`:"
        " the context's KV was missing. `none`: nothing to reuse.",
    )
    restore_ms: float | None = Field(..., description="Milliseconds to bring the KV back; null if none was brought.")
    committed: bool = Field(
        ...,
        description="Whether the turn is part of the context now. If not, `reason` tells why, and the "
        "answer is complete all the same.",
    )
    saved_ms: int | None = Field(
        None, ge=0, description="Estimated milliseconds to compute the cached tokens, less `restore_ms`."
    )
    match: Literal["append", "exact", "extend", "diverge"] | None = Field(
        None,
        description="Relation of a turn's prompt to the context. `append`: new text. `exact`: the conversation, no "
        "more. `extend`: the conversation and new text. `diverge`: the conversation with a change.",
    )
    diverged: Diverged | None = Field(
        None, description="Place where a diverging replay leaves the context; absent otherwise."
    )
    truncated_tokens: int | None = Field(None, ge=1, description="Tokens cut from the context so that the turn fits.")
    reason: str | None = Field(None, description="Reason why the turn was not committed, or else why no KV was reused.")


class Usage(BaseModel):
    """Token counts of a prompt and its answer."""

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
    """The engine's object with the fields of a context. The engine may add more fields."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: str
    model: str
    choices: list[dict[str, JsonValue]]


class Completed(_Completed):
    """Answer of a completion or chat completion."""

    usage: Usage | None = None
    session_id: str | None = Field(None, description="Context of the request. null: its create was not committed.")
    expires_at: int | None = None


class CreatedUsage(Usage):
    """Usage of a create."""

    context: ContextUsage = Field(...)


class Created(_Completed):
    """Answer of a create: a completion, or a chat completion if the request has messages."""

    usage: CreatedUsage
    session_id: str | None = Field(
        ..., description="Name of the new context. null: it was not committed; `usage.context.reason` tells why."
    )
    expires_at: int


class MessageUsage(BaseModel):
    """Anthropic's usage. The sum of the three kinds of input tokens is the whole prompt."""

    input_tokens: int = Field(..., ge=0)
    output_tokens: int = Field(..., ge=0)
    cache_creation_input_tokens: int | None = Field(None, ge=0)
    cache_read_input_tokens: int | None = Field(None, ge=0)
    context: ContextUsage | None = Field(None, description="Reuse figures of a request with a context.")


class AnsweredMessage(BaseModel):
    """Answer to Anthropic's messages with the fields of a context. The engine may add more fields."""

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
    """Number of reused prompt tokens."""

    cached_tokens: int = Field(..., ge=0)


class ResponseUsage(BaseModel):
    """OpenAI's usage of a response. It counts the whole prompt."""

    input_tokens: int = Field(..., ge=0)
    input_tokens_details: ResponseTokens
    output_tokens: int = Field(..., ge=0)
    total_tokens: int = Field(..., ge=0)
    context: ContextUsage | None = Field(None, description="Reuse figures of a request with a context.")


class Answered(BaseModel):
    """A response with the fields of a context. The engine may add more fields."""

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
    """Error in OpenAI's format."""

    message: str
    type: str
    code: str
    param: str | None = Field(...)


class Error(BaseModel):
    """Error of context-cache."""

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
    """Holder of the KV of the newest generation."""

    endpoint: Annotated[str, Field(description="Name of the pod.")]
    state: Annotated[
        HolderState,
        Field(
            description="`sealed`: the newest KV is durable. `pending`: its save runs. `absent`: there is none,"
            " and the next turn computes. `unreachable`: the sidecar does not answer."
        ),
    ]
    reason: NotRequired[
        Annotated[str, Field(description="Reason for missing KV of the newest generation, if the sidecar knows it.")]
    ]


class ForkedFrom(TypedDict):
    """Source of a fork. The source may be deleted."""

    session_id: Annotated[str, Field(description="Context of the source, which may be deleted.")]
    generation: Annotated[int, Field(description="Generation at which the fork began.")]


class TurnObject(TypedDict):
    """Receipt of a committed turn. Times are in milliseconds."""

    generation: Annotated[int, Field(description="Generation that the turn made.")]
    at: Annotated[int, Field(description="Time of the commit.")]
    computed_tokens: Annotated[int, Field(description="Prompt tokens that were computed.")]
    cached_tokens: Annotated[int, Field(description="Prompt tokens that were read from the cache.")]
    context_tokens: Annotated[int, Field(description="Prompt tokens that the context already had.")]
    completion_tokens: Annotated[int, Field(description="Tokens of the answer.")]
    source: Annotated[str, Field(description="Source of most cached tokens.")]
    match: Annotated[str | None, Field(description="Relation of the prompt to the context; null for the create.")]
    reason: Annotated[str | None, Field(description="Reason why no KV was reused.")]
    restore_ms: Annotated[int | None, Field(description="Milliseconds to bring the KV back.")]
    first_token_ms: Annotated[int | None, Field(description="Milliseconds to the first token of a stream.")]
    took_ms: Annotated[int, Field(description="Milliseconds to the commit.")]


class ContextSummary(TypedDict):
    """One context, without the state of its KV."""

    object: Literal["context"]
    session_id: Annotated[str, Field(description="Name of the context.")]
    model: Annotated[str, Field(description="Model of the context.")]
    mode: Annotated[str, Field(description="`session` or `prefix`.")]
    state: Annotated[str, Field(description="`creating`: its first answer runs. `ready`. `busy`: a turn runs.")]
    created: Annotated[int, Field(description="Time of the creation.")]
    expires_at: Annotated[int, Field(description="Time of the expiry.")]
    ttl: Annotated[int, Field(description="Life in seconds.")]
    ttl_policy: Annotated[str, Field(description="`fixed` or `sliding`.")]
    turns: Annotated[int, Field(description="Number of committed turns, the create included.")]
    tokens: Annotated[int, Field(description="Tokens of the conversation.")]
    generation: Annotated[int, Field(description="Number of the last commit.")]
    metadata: Annotated[dict[str, str], Field(description="Names and values that the client gave.")]
    forked_from: Annotated[ForkedFrom | None, Field(description="Source of a fork; null otherwise.")]


class HolderName(TypedDict):
    """Pod that saved the KV of the newest generation."""

    endpoint: Annotated[str, Field(description="Name of the pod; empty: none.")]


class ListedContext(ContextSummary):
    """One context in a list."""

    holder: Annotated[HolderName, Field(description="Pod with the KV of the newest generation.")]


class ContextObject(ContextSummary):
    """One context with the state of its KV."""

    bytes: Annotated[
        int | None,
        Field(description="Bytes of its KV, with shared blocks in full; null if the sidecar is unreachable."),
    ]
    tiers: Annotated[list[str], Field(description="Places of the KV now: `host`, `disk`.")]
    holder: Annotated[Holder, Field(description="Pod with the KV of the newest generation.")]


class ReadContext(ContextObject):
    """One context with its last turns."""

    recent_turns: Annotated[
        list[TurnObject], Field(description="Last 32 committed turns, oldest first. A new fork has none.")
    ]


class ContextList(TypedDict):
    """One page of contexts, newest first."""

    object: Literal["list"]
    data: Annotated[list[ListedContext], Field(description="Contexts of this page.")]
    has_more: Annotated[bool, Field(description="Whether more contexts follow.")]
    last_id: Annotated[str | None, Field(description="Value for `after` to get the next page.")]


class KeptMissObject(TypedDict):
    """Last prompt that differed from the kept conversation."""

    matched: Annotated[int, Field(description="Tokens that the prompt shared with the kept KV.")]
    of: Annotated[int, Field(description="Tokens that were kept.")]
    diverged_at_token: Annotated[int, Field(description="First token that differed.")]
    at: Annotated[int, Field(description="Time of the prompt.")]


class KeptObject(TypedDict):
    """Kept KV of requests without a context that look like one conversation."""

    object: Literal["kept"]
    id: Annotated[str, Field(description="Name of the kept conversation.")]
    tokens: Annotated[int, Field(description="Tokens with KV.")]
    bytes: Annotated[int, Field(description="Bytes of KV.")]
    last_used: Annotated[int | None, Field(description="Time of the last use; null: before its sidecar started.")]
    expires_at: Annotated[int, Field(description="Time of the expiry.")]
    pods: Annotated[list[str], Field(description="Pods with some of it.")]
    last_miss: Annotated[KeptMissObject | None, Field(description="Last prompt that did not begin with the kept KV.")]
    unreachable: NotRequired[Annotated[list[str], Field(description="Pods that did not answer.")]]


class KeptList(TypedDict):
    """One page of kept conversations, last used first."""

    object: Literal["list"]
    data: Annotated[list[KeptObject], Field(description="Kept conversations of this page.")]
    has_more: Annotated[bool, Field(description="Whether more follow.")]
    last_id: Annotated[str | None, Field(description="Value for `after` to get the next page.")]
    unreachable: Annotated[list[str], Field(description="Pods that did not answer.")]


class ByteHours(TypedDict):
    """Stored bytes times hours, by tier."""

    memory: Annotated[int, Field(description="In the memory of pods.")]
    disk: Annotated[int, Field(description="On the disks of pods.")]
    store: Annotated[int, Field(description="In the shared store.")]


class Used(TypedDict):
    """Usage figures."""

    contexts: Annotated[int, Field(description="Created contexts, forks included.")]
    turns: Annotated[int, Field(description="Answers, creates included.")]
    computed_tokens: Annotated[int, Field(description="Computed tokens of prompts.")]
    cached_tokens: Annotated[int, Field(description="Cached tokens of prompts.")]
    completion_tokens: Annotated[int, Field(description="Tokens of answers.")]
    saved_seconds: Annotated[
        float, Field(description="Estimated seconds to compute the cached tokens, less the time to bring them back.")
    ]
    byte_hours: Annotated[ByteHours, Field(description="Bytes held, times hours.")]


class UsedByKey(Used):
    """Usage of one API key."""

    key: Annotated[str, Field(description="Name of the API key; empty for usage of no key, such as bytes held.")]


class DayOfUsage(TypedDict):
    """Usage of one day in UTC."""

    day: Annotated[str, Field(description="Date, as `2026-11-25`.")]
    keys: Annotated[list[UsedByKey], Field(description="Usage by API key.")]


class UsageOfTenant(TypedDict):
    """Usage of a tenant."""

    object: Literal["usage"]
    tenant: Annotated[str, Field(description="Name of the tenant.")]
    operator: Annotated[bool, Field(description="Whether the asking key is an operator's, and may read other tenants.")]
    contexts_now: Annotated[int, Field(description="Live contexts.")]
    total: Annotated[Used, Field(description="Sum of the days.")]
    days: Annotated[list[DayOfUsage], Field(description="Days with any usage, oldest first.")]


class EngineObject(TypedDict):
    """Load of a pod's engine at the last probe."""

    running: Annotated[int, Field(description="Running requests.")]
    waiting: Annotated[int, Field(description="Waiting requests.")]
    kv_usage: Annotated[float, Field(description="Share of its KV blocks in use, 0 to 1.")]


class PodObject(TypedDict):
    """A pod in the view of this gateway."""

    name: Annotated[str, Field(description="Name of the pod.")]
    state: Annotated[Literal["ready", "draining", "not_ready"], Field(description="`draining`: gets no new contexts.")]
    models: Annotated[list[str], Field(description="Models that it serves.")]
    engine: Annotated[EngineObject, Field(description="Load at the last probe.")]
    carried: Annotated[int, Field(description="Requests that this gateway carries there; 0 behind Envoy.")]
    tiers: Annotated[dict[str, float], Field(description="Used share of each tier's limit.")]
    fingerprint: Annotated[
        str, Field(description="Fingerprint of its KV: pods with another one cannot use it. Empty: not known.")
    ]


class TenantObject(TypedDict):
    """A tenant that has a key."""

    tenant: Annotated[str, Field(description="Name of the tenant.")]
    keys: Annotated[list[str], Field(description="Names of its first 100 keys.")]
    num_keys: Annotated[int, Field(description="Number of its keys.")]
    requests_in_hand: Annotated[
        int, Field(description="Requests in flight at this gateway, counted if there is a limit.")
    ]
    bytes_in_hand: Annotated[int, Field(description="Bytes of these requests.")]


class TenantLimitsObject(TypedDict):
    """Limits of each tenant at one gateway. 0: no limit."""

    requests_per_second: Annotated[float, Field(description="Requests a second.")]
    burst: Annotated[int, Field(description="Requests at once.")]
    requests_in_hand: Annotated[int, Field(description="Requests in flight.")]
    bytes_in_hand: Annotated[int, Field(description="Bytes of requests in flight.")]


class DeploymentObject(TypedDict):
    """A deployment in the view of one gateway."""

    object: Literal["deployment"]
    pods: Annotated[list[PodObject], Field(description="Pods of the deployment.")]
    limits: Annotated[TenantLimitsObject, Field(description="Limits of each tenant at each gateway.")]
    tenants: Annotated[list[TenantObject], Field(description="Tenants with a key, by name.")]
    has_more: Annotated[bool, Field(description="Whether more tenants follow.")]
    last_tenant: Annotated[str | None, Field(description="Value for `after` to get the next page.")]


class ModelObject(TypedDict):
    """A model in OpenAI's format."""

    id: Annotated[str, Field(description="Name of the model.")]
    object: Literal["model"]
    created: Annotated[int, Field(description="Time of the answer, as in the engine's own list.")]
    owned_by: Annotated[str, Field(description="`vllm`.")]


class ContextDeleted(TypedDict):
    """Result of deleting a context or a kept conversation."""

    session_id: Annotated[str, Field(description="Name of the deleted context.")]
    status: Annotated[Literal["success", "partial"], Field(description="`partial`: a pod was unreachable.")]
    unreachable: NotRequired[
        Annotated[
            list[str], Field(description="Pods that delete their part at its expiry; only for a kept conversation.")
        ]
    ]


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
