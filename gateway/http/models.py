"""What clients send and what they are answered, as types: the OpenAPI document is made of these, and of `routes.py`.

Answers of the control calls are built here. Bodies of the calls that are carried to pods are only described: nobody
builds them here, the pod judges them. Bounds are those of a deployment that changes none; schemathesis sends what this
allows and what it does not (tests/fuzz), so a lie in here is a test that fails. Times are Unix seconds, as in every
OpenAI object; the row keeps milliseconds.
"""

from __future__ import annotations

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
)
from gateway.kept import KeptConversation, KeptPage
from gateway.pods.sidecars import HolderState, KVState

SESSION_ID_SCHEMA = {"pattern": f"^{SESSION_ID_PATTERN.pattern}$"}

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
        None, ge=0, description="0: compute and keep the prompt, answer nothing; of a context only."
    )
    stream: bool | None = False


class _Termed(_Answered):
    """What a create says of the life of a context."""

    ttl: int = Field(DEFAULT_TTL_S, ge=MIN_TTL_S, le=MAX_TTL_S, description="Life in seconds; never clamped.")
    ttl_policy: Literal["fixed", "sliding"] | None = "fixed"
    mode: Literal["session", "prefix"] | None = "session"
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA_KEYS)


class _Create(_Termed):
    session_id: SessionId | None = Field(None, description="The client's own name for the context; minted when absent.")


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
    ttl: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S, description="A new life from now, in seconds.")]
    ttl_policy: Literal["fixed", "sliding"] | None
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None,
        Field(max_length=MAX_METADATA_KEYS, description="Takes the place of all there was."),
    ]


class ContextFork(TypedDict, total=False):
    """What is another of the fork; what is not there is as of the context forked from."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # how pydantic is told so
    generation: Annotated[
        int | None, Field(ge=1, le=MAX_GENERATION, description="Where it begins; the newest when absent.")
    ]
    session_id: Annotated[SessionId | None, Field(description="The client's own name for it; minted when absent.")]
    ttl: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S, description="Life in seconds; never clamped.")]
    ttl_policy: Literal["fixed", "sliding"] | None
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, Field(max_length=MAX_METADATA_KEYS)]


class ContextRewind(TypedDict):
    """Where to go back to."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # how pydantic is told so
    generation: Annotated[
        int, Field(ge=1, le=MAX_GENERATION, description="As `generation` and `X-Context-Generation` told it.")
    ]


