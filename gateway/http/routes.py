"""Every route of the HTTP front: contexts and operations answered here, creates and turns carried to a pod.

FastAPI makes the OpenAPI document of them. Those that are carried are never run: `app.py` takes their bytes past
FastAPI, so their signatures are words for the document only, like what is said here of each call's answers.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, BeforeValidator, TypeAdapter, WithJsonSchema

from contextcache.claim import read_object
from contextcache.errors import ERRORS_BY_CODE, OperatorOnly
from contextcache.fields import refuse_unknown
from contextcache.model import MAX_LIST_LIMIT, TenantId
from contextcache.names import KEPT_PREFIX, check_generation
from contextcache.terms import read_generation, read_if_match, read_session_id, read_terms
from gateway.contexts import NewFork
from gateway.deployment import deployment_view, model_seen_s
from gateway.flows import Gateway
from gateway.fronts import ReadyState
from gateway.http.models import (
    SESSION_ID_SCHEMA,
    Answered,
    AnsweredMessage,
    AnthropicMessages,
    ChatCompletion,
    Completed,
    Completion,
    ContextDeleted,
    ContextFork,
    ContextList,
    ContextObject,
    ContextPatch,
    ContextRewind,
    Created,
    CreateFromMessages,
    CreateFromPrompt,
    DeploymentObject,
    Error,
    KeptList,
    KeptObject,
    ModelObject,
    NewResponse,
    ReadContext,
    UsageOfTenant,
    context_list,
    context_object,
    context_read,
    deployment_object,
    kept_list,
    kept_object,
    usage_of_tenant,
)
from gateway.metrics import Metrics


def _day(said: object) -> date:
    day = date.fromisoformat(str(said))
    if day.isoformat() != said:  # pydantic alone takes seconds since 1970, the library weeks
        raise ValueError("a day must be YYYY-MM-DD")
    return day


Day = Annotated[date, BeforeValidator(_day)]
DEFAULT_LIST_LIMIT = 20
DESCRIPTION = (
    "Create a context once, then send its `session_id` and only the new turn. Errors have OpenAI's "
    "body plus `detail`. The gateway passes all other paths under `/v1/` to the engine."
)

_EPOCH = date(1970, 1, 1)
_ALWAYS = ("invalid_api_key", "rate_limit_exceeded", "internal_error")
_KEPT_BY_MANAGER = (*_ALWAYS, "store_unavailable", "gateway_unavailable")
_WITH_BODY = ("invalid_request", "upload_too_slow", "body_too_large", "too_many_in_flight", "no_ready_endpoint")
_NAMED_CONTEXT = ("context_not_found", "context_expired", "not_found")
"""The last of a name that is not plainly spelled."""
_CREATES = (
    *_KEPT_BY_MANAGER,
    *_WITH_BODY,
    *("ttl_out_of_range", "context_length_exceeded", "model_not_found", "context_exists", "context_expired"),
    *("context_busy", "idempotency_key_in_use", "answer_not_kept", "idempotency_key_reused"),
    *("context_quota_exceeded", "endpoints_saturated", "engine_error", "deadline_exceeded"),
)
_TURNS = (*_CREATES, "history_ambiguous", "model_mismatch", "context_not_found", "generation_mismatch")
_CHANGES = (*_KEPT_BY_MANAGER, *_WITH_BODY, *_NAMED_CONTEXT, "context_busy")
_STATUSES = {code: error.http_status for code, error in ERRORS_BY_CODE.items()}
_TEXT = {"schema": {"type": "string"}}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_NUMBER = {"schema": {"type": "integer", "minimum": 0}}
_REQUEST_ID = {"X-Request-ID": {"required": True, **_TEXT}}
_RECEIPT: dict[str, Any] = {
    "X-Session-ID": _TEXT,
    "X-Context-Cache": {"schema": {"enum": ["hit", "partial", "miss", "recomputed"]}},
    "X-Context-Cached-Tokens": _NUMBER,
    "X-Context-Mode": {"schema": {"enum": ["append", "replay"]}},
    "X-Context-Generation": _NUMBER,
    "X-Context-Expires-At": _NUMBER,
    "Server-Timing": _TEXT,
}
_REQUIRED_RECEIPT = {name: {**header, "required": True} for name, header in _RECEIPT.items()}
_REPLAYED = {
    "Idempotent-Replayed": {
        "schema": {"const": "true"},
        "description": "The answer repeats the first answer under this key.",
    }
}
_SOURCE = {
    "X-Context-Source": {"schema": {"type": "string"}, "description": "Source of the KV of a request whose KV is kept."}
}
_RETRY = {"Retry-After": _NUMBER}
_ERROR_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"required": True, **_TEXT}},
    409: _RETRY,
    429: _RETRY,
    503: {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 0}}},
}
_KEY = HTTPBearer(
    scheme_name="key", description="The key may also be in `X-Api-Key`. Two different keys are a 401.", auto_error=False
)
_NAMED = "$response.header.X-Session-ID"
_CALL = {"parameters": {"session_id": _NAMED}}
_TURN = {"requestBody": {"session_id": _NAMED, "model": "$request.body#/model"}}
_CARRIED: dict[str, Any] = {
    "description": "The engine's completion object or event stream, with the context's fields.",
    "content": {"text/event-stream": {}},
    # What can be done with the context that the answer names.
    "links": {
        "read_context": {"operationId": "read_context", **_CALL},
        "patch_context": {"operationId": "patch_context", **_CALL},
        "rewind_context": {"operationId": "rewind_context", **_CALL},
        "fork_context": {"operationId": "fork_context", **_CALL},
        "delete_context": {"operationId": "delete_context", **_CALL},
        "completion": {"operationId": "completion", **_TURN},
        "chat_completion": {"operationId": "chat_completion", **_TURN},
    },
}


def _answers(*codes: str, success: int = 200, **more: Any) -> dict[int | str, dict[str, Any]]:
    """Return what a call answers: `success` with `more` said of it, and errors of these codes, each at its status."""
    found: dict[int | str, dict[str, Any]] = {success: {**more, "headers": _REQUEST_ID | more.get("headers", {})}}
    for status in sorted({_STATUSES[code] for code in codes}):
        of_status = sorted({code for code in codes if _STATUSES[code] == status})
        schema = {"properties": {"error": {"properties": {"code": {"enum": of_status}}}}}
        found[status] = {
            "model": Error,
            "description": f"`code`: {', '.join(of_status)}",
            "headers": _REQUEST_ID | _ERROR_HEADERS.get(status, {}),
            "content": {"application/json": {"schema": schema}},
        }
    return found


def _carried(model: type[BaseModel], *codes: str, headers: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return what a call answers that goes to a pod: the engine's answer, whole or as a stream."""
    told = _answers(*codes, **_CARRIED, headers=headers | _REPLAYED)
    return told | {200: {**told[200], "model": model}}


