"""Which pod takes a request. Pure.

In this order: pods that are ready, in the proxy's subset, serve the model and do not drain; of those the ones whose
queue is not full, and where the tenant has less than its share (`gateway/shares.py`); of those, unless the client
asked for something else, the one where the KV is (a turn's holder, the pod that was asked last for a kept
conversation), as long as waiting there costs less than having the KV elsewhere; else, where requests with the same
beginning should meet (a new context), the one that costs least, of those that have not been given more than their
share of new contexts; else the least loaded. Where every queue is full, a tenant below its share is sent to one all
the same.

Of many pods a few are looked at: the holder, those that know the beginning, those that a ring names for it, or some
taken at random.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from contextcache.claim import Claims
from contextcache.errors import EndpointsSaturated, TooManyInFlight
from contextcache.model import ModelId, TenantId
from gateway.pods.costs import (
    MOVE_GAIN,
    LoadLimits,
    busy_s,
    is_full,
    is_saturated,
    load_of,
    move_s,
    placed_max,
    queue_s,
    room_s,
    waiting_at,
)
from gateway.pods.roster import RETRY_AFTER_S, Candidates, Roster, some_of
from gateway.ports import Endpoint, EndpointState

STRATEGY_HEADER = "routing-strategy"
"""AIBrix's header, with its values; unknown ones are ignored. It travels on: an engine does not know it."""
_PREFIX_BYTES = 1024
"""Of a prompt as spelled, that decide: a system prompt's worth. Longer ones would keep near-equal prompts apart."""
_MESSAGE_BYTES = 64 << 10
"""Within which a first message is looked for."""
_SHARE_RETRY_S = 1
"""A probe interval: until then the gateway knows of no room that it does not estimate already."""
_DIGEST_BYTES = 16
_TOKEN_BYTES = 4
_JSON = json.JSONDecoder()


class Strategy(Enum):
    """What a client may ask for in `routing-strategy`."""

    RANDOM = "random"
    LEAST_REQUEST = "least-request"
    PREFIX_CACHE = "prefix-cache"
    """Where requests that begin alike go; a turn's holder is that already."""
    SESSION_AFFINITY = "session-affinity"
    """Where requests with the same `X-Session-ID` go, a context's or a label; a turn's holder is that already."""


class Reason(Enum):
    """Why a pod was chosen; a metric's label."""

    HOLDER = "holder"
    AWAY = "holder_away"
    """The holder is not there, not ready, not allowed, or serves another model now."""
    DRAINING = "holder_draining"
    SATURATED = "holder_saturated"
    QUEUE = "holder_queue"
    """Waiting at the holder costs more than having its KV elsewhere."""
    AFFINITY = "affinity"
    LEAST_LOADED = "least_loaded"
    STRATEGY = "strategy"


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What is known of a request when its pod is chosen."""

    model: ModelId | None = None
    holder: str = ""
    """Endpoint that has the context's KV; empty: none, or not known."""
    affinity: str = ""
    """Requests with equal ones should meet on one pod; empty: no wish."""
    is_conversation: bool = False
    """Requests with the same affinity go on from each other: where the newest was is the KV."""
    stays: bool = False
    """What it makes stays on its pod, and later requests follow: a context, a kept conversation."""
    num_tokens: int = 0
    """Whose KV it needs, as far as is known: a context's, or about as many as its prompt has."""
    strategy: Strategy | None = None
    subset: frozenset[str] | None = None
    """Addresses (`host:port`) that the proxy in front allows; None: all."""
    light: bool = False
    """It asks the engine for no work, so a full queue is no reason to refuse it."""
    tenant: str = ""
    """Tag of the request's tenant."""

    @property
    def counted_tenant(self) -> str | None:
        """Tag by which a pod counts the request as in flight; None: the engine computes nothing for it."""
        return None if self.light else self.tenant


@dataclass(frozen=True, slots=True)
class Choice:
    """A pod, and why it is that one."""

    endpoint: Endpoint
    reason: Reason
    is_placed: bool = False
    """Whether something stays there now that did not: a new context, or one that has left its holder."""
    prefix_at: str = ""
    """Sidecar of a pod that served what begins alike, where this one did not; empty: no other is known."""


def strategy_of(header: str | None) -> Strategy | None:
    """Return the strategy a `routing-strategy` header names; None for none and for unknown ones."""
    return _STRATEGIES.get(header.strip().lower()) if header else None


