"""Chooses the pod for a request. Pure.

Rules, in this order:

1. Candidates are ready pods in the proxy's subset that serve the model. Draining pods count only if no other is left.
2. A pod takes no request if its queue is full, or if the tenant has its fair share there (`gateway/shares.py`). If no
   pod takes the request, a tenant below its share is sent to one all the same.
3. A turn goes to the pod that has its KV, a kept conversation to the pod of its last request. Both move if waiting
   there costs more than moving the KV.
4. Requests with the same beginning meet on the cheapest pod. A new context goes only to pods that have at most their
   share of new contexts.
5. Other requests go to the least loaded pod.

A turn, and a request whose KV is kept, also gets a standby (`standby_for`): the pod that continues the answer if the
chosen pod's engine fails.

Of many pods only a few are compared: the holder, pods that know the beginning, pods next to it on the hash ring, or a
random sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from contextcache.errors import EndpointsSaturated, TooManyInFlight
from contextcache.identity import Standby
from contextcache.model import ModelId
from gateway.pods.roster import RETRY_AFTER_S, Roster, some_of
from gateway.pods.state import MOVE_GAIN, Endpoint, EndpointState, LoadLimits, move_s

_SHARE_RETRY_S = 1
"""Seconds of one probe interval: the next probe is the first to show room that the gateway does not estimate yet."""
_PLACED_OVERLOAD = 1.25
"""Factor above the mean of new contexts placed lately that one pod may have."""
_PLACED_SLACK = 4
"""New contexts beyond that: a few with the same beginning are best together."""


class ChoiceReason(Enum):
    """Reason for a choice; a metric's label."""

    HOLDER = "holder"
    AWAY = "holder_away"
    """The holder is gone, not ready, outside the subset, or serves another model now."""
    DRAINING = "holder_draining"
    SATURATED = "holder_saturated"
    QUEUE = "holder_queue"
    """Waiting at the holder costs more than moving the KV."""
    AFFINITY = "affinity"
    LEAST_LOADED = "least_loaded"


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Facts about a request that decide its pod."""

    model: ModelId | None = None
    holder: str = ""
    """Endpoint that has the KV of the context, or of a new context's parent; empty: none, or unknown."""
    affinity: str = ""
    """Hash of the prompt's beginning, or name of the kept conversation. Requests with the same one share a prefix.
    Empty: unknown."""
    parent: str = ""
    """Affinity of the parent conversation. It counts while `affinity` is unknown."""
    is_conversation: bool = False
    """True: requests with the same affinity continue each other, so the pod of the newest one has the KV."""
    stays: bool = False
    """True: the request leaves KV that later requests follow, as a new context or a kept conversation does."""
    num_tokens: int = 0
    """Tokens of the context, or an estimate of the prompt's."""
    subset: frozenset[str] | None = None
    """Addresses (`host:port`) of turn processes that the proxy in front allows; None: all."""
    only_turn: bool = False
    """True: the proxy in front reaches the turn processes only, as an InferencePool does."""
    body_bytes: int | None = 0
    """Size of the body; None: the body was not read."""
    light: bool = False
    """True: the engine computes nothing for the request, so a full queue does not refuse it."""
    tenant: str = ""
    """Tag of the request's tenant."""

    @property
    def counted_tenant(self) -> str | None:
        """Tag under which a pod counts the request as in flight; None: the engine computes nothing for it."""
        return None if self.light else self.tenant


@dataclass(frozen=True, slots=True)
class Choice:
    """A pod, with the reason."""

    endpoint: Endpoint
    reason: ChoiceReason
    is_placed: bool = False
    """True: KV will stay on this pod that was not there, of a new context or of one that left its holder."""
    prefix_at: str = ""
    """Sidecar of a pod that has served this beginning, if the chosen pod has not; empty: none is known."""


def choose_endpoint(roster: Roster, query: RouteQuery, *, limits: LoadLimits, rng: Random) -> Choice:
    """Return the pod for a request. Raises NoReadyEndpoint, EndpointsSaturated, TooManyInFlight."""
    return _Choosing(roster, query, limits, rng).choice()


