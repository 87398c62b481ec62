"""What the gateway does, in order: route a request, read, list and delete contexts. Read this first.

Knows no wire: a front (HTTP today, Envoy's external processor beside it later) turns its messages into these
calls and ContextCacheErrors into answers. Routing comes in the two steps in which every front learns of a
request: `admit` with the head (who, what), then `route` with the body (which context, which pod).
Nothing is kept between calls, so the gateway can die at any moment without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from contextcache.clock import Clock
from contextcache.errors import ContextNotFound
from contextcache.identity import IDENTITY_HEADER, Identity, sign_identity
from contextcache.json_body import parse_object
from contextcache.model import MAX_LIST_LIMIT, SESSION_ID_PATTERN, CacheSessionMetadata, ModelId, SessionId, TenantId
from contextcache.session_claim import SESSION_HEADER, SessionClaim, session_claim
from gateway.context_object import ContextDeleted, ContextList, ContextObject, context_object, context_summary
from gateway.holders import Holders
from gateway.paths import Kind, kind_of
from gateway.ports import Authenticator, Endpoint, EndpointDirectory, SessionDirectory
from gateway.request_body import model_of, needs_parsing, parse_leniently, without_forbidden_keys
from gateway.routing import choose_endpoint, model_matters

ROUTING_HEADERS = frozenset({"x-gateway-destination-endpoint", "target-pod", "x-envoy-original-dst-host"})
"""Headers with which proxies pick a pod; a client's own never get through."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose sender and path are accepted; its body is not read yet."""

    tenant: TenantId
    kind: Kind
    request_id: str
    """Minted by the front, never the client's: receipts are looked up by it."""
    headers: Mapping[str, str]
    """Lower-case names."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Where a request goes and what changes on the way."""

    endpoint: Endpoint
    kind: Kind
    set_headers: Mapping[str, str]
    remove_headers: frozenset[str]
    body: bytes | None
    """None: carry the body as it came."""
    model: ModelId | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """What a deployment decides."""

    secret: bytes
    """Signs identities; the pods have the same one."""
    identity_ttl_ms: int = 60_000
    engine_paths: frozenset[str] = frozenset()
    """Paths outside `/v1/` that reach the engine."""
    removed_headers: frozenset[str] = frozenset()
    """More headers that end here, such as `authorization` when its key is ours."""


