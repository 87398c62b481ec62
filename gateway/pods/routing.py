"""Which pod takes a request. Pure.

In this order: pods that are ready, in the proxy's subset, serve the model and do not drain; of those the ones whose
queue is not full; of those the holder of the context's KV, unless it is saturated and another is not, or the client
asked for something else; else, where requests with the same beginning should meet (a new context), a pod where they
did already, or the one that rendezvous hashing names, unless it is loaded well beyond the others; else the least
loaded.

A pod's load is what its engine said at the last probe, corrected by what this gateway knows to have come and gone
since. Other gateways' requests show at the next probe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from contextcache.claim import Claims
from contextcache.errors import EndpointsSaturated, NoReadyEndpoint
from contextcache.model import ModelId, TenantId
from gateway.ports import Endpoint, EndpointState

_RETRY_AFTER_S = 2
"""About two probe intervals: long enough for a pod to be seen ready."""
STRATEGY_HEADER = "routing-strategy"
"""AIBrix's header, with its values; unknown ones are ignored. It travels on: an engine does not know it."""
_PREFIX_BYTES = 1024
"""Of a prompt as spelled, that decide: a system prompt's worth. Longer ones would keep near-equal prompts apart."""
_MESSAGE_BYTES = 64 << 10
"""Within which a first message is looked for."""
_DIGEST_BYTES = 16
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
    affinity: str = ""
    """Requests with equal ones should meet on one pod; empty: no wish."""
    strategy: Strategy | None = None
    subset: frozenset[str] | None = None
    """Addresses (`host:port`) that the proxy in front allows; None: all."""
    light: bool = False
    """It asks the engine for no work, so a full queue is no reason to refuse it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A pod, and why it is that one."""

    endpoint: Endpoint
    reason: Reason
    prefix_at: str = ""
    """Sidecar of a pod that served what begins alike, where this one did not; empty: no other is known."""


def strategy_of(header: str | None) -> Strategy | None:
    """Return the strategy a `routing-strategy` header names; None for none and for unknown ones."""
    return _STRATEGIES.get(header.strip().lower()) if header else None


def choose_endpoint(states: Sequence[EndpointState], query: RouteQuery, *, limits: LoadLimits, rng: Random) -> Choice:
    """Return the pod for a request. Raises NoReadyEndpoint, EndpointsSaturated.

    Pods that serve `query.model` come first; when none does, any ready pod may say so in the engine's own words.
    """
    fitting = _candidates(states, query)
    candidates = _with_room(fitting, query, limits)
    if query.strategy is Strategy.RANDOM or query.strategy is Strategy.LEAST_REQUEST:
        # The client wants another pod more than its KV.
        free = _not_saturated(candidates, limits)
        chosen = rng.choice(free).endpoint if query.strategy is Strategy.RANDOM else least_loaded(free, rng)
        return Choice(chosen, Reason.STRATEGY)
    if query.holder:
        holder = _named(candidates, query.holder)
        if holder is not None and not is_saturated(holder, limits):
            return Choice(holder.endpoint, Reason.HOLDER)
        free = _not_saturated(candidates, limits)
        if holder is not None and holder in free:
            # All are saturated: the holder is as good as any, and has the KV.
            return Choice(holder.endpoint, Reason.HOLDER)
        away = _named(states, query.holder)
        return Choice(_least_loaded_alike(free, away, rng), _reason_to_move(away, fitting))
    if query.affinity:
        home = _by_affinity(candidates, query.affinity, limits)
        return Choice(home.endpoint, Reason.AFFINITY, _prefix_at(states, home, query.affinity))
    return Choice(least_loaded(candidates, rng), Reason.LEAST_LOADED)


def prompt_affinity(tenant: TenantId, claims: Claims) -> str:
    """Return what a body's prompt or messages begin with, the tenant and model with it; empty when there is neither."""
    beginning = _beginning(claims)
    return _digest(tenant, f"{claims.model()}\0".encode() + beginning) if beginning else ""


def label_affinity(tenant: TenantId, label: str) -> str:
    """Return what requests with the same `X-Session-ID` have in common; empty without one."""
    return _digest(tenant, label.encode("utf-8", "surrogatepass")) if label else ""


def waiting_at(state: EndpointState) -> int:
    """Return the requests in a pod's queue by now: where some wait, what comes waits too, and what ends lets one in."""
    return max(0, state.load.waiting + state.since_probe) if state.load.waiting else 0