def standby_for(
    roster: Roster, query: RouteQuery, chosen: Endpoint, *, rng: Random, limits: LoadLimits
) -> Standby | None:
    """Return the pod that continues the answer if the chosen pod's engine fails; None: no pod can.

    Both pods need a turn process of their own: it outlives the engine, and the other engine takes its requests. The
    fingerprints must be equal, so that the other engine loads the KV and computes the same answer.
    """
    here = roster.named(chosen.name)
    if here is None or not chosen.has_turn_process:
        return None
    fitting = [
        state
        for state in some_of(roster.candidates(query.model, query.subset).states, rng)
        if state is not here
        and state.endpoint.has_turn_process
        and state.fingerprint == here.fingerprint
        and not (state.endpoint.draining or state.is_saturated(limits) or state.is_full(limits))
    ]
    if not fitting:
        return None
    other = _least_loaded(fitting, rng).endpoint
    return Standby(other.name, other.url, other.sidecar, chosen.sidecar)


class _Choosing:
    """One choice."""

    def __init__(self, roster: Roster, query: RouteQuery, limits: LoadLimits, rng: Random) -> None:
        self._roster, self._query, self._limits, self._rng = roster, query, limits, rng
        self._candidates = roster.candidates(query.model, query.subset)

    def choice(self) -> Choice:
        query, holder = self._query, self._roster.named(self._query.holder)
        if query.holder and not query.stays:
            return self._at_holder(holder)
        if holder is not None and holder in self._candidates:
            # The parent's. The new context needs the common beginning of its KV, and its own KV stays where it is made.
            chosen = self._at_holder(holder)
            is_away = chosen.endpoint.name != holder.endpoint.name and bool(holder.tiers)
            return replace(chosen, is_placed=True, prefix_at=holder.endpoint.sidecar if is_away else "")
        if self._query.affinity:
            return self._where_alike()
        least = _least_loaded(self._some(), self._rng)
        return Choice(least.endpoint, ChoiceReason.LEAST_LOADED, self._query.stays)

    def _at_holder(self, holder: EndpointState | None) -> Choice:
        """Return the holder, or the least loaded other pod if the holder cannot take the request or costs more."""
        if holder is None or holder not in self._candidates:
            is_draining = holder is not None and holder.ready and holder.endpoint.draining
            reason = ChoiceReason.DRAINING if is_draining else ChoiceReason.AWAY
            return self._moved(self._not_saturated(self._some()), holder, reason)
        num_tokens, is_busy = self._query.num_tokens, holder.is_saturated(self._limits)
        gain_s = holder.queue_s() - move_s(num_tokens) * (1 if is_busy else MOVE_GAIN)
        is_open = self._is_open(holder)
        if is_open and gain_s <= 0:
            return Choice(holder.endpoint, ChoiceReason.HOLDER)
        others = [state for state in self._some() if state is not holder]
        if is_open:
            # Only to pods without a queue: requests queued there would wait for the moved KV's prefill, and move too.
            idle = [state for state in others if not state.num_waiting()]
            better: Sequence[EndpointState] = [s for s in idle if s.busy_s() + s.room_s(num_tokens) < gain_s]
        else:
            better = self._not_saturated(others)
        if not better:
            return Choice(holder.endpoint, ChoiceReason.HOLDER)
        return self._moved(better, holder, ChoiceReason.SATURATED if is_busy else ChoiceReason.QUEUE)

    def _moved(self, others: Sequence[EndpointState], holder: EndpointState | None, reason: ChoiceReason) -> Choice:
        """Return the least loaded of the other pods, preferably of those that can use the holder's KV."""
        fingerprint = holder.fingerprint if holder is not None else ""
        alike = [state for state in others if fingerprint and state.fingerprint == fingerprint and state.tiers]
        return Choice(_least_loaded(alike or others, self._rng).endpoint, reason, is_placed=True)

    def _where_alike(self) -> Choice:
        """Return the pod of requests with this beginning, or a cheaper one."""
        query = self._query
        heard = self._roster.knowing(query.affinity) or self._roster.knowing(query.parent)
        names = heard if query.is_conversation else some_of(list(heard), self._rng)
        knowing = [state for name in names if (state := self._roster.named(name)) is not None]
        fitting = [state for state in knowing if state in self._candidates]
        if query.is_conversation and fitting:
            chosen = self._at_holder(_asked_last(fitting, heard))
        else:
            # All gateways send an unknown beginning to the same pod.
            chosen = self._cheapest(fitting if knowing else self._candidates.near(query.affinity, 1))
        prefix_at = _prefix_at(knowing, heard, chosen.endpoint, query)
        return replace(chosen, reason=ChoiceReason.AFFINITY, prefix_at=prefix_at)

    def _cheapest(self, having: Sequence[EndpointState]) -> Choice:
        """Return the cheapest pod; `having` have the beginning, on others its KV must be moved or computed."""
        query = self._query
        sample = some_of(self._candidates.states, self._rng)
        compared = self._candidates.near(query.affinity)
        compared += [state for state in (*having, *sample) if state not in compared]
        if query.stays:
            most = placed_max(sum(state.placed for state in sample), len(sample))
            compared = [state for state in compared if state.placed <= most]
        open_ = [state for state in compared if self._is_open(state)] or self._some()

        def cost_s(state: EndpointState) -> float:
            here_s = state.busy_s() + state.room_s(query.num_tokens)
            return here_s if state in having else here_s + move_s(query.num_tokens)

        return Choice(min(self._not_saturated(open_), key=cost_s).endpoint, ChoiceReason.AFFINITY, query.stays)

    def _some(self) -> Sequence[EndpointState]:
        """Return all pods that take the request, or a sample of many. Raises EndpointsSaturated, TooManyInFlight.

        If every queue is full, a tenant below its share may use the pods that others fill.
        """
        tenant, states = self._query.tenant, self._candidates.states
        for some in (some_of(states, self._rng), states):
            if with_room := [state for state in some if self._is_open(state)]:
                return with_room
        if below_share := [state for state in states if state.tenants.is_below_share(tenant)]:
            return below_share
        if all(state.tenants.takes(tenant) for state in states):
            raise EndpointsSaturated("every pod's queue is full", retry_after_s=RETRY_AFTER_S)
        raise TooManyInFlight(
            "every pod is busy, and this tenant has its fair share of their requests in flight",
            retry_after_s=_SHARE_RETRY_S,
        )

    def _is_open(self, state: EndpointState) -> bool:
        query = self._query
        return query.light or (state.tenants.takes(query.tenant) and not state.is_full(self._limits))

    def _not_saturated(self, states: Sequence[EndpointState]) -> Sequence[EndpointState]:
        return [state for state in states if not state.is_saturated(self._limits)] or states


def placed_max(num_placed: int, num_pods: int) -> float:
    """Return one pod's share of the new contexts placed lately on `num_pods` pods."""
    return _PLACED_OVERLOAD * num_placed / num_pods + _PLACED_SLACK


def _least_loaded(states: Sequence[EndpointState], rng: Random) -> EndpointState:
    """Return the pod with the fewest requests; among equals, the one used longer ago of two taken at random."""
    loads = [state.num_requests() for state in states]
    least = min(loads)
    equals = [state for state, load in zip(states, loads, strict=True) if load == least]
    pair = rng.sample(equals, 2) if len(equals) > 2 else equals
    return min(pair, key=lambda state: state.routed_at)


def _prefix_at(knowing: Sequence[EndpointState], heard: Mapping[str, int], chosen: Endpoint, query: RouteQuery) -> str:
    """Return the sidecar that has the beginning if the chosen pod lacks it, or lacks the newest of a conversation.

    The pod asked last has most of a conversation. For other beginnings the pod asked first had time to compute it.
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