def _turn_answers(model: type[BaseModel] = Completed, *more: str) -> dict[int | str, dict[str, Any]]:
    """Return what a completion answers, `more` codes too: without a context the engine refuses in its own words."""
    its = "an error of the engine itself, for a request without a context"
    found = _carried(model, *_TURNS, *more, headers=_RECEIPT | _SOURCE)
    for status in (400, 404):
        found[status] = {"description": f"{found[status]['description']}; or {its}", "content": _OBJECT}
    return found | {"4XX": {"description": f"{its.capitalize()}.", "content": _OBJECT}}


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.gateway
    return gateway


def _tenant(request: Request) -> TenantId:
    tenant: TenantId = request.state.tenant
    return tenant


async def _known_query(request: Request) -> None:
    """Raise InvalidRequest for a query parameter that a call has not: `?tenent=b` must not tell of tenant a."""
    known = frozenset(parameter.alias for parameter in request.scope["route"].dependant.query_params)
    refuse_unknown(request.query_params, known, kind="query parameter")


async def _fields(request: Request) -> dict[str, Any]:
    """Return the body, an object. Raises InvalidRequest with line and column."""
    return read_object(request.state.body)


async def _fields_or_none(request: Request) -> dict[str, Any]:
    """Return the body as `_fields`; without one, an empty object."""
    return await _fields(request) if request.state.body else {}


