"""The interface that the HTTP front and the Envoy front share: requests, their ids, errors as answers, readiness.

Routes nothing and carries nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span

from contextcache.errors import ContextCacheError, MethodNotAllowed, error_body, error_headers
from contextcache.process.logs import traceback_without_messages
from contextcache.wire.rpc import cause_of
from gateway.flows import REQUEST_ID_HEADER, REQUEST_ID_PATTERN, Forward
from gateway.parts import Parts
from gateway.pods.state import EndpointState
from gateway.tenants.keys import AUTHENTICATE

log = logging.getLogger(__name__)

CORS_METHODS = ("GET", "POST", "PATCH", "DELETE")
CORS_HEADERS = ("authorization", "*")
"""Headers that a page may send: its key, which the wildcard does not cover, and those of its client library."""
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
"""Headers of an answer that a page may read, beside those that browsers always show."""
CORS_MAX_AGE_S = 600
"""Seconds for which a browser caches a preflight: a removed origin keeps access for that long."""
CORS_POD_HEADERS = ("access-control-allow-origin", "access-control-allow-credentials")
"""vLLM's permissive CORS headers. Removed if `cors_origins` is set."""
REFUSED = "refused"
"""Kind in metrics of requests that were refused before their kind was known."""
MANAGER_WAIT_S = 1.0
"""Seconds that `/readyz` waits for a manager that hangs. Envoy waits 2 s for `/readyz`, a kubelet 5 s."""


class ClientGone(Exception):
    """The client, or the proxy in front, closed the connection. No answer can be sent."""


class FrontRequest:
    """Head of one request, its ids, and its kind in metrics."""

    def __init__(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """`headers` have lower-case names, with repeated ones joined."""
        self.method, self.path, self.headers = method, path, headers
        self.minted_id = mint_request_id()
        """Id of the request among our parts; never the client's choice."""
        self.request_id = plain_request_id(headers) or self.minted_id
        """Id in answers and towards the engine: the client's own id if it is valid."""
        self.kind = REFUSED

    @property
    def declared_bytes(self) -> int:
        """Size of the body by the client's Content-Length; 0 without a valid one."""
        declared = self.headers.get("content-length", "")
        # Python refuses to parse thousands of digits. No size has more than twenty.
        return int(declared[:20]) if declared.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Answer to a request that failed."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    code: str

    @classmethod
    def of(cls, exc: Exception, *, request_id: str) -> ErrorAnswer:
        """Return the answer for an exception, and log faults of ours. Other exceptions than our errors get a 500."""
        if isinstance(exc, ContextCacheError):
            error = exc
            if error.http_status >= 500:
                fields = {"request_id": request_id, "code": error.code, "error": error.message}
                log.warning("request refused", extra={**fields, "cause": cause_of(error)})
        else:
            error = ContextCacheError("the gateway failed")
            # The exception's message may quote the request.
            log.error("request failed", extra={"request_id": request_id, "exception": traceback_without_messages(exc)})
        headers = error_headers(error)
        if error.http_status == 401:
            headers.append(("www-authenticate", AUTHENTICATE))
        if error.http_status == 503 and error.retry_after_s is None:
            headers.append(("retry-after", "1"))
        if isinstance(error, MethodNotAllowed) and error.allow:
            headers.append(("allow", error.allow))
        return cls(error.http_status, headers, error_body(error), error.code)


def mint_request_id() -> str:
    """Return a new request id."""
    return f"req_{uuid.uuid4().hex}"


def plain_request_id(headers: Mapping[str, str]) -> str:
    """Return the client's own request id; empty if there is none, or an invalid one."""
    asked = headers.get(REQUEST_ID_HEADER, "")
    return asked if REQUEST_ID_PATTERN.fullmatch(asked) else ""


def header_text(value: bytes) -> str:
    """Return a header's value as text. Never fails."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def describe(span: Span, forward: Forward) -> None:
    """Put the pod of a request, and the reason for its choice, on the request's span."""
    if not span.is_recording():
        return
    span.update_name(f"gateway {forward.kind.value}")
    span.set_attribute("contextcache.endpoint", forward.endpoint.name)
    span.set_attribute("contextcache.choice", forward.choice.reason.value)
    if forward.session is not None:
        span.set_attribute("contextcache.session_id", forward.session.session_id)


class ReadyState:
    """Readiness of this gateway: it is ready while the context manager serves, a pod is ready and it does not drain."""

    def __init__(self, parts: Parts, *, manager_wait_s: float = MANAGER_WAIT_S) -> None:
        self._parts = parts
        self._manager_wait_s = manager_wait_s
        self.draining = False

    async def describe(self) -> dict[str, Any]:
        """Return the body of `/readyz` on the metrics port. `missing` names the reasons against readiness."""
        states = self._parts.endpoints.states()
        missing = [] if await self._manager_serves() else ["context manager"]
        if not any(state.ready for state in states):
            missing.append("ready endpoint")
        if self.draining:
            missing.append("time: the gateway is draining")
        self._parts.metrics.ready.set(not missing)
        return {
            "ready": not missing,
            "missing": missing,
            "endpoints": {state.endpoint.name: _described(state) for state in states},
        }

    async def _manager_serves(self) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._manager_wait_s):
                return await self._parts.manager.is_serving()
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
        "beginnings": len(state.heard),
        "placed": state.placed,
    }
