"""Request and parser of each call, shared by the synchronous and the asynchronous client. Sans-IO."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from contextcache.client import types
from contextcache.client.errors import ContextNotFound
from contextcache.client.failures import ApiError, NotCreated
from contextcache.client.types import Changes, ContextInfo, CreateFields, KeptInfo, Message, Prompt, Reply, TurnFields

T = TypeVar("T")
DONE: Mapping[str, Any] = {"status": "success"}
"""Answer to a retry whose earlier attempt has taken effect."""
_PAGE = 100
"""Entries of a page: the server's maximum."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the parser of its answer."""

    method: str
    path: str
    read: Callable[[Any, Mapping[str, str]], T]
    """Takes the answer's JSON and headers. Raises for a body that is not of this API."""
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """Whether the request is idempotent: it may be sent again if its effect is unknown."""
    done_when: type[ApiError] | None = None
    """Error of a retry that shows that an earlier attempt has taken effect."""

    def streamed(self) -> Call[T]:
        """Return the same call with its answer as an event stream."""
        return replace(self, body={**(self.body or {}), "stream": True, "stream_options": {"include_usage": True}})


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    data: Sequence[T]
    after: str | None
    """Cursor of the next page; None: this page is the last."""


def create(model: str, text: Prompt | None, messages: Sequence[Message] | None, fields: CreateFields) -> Call[Reply]:
    """Create a context with a prompt, or with messages. Raises ValueError for both or neither."""
    if (text is None) == (messages is None):
        raise ValueError("a create takes either `prompt` or `messages`, not both")
    said = {"prompt": text} if messages is None else {"messages": list(messages)}
    return _turn("/v1/context", {"model": model, **said}, fields, CreateFields)


def ask(model: str, session_id: str, prompt: Prompt, fields: TurnFields) -> Call[Reply]:
    """Run a turn with text or token ids."""
    return _turn("/v1/completions", {"model": model, "session_id": session_id, "prompt": prompt}, fields, TurnFields)


def chat(model: str, session_id: str, said: str | Sequence[Message], fields: TurnFields) -> Call[Reply]:
    """Run a turn with a user's message, or with messages."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    body = {"model": model, "session_id": session_id, "messages": messages}
    return _turn("/v1/chat/completions", body, fields, TurnFields)


def get(session_id: str) -> Call[ContextInfo]:
    """Read one context."""
    return Call("GET", _path(session_id), _info)


def update(session_id: str, changes: Changes) -> Call[ContextInfo]:
    """Change ttl, policy or metadata. Idempotent, but a ttl counts from the last attempt."""
    _check_names(changes, Changes)
    return Call("PATCH", _path(session_id), _info, body=dict(changes))


def branch(session_id: str, how: Literal["fork", "compact"], fields: Mapping[str, Any]) -> Call[ContextInfo]:
    """Fork or compact a context. Not repeatable: a second attempt could make a second context."""
    body = {key: value for key, value in fields.items() if value is not None}
    return Call("POST", f"{_path(session_id)}/{how}", _info, body=body, repeatable=False)


def rewind(session_id: str, generation: int, if_match: int | None) -> Call[ContextInfo]:
    """Rewind a context to a generation. Not repeatable: a turn may have run since the first attempt."""
    headers = {} if if_match is None else {"if-match": str(if_match)}
    path, body = f"{_path(session_id)}/rewind", {"generation": generation}
    return Call("POST", path, _info, body=body, headers=headers, repeatable=False)


def delete(session_id: str) -> Call[None]:
    """Delete a context and its KV."""
    return Call("DELETE", _path(session_id), _deleted, done_when=ContextNotFound)


def page(after: str | None, model: str | None) -> Call[Page[ContextInfo]]:
    """List contexts, newest first."""
    query = _query(limit=_PAGE, after=after, model=model)
    return Call("GET", "/v1/context", partial(_page, types.context_info), query=query)


def kept_page(after: str | None) -> Call[Page[KeptInfo]]:
    """List KV that is kept of requests without a context."""
    query = _query(kind="kept", limit=_PAGE, after=after)
    return Call("GET", "/v1/context", partial(_page, types.kept_info), query=query)


def models() -> Call[list[str]]:
    """List the served models."""
    return Call("GET", "/v1/models", lambda body, _headers: [model["id"] for model in body["data"]])


def usage(first_day: str | None, last_day: str | None, tenant: str | None) -> Call[dict[str, Any]]:
    """Read the usage of a tenant."""
    query = _query(**{"from": first_day}, to=last_day, tenant=tenant)
    return Call("GET", "/v1/usage", partial(_object, "usage"), query=query)


def deployment(after: str | None, limit: int | None) -> Call[dict[str, Any]]:
    """Read the report for operators."""
    return Call("GET", "/v1/deployment", partial(_object, "deployment"), query=_query(after=after, limit=limit))


def created(reply: Reply) -> Reply:
    """Return the answer of a create. Raises NotCreated if the server stored no context."""
    if reply.raw.get("session_id") is None:
        raise NotCreated("the server answered but stored no context", reply=reply)
    return reply


def _turn(path: str, body: dict[str, Any], fields: Mapping[str, Any], known: type) -> Call[Reply]:
    _check_names(fields, known)
    said = dict(fields)
    key = said.pop("idempotency_key", None) or uuid.uuid4().hex
    generation = said.pop("if_match", None)
    extra = said.pop("extra", None) or {}
    headers = {"idempotency-key": key} | ({} if generation is None else {"if-match": str(generation)})
    # The key makes a turn repeatable. A turn that commits nothing runs again, which changes nothing.
    return Call("POST", path, types.reply, body={**body, **said, **extra}, headers=headers)


def _check_names(fields: Mapping[str, Any], known: type) -> None:
    """Raise TypeError for a keyword argument that is no key of a TypedDict: the server would ignore a misspelt one."""
    names = sorted(known.__annotations__)
    for name in fields.keys() - names:
        meant = get_close_matches(name, names, n=1)
        hint = f"did you mean {meant[0]!r}?" if meant else f"allowed: {', '.join(names)}"
        extra = "; pass the engine's own fields in extra={…}" if "extra" in names else ""
        raise TypeError(f"unexpected keyword argument {name!r}: {hint}{extra}")


def _info(body: Any, _headers: Mapping[str, str]) -> ContextInfo:
    return types.context_info(body)


def _deleted(body: Any, _headers: Mapping[str, str]) -> None:
    if body["status"] not in {"success", "partial"}:
        raise ValueError(body)


def _object(kind: str, body: Any, _headers: Mapping[str, str]) -> dict[str, Any]:
    if body["object"] != kind:
        raise ValueError(body)
    return dict(body)


def _page(read: Callable[[Mapping[str, Any]], T], body: Any, _headers: Mapping[str, str]) -> Page[T]:
    after = body["last_id"] if body["has_more"] else None
    if body["has_more"] and not isinstance(after, str):
        raise TypeError(after)  # a list that ended here would not be whole
    return Page([read(one) for one in body["data"]], after)


def _path(session_id: str) -> str:
    return f"/v1/context/{quote(session_id, safe='')}"


def _query(**fields: str | int | None) -> dict[str, str]:
    return {key: str(value) for key, value in fields.items() if value is not None}
