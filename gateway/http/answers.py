"""JSON objects of the calls that the gateway answers, with the fields of `openapi.yaml`. Times are Unix seconds."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Literal

from contextcache.errors import InvalidRequest
from contextcache.model import (
    SAVED_COUNTS,
    CacheSessionMetadata,
    SessionPage,
    TenantId,
    TurnReceipt,
    Usage,
    UsageReport,
    saved_share,
)
from gateway.kept import KeptConversation, KeptPage
from gateway.parts import Parts
from gateway.pods.sidecars import KVState
from gateway.pods.state import EndpointState

Json = dict[str, Any]

_KEYS_SHOWN = 100
"""Most key names of one tenant in an answer. It bounds the answer's size."""


def context_list(page: SessionPage) -> Json:
    """Return a page of contexts. A short or empty page names the next page too."""
    data = [_summary(session) | {"holder": {"endpoint": session.holder}} for session in page.sessions]
    return {"object": "list", "data": data, "has_more": page.has_more, "last_id": page.last_id or None}


def context_object(session: CacheSessionMetadata, kv: KVState) -> Json:
    """Return a context with the state of its KV."""
    holder = {"endpoint": session.holder, "state": kv.state}
    if kv.reason:
        holder["reason"] = kv.reason
    tiers = [kv.tier] if kv.tier else []
    return _summary(session) | {"bytes": kv.size_bytes, "tiers": tiers, "holder": holder}


def context_read(session: CacheSessionMetadata, kv: KVState, turns: Sequence[TurnReceipt]) -> Json:
    """Return a context with the state of its KV and its last turns."""
    return context_object(session, kv) | {"recent_turns": [_turn(turn) for turn in turns]}


def _summary(session: CacheSessionMetadata) -> Json:
    source = session.forked_from
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
        "forked_from": source and {"session_id": source[0], "generation": source[1]},
        "parent": session.parent or None,
        **_saved(session.computed_tokens, session.cached_tokens, session.saved_ms),
    }


def _saved(computed_tokens: int, cached_tokens: int, saved_ms: int) -> Json:
    """Return the benefit fields of a context, a key, a model, a day or a tenant."""
    return {
        "computed_tokens": computed_tokens,
        "cached_tokens": cached_tokens,
        "saved_share": saved_share(computed_tokens, cached_tokens),
        "saved_seconds": saved_ms / 1000,
    }


def _turn(turn: TurnReceipt) -> Json:
    fields = asdict(turn)
    at_ms = fields.pop("at_ms")
    share = saved_share(turn.computed_tokens, turn.cached_tokens)
    return fields | {
        "at": at_ms // 1000,
        "match": turn.match or None,
        "reason": turn.reason or None,
        "saved_share": share,
    }


def conversation_object(session: CacheSessionMetadata) -> Json:
    """Return a context as OpenAI's conversation."""
    return {
        "id": session.session_id,
        "object": "conversation",
        "created_at": session.created_at_ms // 1000,
        "metadata": dict(session.metadata),
    }


def item_page(items: Sequence[Json], *, limit: int, after: str, order: str) -> Json:
    """Return the page of at most `limit` items behind the item `after`. `items`: all of them, oldest first.

    Raises InvalidRequest for an unknown `after`.
    """
    ordered = items if order == "asc" else items[::-1]
    first = 0
    if after:
        first = next((at for at, item in enumerate(ordered, 1) if item["id"] == after), 0)
        if not first:
            raise InvalidRequest("no item has the id in `after`", param="after")
    return item_list(ordered[first : first + limit], has_more=first + limit < len(ordered))


def item_list(items: Sequence[Json], *, has_more: bool = False) -> Json:
    """Return items as OpenAI's list."""
    first_id, last_id = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": [*items], "first_id": first_id, "last_id": last_id, "has_more": has_more}


def kept_list(page: KeptPage) -> Json:
    """Return a page of kept conversations."""
    data = [kept_object(kept) for kept in page.conversations]
    last_id, unreachable = data[-1]["id"] if data else None, list(page.unreachable)
    return {"object": "list", "data": data, "has_more": page.has_more, "last_id": last_id, "unreachable": unreachable}


