"""All pods, and what follows of them from what changes rarely, found once: a request looks at a few pods, not at all.

Which pods may take a request, and in which order requests that begin alike prefer them. Pure.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from random import Random
from typing import Protocol, TypeVar

from contextcache.errors import NoReadyEndpoint
from contextcache.model import ModelId
from gateway.ports import Endpoint, EndpointState

LOOKED_AT_MAX = 16
"""Pods that are compared for one request: more find little better, and all gateways would find the same one."""
RETRY_AFTER_S = 2
"""About two probe intervals: long enough for a pod to be seen ready."""
_POINTS = 32
"""Of a pod on the ring: its share of it is then right to a sixth."""
_POINT_BYTES = 8
_NONE: Mapping[str, int] = {}
_NOBODY: Mapping[str, Mapping[str, int]] = {}
_UNSERVED = ModelId("")


Listed = TypeVar("Listed")


def some_of(listed: Sequence[Listed], rng: Random) -> Sequence[Listed]:
    """Return all, or of many some at random."""
    return listed if len(listed) <= LOOKED_AT_MAX else rng.sample(listed, LOOKED_AT_MAX)


class Candidates:
    """Pods that may take a request of some kind: there is one at least."""

    def __init__(self, states: Sequence[EndpointState]) -> None:
        self.states = states

    def __contains__(self, state: EndpointState) -> bool:
        return state.endpoint.name in self._names

    def near(self, affinity: str, count: int = LOOKED_AT_MAX) -> list[EndpointState]:
        """Return `count` pods, or all, in the order in which these bytes prefer them.

        A pod that goes moves only its own requests, to as many others as there are.
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
    """The pods as they are listed and ready now; their loads may change, anything else makes another roster."""

    def __init__(
        self,
        states: Sequence[EndpointState],
        knowing: Mapping[str, Mapping[str, int]] | None = None,
        expected: frozenset[ModelId] = frozenset(),
    ) -> None:
        """`knowing`: see `knowing()`, by beginning; `expected`: models that pods served lately, gone ones too."""
        self.states = tuple(states)
        self._by_name = {state.endpoint.name: state for state in states}
        self._knowing = _NOBODY if knowing is None else knowing
        self._served = {model for state in states for model in state.models} | expected
        self._candidates: dict[ModelId | None, Candidates] = {}
        """By model; of those that nobody serves by `_UNSERVED`: names are the clients' to make up."""

    def named(self, name: str) -> EndpointState | None:
        """Return the pod of this name, ready or not."""
        return self._by_name.get(name)

    def serves(self, model: ModelId) -> bool:
        """Return whether a pod says that it serves a model, or said so a moment ago."""
        return model in self._served

    def knowing(self, beginning: str) -> Mapping[str, int]:
        """Return the pods where what begins so was asked for: the last ones, not all.

        Each with when it was asked for there last, by this gateway's clock.
        """
        return self._knowing.get(beginning, _NONE)

    def candidates(self, model: ModelId | None, subset: frozenset[str] | None) -> Candidates:
        """Return the ready pods that serve a model, those that do not drain if there are any. Raises NoReadyEndpoint.

        When no pod serves it, any ready one may say so in the engine's own words; not while one that is not ready may
        be that model's, or one was a moment ago: it may be back soon. `subset`: addresses; None: all.
        """
        if subset is not None:
            return self._found(model, subset)
        kind = model if model is None or model in self._served else _UNSERVED
        if kind not in self._candidates:
            self._candidates[kind] = self._found(model, None)
        return self._candidates[kind]

    def _found(self, model: ModelId | None, subset: frozenset[str] | None) -> Candidates:
        ready = [state for state in self.states if state.ready and (subset is None or state.endpoint.address in subset)]
        if not ready:
            raise NoReadyEndpoint("no pod is ready", retry_after_s=RETRY_AFTER_S)
        if model is not None:
            serving = [state for state in ready if not state.models or model in state.models]
            if not serving and (model in self._served or any(not state.models for state in self.states)):
                raise NoReadyEndpoint("no pod that serves this model is ready", retry_after_s=RETRY_AFTER_S)
            ready = serving or ready
        return Candidates([state for state in ready if not state.endpoint.draining] or ready)


class EndpointDirectory(Protocol):
    """Which pods there are and how they do. In memory; the calls never wait."""

    def roster(self) -> Roster:
        """Return all pods, ready or not."""
        ...

    def note_placed(self, name: str, beginning: str, *, at_ms: int, is_new: bool) -> Callable[[], None]:
        """Remember what was just sent to a pod, before its reports tell; a pod gone is none.

        What is returned takes it back: it never got there.
        `beginning`: what it begins with, if that has a name; `at_ms`: now; `is_new`: it stays there now, and did not.
        """
        ...

    def endpoint(self, name: str) -> Endpoint | None:
        """Return the pod of this name, ready or not; None when there is none."""
        ...

    def mark_unreachable(self, name: str, *, certain: bool = True) -> None:
        """Take a pod that refused a connection out until it is seen healthy again; a pod gone is out already.

        Not `certain`: it did not take one in time; the last ready pod stays, as long as its probes let it.
        """
        ...

    def note_routed(self, name: str, tenant: str | None = None) -> None:
        """Count one request as sent to this pod by a proxy that does not report its end; a pod gone counts none.

        `tenant`: its tag; None for a request that asks the engine for no work.
        """
        ...

    def num_reported(self, tenant: str) -> int:
        """Return a tenant's requests that the pods reported and this gateway does not carry itself. O(pods)."""
        ...

    def carrying(self, name: str, tenant: str | None = None) -> AbstractContextManager[None]:
        """Count one request as in flight to this pod for the length of the `with` block; `tenant`: see note_routed."""
        ...


@lru_cache(maxsize=4096)
def _points(name: str) -> tuple[int, ...]:
    per_digest = hashlib.blake2b().digest_size // _POINT_BYTES
    digests = (hashlib.blake2b(f"{name}\0{number}".encode()).digest() for number in range(_POINTS // per_digest))
    return tuple(
        int.from_bytes(digest[at : at + _POINT_BYTES])
        for digest in digests
        for at in range(0, len(digest), _POINT_BYTES)
    )
