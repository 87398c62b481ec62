"""Calls that the gateway answers itself. `openapi.yaml` describes them under the names of these functions.

The document also names the allowed query parameters and body fields. These functions and `contextcache.terms` check
values.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BeforeValidator

from contextcache.claim import read_object
from contextcache.errors import OperatorOnly
from contextcache.fields import refuse_unknown
from contextcache.model import MAX_LIST_LIMIT, TenantId
from contextcache.names import KEPT_PREFIX, check_generation
from contextcache.terms import read_generation, read_if_match, read_session_id, read_terms
from gateway.contexts import NewFork
from gateway.deployment import deployment_view, model_seen_s
from gateway.flows import Gateway
from gateway.http.answers import (
    Json,
    context_list,
    context_object,
    context_read,
    deployment_object,
    kept_list,
    kept_object,
    usage_of_tenant,
)
from gateway.http.openapi import body_fields, query_parameters

_EPOCH = date(1970, 1, 1)
_LIST_LIMIT = 20
"""Default number of elements of a page."""


def _day(said: object) -> date:
    day = date.fromisoformat(str(said))
    if day.isoformat() != said:  # pydantic alone takes seconds since 1970, the library weeks
        raise ValueError("a day must be YYYY-MM-DD")
    return day


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.gateway
    return gateway


def _tenant(request: Request) -> TenantId:
    tenant: TenantId = request.state.tenant
    return tenant


async def _known_query(request: Request) -> None:
    """Raise InvalidRequest for an unknown query parameter: `?tenent=b` must not report tenant a."""
    refuse_unknown(request.query_params, query_parameters(request.scope["route"].name), kind="query parameter")


async def _fields(request: Request) -> Json:
    """Return the body, a JSON object. Raises InvalidRequest with line and column, or with an unknown field."""
    fields = read_object(request.state.body)
    refuse_unknown(fields, body_fields(request.scope["route"].name))
    return fields


async def _fields_or_none(request: Request) -> Json:
    """Return the body as `_fields` does, and an empty object for an empty body."""
    return await _fields(request) if request.state.body else {}


AskedGateway = Annotated[Gateway, Depends(_gateway)]
Tenant = Annotated[TenantId, Depends(_tenant)]
Fields = Annotated[dict[str, Any], Depends(_fields)]
FieldsOrNone = Annotated[dict[str, Any], Depends(_fields_or_none)]
Limit = Annotated[int, Query(ge=1, le=MAX_LIST_LIMIT)]
Day = Annotated[date, BeforeValidator(_day)]

contexts = APIRouter(dependencies=[Depends(_known_query)])
operations = APIRouter()


@contexts.get("/v1/context")
async def list_contexts(
    gateway: AskedGateway,
    tenant: Tenant,
    limit: Limit = _LIST_LIMIT,
    after: Annotated[str, Query(max_length=128)] = "",
    model: Annotated[str, Query(max_length=1024)] = "",
    kind: Literal["session", "kept"] = "session",
) -> Json:
    """List the tenant's live contexts, newest first."""
    if kind == "kept":
        return kept_list(await gateway.kept.page(tenant, limit=limit, after=after))
    return context_list(await gateway.contexts.page(tenant, limit=limit, after=after, model=model))


@contexts.get("/v1/context/{session_id}")
async def read_context(gateway: AskedGateway, tenant: Tenant, session_id: str) -> Json:
    """Describe one context, or one kept conversation, its KV included."""
    if session_id.startswith(KEPT_PREFIX):
        kept, unreachable = await gateway.kept.read(tenant, session_id)
        return kept_object(kept) | {"unreachable": list(unreachable)}
    return context_read(*await gateway.contexts.read(tenant, session_id))


@contexts.patch("/v1/context/{session_id}")
async def patch_context(gateway: AskedGateway, tenant: Tenant, session_id: str, said: Fields) -> Json:
    """Change the ttl, policy or metadata of a context, even while a turn runs."""
    return context_object(*await gateway.contexts.patch(tenant, session_id, read_terms(said)))


