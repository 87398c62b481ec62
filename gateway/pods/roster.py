"""All pods, and the results that follow from them and are computed once per change: candidates and the hash ring. Pure.

A request therefore looks at a few pods, not at all.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from random import Random
from typing import TypeVar

from contextcache.errors import NoReadyEndpoint
from contextcache.model import ModelId
from gateway.pods.state import EndpointState

LOOKED_AT_MAX = 16
"""Pods compared for one request. More improve little, and all gateways would send to the same best pod."""
RETRY_AFTER_S = 2
"""Seconds of about two probe intervals: long enough to see a pod ready."""
_POINTS = 32
"""Points of a pod on the ring. Each pod's share of the ring is then within a sixth of the mean."""
_POINT_BYTES = 8
_UNSERVED = ModelId("")
"""Key of the candidates for all models that no pod serves: clients may invent any number of names."""

Listed = TypeVar("Listed")


def some_of(listed: Sequence[Listed], rng: Random) -> Sequence[Listed]:
    """Return all entries, or LOOKED_AT_MAX at random."""
    return listed if len(listed) <= LOOKED_AT_MAX else rng.sample(listed, LOOKED_AT_MAX)


class Candidates:
    """One pod or more that may take a request."""

    def __init__(self, states: Sequence[EndpointState]) -> None:
        self.states = states

    def __contains__(self, state: EndpointState) -> bool:
        return state.endpoint.name in self._names

    def near(self, affinity: str, count: int = LOOKED_AT_MAX) -> list[EndpointState]:
        """Return `count` pods, or all, in the order in which consistent hashing prefers them for `affinity`.

        A pod that leaves moves only its own requests, spread over all other pods.
        """
        points, states = self._ring
        at = bisect(points, int.from_bytes(hashlib.blake2b(affinity.encode(), digest_size=_POINT_BYTES).digest()))
        found: dict[str, EndpointState] = {}
        wanted = min(count, len(self.states))
        while len(found) < wanted:
            state = states[at % len(points)]
            found.setdefault(state.endpoint.name, state)
            at += 1
        return list(found.values())

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(state.endpoint.name for state in self.states)

    @cached_property
    def _ring(self) -> tuple[list[int], list[EndpointState]]:
        of = {point: state for state in self.states for point in _points(state.endpoint.name)}
        points = sorted(of)
        return points, [of[point] for point in points]


class Roster:
    """The pods that are listed, ready or not. Loads change in place; any other change makes a new roster."""

    def __init__(
        self,
        states: Sequence[EndpointState],
        knowing: Mapping[str, Mapping[str, int]] | None = None,
        expected: frozenset[ModelId] = frozenset(),
    ) -> None:
        """`knowing`: by beginning, see `knowing()`; `expected`: models that any pod served lately."""
        self.states = tuple(states)
        self._by_name = {state.endpoint.name: state for state in states}
        self._knowing = {} if knowing is None else knowing
        self._served = {model for state in states for model in state.models} | expected
        self._candidates: dict[ModelId | None, Candidates] = {}

    def named(self, name: str) -> EndpointState | None:
        """Return the pod of this name, ready or not."""
        return self._by_name.get(name)

    def serves(self, model: ModelId) -> bool:
        """Return whether a pod serves a model, or did lately."""
        return model in self._served

    def knowing(self, beginning: str) -> Mapping[str, int]:
        """Return the pods that served this beginning lately, each with the time of its last request in ms."""
        return self._knowing.get(beginning, {})

    def candidates(self, model: ModelId | None, subset: frozenset[str] | None) -> Candidates:
        """Return the ready pods that serve a model, without draining ones if possible. Raises NoReadyEndpoint.

        `subset`: allowed addresses of turn processes; None: all. For an unknown model these are all ready pods: any of
        them answers with vLLM's 404. If a pod of that model may come back soon, NoReadyEndpoint is raised instead.
        """
        if subset is not None:
            return self._found(model, subset)
        kind = model if model is None or model in self._served else _UNSERVED
        if kind not in self._candidates:
            self._candidates[kind] = self._found(model, None)
        return self._candidates[kind]

    def _found(self, model: ModelId | None, subset: frozenset[str] | None) -> Candidates:
        allowed = [state for state in self.states if subset is None or state.endpoint.turn_address in subset]
        ready = [state for state in allowed if state.ready]
        if not ready:
            raise NoReadyEndpoint("no pod is ready", retry_after_s=RETRY_AFTER_S)
        if model is not None:
            serving = [state for state in ready if not state.models or model in state.models]
            if not serving and (model in self._served or any(not state.models for state in self.states)):
                raise NoReadyEndpoint("no pod that serves this model is ready", retry_after_s=RETRY_AFTER_S)
            ready = serving or ready
        return Candidates([state for state in ready if not state.endpoint.draining] or ready)


@lru_cache(maxsize=4096)
def _points(name: str) -> tuple[int, ...]:
    per_digest = hashlib.blake2b().digest_size // _POINT_BYTES
    digests = (hashlib.blake2b(f"{name}\0{number}".encode()).digest() for number in range(_POINTS // per_digest))
    return tuple(
        int.from_bytes(digest[at : at + _POINT_BYTES])
        for digest in digests
        for at in range(0, len(digest), _POINT_BYTES)
    )