class Gateway:
    """Routes requests to pods and answers for contexts."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        directory: SessionDirectory,
        endpoints: EndpointDirectory,
        holders: Holders,
        clock: Clock,
        rules: GatewayRules,
    ) -> None:
        self._authenticator = authenticator
        self._directory = directory
        self._endpoints = endpoints
        self._holders = holders
        self._clock = clock
        self._rules = rules
        self._removed_headers = ROUTING_HEADERS | {IDENTITY_HEADER} | rules.removed_headers

    def kind_of(self, method: str, path: str) -> Kind:
        """Return which call this is. Raises PathNotFound, MethodNotAllowed."""
        return kind_of(method, path, self._rules.engine_paths)

    def admit(self, kind: Kind, headers: Mapping[str, str], *, request_id: str) -> Admission:
        """Return who is asking for what. `headers` have lower-case names. Raises Unauthorized."""
        return Admission(self.authenticate(headers), kind, request_id, headers)

    def authenticate(self, headers: Mapping[str, str]) -> TenantId:
        """Return the tenant whose key the request has. Raises Unauthorized."""
        return self._authenticator.tenant_of(headers.get("authorization"))

    async def route(self, admission: Admission, body: bytes) -> Forward:
        """Return where an admitted create, completion or stateless request goes.

        Raises InvalidRequest, ContextNotFound, ContextExpired, StoreUnavailable, NoReadyEndpoint.
        """
        if admission.kind is Kind.CREATE:
            parsed = parse_object(body)
            return self._session_forward(admission, Kind.CREATE, parsed, model=model_of(parsed))
        parsed_or_none = self._parse_if_needed(admission, body)
        if admission.kind is Kind.COMPLETION:
            claim = session_claim(parsed_or_none, admission.headers.get(SESSION_HEADER))
            session = None if claim is None else await self._claimed_session(admission.tenant, claim)
            if session is not None:
                # A claim in the body was read strictly already; one in the header says nothing about the body.
                parsed = parse_object(body) if parsed_or_none is None else parsed_or_none
                return self._session_forward(admission, Kind.TURN, parsed, model=session.model_id, session=session)
        changed = None if parsed_or_none is None else without_forbidden_keys(parsed_or_none)
        return self._forward(Kind.STATELESS, changed, model=model_of(parsed_or_none))

    def reroute(self, forward: Forward, *, unreachable: str) -> Forward:
        """Return the same request for another pod, after `unreachable` refused the connection.

        Nothing was sent, and an identity is good for any pod. Raises NoReadyEndpoint.
        """
        self._endpoints.mark_unreachable(unreachable)
        endpoint = choose_endpoint(self._endpoints.states(), model=forward.model, holder=forward.holder)
        return replace(forward, endpoint=endpoint)

    async def read(self, tenant: TenantId, session_id: SessionId) -> ContextObject:
        """Return one context. Raises ContextNotFound, ContextExpired, StoreUnavailable; never for a sidecar."""
        session = await self._session(tenant, session_id)
        return context_object(session, await self._holders.kv_state(session))

    async def list_contexts(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model: ModelId = ""
    ) -> ContextList:
        """Return one page of the tenant's contexts, newest first. Raises StoreUnavailable."""
        assert 1 <= limit <= MAX_LIST_LIMIT
        sessions, has_more = await self._directory.list_sessions(tenant, limit=limit, after=after, model_id=model)
        return {
            "object": "list",
            "data": [context_summary(session) for session in sessions],
            "has_more": has_more,
            "last_id": sessions[-1].session_id if sessions else None,
        }

    async def delete(self, tenant: TenantId, session_id: SessionId) -> ContextDeleted:
        """Remove a context: first its row, so that nothing points at KV that is going, then its KV everywhere.

        A sidecar that cannot be reached collects by TTL. Raises ContextNotFound, ContextExpired, StoreUnavailable.
        """
        _check_id(session_id)
        try:
            session = await self._directory.unregister_session_cache(tenant, session_id)
        except ContextNotFound as exc:
            raise _not_found() from exc
        await self._holders.delete(session)
        return {"session_id": session_id, "status": "success"}

    async def is_serving(self) -> bool:
        """Return whether the context manager answers. Never raises."""
        return await self._directory.is_serving()

    def _parse_if_needed(self, admission: Admission, body: bytes) -> dict[str, Any] | None:
        if not body:
            return None
        content_type = admission.headers.get("content-type", "")
        wanted = model_matters(self._endpoints.states()) and content_type.startswith("application/json")
        return parse_leniently(body) if wanted or needs_parsing(body, content_type) else None

    async def _claimed_session(self, tenant: TenantId, claim: SessionClaim) -> CacheSessionMetadata | None:
        """Return the session, or None when only a header names an id that is nobody's: a label of the client's own.

        With the store down we cannot tell label from context, and an answer without its context would be wrong.
        """
        try:
            return await self._directory.locate(tenant, claim.session_id)
        except ContextNotFound as exc:
            if claim.binding:
                raise _not_found() from exc
            return None

    async def _session(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        _check_id(session_id)
        try:
            return await self._directory.get_session_metadata(tenant, session_id)
        except ContextNotFound as exc:
            raise _not_found() from exc

    def _session_forward(
        self,
        admission: Admission,
        kind: Kind,
        parsed: dict[str, Any],
        *,
        model: ModelId | None,
        session: CacheSessionMetadata | None = None,
    ) -> Forward:
        identity = Identity(
            tenant=admission.tenant,
            request_id=admission.request_id,
            expires_at_ms=self._clock.now_ms() + self._rules.identity_ttl_ms,
            session_id=None if session is None else session.session_id,
        )
        headers = {IDENTITY_HEADER: sign_identity(identity, self._rules.secret)}
        holder = "" if session is None else session.holder
        return self._forward(kind, without_forbidden_keys(parsed), model=model, holder=holder, headers=headers)

    def _forward(
        self,
        kind: Kind,
        body: bytes | None,
        *,
        model: ModelId | None,
        holder: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Forward:
        return Forward(
            endpoint=choose_endpoint(self._endpoints.states(), model=model, holder=holder),
            kind=kind,
            set_headers=headers or {},
            remove_headers=self._removed_headers,
            body=body,
            model=model,
            holder=holder,
        )


def _check_id(session_id: SessionId) -> None:
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise _not_found()


def _not_found() -> ContextNotFound:
    # One text for absent, deleted and foreign ids: the answers must not differ in a byte.
    return ContextNotFound("no context has this session_id", param="session_id")
