"""A client's request for one turn: read, checked, and split into our part and the engine's part. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

import msgspec

from contextcache.claim import FORBIDDEN_KEYS, IF_MISSING
from contextcache.errors import InvalidRequest
from contextcache.fields import OUR_FIELDS
from contextcache.hints import NO_HINTS, Hints
from contextcache.model import (
    DEFAULT_TTL_S,
    ContextMode,
    NewSession,
    Repeatable,
    SessionId,
    SessionMode,
    TenantId,
    TtlPolicy,
    UsageFormat,
)
from contextcache.names import new_session_id
from contextcache.terms import names_any, read_choice, read_if_match, read_mode, read_session_id, read_terms, whole

CONTEXT_PATH = "/v1/context"
COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
MESSAGES_PATH = "/v1/messages"

Kind = TypeVar("Kind")
_FAULT_CHARS_MAX = 200
_USAGE_FORMATS = {usage.value: usage for usage in UsageFormat}
NEVER_FROM_CLIENTS = frozenset({*FORBIDDEN_KEYS, "return_token_ids"})
_REFUSED: Mapping[str, str] = {
    "echo": "echo repeats the whole prompt, which a context avoids",
    "use_beam_search": "beam search has no single answer to append to the context",
    "prompt_embeds": "a context stores token ids, not embeddings",
    "truncate_prompt_tokens": "a context is never cut silently",
    "continue_final_message": "the answer must be a new message",
    "suffix": "a context grows only at its end",
}


@dataclass(frozen=True, slots=True)
class ClientPrompt:
    """The request's prompt; exactly one field is set."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


class TruncationType(Enum):
    """Part of a context that is cut when it is too long for a turn."""

    LAST = "last_history_tokens"
    """All but the last so many tokens of the history."""
    ROLLING = "rolling_tokens"
    """When the model's window is full, the oldest so many at once."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a turn's context may be cut."""

    type: TruncationType
    tokens: int


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One checked request."""

    path: str
    """Path on the engine: completions or chat."""
    model: str
    prompt: ClientPrompt
    engine_fields: Mapping[str, Any]
    """The body without the prompt and without our own fields."""
    stream: bool = False
    prefill_only: bool = False
    """`max_tokens: 0`: compute and keep the prompt, answer nothing."""
    wants_token_ids: bool = False
    wants_usage_chunk: bool = False
    """The client asked for `stream_options.include_usage`."""
    usage: UsageFormat | None = None
    """Value of `X-Usage-Format`; None: the default of the client's key, or of the endpoint, applies."""
    context_mode: ContextMode | None = None
    """None: the client left it to its key's default."""
    commit: bool = True
    expected_generation: int | None = None
    """Value of `If-Match`."""
    truncation: Truncation | None = None
    """None: a prompt that does not fit is refused."""
    creates_if_missing: bool = False
    """The context is to be created where there is none."""
    repeatable: Repeatable | None = None
    """Name of a request that may come again."""
    template_fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields besides the messages on which their rendering depends."""
    instructions: str | None = None
    """In the place of the system message the conversation begins with; empty: none. None: that stays."""
    follows: bool = False
    """The client named the answer that the messages follow: a response's `previous_response_id`, `conversation`."""
    item_ids: frozenset[str] = frozenset()
    """Ids of a response's input items: those that a context delivered are history."""
    compared_with: str | None = None
    """Id of the earlier answer to compare prompts with; empty: there is none yet. None: no diagnostics."""
    hints: Hints = NO_HINTS
    said: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the answer repeats: a response's `previous_response_id`, `conversation`."""

    def engine_body(
        self, prompt: list[int], messages: Sequence[Mapping[str, Any]], kv_transfer: dict[str, Any], salt: str
    ) -> dict[str, Any]:
        """Return vLLM's body: the client's fields, a prompt as ids, a chat's messages, and the connector's order."""
        body = {**self.engine_fields, "cache_salt": salt, "return_token_ids": True, "kv_transfer_params": kv_transfer}
        if self.path != CHAT_PATH:
            return body | {"prompt": prompt}
        # vLLM 0.32 renderers/online_renderer.py: these ids are used instead of rendering the messages.
        return body | {"messages": [*messages], "kv_transfer_params": kv_transfer | {"prompt_token_ids": prompt}}


