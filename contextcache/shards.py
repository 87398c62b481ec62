"""The shard of a session: which of Redis's slots has its keys. Pure.

The gateway knows it too: a fork shares the segments of its source only when both are in one shard.
"""

from __future__ import annotations

from hashlib import blake2b

from contextcache.model import SessionId, TenantId

NUM_SHARDS = 64
"""Fixed for the life of a deployment's data: the shard is part of every key."""


def shard_of(tenant: TenantId, session_id: SessionId) -> int:
    """Return the shard of a session, 0 to 63; the same on every machine and in every version."""
    digest = blake2b(f"{tenant}:{session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % NUM_SHARDS
