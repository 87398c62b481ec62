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
from contextcache.errors import ModelNotFound, OperatorOnly
from contextcache.fields import refuse_unknown
from contextcache.hints import Hints, read_hints
from contextcache.model import MAX_LIST_LIMIT
from contextcache.names import KEPT_PREFIX, check_generation
from contextcache.terms import read_generation, read_if_match, read_session_id, read_terms
from gateway.compaction import Ask
from gateway.contexts import NewFork
from gateway.flows import Admission, Gateway
from gateway.http.answers import (
    Json,
    context_list,
    context_object,
    context_read,
    conversation_object,
    deployment_object,
    item_list,
    item_page,
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


class ControlCall:
    """A call that the gateway answers: the gateway, and the sender."""

    def __init__(self, request: Request) -> None:
        """Read them from a request with the admission in its state."""
        admission: Admission = request.state.admission
        self.gateway: Gateway = request.app.gateway
        self.tenant, self.caller = admission.tenant, admission.caller
        self.ask: Ask = request.state.ask

    def check_operator(self, refusal: str) -> None:
        """Raise OperatorOnly with `refusal` unless the key is an operator's."""
        if not self.caller.operator:
            raise OperatorOnly(refusal)


async def _known_query(request: Request) -> None:
    """Raise InvalidRequest for an unknown query parameter: `?tenent=b` must not report tenant a."""
    refuse_unknown(request.query_params, query_parameters(request.scope["route"].name), kind="query parameter")


async def _fields(request: Request) -> Json:
    """Return the body, a JSON object; an empty one for no body where the document allows none.

    Raises InvalidRequest with line and column, or with an unknown field.
    """
    names, is_required = body_fields(request.scope["route"].name)
    if not request.state.body and not is_required:
        return {}
    fields: Json = await request.app.gateway.large_bodies.read(read_object, request.state.body)
    refuse_unknown(fields, names)
    return fields


Asked = Annotated[ControlCall, Depends()]
Fields = Annotated[dict[str, Any], Depends(_fields)]
Limit = Annotated[int, Query(ge=1, le=MAX_LIST_LIMIT)]
After = Annotated[str, Query(max_length=128)]
Order = Literal["asc", "desc"]
Day = Annotated[date, BeforeValidator(_day)]

contexts = APIRouter(dependencies=[Depends(_known_query)])
operations = APIRouter()


@contexts.get("/v1/context")
async def list_contexts(
    call: Asked,
    limit: Limit = _LIST_LIMIT,
    after: After = "",
    model: Annotated[str, Query(max_length=1024)] = "",
    kind: Literal["session", "kept"] = "session",
) -> Json:
    """List the tenant's live contexts, newest first."""
    if kind == "kept":
        return kept_list(await call.gateway.kept.page(call.tenant, limit=limit, after=after))
    return context_list(await call.gateway.contexts.page(call.tenant, limit=limit, after=after, model=model))


@contexts.get("/v1/context/{session_id}")
async def read_context(call: Asked, session_id: str) -> Json:
    """Describe one context, or one kept conversation, its KV included."""
    if session_id.startswith(KEPT_PREFIX):
        kept, unreachable = await call.gateway.kept.read(call.tenant, session_id)
        return kept_object(kept) | {"unreachable": list(unreachable)}
    return context_read(*await call.gateway.contexts.read(call.tenant, session_id))


@contexts.patch("/v1/context/{session_id}")
async def patch_context(call: Asked, session_id: str, said: Fields) -> Json:
    """Change the ttl, policy or metadata of a context, or place or protect its KV, even while a turn runs."""
    hints, terms = Hints(read_hints(said.get("kv_hints"))), read_terms(said)
    session, kv = await call.gateway.contexts.patch(call.tenant, session_id, terms)
    answers = await call.gateway.contexts.carry_out(session, hints)
    return context_object(session, kv) | ({"hints": answers} if answers else {})


@contexts.delete("/v1/context/{session_id}")
async def delete_context(call: Asked, session_id: str) -> Json:
    """Delete a context, or a kept conversation, and its KV."""
    if session_id.startswith(KEPT_PREFIX):
        unreachable = list(await call.gateway.kept.delete(call.tenant, session_id))
        status = "partial" if unreachable else "success"
        return {"session_id": session_id, "status": status, "unreachable": unreachable}
    await call.gateway.contexts.delete(call.tenant, session_id)
    return {"session_id": session_id, "status": "success"}


@contexts.post("/v1/context/{session_id}/fork", status_code=201)
async def fork_context(call: Asked, session_id: str, said: Fields) -> Json:
    """Create a context with the turns of this one, without copying its KV."""
    named = read_session_id(said.get("session_id"))
    fork = NewFork(read_generation(said), named, read_terms(said), call.caller.key)
    return context_object(*await call.gateway.contexts.fork(call.tenant, session_id, fork))


@contexts.post("/v1/context/{session_id}/rewind")
async def rewind_context(
    call: Asked,
    session_id: str,
    said: Fields,
    if_match: Annotated[str | None, Header()] = None,
) -> Json:
    """Rewind a context to an earlier turn. A context at that turn stays unchanged."""
    generation, expected = check_generation(read_generation(said)), read_if_match(if_match)
    rewound = call.gateway.contexts.rewind(call.tenant, session_id, generation=generation, expected_generation=expected)
    return context_object(*await rewound)


@contexts.post("/v1/context/{session_id}/compact", status_code=201)
async def compact_context(call: Asked, session_id: str, said: Fields) -> Json:
    """Create a short context that continues this one."""
    return context_object(*await call.gateway.compactions.compact(call.tenant, session_id, said, call.ask))


@contexts.post("/v1/responses/compact")
async def compact_response(call: Asked, said: Fields) -> Json:
    """Compact a stored response, or the input, in OpenAI's format."""
    return await call.gateway.compactions.compact_response(call.tenant, said, call.ask)


@contexts.post("/v1/conversations")
async def create_conversation(call: Asked, said: Fields) -> Json:
    """Create a conversation."""
    items = [] if said.get("items") is None else said["items"]
    made = await call.gateway.conversations.create(call.tenant, items, read_terms(said), key=call.caller.key)
    return conversation_object(made)


@contexts.get("/v1/conversations/{conversation_id}")
async def read_conversation(call: Asked, conversation_id: str) -> Json:
    """Describe a conversation."""
    return conversation_object(await call.gateway.conversations.read(call.tenant, conversation_id))


@contexts.post("/v1/conversations/{conversation_id}")
async def update_conversation(call: Asked, conversation_id: str, said: Fields) -> Json:
    """Change a conversation's metadata."""
    metadata = (read_terms(said).metadata or {}) if "metadata" in said else None
    return conversation_object(await call.gateway.conversations.update(call.tenant, conversation_id, metadata))


@contexts.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(call: Asked, conversation_id: str) -> Json:
    """Delete a conversation, its items and their KV."""
    await call.gateway.contexts.delete(call.tenant, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@contexts.get("/v1/conversations/{conversation_id}/items")
async def list_items(
    call: Asked, conversation_id: str, limit: Limit = _LIST_LIMIT, after: After = "", order: Order = "desc"
) -> Json:
    """List a conversation's items."""
    items = await call.gateway.conversations.items(call.tenant, conversation_id)
    return item_page(items, limit=limit, after=after, order=order)


@contexts.post("/v1/conversations/{conversation_id}/items")
async def create_items(call: Asked, conversation_id: str, said: Fields) -> Json:
    """Add items to a conversation."""
    return item_list(await call.gateway.conversations.add(call.tenant, conversation_id, said.get("items")))


@contexts.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def read_item(call: Asked, conversation_id: str, item_id: str) -> Json:
    """Return one item of a conversation."""
    return await call.gateway.conversations.item(call.tenant, conversation_id, item_id)


@contexts.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(call: Asked, conversation_id: str, item_id: str) -> Json:
    """Delete one item of a conversation."""
    return conversation_object(await call.gateway.conversations.remove(call.tenant, conversation_id, item_id))


@contexts.get("/v1/responses/{response_id}")
async def read_response(call: Asked, response_id: str) -> Json:
    """Return a stored response."""
    return await call.gateway.conversations.response(call.tenant, response_id)


@contexts.delete("/v1/responses/{response_id}")
async def delete_response(call: Asked, response_id: str) -> Json:
    """Delete a stored response."""
    await call.gateway.conversations.delete_response(call.tenant, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@contexts.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    call: Asked, response_id: str, limit: Limit = _LIST_LIMIT, after: After = "", order: Order = "desc"
) -> Json:
    """List the items that a stored response was made from."""
    items = await call.gateway.conversations.input_items(call.tenant, response_id)
    return item_page(items, limit=limit, after=after, order=order)


@contexts.get("/v1/models/{model:path}")
async def read_model(call: Asked, model: str) -> Json:
    """Describe one served model in OpenAI's format."""
    parts = call.gateway.parts
    if not parts.endpoints.roster().serves(model):
        raise ModelNotFound(f"the model `{model}` does not exist", param="model")
    # The time of the call, as in vLLM's own list.
    return {"id": model, "object": "model", "created": parts.clock.now_ms() // 1000, "owned_by": "vllm"}


@contexts.get("/v1/usage")
async def read_usage(
    call: Asked,
    from_: Annotated[Day | None, Query(alias="from")] = None,
    to: Day | None = None,
    of: Annotated[str, Query(alias="tenant", max_length=64)] = "",
) -> Json:
    """Return the tenant's usage by day and API key."""
    if of not in {"", call.tenant}:
        call.check_operator("this key may read the usage of its own tenant only")
    first_day, last_day = (None if day is None else (day - _EPOCH).days for day in (from_, to))
    report = await call.gateway.contexts.usage(of or call.tenant, first_day=first_day, last_day=last_day)
    return usage_of_tenant(of or call.tenant, report, operator=call.caller.operator)


@contexts.get("/v1/deployment")
async def read_deployment(
    call: Asked,
    limit: Limit = _LIST_LIMIT,
    after: Annotated[str, Query(max_length=64)] = "",
) -> Json:
    """Return the pods and tenants in the view of this gateway. Needs an operator's key."""
    call.check_operator("only an operator's key may read the deployment")
    return deployment_object(call.gateway.parts, limit=limit, after=after)


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
