"""What a client says of a context's life and of what it carries along, read and checked in one place. Pure.

A create says all of it, a PATCH and a fork some. Bounds of a deployment are the manager's to check; what cannot be a
ttl, a policy or metadata at all is refused here, before anybody is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from contextcache.errors import InvalidRequest, TtlOutOfRange
from contextcache.model import SessionId, SessionMode, TtlPolicy
from contextcache.names import check_generation, check_metadata, context_id

_MAX_INTEGER = 2**53
"""Integers beyond it are not exact in JSON implementations, and no field needs them."""

_GENERATION_TAG = re.compile(r'([0-9]{1,15})|(?:W/)?"([0-9]{1,15})"', re.ASCII)
_TTL_TEXT = re.compile(r"([1-9][0-9]{0,14})s", re.ASCII)
"""A life as Gemini's API writes it."""
_PREFIX_NAMES = ("common_prefix",)
"""Names that other APIs (Volcengine's) have for the mode `prefix`."""

ChoiceT = TypeVar("ChoiceT", bound=Enum)


@dataclass(frozen=True, slots=True)
class Terms:
    """What is said; None: nothing is said of it."""

    ttl_s: int | None = None
    ttl_policy: TtlPolicy | None = None
    metadata: Mapping[str, str] | None = None


def read_terms(body: Mapping[str, Any]) -> Terms:
    """Read `ttl`, `ttl_policy` and `metadata`. Raises InvalidRequest, TtlOutOfRange naming the field."""
    return Terms(_ttl_s(body), read_choice(body, "ttl_policy", TtlPolicy), _metadata(body.get("metadata")))


def read_session_id(named: Any) -> SessionId | None:
    """Return the name that a client gives a new context; None: it gives none. Raises InvalidRequest."""
    return None if named is None else context_id(named)


def read_generation(body: Mapping[str, Any]) -> int | None:
    """Return the generation that a body names; None: it names none. Raises InvalidRequest."""
    said = body.get("generation")
    return None if said is None else check_generation(whole(said))


def read_if_match(header: str | None) -> int | None:
    """Return the generation that a request is for; None: any, as also for `*`. Raises InvalidRequest.

    A generation may stand alone or as an entity tag. A weak tag is equal to the strong one: an answer to a generation
    is the same in every byte.
    """
    if header is None or names_any(header):
        return None
    found = _GENERATION_TAG.fullmatch(header.strip())
    if found is None:
        raise InvalidRequest('If-Match must be one generation (3, "3" or W/"3") or *', param="If-Match")
    return int(found[1] or found[2])


def names_any(if_match: str | None) -> bool:
    """Return whether `If-Match` asks for a context that is there, at whatever generation."""
    return if_match is not None and if_match.strip() == "*"


def read_choice(body: Mapping[str, Any], key: str, choices: type[ChoiceT]) -> ChoiceT | None:
    """Return which of `choices` a field names; None: it is not there. Raises InvalidRequest."""
    value = body.get(key)
    if value is None:
        return None
    try:
        return choices(value)
    except ValueError:
        names = ", ".join(choice.value for choice in choices)
        raise InvalidRequest(f"{key} must be one of {names}", param=key) from None


def read_mode(body: Mapping[str, Any]) -> SessionMode | None:
    """Return the mode that a body names; None: it names none. Raises InvalidRequest."""
    if body.get("mode") in _PREFIX_NAMES:
        return SessionMode.PREFIX
    return read_choice(body, "mode", SessionMode)


def whole(value: Any) -> int | None:
    """Return a whole number, which JSON may write as 5.0 too, or None. `true` is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _ttl_s(body: Mapping[str, Any]) -> int | None:
    if "ttl" not in body:
        return None
    said = body["ttl"]
    text = _TTL_TEXT.fullmatch(said) if isinstance(said, str) else None
    ttl_s = whole(said) if text is None else int(text[1])
    if ttl_s is None:
        raise InvalidRequest('ttl must be a whole number of seconds: 3600, or "3600s"', param="ttl")
    if not 0 < ttl_s <= _MAX_INTEGER:
        raise TtlOutOfRange(f"ttl must be from 1 to {_MAX_INTEGER} seconds", param="ttl")
    return ttl_s


def _metadata(given: Any) -> Mapping[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise InvalidRequest("metadata must be an object whose values are strings", param="metadata")
    check_metadata(given)
    return given