class Truncation(BaseModel):
    """What goes of a context that does not fit the model's window: the oldest, never its head or what is new."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["last_history_tokens", "rolling_tokens"]
    tokens: int = Field(ge=1, description="Kept of the history at most, or cut of it at once at least.")


class _Turn(_Termed):
    session_id: SessionId | None = Field(None, description="The context to continue; also as header X-Session-ID.")
    context_mode: Literal["auto", "append", "replay"] | None = "auto"
    context_commit: bool | None = True
    truncation: Truncation | None = None
    context_create: Literal["if_missing"] | None = Field(
        None, description="Create the context where there is none: ttl, ttl_policy, mode and metadata count then."
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
    instructions: str | None = Field(None, description="Of this request alone.")
    previous_response_id: str | None = Field(
        None, pattern=r"^resp_[1-9][0-9]{0,14}_[A-Za-z0-9_.-]{1,128}$", description="One of `store`'s to go on from."
    )
    conversation: SessionId | ConversationName | None = Field(
        None, description="The context's name: it is created where there is none."
    )
    store: bool | None = Field(None, description="True: kept as a context. False: nothing of it is kept.")
    truncation: Truncation | Literal["disabled"] | None = None  # type: ignore[assignment]  # OpenAI's default


class Diverged(BaseModel):
    """Where a replay leaves the context, and why."""

    message: int | None = Field(..., description="Position in the messages that were sent; null for text and ids.")
    token: int
    why: str


class ContextUsage(BaseModel):
    """What of a prompt was reused, and whether the turn is part of the context now."""

    cached_tokens: int = Field(..., ge=0)
    context_tokens: int = Field(..., ge=0)
    source: Literal["device", "host", "disk", "peer", "object", "recompute", "none"]
    restore_ms: float | None = Field(...)
    committed: bool
    match: Literal["append", "exact", "extend", "diverge"] | None = Field(None, description="Of a turn.")
    diverged: Diverged | None = None
    truncated_tokens: int | None = Field(None, ge=1, description="Cut of the context, so that the turn fits.")
    reason: str | None = Field(None, description="Why it was not committed; else why there was no KV.")


class Usage(BaseModel):
    """What a prompt and its answer cost."""

    prompt_tokens: int = Field(..., ge=0)
    completion_tokens: int | None = Field(None, ge=0)
    total_tokens: int = Field(..., ge=0)
    prompt_tokens_details: dict[str, int | None] | None = None
    context: ContextUsage | None = Field(None, description="Of a context's request.")


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
    session_id: str | None = Field(None, description="Of a context's request; null: its create was not committed.")
    expires_at: int | None = None


class CreatedUsage(Usage):
    """The usage of a create."""

    context: ContextUsage = Field(...)


class Created(_Completed):
    """What a create answers: a completion, or a chat completion where it has messages."""

    usage: CreatedUsage
    session_id: str | None = Field(..., description="null: it was not committed, `usage.context.reason` says why.")
    expires_at: int


class MessageUsage(BaseModel):
    """Anthropic's usage: the three kinds of input tokens are the whole prompt."""

    input_tokens: int = Field(..., ge=0)
    output_tokens: int = Field(..., ge=0)
    cache_creation_input_tokens: int | None = Field(None, ge=0)
    cache_read_input_tokens: int | None = Field(None, ge=0)
    context: ContextUsage | None = Field(None, description="Of a context's request.")


class AnsweredMessage(BaseModel):
    """What Anthropic's messages are answered with, and what a context adds. The engine may say more in it."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, JsonValue]]
    usage: MessageUsage
    session_id: str | None = Field(None, description="Of a context's request; null: its create was not committed.")
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
    context: ContextUsage | None = Field(None, description="Of a context's request.")


class Answered(BaseModel):
    """A response, and what a context adds. The engine may say more in it."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(..., description="To go on from, where it is kept: `resp_`, the generation, `_`, the context.")
    status: str
    model: str
    output: list[dict[str, JsonValue]]
    usage: ResponseUsage | None = Field(...)
    conversation: ConversationName | None = None
    session_id: str | None = Field(None, description="Of a context's request; null: its create was not committed.")
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

    type: Literal["error"] = Field(description="In Anthropic's words.")
    error: ErrorInfo
    detail: str = Field(description="The message again.")


class Holder(TypedDict):
    """Where the KV of the newest generation is."""

    endpoint: str
    state: HolderState
    reason: NotRequired[str]
    """Why there is no KV of the newest generation, where the sidecar knows."""


class ContextSummary(TypedDict):
    """One context as the list shows it: the row, without asking a sidecar."""

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


class ContextObject(ContextSummary):
    """One context, with what its holder's sidecar says about the KV."""

    bytes: int | None
    tiers: list[str]
    holder: Holder


class ContextList(TypedDict):
    """One page of contexts, newest first."""

    object: Literal["list"]
    data: list[ContextSummary]
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


class ContextDeleted(TypedDict):
    """What is left of a context, or of a kept conversation."""

    session_id: str
    status: Literal["success", "partial"]
    unreachable: NotRequired[list[str]]
    """Of a kept conversation: pods where it goes by its TTL."""


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


def context_list(page: SessionPage) -> ContextList:
    """Return a page as a client sees it; a short or empty one says where to go on too."""
    return {
        "object": "list",
        "data": [context_summary(session) for session in page.sessions],
        "has_more": page.has_more,
        "last_id": page.last_id or None,
    }