def read_turn(path: str, body: dict[str, Any], headers: Mapping[str, str]) -> TurnRequest:
    """Check a create or turn. Raises InvalidRequest naming the field at fault."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model must be a non-empty string", param="model")
    prompt = _prompt(path, body)
    _refuse_unsupported(body)
    fields = {key: value for key, value in body.items() if key not in OUR_FIELDS | NEVER_FROM_CLIENTS}
    for key in ("prompt", "messages"):
        fields.pop(key, None)
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise InvalidRequest("stream_options must be an object", param="stream_options")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    return TurnRequest(
        path=COMPLETIONS_PATH if prompt.messages is None else CHAT_PATH,
        model=model,
        prompt=prompt,
        engine_fields=fields,
        stream=_flag(body, "stream", default=False),
        prefill_only=max_tokens == 0 and max_tokens is not False,
        wants_token_ids=body.get("return_token_ids") is True,
        wants_usage_chunk=stream_options.get("include_usage") is True,
        usage=_USAGE_FORMATS.get(headers.get("x-usage-format", "").strip().lower()),
        context_mode=read_choice(body, "context_mode", ContextMode),
        commit=_flag(body, "context_commit", default=True),
        expected_generation=read_if_match(headers.get("if-match")),
        truncation=_truncation(path, body),
        creates_if_missing=_creates_if_missing(path, body) and not names_any(headers.get("if-match")),
        template_fields=_template_fields(body),
    )


def read_as(kind: type[Kind], body: Mapping[str, Any], *, unknown: str) -> Kind:
    """Return a body as a msgspec type. Raises InvalidRequest for the first field that has not its type.

    `unknown`: error of an object in a list whose `type` is unknown.
    """
    try:
        return msgspec.convert(body, kind)
    except ValueError as exc:  # msgspec's own, and half a surrogate pair in a name
        raise _refusal(str(exc), unknown) from exc


def _refusal(fault: str, unknown: str) -> InvalidRequest:
    """Return the error of a field, from msgspec's message."""
    fault, _, place = fault.rpartition(" - at `$") if " - at `$" in fault else (fault, "", "")
    param = place.removesuffix("`").removeprefix(".")
    if fault.startswith("Invalid value") and param.endswith("].type"):
        return InvalidRequest(f"{unknown}: {fault[:_FAULT_CHARS_MAX]}", param=param.removesuffix(".type"))
    if fault.startswith("Object missing required field"):
        param, fault = f"{param}.{fault.split('`')[1]}".removeprefix("."), "is required"
    fault = fault[:_FAULT_CHARS_MAX].replace("Expected ", "must be ", 1)
    return InvalidRequest(f"`{param}`: {fault}" if param else fault, param=param or None)


def read_compared(body: Mapping[str, Any], name: str, key: str) -> str | None:
    """Return the answer id in `body[name][key]`; empty: the object has none. None: no object. Raises InvalidRequest."""
    asked = body.get(name)
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    answer_id = asked.get(key)
    if answer_id is None:
        return ""
    if not isinstance(answer_id, str):
        raise InvalidRequest(f"{name}.{key} must be a string", param=f"{name}.{key}")
    return answer_id


def with_new_messages(request: TurnRequest, new: Sequence[int] | None) -> TurnRequest:
    """Return a request with those of its messages alone; None: as it is."""
    messages = request.prompt.messages
    if new is None or messages is None or len(new) == len(messages):
        return request
    return replace(request, prompt=ClientPrompt(messages=tuple(messages[at] for at in new)))


def read_new_session(
    body: dict[str, Any], *, tenant: TenantId, model: str, session_id: SessionId | None = None, parent: SessionId = ""
) -> NewSession:
    """Read a create's terms of its session. Raises InvalidRequest, TtlOutOfRange.

    `session_id`: its name where the body need not say it; the body's own, or a new one, else.
    """
    terms = read_terms(body)
    return NewSession(
        tenant=tenant,
        session_id=session_id or read_session_id(body.get("session_id")) or new_session_id(),
        model_id=model,
        mode=read_mode(body) or SessionMode.SESSION,
        ttl_s=DEFAULT_TTL_S if terms.ttl_s is None else terms.ttl_s,
        ttl_policy=terms.ttl_policy or TtlPolicy.FIXED,
        metadata=terms.metadata or {},
        parent=parent,
    )


