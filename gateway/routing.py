"""Which pod takes a request. Pure.

In this order: pods that are ready, not draining, serve the model and are in the proxy's subset; of those the holder of
the context's KV, unless it is saturated or the client asked for something else; else, where requests with the same
beginning should meet (a new context), the pod that rendezvous hashing names, unless it is loaded well beyond the
others; else the least loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from contextcache.errors import EndpointsSaturated, NoReadyEndpoint
from contextcache.model import ModelId
from gateway.ports import Endpoint, EndpointState

_RETRY_AFTER_S = 2
"""About two probe intervals: long enough for a pod to be seen ready."""
STRATEGY_HEADER = "routing-strategy"
"""AIBrix's header, with its values; unknown ones are ignored."""


class Strategy(Enum):
    """What a client may ask for in `routing-strategy`."""

    RANDOM = "random"
    LEAST_REQUEST = "least-request"
    PREFIX_CACHE = "prefix-cache"
    SESSION_AFFINITY = "session-affinity"


class Reason(Enum):
    """Why a pod was chosen; a metric's label."""

    HOLDER = "holder"
    AWAY = "holder_away"
    """The holder is not ready, or not there."""
    DRAINING = "holder_draining"
    SATURATED = "holder_saturated"
    AFFINITY = "affinity"
    LEAST_LOADED = "least_loaded"
    STRATEGY = "strategy"


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """When a pod has enough."""

    saturated_waiting: int = 32
    """Requests in a pod's queue from which turns move away from their holder."""
    saturated_kv_usage: float = 0.98
    """Share of KV blocks in use from which, with requests waiting, the same holds."""
    shed_waiting: int = 256
    """Requests in every pod's queue from which new ones are refused; 0: never."""
    affinity_overload: float = 1.25
    """Times the mean load (plus one) that the rendezvous pod may have."""


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What is known of a request when its pod is chosen."""

    model: ModelId | None = None
    holder: str = ""
    """Endpoint that has the context's KV; empty: none, or not known."""
    affinity: bytes = b""
    """Requests with equal bytes should meet on one pod; empty: no wish."""
    strategy: Strategy | None = None
    subset: frozenset[str] | None = None
    """Addresses (`host:port`) that the proxy in front allows; None: all."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A pod, and why it is that one."""

    endpoint: Endpoint
    reason: Reason


def strategy_of(header: str | None) -> Strategy | None:
    """Return the strategy a `routing-strategy` header names; None for none and for unknown ones."""
    try:
        return Strategy((header or "").strip().lower())
    except ValueError:
        return None


def choose_endpoint(states: Sequence[EndpointState], query: RouteQuery, *, limits: LoadLimits, rng: Random) -> Choice:
    """Return the pod for a request. Raises NoReadyEndpoint, EndpointsSaturated.

    Pods that serve `query.model` come first; when none does, any ready pod may say so in the engine's own words.
    """
    candidates = _candidates(states, query)
    if limits.shed_waiting and all(state.load.waiting >= limits.shed_waiting for state in candidates):
        raise EndpointsSaturated("every pod has too many requests waiting", retry_after_s=_RETRY_AFTER_S)
    by_name = {state.endpoint.name: state for state in candidates}
    holder = by_name.get(query.holder)
    if query.strategy is Strategy.RANDOM:
        return Choice(rng.choice(candidates).endpoint, Reason.STRATEGY)
    if query.strategy is Strategy.LEAST_REQUEST:
        return Choice(least_loaded(candidates, rng), Reason.STRATEGY)
    if holder is not None and not (
        is_saturated(holder, limits) and any(not is_saturated(s, limits) for s in candidates)
    ):
        return Choice(holder.endpoint, Reason.HOLDER)
    if query.holder:
        return _moved(states, candidates, query, limits=limits, rng=rng)
    if query.affinity:
        return Choice(_by_affinity(candidates, query.affinity, limits), Reason.AFFINITY)
    return Choice(least_loaded(candidates, rng), Reason.LEAST_LOADED)


def model_matters(states: Sequence[EndpointState]) -> bool:
    """Return whether ready pods serve different models, so that a request's model has to be known to route it."""
    return len({state.models for state in states if state.ready}) > 1


def is_saturated(state: EndpointState, limits: LoadLimits) -> bool:
    """Return whether a pod has so much to do that even a context's holder is not worth waiting for."""
    if state.load.waiting >= limits.saturated_waiting:
        return True
    return state.load.waiting > 0 and state.load.kv_usage >= limits.saturated_kv_usage


def load_of(state: EndpointState) -> int:
    """Return the requests a pod has: what it said, or what this gateway knows of, whichever is more."""
    return max(state.load.running + state.load.waiting, state.in_flight)


def least_loaded(candidates: Sequence[EndpointState], rng: Random) -> Endpoint:
    """Return the pod with the least load; among equals the less used one of two taken at random."""
    least = min(map(load_of, candidates))
    equals = [state for state in candidates if load_of(state) == least]
    pair = rng.sample(equals, 2) if len(equals) > 2 else equals
    return min(pair, key=lambda state: state.num_routed).endpoint


def rendezvous_order(candidates: Sequence[EndpointState], affinity: bytes) -> list[EndpointState]:
    """Return pods in the order in which these bytes prefer them: a pod that goes moves only its own requests."""

    def weight(state: EndpointState) -> bytes:
        return hashlib.blake2b(affinity, digest_size=8, key=state.endpoint.name.encode()[:64]).digest()

    return sorted(candidates, key=weight, reverse=True)


def _candidates(states: Sequence[EndpointState], query: RouteQuery) -> list[EndpointState]:
    ready = [state for state in states if state.ready and _is_allowed(state, query.subset)]
    if not ready:
        raise NoReadyEndpoint("no pod is ready to take the request", retry_after_s=_RETRY_AFTER_S)
    serving = [state for state in ready if _may_serve(state, query.model)] or ready
    return [state for state in serving if not state.endpoint.draining] or serving


def _moved(
    states: Sequence[EndpointState],
    candidates: Sequence[EndpointState],
    query: RouteQuery,
    *,
    limits: LoadLimits,
    rng: Random,
) -> Choice:
    """Choose for a turn whose holder is not to be used: least loaded, where its KV can be used if possible."""
    holder = next((state for state in states if state.endpoint.name == query.holder), None)
    if holder is None or not holder.ready:
        reason = Reason.AWAY
    elif holder.endpoint.draining:
        reason = Reason.DRAINING
    else:
        reason = Reason.SATURATED if holder in candidates else Reason.AWAY
    free = [state for state in candidates if not is_saturated(state, limits)] or list(candidates)
    alike = [state for state in free if holder and holder.fingerprint and state.fingerprint == holder.fingerprint]
    return Choice(least_loaded(alike or free, rng), reason)


def _by_affinity(candidates: Sequence[EndpointState], affinity: bytes, limits: LoadLimits) -> Endpoint:
    bound = limits.affinity_overload * (sum(map(load_of, candidates)) / len(candidates) + 1)
    order = rendezvous_order(candidates, affinity)
    within = (state for state in order if load_of(state) <= bound and not is_saturated(state, limits))
    return next(within, order[0]).endpoint


def _is_allowed(state: EndpointState, subset: frozenset[str] | None) -> bool:
    return subset is None or state.endpoint.address in subset


def _may_serve(state: EndpointState, model: ModelId | None) -> bool:
    return model is None or not state.models or model in state.models