def kept_object(kept: KeptConversation) -> Json:
    """Return a kept conversation."""
    miss = kept.last_miss
    return {
        "object": "kept",
        "id": kept.group,
        "tokens": kept.num_tokens,
        "bytes": kept.size_bytes,
        "last_used": kept.used_at_ms // 1000 or None,
        "expires_at": kept.expires_at_ms // 1000,
        "pods": list(kept.pods),
        "last_miss": miss
        and {"matched": miss.matched, "of": miss.of, "diverged_at_token": miss.matched, "at": miss.at_ms // 1000},
    }


def usage_of_tenant(tenant: str, report: UsageReport, *, operator: bool) -> Json:
    """Return the usage of a tenant. `operator`: the asking key is an operator's."""
    everything = [one for usage in report.days.values() for one in usage]
    days = [
        {
            "day": (dt.date(1970, 1, 1) + dt.timedelta(day)).isoformat(),
            "total": _total(usage),
            "keys": _used_by("key", usage),
            "models": _used_by("model", usage),
        }
        for day, usage in report.days.items()
    ]
    return {
        "object": "usage",
        "tenant": tenant,
        "operator": operator,
        "contexts_now": report.num_contexts,
        "total": _total(everything),
        "models": _used_by("model", everything),
        "days": days,
    }


def _used_by(name: Literal["key", "model"], usage: Iterable[Usage]) -> list[Json]:
    """Return usage summed by key or by model, by name. Usage of no model, as bytes held, is of no entry by model."""
    found = groupby(sorted(usage, key=attrgetter(name)), key=attrgetter(name))
    return [_total(of_one) | {name: value} for value, of_one in found if value or name == "key"]


def _total(usage: Iterable[Usage]) -> Json:
    counts = Counter[str]()
    for one in usage:
        counts.update(one.counts)
    names = ("contexts", "turns", "completion_tokens")
    hours = {tier: round(counts[f"{tier}_kib_s"] * 1024 / 3600) for tier in ("memory", "disk", "store")}
    saved = _saved(*(counts[name] for name in SAVED_COUNTS))
    return {name: counts[name] for name in names} | saved | {"byte_hours": hours}


def deployment_object(parts: Parts, *, limit: int, after: TenantId) -> Json:
    """Return all pods, and at most `limit` tenants after the name `after`; `limit` is 1 or more.

    Reads memory only, so it answers while the context manager and the pods do not.
    """
    key_names, limits = parts.keys.key_names(), parts.tenants
    following = list(islice((tenant for tenant in key_names if tenant > after), limit + 1))
    page = following[:limit]
    requests_max, bytes_max = limits.limits
    return {
        "object": "deployment",
        "pods": [_pod(state) for state in sorted(parts.endpoints.states(), key=lambda state: state.endpoint.name)],
        "limits": {
            "requests_per_second": limits.rate_per_s,
            "burst": limits.burst,
            "requests_in_hand": requests_max,
            "bytes_in_hand": bytes_max,
        },
        "tenants": [_tenant(tenant, key_names[tenant], *limits.held_by(tenant)) for tenant in page],
        "has_more": len(following) > limit,
        "last_tenant": page[-1] if page else None,
    }


def _tenant(tenant: TenantId, names: Sequence[str], requests: int, size_bytes: int) -> Json:
    return {
        "tenant": tenant,
        "keys": list(names[:_KEYS_SHOWN]),
        "num_keys": len(names),
        "requests_in_hand": requests,
        "bytes_in_hand": size_bytes,
    }


def _pod(state: EndpointState) -> Json:
    load, is_draining = state.load, state.endpoint.draining
    return {
        "name": state.endpoint.name,
        "state": "not_ready" if not state.ready else "draining" if is_draining else "ready",
        "models": sorted(state.models),
        "engine": {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage},
        "carried": state.in_flight,
        "tiers": dict(state.tiers),
        "fingerprint": state.fingerprint,
    }
