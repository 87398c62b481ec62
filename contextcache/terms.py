"""Fields and headers in which a client sets the terms of a context or a request, read and checked. Pure.

A create sets all of them, a PATCH and a fork some. The manager checks the bounds of a deployment. Values of the wrong
type or form are refused here, before any call.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from contextcache.errors import InvalidRequest, TtlOutOfRange
from contextcache.model import Repeatable, SessionId, SessionMode, TenantId, TtlPolicy
from contextcache.names import MINTED_PREFIX, check_generation, check_metadata, context_id

IDEMPOTENCY_HEADER = "idempotency-key"
REPLAYED_HEADER = "idempotent-replayed"
"""Header of an answer that was given before; Stripe's name."""
_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}", re.ASCII)
_MAX_INTEGER = 2**53
"""Largest integer that all JSON implementations represent exactly."""
_GENERATION_TAG = re.compile(r'([0-9]{1,15})|(?:W/)?"([0-9]{1,15})"', re.ASCII)
_TTL_TEXT = re.compile(r"([1-9][0-9]{0,14})s", re.ASCII)
"""TTL as Gemini's API writes it."""
_PREFIX_NAMES = ("common_prefix",)
"""Names of the mode `prefix` in other APIs (Volcengine)."""

ChoiceT = TypeVar("ChoiceT", bound=Enum)


@dataclass(frozen=True, slots=True)
class Terms:
    """TTL, its policy and metadata; None: not set."""

    ttl_s: int | None = None
    ttl_policy: TtlPolicy | None = None
    metadata: Mapping[str, str] | None = None


def read_terms(body: Mapping[str, Any]) -> Terms:
    """Read `ttl`, `ttl_policy` and `metadata`. Raises InvalidRequest, TtlOutOfRange with the field's name."""
    return Terms(_ttl_s(body), read_choice(body, "ttl_policy", TtlPolicy), _metadata(body.get("metadata")))


def read_session_id(named: Any) -> SessionId | None:
    """Return the name that a client gives a new context; None: it gives none. Raises InvalidRequest."""
    return None if named is None else context_id(named)


def read_generation(body: Mapping[str, Any]) -> int | None:
    """Return the generation that a body names; None: it names none. Raises InvalidRequest."""
    said = body.get("generation")
    return None if said is None else check_generation(whole(said))


def read_if_match(header: str | None) -> int | None:
    """Return the generation that a request expects; None: any, also for `*`. Raises InvalidRequest.

    The header is a number or an entity tag. Weak and strong tags are equal, because all answers to a generation are
    equal byte by byte.
    """
    if header is None or names_any(header):
        return None
    found = _GENERATION_TAG.fullmatch(header.strip())
    if found is None:
        raise InvalidRequest('If-Match must be one generation (3, "3" or W/"3") or *', param="If-Match")
    return int(found[1] or found[2])


def names_any(if_match: str | None) -> bool:
    """Return whether `If-Match` accepts every generation of an existing context."""
    return if_match is not None and if_match.strip() == "*"


def read_choice(body: Mapping[str, Any], key: str, choices: type[ChoiceT]) -> ChoiceT | None:
    """Return the value of a field as one of `choices`; None: it is absent. Raises InvalidRequest."""
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
    """Return a whole number, which JSON may write as 5.0 too; None: it is none, as `true`."""
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


def read_repeatable(header: str | None, parts: Iterable[bytes]) -> Repeatable | None:
    """Return the digests of an `Idempotency-Key` and of the request's parts; None: there is no key.

    Requests are the same if all bytes are equal. Only digests are stored. Raises InvalidRequest.
    """
    if header is None:
        return None
    if not _IDEMPOTENCY_KEY.fullmatch(header):
        raise InvalidRequest("Idempotency-Key must have 1 to 255 printable ASCII characters", param="Idempotency-Key")
    request = hashlib.sha256()
    for part in parts:
        request.update(len(part).to_bytes(8, "little"))
        request.update(part)
    return Repeatable(hashlib.sha256(header.encode()).hexdigest()[:32], request.hexdigest()[:32])


def session_id_of(tenant: TenantId, key: str, secret: bytes) -> SessionId:
    """Return the id of the context that a create with this idempotency key makes, as hard to guess as a random one."""
    named = hmac.new(secret, f"repeatable create\x00{tenant}\x00{key}".encode(), hashlib.sha256)
    return f"{MINTED_PREFIX}{named.hexdigest()[:32]}"
