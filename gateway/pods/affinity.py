"""Beginning of a prompt: requests with the same one share a prefix and meet on one pod. Pure; keeps no text."""

from __future__ import annotations

import hashlib
import json

from contextcache.claim import Claims
from contextcache.model import TenantId

_PREFIX_BYTES = 1024
"""Bytes of a prompt's JSON that are hashed: a system prompt's worth. More would keep near-equal prompts apart."""
_MESSAGE_BYTES = 64 << 10
"""Bytes of `messages` that are searched for the end of the first message."""
_DIGEST_BYTES = 16
_TOKEN_BYTES = 4
"""Bytes of JSON per token, as in English text."""
_JSON = json.JSONDecoder()


def prompt_affinity(tenant: TenantId, claims: Claims) -> str:
    """Return a hash of tenant, model and the beginning of the prompt or messages; empty if there is neither."""
    beginning = _beginning(claims)
    if not beginning:
        return ""
    seed = f"{tenant}\0{claims.model()}\0".encode() + beginning
    return hashlib.blake2b(seed, digest_size=_DIGEST_BYTES).hexdigest()


def num_tokens_of(claims: Claims) -> int:
    """Return an estimate of the tokens in a body's prompt or messages."""
    fields = claims.fields
    return sum(len(memoryview(spelled)) for spelled in (fields.prompt, fields.messages, fields.input)) // _TOKEN_BYTES


def _beginning(claims: Claims) -> bytes:
    prompt = bytes(memoryview(claims.fields.prompt)[:_PREFIX_BYTES])
    if prompt.startswith((b'"', b"[")):
        return prompt if prompt not in (b'""', b"[]") else b""
    messages = bytes(memoryview(claims.fields.messages)[:_MESSAGE_BYTES])
    return _first_message(messages[1:].lstrip()) if messages.startswith(b"[") else b""


def _first_message(spelled: bytes) -> bytes:
    """Return the beginning of the first message, with sorted keys. Later messages differ in every conversation."""
    if spelled.startswith(b"]"):
        return b""
    try:
        message, _ = _JSON.raw_decode(spelled.decode(errors="replace"))
        return json.dumps(message, sort_keys=True)[:_PREFIX_BYTES].encode()
    except (ValueError, RecursionError):
        return spelled[:_PREFIX_BYTES]  # longer than _MESSAGE_BYTES, or not JSON
