"""Names of tenants, contexts, KV and API keys: their patterns, their checks, and how new names are made. Pure.

Names become Redis keys, file names and URL paths. These checks keep one tenant out of another tenant's keys.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from contextcache.errors import InvalidRequest
from contextcache.model import CacheRef, SessionId, TenantId

SESSION_ID_PATTERN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
SESSION_ID_RULE = "1 to 128 letters, digits, '_', '-' or '.', and must not begin with '.'"
"""The pattern in words, for error messages. `.` and `..` have a meaning of their own in URL paths."""
TENANT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
CACHE_REF_PATTERN = re.compile(r"ref_[0-9a-f]{32}")
KEY_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Name of an API key in usage reports. It is never the key itself."""
DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")
"""First half of a SHA-256 digest in hex."""

NO_CONTEXT = "no context has this session_id"
"""Message for malformed, absent, deleted and foreign ids. Equal answers do not tell whose a context is."""
MINTED_PREFIX = "ctx_"
"""Prefix of ids that the product makes. An `X-Session-ID` with it names a context; any other value is a label."""
KEPT_PREFIX = "kept_"
"""Prefix of groups of kept KV. A group takes the place of a session id, but is no session."""
OBJECT_PREFIX = f"{KEPT_PREFIX}lmcache_"
"""Prefix of groups that hold one object of LMCache. They are no conversations."""

MAX_GENERATION = 10**15 - 1
"""Largest number in a session's row."""
MAX_METADATA_KEYS = 16
"""OpenAI's limits of metadata: 16 keys of at most 64 characters, values of at most 512."""
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

NUM_SHARDS = 64
"""Shards of Redis keys. Fixed for the life of a deployment's data: the shard is part of every key."""


def check_tenant(tenant: str) -> None:
    """Raise InvalidRequest for a tenant that cannot be part of a key."""
    if not TENANT_PATTERN.fullmatch(tenant):
        raise InvalidRequest(
            "tenant must be 1 to 64 letters, digits, '_', '-' or '.', and begin with a letter or digit", param="tenant"
        )


def check_session_id(session_id: str, *, param: str = "session_id") -> None:
    """Raise InvalidRequest unless the id may name a context or a group of kept KV."""
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise InvalidRequest(f"{param} must be {SESSION_ID_RULE}", param=param)


def context_id(given: object) -> SessionId:
    """Return the name that a client gives a context. Raises InvalidRequest, also for the prefix of kept groups."""
    session_id = given if isinstance(given, str) else ""
    check_session_id(session_id)
    if session_id.startswith(KEPT_PREFIX):
        raise InvalidRequest(
            f"session_id must not begin with {KEPT_PREFIX}: the server uses this prefix for kept conversations",
            param="session_id",
        )
    return session_id


def check_cache_refs(cache_refs: Iterable[str], *, param: str = "cache_ref") -> None:
    """Raise InvalidRequest unless all are names of KV."""
    if not all(map(CACHE_REF_PATTERN.fullmatch, cache_refs)):
        raise InvalidRequest('cache_ref must be "ref_" and 32 hex digits', param=param)


def check_generation(generation: int | None) -> int:
    """Return the number of a committed turn. Raises InvalidRequest."""
    if generation is None or not 1 <= generation <= MAX_GENERATION:
        raise InvalidRequest(f"generation must be a whole number from 1 to {MAX_GENERATION}", param="generation")
    return generation


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise InvalidRequest for more or longer metadata than OpenAI allows."""
    if len(metadata) > MAX_METADATA_KEYS:
        raise InvalidRequest(f"metadata may have at most {MAX_METADATA_KEYS} keys", param="metadata")
    if not all(1 <= len(key) <= MAX_METADATA_KEY_CHARS for key in metadata):
        raise InvalidRequest(f"a metadata key must have 1 to {MAX_METADATA_KEY_CHARS} characters", param="metadata")
    if any(len(text) > MAX_METADATA_VALUE_CHARS for text in metadata.values()):
        raise InvalidRequest(
            f"a metadata value may have at most {MAX_METADATA_VALUE_CHARS} characters", param="metadata"
        )


def new_session_id() -> SessionId:
    """Return a new session id of 128 random bits."""
    return f"{MINTED_PREFIX}{secrets.token_hex(16)}"


def new_cache_ref() -> CacheRef:
    """Return a new cache_ref of 128 random bits."""
    return f"ref_{secrets.token_hex(16)}"


def prompt_ref(cache_ref: CacheRef) -> CacheRef:
    """Map a cache_ref to the ref of its prompt-only KV, and that ref back: flip the top random bit.

    Only a holder of one name can derive the other.
    """
    return f"ref_{int(cache_ref[4], 16) ^ 8:x}{cache_ref[5:]}"


def shard_of(tenant: TenantId, session_id: SessionId) -> int:
    """Return the shard of a session, 0 to 63: the same on every machine and in every version.

    A fork shares the segments of its source only if both are in one shard.
    """
    digest = blake2b(f"{tenant}:{session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % NUM_SHARDS