def _body(schema: Any, *, required: bool = True) -> dict[str, Any]:
    """Return what the document says of a body that is read here, and not by FastAPI: our words, line and column."""
    content = {"application/json": {"schema": TypeAdapter(schema).json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


AskedGateway = Annotated[Gateway, Depends(_gateway)]
Tenant = Annotated[TenantId, Depends(_tenant)]
Fields = Annotated[dict[str, Any], Depends(_fields)]
FieldsOrNone = Annotated[dict[str, Any], Depends(_fields_or_none)]
IfMatch = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "pattern": r'^([0-9]{1,15}|(W/)?"[0-9]{1,15}"|\*)$'}),
    Header(
        description="Generation that the context must have. Any other generation is a 409. `*` accepts any generation."
    ),
]
RepeatKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[!-~]([ -~]{0,253}[!-~])?$",
        description="Client's name for this request. A repeat within a day gets the first answer again.",
    ),
]
UsageHeader = Annotated[
    str | None,
    WithJsonSchema({"type": "string"}),
    Header(
        alias="X-Usage-Format",
        description="Prompt count in usage. `openai`: the whole prompt. `context`: the computed tokens. Without it "
        "the key or the endpoint decides.",
    ),
]
KeepAliveHeader = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "pattern": "^([1-9]|[1-5][0-9]|60)$"}),
    Header(
        alias="X-Keep-Alive-Comments",
        description="Seconds of silence, 1 to 60, after which a stream sends its head and a comment. The head then "
        "lacks the receipt headers, and a later error is an event.",
    ),
]
SessionHeader = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "pattern": "^[!-~]{1,128}$"}),
    Header(
        alias="X-Session-ID",
        description="Context to continue. A value without `ctx_` is a label: the name of one of the tenant's "
        "contexts, or ignored.",
    ),
]
KeepHeader = Annotated[
    str | None,
    WithJsonSchema({"type": "string", "pattern": "^[!-~]{1,128}$"}),
    Header(
        alias="X-Context-Keep", description="`off`: do not keep the KV of this request, whatever the key's default."
    ),
]
SessionPath = Annotated[str, Path(json_schema_extra=SESSION_ID_SCHEMA, description="Name of the context.")]

contexts = APIRouter(tags=["contexts"], dependencies=[Depends(_KEY), Depends(_known_query)])
turns = APIRouter(tags=["turns"], dependencies=[Depends(_KEY)])
operations = APIRouter(tags=["operations"])


@contexts.post(
    "/v1/context", operation_id="create_context", responses=_carried(Created, *_CREATES, headers=_REQUIRED_RECEIPT)
)
async def create_context(
    body: CreateFromPrompt | CreateFromMessages,
    key: RepeatKey = "",
    usage: UsageHeader = None,
    keep_alive: KeepAliveHeader = None,
) -> None:
    """Create a context and answer its first prompt."""


@turns.post("/v1/completions", operation_id="completion", responses=_turn_answers())
async def complete(
    body: Completion,
    key: RepeatKey = "",
    usage: UsageHeader = None,
    session: SessionHeader = None,
    keep: KeepHeader = None,
    keep_alive: KeepAliveHeader = None,
    if_match: IfMatch = None,
) -> None:
    """Complete a prompt. With `session_id`, continue a context."""


@turns.post("/v1/chat/completions", operation_id="chat_completion", responses=_turn_answers())
async def complete_chat(
    body: ChatCompletion,
    key: RepeatKey = "",
    usage: UsageHeader = None,
    session: SessionHeader = None,
    keep: KeepHeader = None,
    keep_alive: KeepAliveHeader = None,
    if_match: IfMatch = None,
) -> None:
    """Answer messages. With `session_id`, continue a context."""


@turns.post("/v1/messages", operation_id="messages", responses=_turn_answers(AnsweredMessage))
async def answer_messages(
    body: AnthropicMessages,
    key: RepeatKey = "",
    session: SessionHeader = None,
    keep: KeepHeader = None,
    keep_alive: KeepAliveHeader = None,
    if_match: IfMatch = None,
) -> None:
    """Answer Anthropic's messages. With `session_id`, continue a context."""


@turns.post("/v1/responses", operation_id="response", responses=_turn_answers(Answered, "previous_response_not_found"))
async def respond(
    body: NewResponse,
    key: RepeatKey = "",
    session: SessionHeader = None,
    keep: KeepHeader = None,
    keep_alive: KeepAliveHeader = None,
    if_match: IfMatch = None,
) -> None:
    """Answer a request of the Responses API. Continue a stored response or a conversation."""