@contexts.delete("/v1/context/{session_id}")
async def delete_context(gateway: AskedGateway, tenant: Tenant, session_id: str) -> Json:
    """Delete a context, or a kept conversation, and its KV."""
    if session_id.startswith(KEPT_PREFIX):
        unreachable = list(await gateway.kept.delete(tenant, session_id))
        status = "partial" if unreachable else "success"
        return {"session_id": session_id, "status": status, "unreachable": unreachable}
    await gateway.contexts.delete(tenant, session_id)
    return {"session_id": session_id, "status": "success"}


@contexts.post("/v1/context/{session_id}/fork", status_code=201)
async def fork_context(
    request: Request, gateway: AskedGateway, tenant: Tenant, session_id: str, said: FieldsOrNone
) -> Json:
    """Create a context with the turns of this one, without copying its KV."""
    named = read_session_id(said.get("session_id"))
    fork = NewFork(read_generation(said), named, read_terms(said), request.state.key)
    return context_object(*await gateway.contexts.fork(tenant, session_id, fork))


@contexts.post("/v1/context/{session_id}/rewind")
async def rewind_context(
    gateway: AskedGateway,
    tenant: Tenant,
    session_id: str,
    said: Fields,
    if_match: Annotated[str | None, Header()] = None,
) -> Json:
    """Rewind a context to an earlier turn. A context at that turn stays unchanged."""
    generation, expected = check_generation(read_generation(said)), read_if_match(if_match)
    rewound = gateway.contexts.rewind(tenant, session_id, generation=generation, expected_generation=expected)
    return context_object(*await rewound)


@contexts.get("/v1/models/{model:path}")
async def read_model(gateway: AskedGateway, model: str) -> Json:
    """Describe one served model in OpenAI's format."""
    return {"id": model, "object": "model", "created": model_seen_s(gateway.parts, model), "owned_by": "vllm"}


@contexts.get("/v1/usage")
async def read_usage(
    request: Request,
    gateway: AskedGateway,
    tenant: Tenant,
    from_: Annotated[Day | None, Query(alias="from")] = None,
    to: Day | None = None,
    of: Annotated[str, Query(alias="tenant", max_length=64)] = "",
) -> Json:
    """Return the tenant's usage by day and API key."""
    if of not in {"", tenant}:
        _check_operator(request, "this key may read the usage of its own tenant only")
    first_day, last_day = (None if day is None else (day - _EPOCH).days for day in (from_, to))
    report = await gateway.contexts.usage(of or tenant, first_day=first_day, last_day=last_day)
    return usage_of_tenant(of or tenant, report, operator=request.state.operator)


@contexts.get("/v1/deployment")
async def read_deployment(
    request: Request,
    gateway: AskedGateway,
    limit: Limit = _LIST_LIMIT,
    after: Annotated[str, Query(max_length=64)] = "",
) -> Json:
    """Return the pods and tenants in the view of this gateway. Needs an operator's key."""
    _check_operator(request, "only an operator's key may read the deployment")
    return deployment_object(deployment_view(gateway.parts, limit=limit, after=after))


def _check_operator(request: Request, refusal: str) -> None:
    if not request.state.operator:
        raise OperatorOnly(refusal)


@operations.get("/healthz")
async def healthz() -> dict[str, str]:
    """Return 200 while the process runs."""
    return {"status": "ok"}


@operations.get("/readyz")
async def readyz(request: Request) -> Response:
    """Return 200 if the gateway can serve requests, else 503."""
    ready = (await request.app.ready_state.describe())["ready"]
    answer = Response(json.dumps({"ready": ready}), 200 if ready else 503, media_type="application/json")
    if not ready:
        # Envoy's health check then prefers another gateway and does not take this one for dead.
        answer.headers["x-envoy-degraded"] = "1"
    return answer


@operations.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(generate_latest(request.app.parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)
