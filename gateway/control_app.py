"""The control calls on FastAPI: list, read and delete contexts; health, metrics, the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from contextcache.error_body import error_body
from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.model import MAX_LIST_LIMIT, TenantId
from contextcache.request_headers import joined_headers
from contextcache.rpc import cause_of
from gateway.api_document import DESCRIPTION, completed
from gateway.context_object import ContextDeleted, ContextList, ContextObject
from gateway.exchange import answer_headers, header_text
from gateway.flows import Gateway
from gateway.metrics import Metrics
from gateway.paths import MethodNotAllowed, PathNotFound
from gateway.ports import EndpointDirectory, EndpointState

log = logging.getLogger(__name__)

DEFAULT_LIST_LIMIT = 20
MANAGER_WAIT_S = 1.0
"""How long `/readyz` waits for a manager that hangs: less than Envoy (2 s) and a kubelet (5 s) wait for `/readyz`."""
contexts = APIRouter(tags=["contexts"])


class ReadyState:
    """Whether this gateway takes requests: everything it needs is there, and it is not on its way out."""

    def __init__(
        self,
        gateway: Gateway,
        endpoints: EndpointDirectory,
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
        """Return what `/readyz` says; `missing` names what is not there."""
        states = self._endpoints.states()
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
        "running": state.load.running,
        "waiting": state.load.waiting,
        "kv_usage": round(state.load.kv_usage, 3),
        "tiers": sorted(state.tiers),
    }


def control_app(gateway: Gateway, ready_state: ReadyState, metrics: Metrics) -> FastAPI:
    """Return the application; authentication is per call, and errors have the one shape of all our errors."""
    app = FastAPI(
        title="context-cache",
        description=DESCRIPTION,
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.gateway = gateway
    app.include_router(contexts)
    _add_health(app, ready_state, metrics)
    app.add_exception_handler(ContextCacheError, _typed_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameter)
    app.add_exception_handler(HTTPException, _framework_error)
    app.openapi = _completed(app.openapi)  # type: ignore[method-assign] # FastAPI's documented way
    return app


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _tenant(request: Request) -> TenantId:
    # Read as the requests that are carried are: one key is one tenant's, whatever its letters and wherever it is sent.
    raw = ((name.decode("latin-1").lower(), header_text(value)) for name, value in request.headers.raw)
    return _gateway(request).authenticate(joined_headers(raw))


@contexts.get("/v1/context", operation_id="list_contexts")
async def list_contexts(
    gateway: Annotated[Gateway, Depends(_gateway)],
    tenant: Annotated[TenantId, Depends(_tenant)],
    limit: Annotated[int, Query(ge=1, le=MAX_LIST_LIMIT)] = DEFAULT_LIST_LIMIT,
    after: Annotated[str, Query(max_length=128)] = "",
    model: Annotated[str, Query(max_length=1024)] = "",
) -> ContextList:
    """List the tenant's live contexts, newest first."""
    return await gateway.list_contexts(tenant, limit=limit, after=after, model=model)


@contexts.get("/v1/context/{session_id}", operation_id="read_context")
async def read_context(
    gateway: Annotated[Gateway, Depends(_gateway)], tenant: Annotated[TenantId, Depends(_tenant)], session_id: str
) -> ContextObject:
    """Describe one context, its KV included."""
    return await gateway.read(tenant, session_id)


@contexts.delete("/v1/context/{session_id}", operation_id="delete_context")
async def delete_context(
    gateway: Annotated[Gateway, Depends(_gateway)], tenant: Annotated[TenantId, Depends(_tenant)], session_id: str
) -> ContextDeleted:
    """Delete a context and its KV."""
    return await gateway.delete(tenant, session_id)


def _add_health(app: FastAPI, ready_state: ReadyState, metrics: Metrics) -> None:
    async def healthz() -> dict[str, str]:
        """Say that the process lives."""
        return {"status": "ok"}

    async def readyz() -> Response:
        """Say whether requests can be served, and what is missing if not."""
        found = await ready_state.describe()
        return Response(json.dumps(found), status_code=200 if found["ready"] else 503, media_type="application/json")

    async def metrics_page() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.get("/healthz", tags=["operations"])(healthz)
    app.get("/readyz", tags=["operations"])(readyz)
    app.get("/metrics", tags=["operations"])(metrics_page)


async def _typed_error(request: Request, exc: Exception) -> Response:
    del request
    assert isinstance(exc, ContextCacheError)
    if exc.http_status >= 500:
        log.warning("request refused", extra={"code": exc.code, "error": exc.message, "cause": cause_of(exc)})
    return Response(error_body(exc), status_code=exc.http_status, headers=dict(answer_headers(exc)))


async def _invalid_parameter(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    first = exc.errors()[0]
    name = str(first["loc"][-1])
    return await _typed_error(request, InvalidRequest(f"{name}: {first['msg']}", param=name))


async def _framework_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 405:
        return await _typed_error(request, MethodNotAllowed("this method is not possible here"))
    return await _typed_error(request, PathNotFound("no such path"))


def _completed(document: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def openapi() -> dict[str, Any]:
        return completed(document())

    return openapi
