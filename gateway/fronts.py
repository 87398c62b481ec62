"""What both fronts say alike: names of requests, headers, errors, and whether this gateway takes requests.

Decides nothing, and carries nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from opentelemetry.trace import Span

from contextcache.errors import ContextCacheError, MethodNotAllowed, error_headers
from contextcache.wire.rpc import cause_of
from gateway.flows import REQUEST_ID_HEADER, REQUEST_ID_PATTERN, Forward, Gateway
from gateway.metrics import Metrics
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.state import EndpointState
from gateway.tenants.keys import AUTHENTICATE

log = logging.getLogger(__name__)

CORS_METHODS = ("GET", "POST", "PATCH", "DELETE")
CORS_HEADERS = ("authorization", "*")
"""That a page may send: its key, which no wildcard covers, and whatever else its client library adds."""
CORS_EXPOSED_HEADERS = (
    "x-request-id",
    "x-session-id",
    "x-context-cache",
    "x-context-cached-tokens",
    "x-context-source",
    "x-context-mode",
    "x-context-generation",
    "x-context-expires-at",
    "idempotent-replayed",
    "server-timing",
    "retry-after",
    "www-authenticate",
    "allow",
)
"""That a page may read of an answer, beside those that browsers always show."""
CORS_MAX_AGE_S = 600
"""How long a browser asks no more: an origin taken back is out after that."""
CORS_POD_HEADERS = ("access-control-allow-origin", "access-control-allow-credentials")
"""By which a pod lets every origin read, unless told otherwise: with a list of ours they end here."""
REFUSED = "refused"
"""Kind under which requests are counted that never got as far as having one."""
MANAGER_WAIT_S = 1.0
"""How long `/readyz` waits for a manager that hangs: less than Envoy (2 s) and a kubelet (5 s) wait for `/readyz`."""


class ClientGone(Exception):
    """The client, or the proxy before us, closed the connection; nobody is left to answer."""


def mint_request_id() -> str:
    """Return a new name for a request."""
    return f"req_{uuid.uuid4().hex}"


def plain_request_id(headers: Mapping[str, str]) -> str:
    """Return the client's own name for a request; empty when there is none, or not a plain one."""
    asked = headers.get(REQUEST_ID_HEADER, "")
    return asked if REQUEST_ID_PATTERN.fullmatch(asked) else ""


def header_text(value: bytes) -> str:
    """Return a header's value as text, whatever its bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def answer_headers(error: ContextCacheError) -> list[tuple[str, str]]:
    """Return the headers of an error's answer."""
    headers = error_headers(error)
    if error.http_status == 401:
        headers.append(("www-authenticate", AUTHENTICATE))
    if error.http_status == 503 and error.retry_after_s is None:
        headers.append(("retry-after", "1"))
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers.append(("allow", error.allow))
    return headers


def log_refusal(error: ContextCacheError, *, request_id: str) -> None:
    """Log an error that is ours, with what an inner call said, which no client is told."""
    if error.http_status >= 500:
        fields = {"request_id": request_id, "code": error.code, "error": error.message, "cause": cause_of(error)}
        log.warning("request refused", extra=fields)


def describe(span: Span, forward: Forward) -> None:
    """Say on a request's span where it goes, and why there."""
    if not span.is_recording():
        return
    span.update_name(f"gateway {forward.kind.value}")
    span.set_attribute("contextcache.endpoint", forward.endpoint.name)
    span.set_attribute("contextcache.choice", forward.choice.reason.value)
    if forward.session is not None:
        span.set_attribute("contextcache.session_id", forward.session.session_id)


class ReadyState:
    """Whether this gateway takes requests: everything it needs is there, and it is not on its way out."""

    def __init__(
        self,
        gateway: Gateway,
        endpoints: WatchedEndpoints,
        *,
        metrics: Metrics | None = None,
        manager_wait_s: float = MANAGER_WAIT_S,
    ) -> None:
        self._manager_wait_s = manager_wait_s
        self._metrics = metrics
        self._gateway = gateway
        self._endpoints = endpoints
        self.draining = False

    async def describe(self) -> dict[str, Any]:
        """Return what `/readyz` on the metrics port says; `missing` names what is not there."""
        states = self._endpoints.roster().states
        missing = [] if await self._manager_serves() else ["context manager"]
        if not any(state.ready for state in states):
            missing.append("ready endpoint")
        if self.draining:
            missing.append("time: the gateway is draining")
        if self._metrics is not None:
            self._metrics.ready.set(not missing)
        return {
            "ready": not missing,
            "missing": missing,
            "endpoints": {state.endpoint.name: _described(state) for state in states},
        }

    async def _manager_serves(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._manager_wait_s):
                return await self._gateway.is_serving()
        return False


def _described(state: EndpointState) -> dict[str, Any]:
    return {
        "ready": state.ready,
        "draining": state.endpoint.draining,
        "models": sorted(state.models),
        "in_flight": state.in_flight,
        "clock_skew_s": state.clock_skew_s,
        "running": state.load.running,
        "waiting": state.load.waiting,
        "kv_usage": round(state.load.kv_usage, 3),
        "tiers": sorted(state.tiers),
        "beginnings": state.beginnings,
        "placed": state.placed,
    }
