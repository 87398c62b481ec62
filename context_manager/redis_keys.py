"""Names of the Redis keys and the shape of rows in replies. Pure; the table is in store.py's docstring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from context_manager.session_row import SessionRow, row_from_fields
from context_manager.store import SessionKey, shard_of
from contextcache.model import TenantId

NAMING_FIELDS = (
    *("state", "created_at_ms", "expires_at_ms", "lease_id", "lease_until_ms"),
    *("cache_ref", "previous_cache_ref"),
)
"""What it takes to tell which KV a row names: a client's metadata, the large part of a row, stays where it is."""


def session_key(key: SessionKey) -> str:
    """Return the name of a session's hash."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:session:{member(key)}"


def transcript_key(key: SessionKey) -> str:
    """Return the name of a session's list of segments."""
    return f"{_tag(shard_of(key.tenant, key.session_id))}:transcript:{member(key)}"


def expiry_key(shard: int) -> str:
    """Return the name of a shard's expiry set."""
    return f"{_tag(shard)}:expiry"


def tenant_key(shard: int, tenant: TenantId) -> str:
    """Return the name of the set of a tenant's sessions in one shard."""
    return f"{_tag(shard)}:tenant:{tenant}"


def member(key: SessionKey) -> str:
    """Return a session's name in the expiry set."""
    return f"{key.tenant}:{key.session_id}"


def key_of_member(name: bytes) -> SessionKey:
    """Return the session named by a member of the expiry set."""
    tenant, session_id = name.decode().split(":", 1)
    return SessionKey(tenant, session_id)


def script_keys(key: SessionKey) -> list[str]:
    """Return KEYS of the scripts about one session: row, transcript, expiry set, tenant set."""
    shard = shard_of(key.tenant, key.session_id)
    return [session_key(key), transcript_key(key), expiry_key(shard), tenant_key(shard, key.tenant)]


def row_of_reply(key: SessionKey, reply: Any) -> SessionRow:
    """Return the row of an HGETALL reply: a mapping from the client, a flat list from a script."""
    pairs = reply.items() if isinstance(reply, Mapping) else zip(reply[::2], reply[1::2], strict=True)
    fields = {name.decode(): value.decode() for name, value in pairs}
    return row_from_fields(key.tenant, key.session_id, fields)


def row_of_values(key: SessionKey, values: Sequence[bytes | None]) -> SessionRow | None:
    """Return what an HMGET of NAMING_FIELDS tells of a row; None where there is none."""
    pairs = zip(NAMING_FIELDS, values, strict=True)
    fields = {name: value.decode() for name, value in pairs if value is not None}
    return row_from_fields(key.tenant, key.session_id, fields) if fields else None


def _tag(shard: int) -> str:
    # The braces make Redis Cluster hash the shard alone: all keys of a session lie in one slot.
    return f"cc:{{s{shard}}}"