def _template_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields by which `/tokenize` renders messages as the chat route does.

    It has no fields for arguments that vLLM gives to the template itself (vLLM 0.32
    entrypoints/openai/chat_completion/protocol.py `build_chat_params`).
    """
    names = ("tools", "chat_template", "chat_template_kwargs", "add_special_tokens")
    fields = {name: body[name] for name in names if body.get(name) is not None}
    given = fields.get("chat_template_kwargs", {})
    told = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) not in (None, "auto")}
    if told and isinstance(given, dict):  # the engine refuses other types
        thinks = {"enable_thinking": told["reasoning_effort"] != "none"} if "reasoning_effort" in told else {}
        fields["chat_template_kwargs"] = thinks | given | told
    return fields


def _prompt(path: str, body: dict[str, Any]) -> ClientPrompt:
    prompt, messages = body.get("prompt"), body.get("messages")
    if path == CHAT_PATH or (path == CONTEXT_PATH and prompt is None and messages is not None):
        return ClientPrompt(messages=_messages(messages))
    if messages is not None:
        raise InvalidRequest("give either prompt or messages, not both", param="messages")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        return ClientPrompt(text=prompt)
    if isinstance(prompt, list):
        return ClientPrompt(token_ids=_token_ids(prompt))
    raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")


def _token_ids(prompt: list[Any]) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    # In C, and for a million ids in a moment: one look at their kinds, one at each end.
    kinds = set(map(type, prompt))
    if kinds & {str, list}:
        raise InvalidRequest("a context takes one prompt, not several", param="prompt")
    ids = prompt if kinds == {int} else [whole(item) for item in prompt]
    if None in ids or min(ids) < 0 or max(ids) >= 2**32:
        raise InvalidRequest("token ids must be whole numbers from 0", param="prompt")
    return tuple(ids)


def _messages(messages: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a non-empty list", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest("each message needs a role", param=f"messages[{index}]")
        if not _is_text(message.get("content")):
            raise InvalidRequest("a context can store only text", param=f"messages[{index}].content")
    return tuple(messages)


def _is_text(content: Any) -> bool:
    """Return whether a message has nothing but text: token ids alone do not say which image was computed.

    A part without a type, or with a `uuid`, is to vLLM 0.32 whatever its other fields name (renderers/chat_utils.py).
    """
    if not isinstance(content, list):
        return content is None or isinstance(content, str)
    return all(
        isinstance(part, dict)
        and part.get("type") == "text"
        and part.get("uuid") is None
        and isinstance(part.get("text"), str)
        for part in content
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for key in ("n", "best_of"):
        if body.get(key) not in (None, 1):
            raise InvalidRequest(f"a context has one answer: {key} must be 1", param=key)
    for key, reason in _REFUSED.items():
        if body.get(key):
            raise InvalidRequest(f"{key} cannot be used with a context: {reason}", param=key)
    if body.get("add_generation_prompt") is False:
        raise InvalidRequest(
            "add_generation_prompt must not be false: a turn always generates an answer", param="add_generation_prompt"
        )
    if body.get("include_reasoning") is False:
        raise InvalidRequest(
            "include_reasoning must not be false: a context stores the reasoning", param="include_reasoning"
        )


def _truncation(path: str, body: dict[str, Any]) -> Truncation | None:
    said = body.get("truncation")
    if said is None:
        return None
    if path == CONTEXT_PATH:
        raise InvalidRequest("truncation is not allowed on a create: set it on each turn", param="truncation")
    if not isinstance(said, dict) or set(said) != {"type", "tokens"}:
        raise InvalidRequest('truncation must be {"type": …, "tokens": …}', param="truncation")
    kind = next((kind for kind in TruncationType if kind.value == said["type"]), None)
    tokens = whole(said["tokens"])
    if kind is None or tokens is None or tokens < 1:
        names = " or ".join(kind.value for kind in TruncationType)
        raise InvalidRequest(f"truncation must have the type {names}, and tokens of at least 1", param="truncation")
    return Truncation(kind, tokens)


def _creates_if_missing(path: str, body: dict[str, Any]) -> bool:
    asked = body.get("context_create")
    if asked is None:
        return False
    if asked != IF_MISSING or path == CONTEXT_PATH:
        told = "is not allowed on a create" if path == CONTEXT_PATH else f"must be {IF_MISSING}"
        raise InvalidRequest(f"context_create {told}", param="context_create")
    return True


def _flag(body: dict[str, Any], key: str, *, default: bool) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"{key} must be true or false", param=key)
    return value