def choose_endpoint(roster: Roster, query: RouteQuery, *, limits: LoadLimits, rng: Random) -> Choice:
    """Return the pod for a request. Raises NoReadyEndpoint, EndpointsSaturated, TooManyInFlight.

    Of the pods that serve `query.model`; when no pod does, any ready one may say so in the engine's own words.
    """
    candidates = roster.candidates(query.model, query.subset)
    if query.strategy is Strategy.RANDOM or query.strategy is Strategy.LEAST_REQUEST:
        # The client wants another pod more than its KV.
        free = _not_saturated(_some(candidates, query, limits, rng), limits)
        chosen = rng.choice(free) if query.strategy is Strategy.RANDOM else least_loaded(free, rng)
        return Choice(chosen.endpoint, Reason.STRATEGY, query.stays or chosen.endpoint.name != query.holder != "")
    if query.holder:
        return _at_holder(candidates, roster.named(query.holder), query, limits, rng)
    if query.affinity:
        return _where_alike(roster, candidates, query, limits, rng)
    return Choice(least_loaded(_some(candidates, query, limits, rng), rng).endpoint, Reason.LEAST_LOADED, query.stays)


def prompt_affinity(tenant: TenantId, claims: Claims) -> str:
    """Return what a body's prompt or messages begin with, the tenant and model with it; empty when there is neither."""
    beginning = _beginning(claims)
    return _digest(tenant, f"{claims.model()}\0".encode() + beginning) if beginning else ""


def label_affinity(tenant: TenantId, label: str) -> str:
    """Return what requests with the same `X-Session-ID` have in common; empty without one."""
    return _digest(tenant, label.encode("utf-8", "surrogatepass")) if label else ""


def num_tokens_of(claims: Claims) -> int:
    """Return about how many tokens a body's prompt or messages are: as if it were English."""
    fields = claims.fields
    return sum(len(memoryview(spelled)) for spelled in (fields.prompt, fields.messages, fields.input)) // _TOKEN_BYTES


def least_loaded(candidates: Sequence[EndpointState], rng: Random) -> EndpointState:
    """Return the pod with the least load; among equals, of two taken at random the one used longer ago."""
    if len(candidates) <= 2:
        return min(candidates, key=_load_then_age)
    loads = [load_of(state) for state in candidates]
    least = min(loads)
    equals = [state for state, load in zip(candidates, loads, strict=True) if load == least]
    pair = rng.sample(equals, 2) if len(equals) > 2 else equals
    return min(pair, key=_load_then_age)


def _at_holder(
    candidates: Candidates, holder: EndpointState | None, query: RouteQuery, limits: LoadLimits, rng: Random
) -> Choice:
    """Return the holder, or the least loaded pod where the holder cannot take it or another one costs less."""
    if holder is None or holder not in candidates:
        reason = Reason.DRAINING if holder is not None and holder.ready and holder.endpoint.draining else Reason.AWAY
        return _moved(_not_saturated(_some(candidates, query, limits, rng), limits), holder, reason, rng)
    is_busy = is_saturated(holder, limits)
    most_s = queue_s(holder) - move_s(query.num_tokens) * (1 if is_busy else MOVE_GAIN)
    if most_s <= 0 and _is_open(holder, query, limits):
        return Choice(holder.endpoint, Reason.HOLDER)
    others = [state for state in _some(candidates, query, limits, rng) if state is not holder]
    if not _is_open(holder, query, limits):
        better = _not_saturated(others, limits)
    else:
        # Only to where nothing waits: what a move computes, the queue there waits for too, and all would come to move.
        idle = [state for state in others if not waiting_at(state)]
        better = [state for state in idle if busy_s(state) + room_s(state, query.num_tokens) < most_s]
    if not better:
        return Choice(holder.endpoint, Reason.HOLDER)
    return _moved(better, holder, Reason.SATURATED if is_busy else Reason.QUEUE, rng)


def _moved(others: Sequence[EndpointState], holder: EndpointState | None, reason: Reason, rng: Random) -> Choice:
    """Return the least loaded pod for what leaves its holder: of those that can use its KV, if there are any."""
    fingerprint = holder.fingerprint if holder is not None else ""
    alike = [state for state in others if fingerprint and state.fingerprint == fingerprint and state.tiers]
    return Choice(least_loaded(alike or others, rng).endpoint, reason, is_placed=True)


def _where_alike(roster: Roster, candidates: Candidates, query: RouteQuery, limits: LoadLimits, rng: Random) -> Choice:
    """Return where such requests were, as long as that costs least; else the first that the ring names, or another."""
    heard = roster.knowing(query.affinity)
    names = heard if query.is_conversation else some_of(list(heard), rng)
    knowing = [state for name in names if (state := roster.named(name)) is not None]
    fitting = [state for state in knowing if state in candidates]
    if query.is_conversation and fitting:
        chosen = _at_holder(candidates, _asked_last(fitting, heard), query, limits, rng)
    else:
        # Where nobody knows the beginning, all gateways send it to the same pod.
        having = fitting if knowing else candidates.near(query.affinity, 1)
        chosen = _cheapest(candidates, having, query, limits, rng)
    return replace(chosen, reason=Reason.AFFINITY, prefix_at=_prefix_at(knowing, heard, chosen.endpoint, query))