@contexts.get("/v1/context", operation_id="list_contexts", responses=_answers(*_KEPT_BY_MANAGER, "invalid_request"))
async def list_contexts(
    gateway: AskedGateway,
    tenant: Tenant,
    limit: Annotated[
        int, Query(ge=1, le=MAX_LIST_LIMIT, description="Most contexts of the page.")
    ] = DEFAULT_LIST_LIMIT,
    after: Annotated[
        str,
        Query(
            max_length=128,
            description="`last_id` of the page before, or the id of any context, also of one deleted within the last "
            "hour. An unknown id is a 400.",
        ),
    ] = "",
    model: Annotated[str, Query(max_length=1024, description="Lists only contexts of this model.")] = "",
    kind: Annotated[
        Literal["session", "kept"],
        Query(description="`kept`: the kept conversations of requests without a context, last used first."),
    ] = "session",
) -> ContextList | KeptList:
    """List the tenant's live contexts, newest first."""
    if kind == "kept":
        return kept_list(await gateway.kept.page(tenant, limit=limit, after=after))
    return context_list(await gateway.contexts.page(tenant, limit=limit, after=after, model=model))


@contexts.get(
    "/v1/context/{session_id}",
    operation_id="read_context",
    responses=_answers(*_KEPT_BY_MANAGER, "invalid_request", *_NAMED_CONTEXT),
)
async def read_context(gateway: AskedGateway, tenant: Tenant, session_id: SessionPath) -> ReadContext | KeptObject:
    """Describe one context, or one kept conversation, its KV included."""
    if session_id.startswith(KEPT_PREFIX):
        kept, unreachable = await gateway.kept.read(tenant, session_id)
        return {**kept_object(kept), "unreachable": list(unreachable)}
    return context_read(*await gateway.contexts.read(tenant, session_id))


@contexts.patch(
    "/v1/context/{session_id}",
    operation_id="patch_context",
    responses=_answers(*_CHANGES, "ttl_out_of_range"),
    openapi_extra=_body(ContextPatch),
)
async def patch_context(gateway: AskedGateway, tenant: Tenant, session_id: SessionPath, said: Fields) -> ContextObject:
    """Change the ttl, policy or metadata of a context, even while a turn runs."""
    refuse_unknown(said, frozenset(ContextPatch.__annotations__))
    return context_object(*await gateway.contexts.patch(tenant, session_id, read_terms(said)))


@contexts.post(
    "/v1/context/{session_id}/fork",
    operation_id="fork_context",
    status_code=201,
    responses=_answers(
        *_CHANGES, "ttl_out_of_range", "context_exists", "generation_gone", "context_quota_exceeded", success=201
    ),
    openapi_extra=_body(ContextFork, required=False),
)
async def fork_context(
    request: Request, gateway: AskedGateway, tenant: Tenant, session_id: SessionPath, said: FieldsOrNone
) -> ContextObject:
    """Create a context with the turns of this one, without copying its KV."""
    refuse_unknown(said, frozenset(ContextFork.__annotations__))
    named = read_session_id(said.get("session_id"))
    fork = NewFork(read_generation(said), named, read_terms(said), request.state.key)
    return context_object(*await gateway.contexts.fork(tenant, session_id, fork))


@contexts.post(
    "/v1/context/{session_id}/rewind",
    operation_id="rewind_context",
    responses=_answers(*_CHANGES, "generation_mismatch", "generation_gone"),
    openapi_extra=_body(ContextRewind),
)
async def rewind_context(
    gateway: AskedGateway, tenant: Tenant, session_id: SessionPath, said: Fields, if_match: IfMatch = None
) -> ContextObject:
    """Rewind a context to an earlier turn. A context at that turn stays unchanged."""
    refuse_unknown(said, frozenset(ContextRewind.__annotations__))
    generation, expected = check_generation(read_generation(said)), read_if_match(if_match)
    rewound = gateway.contexts.rewind(tenant, session_id, generation=generation, expected_generation=expected)
    return context_object(*await rewound)


@contexts.get(
    "/v1/models/{model:path}",
    operation_id="read_model",
    responses=_answers(*_ALWAYS, "invalid_request", "model_not_found", "not_found"),
)
async def read_model(
    gateway: AskedGateway,
    model: Annotated[
        str, Path(json_schema_extra={"pattern": r"^[A-Za-z0-9_.:@-]{1,256}$"}, description="Name of the model.")
    ],
) -> ModelObject:
    """Describe one served model in OpenAI's format."""
    return {"id": model, "object": "model", "created": model_seen_s(gateway.parts, model), "owned_by": "vllm"}