def is_saturated(state: EndpointState, limits: LoadLimits) -> bool:
    """Return whether a pod has so much to do that even a context's holder is not worth waiting for."""
    if not state.load.waiting:
        return False
    waiting = waiting_at(state)
    return waiting >= limits.saturated_waiting or (waiting > 0 and state.load.kv_usage >= limits.saturated_kv_usage)


def load_of(state: EndpointState) -> int:
    """Return the requests a pod has by now, never fewer than this gateway is carrying to it."""
    return max(state.load.running + state.load.waiting + state.since_probe, state.in_flight)


def least_loaded(candidates: Sequence[EndpointState], rng: Random) -> Endpoint:
    """Return the pod with the least load; among equals, of two taken at random the one used longer ago."""
    if len(candidates) <= 2:
        return min(candidates, key=_load_then_age).endpoint
    loads = [load_of(state) for state in candidates]
    least = min(loads)
    equals = [state for state, load in zip(candidates, loads, strict=True) if load == least]
    pair = rng.sample(equals, 2) if len(equals) > 2 else equals
    return min(pair, key=_load_then_age).endpoint


def rendezvous_order(candidates: Sequence[EndpointState], affinity: str) -> list[EndpointState]:
    """Return pods in the order in which these bytes prefer them: a pod that goes moves only its own requests."""

    def weight(state: EndpointState) -> bytes:
        return hashlib.blake2b(f"{affinity}\0{state.endpoint.name}".encode(), digest_size=8).digest()

    return sorted(candidates, key=weight, reverse=True)


def _candidates(states: Sequence[EndpointState], query: RouteQuery) -> list[EndpointState]:
    subset, model = query.subset, query.model
    ready = [state for state in states if state.ready and (subset is None or state.endpoint.address in subset)]
    if not ready:
        raise NoReadyEndpoint("no pod is ready to take the request", retry_after_s=_RETRY_AFTER_S)
    if model is not None:
        ready = [state for state in ready if not state.models or model in state.models] or ready
    return [state for state in ready if not state.endpoint.draining] or ready


def _with_room(candidates: list[EndpointState], query: RouteQuery, limits: LoadLimits) -> list[EndpointState]:
    if query.light or not limits.shed_waiting:
        return candidates
    with_room = [state for state in candidates if not state.load.waiting or waiting_at(state) < limits.shed_waiting]
    if not with_room:
        raise EndpointsSaturated("every pod has too many requests waiting", retry_after_s=_RETRY_AFTER_S)
    return with_room


def _not_saturated(candidates: Sequence[EndpointState], limits: LoadLimits) -> Sequence[EndpointState]:
    return [state for state in candidates if not is_saturated(state, limits)] or candidates


def _named(states: Sequence[EndpointState], name: str) -> EndpointState | None:
    return next((state for state in states if state.endpoint.name == name), None)


def _least_loaded_alike(candidates: Sequence[EndpointState], holder: EndpointState | None, rng: Random) -> Endpoint:
    """Return the least loaded pod for a turn that leaves its holder: of those that can use its KV, if there are any."""
    fingerprint = holder.fingerprint if holder is not None else ""
    alike = [state for state in candidates if fingerprint and state.fingerprint == fingerprint and state.tiers]
    return least_loaded(alike or candidates, rng)


def _reason_to_move(holder: EndpointState | None, fitting: Sequence[EndpointState]) -> Reason:
    if holder is not None and holder in fitting:
        return Reason.SATURATED
    return Reason.DRAINING if holder is not None and holder.ready and holder.endpoint.draining else Reason.AWAY


def _by_affinity(candidates: Sequence[EndpointState], affinity: str, limits: LoadLimits) -> EndpointState:
    """Return the first that is not overloaded: who heard the beginning last, else by rendezvous.

    At least one pod is within the mean.
    """
    free = _not_saturated(candidates, limits)
    bound = limits.affinity_overload * (sum(map(load_of, free)) / len(free) + 1)
    return next(state for state in _last_heard_first(free, affinity) if load_of(state) <= bound)


def _prefix_at(states: Sequence[EndpointState], chosen: EndpointState, affinity: str) -> str:
    """Return a sidecar that was asked for what begins alike after the chosen pod's own was, if that ever was."""
    heard = chosen.beginnings.get(affinity, 0)
    later = [state for state in states if state.beginnings.get(affinity, 0) > heard and state.tiers]
    return next((state.endpoint.sidecar for state in _last_heard_first(later, affinity)), "")


def _last_heard_first(states: Sequence[EndpointState], affinity: str) -> list[EndpointState]:
    """Return them by when they were asked for what begins so: a conversation that moved has its newest KV there."""
    return sorted(rendezvous_order(states, affinity), key=lambda state: -state.beginnings.get(affinity, 0))


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
