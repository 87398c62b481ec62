"""What a request costs on a pod, in seconds: its queue, KV that has to come or be computed, room to keep it. Pure.

A pod's load is what its engine said at the last probe, corrected by what this gateway knows to have come and gone
since. Other gateways' requests show at the next probe.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.ports import EndpointState


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """When a pod has enough."""

    saturated_waiting: int = 32
    """Requests in a pod's queue from which turns move away from their holder as soon as that costs no more."""
    saturated_kv_usage: float = 0.98
    """Share of KV blocks in use from which, with requests waiting, the same holds."""
    shed_waiting: int = 256
    """Requests in every pod's queue from which new ones are refused; 0: never."""
    placed_overload: float = 1.25
    """Times the mean of the new contexts placed lately (and four) that a pod may have been given."""


REQUEST_S = 8.0
"""That a request holds its place in an engine's batch: some hundred tokens of answer."""
BESIDE_S = 0.02
"""That each request in a batch costs the next one: its share of steps that also compute its prompt."""
MOVE_S = 0.1
"""That any move costs before a byte travels: a question to a sidecar, and the answer."""
MOVED_TOKENS_PER_S = 8000.0
"""Of KV that comes from elsewhere or is computed again: 1 GB/s of an 8B model's, and what one GPU computes of it."""
DISK_TOKENS_PER_S = 12_000.0
"""Of KV that is read from disk instead of memory (bench_transfer: 1.7 GB/s)."""
MOVE_GAIN = 1.5
"""Times what a move costs that it has to save: it also stores a second copy, and the queue it saw is a second old."""
_ROOM_SHARE = 0.8
"""Of a tier's limit, beyond which each new context more and more likely displaces another."""
_PLACED_SLACK = 4
"""New contexts that may meet before any share is asked for: few that begin alike are best together."""


def waiting_at(state: EndpointState) -> int:
    """Return the requests in a pod's queue by now: where some wait, what comes waits too, and what ends lets one in.

    Where none waited, what was sent since waits as far as it finds no KV blocks, if requests are as large as those.
    """
    load = state.load
    if load.waiting:
        return max(0, load.waiting + state.since_probe)
    if state.since_probe <= 0 or not load.running or not load.kv_usage:
        return 0
    room = load.running * (1 - load.kv_usage) / load.kv_usage
    return max(0, state.since_probe - int(room))


def is_saturated(state: EndpointState, limits: LoadLimits) -> bool:
    """Return whether a pod has so much to do that nothing is sent there that can be as soon done elsewhere."""
    if not state.load.waiting:
        return False
    waiting = waiting_at(state)
    return waiting >= limits.saturated_waiting or (waiting > 0 and state.load.kv_usage >= limits.saturated_kv_usage)


def is_full(state: EndpointState, limits: LoadLimits) -> bool:
    """Return whether nothing more is sent there while another pod has room."""
    return bool(limits.shed_waiting and state.load.waiting and waiting_at(state) >= limits.shed_waiting)


def load_of(state: EndpointState) -> int:
    """Return the requests a pod has by now, never fewer than this gateway is carrying to it."""
    return max(state.load.running + state.load.waiting + state.since_probe, state.in_flight)


def queue_s(state: EndpointState) -> float:
    """Return how long a request waits there before it is in the batch: a place gets free whenever one ends."""
    waiting = waiting_at(state)
    return waiting * REQUEST_S / max(1, state.load.running) if waiting else 0.0


def busy_s(state: EndpointState) -> float:
    """Return what a pod's other requests cost a new one, in the queue and in the batch."""
    return queue_s(state) + load_of(state) * BESIDE_S


def move_s(num_tokens: int) -> float:
    """Return what it costs to have so many tokens' KV on a pod that has it not."""
    return MOVE_S + num_tokens / MOVED_TOKENS_PER_S


def room_s(state: EndpointState, num_tokens: int) -> float:
    """Return what keeping so many tokens' KV costs later: beyond a tier's room something else is displaced.

    From memory to disk it is read again, from disk it is computed again. Where all pods are full, all are equal.
    """
    tiers = state.tiers
    if not tiers:
        return 0.0
    beyond_memory, beyond_disk = (max(0.0, tiers.get(name, 0.0) - _ROOM_SHARE) for name in ("host", "disk"))
    if not beyond_memory and not beyond_disk:
        return 0.0
    lost_s = beyond_memory / DISK_TOKENS_PER_S + beyond_disk / MOVED_TOKENS_PER_S
    return num_tokens * lost_s / (1 - _ROOM_SHARE)


def placed_max(num_placed: int, num_pods: int, limits: LoadLimits) -> float:
    """Return how many of the new contexts placed lately one of so many pods may have."""
    return limits.placed_overload * num_placed / num_pods + _PLACED_SLACK
