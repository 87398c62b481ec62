"""Beginning of a prompt or a conversation: requests with the same one share a prefix. Pure; keeps no text."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec

from contextcache.claim import Claims
from contextcache.model import TenantId

_PREFIX_BYTES = 1024
"""Bytes of a prompt or message that count: a system prompt's worth. More would keep near-equal prompts apart."""
_SEARCHED_BYTES = 64 << 10
"""Bytes of a list of messages that are searched for the ends of the first messages."""
_MESSAGES_MAX = 8
_TOKEN_BYTES = 4
"""Bytes of JSON per token, as in English text."""
_JSON = json.JSONDecoder()


def beginning_hash(tenant: TenantId, claims: Claims, beginning: bytes) -> str:
    """Return a hash of tenant, model and a beginning: 32 hex digits."""
    seed = f"{tenant}\0{claims.model()}\0".encode("utf-8", "surrogatepass") + beginning
    return hashlib.blake2b(seed, digest_size=16).hexdigest()


def prompt_affinity(tenant: TenantId, claims: Claims) -> str:
    """Return a hash of tenant, model and the prompt or the first message; empty if there is neither."""
    beginning = _start(claims.fields.prompt)
    if not beginning.startswith((b'"', b"[")):
        beginning = b"".join(first_messages(claims.fields.messages, 1))
    return "" if beginning in (b"", b'""', b"[]") else beginning_hash(tenant, claims, beginning)


def conversation_beginning(claims: Claims) -> bytes:
    """Return the constant part of a conversation whose client sends it whole: up to the first message of its user."""
    fields = claims.fields
    turns = fields.messages or fields.input or fields.prompt
    messages = [] if turns is fields.prompt else first_messages(turns)
    return b"\0".join([_start(fields.system), _start(fields.instructions), *(messages or [_start(turns)])])


def first_messages(spelled: msgspec.Raw, count_max: int = _MESSAGES_MAX) -> list[bytes]:
    """Return the starts of the first messages, up to the first one of a user; none if `spelled` is no list.

    Keys are sorted. Later messages differ in every conversation.
    """
    text, at = bytes(memoryview(spelled)[:_SEARCHED_BYTES]).decode(errors="replace"), 1
    found: list[bytes] = []
    while text.startswith("[") and len(found) < count_max:
        while text[at : at + 1] in {" ", "\t", "\r", "\n", ","}:
            at += 1
        if text[at : at + 1] == "]":
            break
        try:
            message, at = _JSON.raw_decode(text, at)
            start = json.dumps(without_marks(message), sort_keys=True)[:_PREFIX_BYTES]
        except (ValueError, RecursionError):
            # Longer than _SEARCHED_BYTES, or no JSON.
            return [*found, text[at : at + _PREFIX_BYTES].encode(errors="replace")]
        found.append(start.encode())
        if isinstance(message, dict) and message.get("role") == "user":
            break
    return found


def num_tokens_of(claims: Claims) -> int:
    """Return an estimate of the tokens in a body's prompt or messages."""
    fields = claims.fields
    return sum(len(memoryview(spelled)) for spelled in (fields.prompt, fields.messages, fields.input)) // _TOKEN_BYTES


def _start(spelled: msgspec.Raw) -> bytes:
    return bytes(memoryview(spelled)[:_PREFIX_BYTES])


def without_marks(message: Any) -> Any:
    """Return a message without cache marks: clients move them from turn to turn."""
    if isinstance(message, dict):
        return {key: without_marks(value) for key, value in message.items() if key != "cache_control"}
    return [without_marks(part) for part in message] if isinstance(message, list) else message
