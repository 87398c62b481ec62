"""What a body on `/v1/responses` says of contexts, in OpenAI's words. Pure.

A response's id names the context it is the newest answer of, and the generation that made it: to continue from it,
nothing else has to be kept. `conversation` names a context, as `session_id` does. `store` says whether an answer stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from contextcache.claim import RESPONSES_PATH, Claims, claimed_session
from contextcache.errors import (
    ContextExpired,
    ContextNotFound,
    GenerationGone,
    InvalidRequest,
    PreviousResponseNotFound,
)
from contextcache.fields import HANDLE_FIELDS, refuse_misspelt
from contextcache.model import SessionId
from contextcache.names import KEPT_PREFIX, SESSION_ID_PATTERN, SESSION_ID_RULE

RESPONSE_FIELDS = frozenset({"previous_response_id", "conversation", "store"})
"""What says which context it is."""
_RESPONSE_HANDLES = HANDLE_FIELDS | RESPONSE_FIELDS
_SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,160}", re.ASCII)
"""Ids that an error may repeat."""
_RESPONSE_ID = re.compile(r"resp_([1-9]\d{0,14})_(.{1,128})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Continued:
    """The context of a response."""

    session_id: SessionId | None
    """None: a new one."""
    generation: int | None = None
    """That it goes on from; None: whichever there is."""
    creates: bool = False
    """It is made where there is none."""
    commits: bool = True
    """The answer stays."""
    said: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The fields that named it, `previous_response_id` or `conversation`, as the client wrote them."""


def response_id(session_id: SessionId, generation: int) -> str:
    """Return the id of the response that made this generation."""
    return f"resp_{generation}_{session_id}"


def continued_by(
    path: str, claims: Claims | None, header: str | None, *, label: SessionId | None = None
) -> Continued | None:
    """Return the context that a call continues, or creates; None: none. `header` is `X-Session-ID`.

    `label`: the one in the header, where it is known to be a context's name. Raises InvalidRequest, also for a field
    that is nearly one that names a context; PreviousResponseNotFound for an id that no response of a context has.
    """
    if claims is not None:
        refuse_misspelt(claims.names, _RESPONSE_HANDLES if path == RESPONSES_PATH else HANDLE_FIELDS)
    named = claimed_session(claims, header) or label
    if claims is None or path != RESPONSES_PATH:
        creates = claims is not None and claims.creates_if_missing()
        return None if named is None else Continued(named, creates=creates)
    previous, said = claims.value("previous_response_id"), claims.value("conversation")
    commits = _store(claims.value("store"))
    if previous is not None and said is not None:
        raise InvalidRequest("give either previous_response_id or conversation, not both", param="conversation")
    generation: int | None = None
    other: SessionId | None = None
    if previous is not None:
        generation, other = _previous(previous)
    elif said is not None:
        other = _conversation(said)
    if named is not None and other not in (None, named):
        raise InvalidRequest(
            "session_id names a different context than previous_response_id or conversation", param="session_id"
        )
    named = named or other
    stays = commits is not False
    if named is None:
        return Continued(None, creates=True) if commits else None
    is_made = (said is not None and stays) or claims.creates_if_missing()
    creates = is_made and generation is None
    written = {"previous_response_id": previous, "conversation": said}
    return Continued(named, generation, creates=creates, commits=stays, said=written)


@contextmanager
def telling_what_is_missing(said: Mapping[str, Any]) -> Iterator[None]:
    """Raise the error of OpenAI's API when the response or the conversation that `said` names is not found.

    Agents recover by it: they send the whole conversation again.
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
        raise


def _no_response(response: str) -> PreviousResponseNotFound:
    """Return OpenAI's own words, by which some clients know the error."""
    shown = response if _SHOWN.fullmatch(response) else "…"
    return PreviousResponseNotFound(f"Previous response with id '{shown}' not found.", param="previous_response_id")


def _previous(said: Any) -> tuple[int, SessionId]:
    if not isinstance(said, str):
        raise InvalidRequest("previous_response_id must be a string", param="previous_response_id")
    found = _RESPONSE_ID.fullmatch(said)
    if found is None or not SESSION_ID_PATTERN.fullmatch(found[2]):
        raise _no_response(said)
    return int(found[1]), SessionId(found[2])


def _conversation(said: Any) -> SessionId:
    name = said.get("id") if isinstance(said, dict) else said
    if not isinstance(name, str) or not SESSION_ID_PATTERN.fullmatch(name) or name.startswith(KEPT_PREFIX):
        told = f"conversation must be a name, or an object with an `id`: {SESSION_ID_RULE}"
        raise InvalidRequest(told, param="conversation")
    return SessionId(name)


def _store(said: Any) -> bool | None:
    if said is not None and not isinstance(said, bool):
        raise InvalidRequest("store must be true or false", param="store")
    return said