def _cheapest(
    candidates: Candidates, having: Sequence[EndpointState], query: RouteQuery, limits: LoadLimits, rng: Random
) -> Choice:
    """Return the pod that costs least, of those with no more than their share of what was placed lately."""
    has = {state.endpoint.name for state in having}
    any_ = some_of(candidates.states, rng)
    looked_at = candidates.near(query.affinity)
    looked_at += [state for state in (*having, *any_) if state not in looked_at]
    if query.stays:
        share = placed_max(sum(state.placed for state in any_), len(any_), limits)
        looked_at = [state for state in looked_at if state.placed <= share]
    open_ = [state for state in looked_at if _is_open(state, query, limits)] or _some(candidates, query, limits, rng)
    free = _not_saturated(open_, limits)
    brought_s = move_s(query.num_tokens)

    def cost_s(state: EndpointState) -> float:
        here_s = busy_s(state) + room_s(state, query.num_tokens)
        return here_s if state.endpoint.name in has else here_s + brought_s

    return Choice(min(free, key=cost_s).endpoint, Reason.AFFINITY, query.stays)


def _some(candidates: Candidates, query: RouteQuery, limits: LoadLimits, rng: Random) -> Sequence[EndpointState]:
    """Return pods that are open to a request: all, or of many some. Raises EndpointsSaturated, TooManyInFlight.

    Where every queue is full, those that others fill are open to a tenant below its share.
    """
    for some in (some_of(candidates.states, rng), candidates.states):
        if with_room := [state for state in some if _is_open(state, query, limits)]:
            return with_room
    if below_share := [state for state in candidates.states if state.tenants.is_below_share(query.tenant)]:
        return below_share
    if all(state.tenants.takes(query.tenant) for state in candidates.states):
        raise EndpointsSaturated("every pod's queue is full", retry_after_s=RETRY_AFTER_S)
    raise TooManyInFlight(
        "every pod is busy, and this tenant has its fair share of their requests in flight",
        retry_after_s=_SHARE_RETRY_S,
    )


def _is_open(state: EndpointState, query: RouteQuery, limits: LoadLimits) -> bool:
    return query.light or (state.tenants.takes(query.tenant) and not is_full(state, limits))


def _not_saturated(candidates: Sequence[EndpointState], limits: LoadLimits) -> Sequence[EndpointState]:
    return [state for state in candidates if not is_saturated(state, limits)] or candidates


def _prefix_at(knowing: Sequence[EndpointState], heard: Mapping[str, int], chosen: Endpoint, query: RouteQuery) -> str:
    """Return the sidecar to fetch the beginning from, where the chosen pod has it not, or not the newest.

    Of a conversation the one asked last has the most; of others the one asked first has had time to compute it.
    """
    there = heard.get(chosen.name, 0)
    if there and not query.is_conversation:
        return ""
    later = [state for state in knowing if state.tiers and heard[state.endpoint.name] > there]
    if not later:
        return ""
    first = min(later, key=lambda state: heard[state.endpoint.name])
    return (_asked_last(later, heard) if query.is_conversation else first).endpoint.sidecar


def _asked_last(states: Sequence[EndpointState], heard: Mapping[str, int]) -> EndpointState:
    return max(states, key=lambda state: (heard[state.endpoint.name], state.endpoint.name))


def _load_then_age(state: EndpointState) -> tuple[int, int]:
    return load_of(state), state.routed_at


def _digest(tenant: TenantId, data: bytes) -> str:
    return hashlib.blake2b(f"{tenant}\0".encode() + data, digest_size=_DIGEST_BYTES).hexdigest()


def _beginning(claims: Claims) -> bytes:
    prompt = bytes(memoryview(claims.fields.prompt)[:_PREFIX_BYTES])
    if prompt.startswith((b'"', b"[")):
        return prompt if prompt not in (b'""', b"[]") else b""
    messages = bytes(memoryview(claims.fields.messages)[:_MESSAGE_BYTES])
    return _first_message(messages[1:].lstrip()) if messages.startswith(b"[") else b""


def _first_message(spelled: bytes) -> bytes:
    """Return how the first message begins: in a conversation sent whole each time, what follows is new every time."""
    if spelled.startswith(b"]"):
        return b""
    try:
        message, _ = _JSON.raw_decode(spelled.decode(errors="replace"))
        return json.dumps(message, sort_keys=True)[:_PREFIX_BYTES].encode()
    except (ValueError, RecursionError):
        return spelled[:_PREFIX_BYTES]  # it goes on


_STRATEGIES = {strategy.value: strategy for strategy in Strategy}