@contexts.get(
    "/v1/usage",
    operation_id="read_usage",
    responses=_answers(*_KEPT_BY_MANAGER, "invalid_request", "operator_only", "too_many_in_flight"),
)
async def read_usage(
    request: Request,
    gateway: AskedGateway,
    tenant: Tenant,
    from_: Annotated[
        Day | None, Query(alias="from", description="First day in UTC. Without it: the same day as `to`.")
    ] = None,
    to: Annotated[
        Day | None, Query(description="Last day in UTC. Without it: today. At most 31 days in total.")
    ] = None,
    of: Annotated[
        str, Query(alias="tenant", max_length=64, description="Name of another tenant. Needs an operator's key.")
    ] = "",
) -> UsageOfTenant:
    """Return the tenant's usage by day and API key."""
    if of not in {"", tenant}:
        _check_operator(request, "this key may read the usage of its own tenant only")
    first_day, last_day = (None if day is None else (day - _EPOCH).days for day in (from_, to))
    report = await gateway.contexts.usage(of or tenant, first_day=first_day, last_day=last_day)
    return usage_of_tenant(of or tenant, report, operator=request.state.operator)


@contexts.get(
    "/v1/deployment",
    operation_id="read_deployment",
    responses=_answers(*_ALWAYS, "gateway_unavailable", "invalid_request", "operator_only"),
)
async def read_deployment(
    request: Request,
    gateway: AskedGateway,
    limit: Annotated[int, Query(ge=1, le=MAX_LIST_LIMIT, description="Most tenants of the page.")] = DEFAULT_LIST_LIMIT,
    after: Annotated[str, Query(max_length=64, description="Lists tenants whose names sort after this one.")] = "",
) -> DeploymentObject:
    """Return the pods and tenants in the view of this gateway. Needs an operator's key."""
    _check_operator(request, "only an operator's key may read the deployment")
    return deployment_object(deployment_view(gateway.parts, limit=limit, after=after))


def _check_operator(request: Request, refusal: str) -> None:
    if not request.state.operator:
        raise OperatorOnly(refusal)


@contexts.delete(
    "/v1/context/{session_id}",
    operation_id="delete_context",
    responses=_answers(*_KEPT_BY_MANAGER, "invalid_request", *_NAMED_CONTEXT),
)
async def delete_context(gateway: AskedGateway, tenant: Tenant, session_id: SessionPath) -> ContextDeleted:
    """Delete a context, or a kept conversation, and its KV."""
    if session_id.startswith(KEPT_PREFIX):
        unreachable = list(await gateway.kept.delete(tenant, session_id))
        status: Literal["success", "partial"] = "partial" if unreachable else "success"
        return {"session_id": session_id, "status": status, "unreachable": unreachable}
    await gateway.contexts.delete(tenant, session_id)
    return {"session_id": session_id, "status": "success"}


@operations.get("/healthz", responses=_answers())
async def healthz() -> dict[str, str]:
    """Return 200 while the process runs."""
    return {"status": "ok"}


_UNREADY = {"description": "Not ready. `/readyz` of the metrics port names the missing part.", "content": _OBJECT}


@operations.get("/readyz", responses=_answers() | {503: _UNREADY})
async def readyz(request: Request) -> Response:
    """Return 200 if the gateway can serve requests, else 503.

    `/readyz` of the metrics port shows the missing parts and the state of each pod.
    """
    ready_state: ReadyState = request.app.ready_state
    ready = (await ready_state.describe())["ready"]
    answer = Response(json.dumps({"ready": ready}), 200 if ready else 503, media_type="application/json")
    if not ready:
        # Envoy's health check: to be left while another one is ready, not to be taken for dead.
        answer.headers["x-envoy-degraded"] = "1"
    return answer


@operations.get(
    "/metrics",
    response_class=Response,
    responses=_answers(content={"text/plain": _TEXT, "application/openmetrics-text": _TEXT}),
)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    counted: Metrics = request.app.parts.metrics
    return Response(generate_latest(counted.registry), media_type=CONTENT_TYPE_LATEST)
