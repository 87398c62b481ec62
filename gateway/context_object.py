"""A context as clients see it: `GET /v1/context` and `GET /v1/context/{id}`. Pure.

Times are Unix seconds, as in every OpenAI object; the row keeps milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import TypedDict

from contextcache.model import CacheSessionMetadata

HolderState = Literal["sealed", "pending", "absent", "unreachable"]


class Holder(TypedDict):
    """Where the KV of the newest generation is."""

    endpoint: str
    state: HolderState


class ContextSummary(TypedDict):
    """One context as the list shows it: the row, without asking a sidecar."""

    object: Literal["context"]
    session_id: str
    model: str
    mode: str
    state: str
    created: int
    expires_at: int
    ttl: int
    ttl_policy: str
    turns: int
    tokens: int
    generation: int
    metadata: dict[str, str]


class ContextObject(ContextSummary):
    """One context, with what its holder's sidecar says about the KV."""

    bytes: int | None
    tiers: list[str]
    holder: Holder


class ContextList(TypedDict):
    """One page of contexts, newest first."""

    object: Literal["list"]
    data: list[ContextSummary]
    has_more: bool
    last_id: str | None


class ContextDeleted(TypedDict):
    """What is left of a context."""

    session_id: str
    status: Literal["success"]


@dataclass(frozen=True, slots=True)
class KVState:
    """What the holder's sidecar said."""

    state: HolderState
    size_bytes: int | None = 0
    """Bytes of the sealed KV, shared blocks counted whole; None: not known."""
    tier: str = ""


def context_summary(session: CacheSessionMetadata) -> ContextSummary:
    """Return the row as a client sees it."""
    return {
        "object": "context",
        "session_id": session.session_id,
        "model": session.model_id,
        "mode": session.mode.value,
        "state": session.state.value,
        "created": session.created_at_ms // 1000,
        "expires_at": session.expires_at_ms // 1000,
        "ttl": session.ttl_s,
        "ttl_policy": session.ttl_policy.value,
        "turns": session.num_turns,
        "tokens": session.num_tokens,
        "generation": session.generation,
        "metadata": dict(session.metadata),
    }


def context_object(session: CacheSessionMetadata, kv: KVState) -> ContextObject:
    """Return row and KV as a client sees them."""
    return {
        **context_summary(session),
        "bytes": kv.size_bytes,
        "tiers": [kv.tier] if kv.tier else [],
        "holder": {"endpoint": session.holder, "state": kv.state},
    }
