"""Which pod takes a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from contextcache.errors import NoReadyEndpoint
from contextcache.model import ModelId
from gateway.ports import Endpoint, EndpointState

_RETRY_AFTER_S = 2
"""About two probe intervals: long enough for a pod to be seen ready."""


def choose_endpoint(states: Sequence[EndpointState], *, model: ModelId | None, holder: str = "") -> Endpoint:
    """Return the holder if it is ready, else the pod with the fewest requests in flight. Raises NoReadyEndpoint.

    Pods that serve `model` come first; when none does, any ready pod may say so in the engine's own words.
    """
    ready = [state for state in states if state.ready]
    if not ready:
        raise NoReadyEndpoint("no pod is ready to take the request", retry_after_s=_RETRY_AFTER_S)
    candidates = [state for state in ready if _may_serve(state, model)] or ready
    for state in candidates:
        if state.endpoint.name == holder:
            return state.endpoint
    return min(candidates, key=lambda state: (state.in_flight, state.num_routed)).endpoint


def model_matters(states: Sequence[EndpointState]) -> bool:
    """Return whether ready pods serve different models, so that a request's model has to be known to route it."""
    return len({state.models for state in states if state.ready}) > 1


def _may_serve(state: EndpointState, model: ModelId | None) -> bool:
    return model is None or not state.models or model in state.models
