"""What the gateway does, in order: route a request, read, list and delete contexts. Read this first.

Knows no wire: a front (HTTP, Envoy's external processor) turns its messages into these calls and ContextCacheErrors
into answers. Routing comes in the steps in which every front learns of a request: `admit` with the head (who, what),
then `route_by_head` where the head may say enough, else `route` with the body (which context, which pod).
Nothing is kept between calls, so the gateway can die at any moment without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from contextcache.clock import Clock
from contextcache.errors import ContextNotFound
from contextcache.identity import IDENTITY_HEADER, UNROUTED_HEADER, Identity, cache_salt, sign_identity
from contextcache.json_body import parse_object
from contextcache.model import MAX_LIST_LIMIT, SESSION_ID_PATTERN, CacheSessionMetadata, ModelId, SessionId, TenantId
from contextcache.session_claim import SESSION_HEADER, SessionClaim, session_claim
from gateway.affinity import label_affinity, prompt_affinity
from gateway.context_object import ContextDeleted, ContextList, ContextObject, context_object, context_summary
from gateway.fairness import TenantRates
from gateway.holders import Holders
from gateway.metrics import Metrics
from gateway.paths import Kind, kind_of
from gateway.ports import Authenticator, Endpoint, EndpointDirectory, SessionDirectory
from gateway.request_body import (
    is_opaque,
    model_of,
    needs_parsing,
    parse_leniently,
    with_cache_salt,
    without_forbidden_keys,
)
from gateway.routing import (
    STRATEGY_HEADER,
    Choice,
    LoadLimits,
    Reason,
    RouteQuery,
    Strategy,
    choose_endpoint,
    model_matters,
    strategy_of,
)

DESTINATION_HEADER = "x-gateway-destination-endpoint"
"""Gateway API Inference Extension, endpoint picker protocol 1.0.0: the pod, as `host:port`."""
TARGET_POD_HEADER = "target-pod"
"""AIBrix's name for the same."""
ROUTING_HEADERS = frozenset({DESTINATION_HEADER, TARGET_POD_HEADER, "x-envoy-original-dst-host", UNROUTED_HEADER})
"""Headers that say how a request was routed; a client's own never get through."""

_ANY_POD = RouteQuery()
"""What most requests ask for."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose sender and path are accepted; its body is not read yet."""

    tenant: TenantId
    kind: Kind
    request_id: str
    """Minted by the front, never the client's: receipts are looked up by it."""
    headers: Mapping[str, str]
    """Lower-case names."""
    subset: frozenset[str] | None = None
    """Pod addresses that the proxy in front allows; None: all."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Where a request goes and what changes on the way."""

    choice: Choice
    kind: Kind
    set_headers: Mapping[str, str]
    """Beside `routing_headers`."""
    remove_headers: frozenset[str]
    """Of the client's; before `set_headers`."""
    body: bytes | None
    """None: carry the body as it came."""
    query: RouteQuery = field(default_factory=RouteQuery)
    session: CacheSessionMetadata | None = None
    """Whose turn it is; None: nobody's."""

    @property
    def endpoint(self) -> Endpoint:
        """The pod."""
        return self.choice.endpoint

    @property
    def routing_headers(self) -> dict[str, str]:
        """Headers that tell the proxies on the way which pod it is."""
        return dict.fromkeys((DESTINATION_HEADER, TARGET_POD_HEADER), self.endpoint.address)


@dataclass(frozen=True, slots=True)
class GatewayRules:
    """What a deployment decides."""

    secret: bytes
    """Signs identities; the pods have the same one."""
    identity_ttl_ms: int = 60_000
    engine_paths: frozenset[str] = frozenset()
    """Paths outside `/v1/` that reach the engine."""
    limits: LoadLimits = field(default_factory=LoadLimits)
    removed_headers: frozenset[str] = frozenset()
    """More headers that end here, such as `authorization` when its key is ours."""
    salts_stateless: bool = False
    """Whether completions without a context hit their tenant's pages of the engine's prefix cache only."""


class Gateway:
    """Routes requests to pods and answers for contexts."""

    def __init__(  # noqa: PLR0913  # one place is told everything, by name
        self,
        *,
        authenticator: Authenticator,
        directory: SessionDirectory,
        endpoints: EndpointDirectory,
        holders: Holders,
        clock: Clock,
        rules: GatewayRules,
        rates: TenantRates | None = None,
        rng: Random | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`rng` breaks ties between pods; tests give a seeded one."""
        self._authenticator = authenticator
        self._directory = directory
        self._endpoints = endpoints
        self._holders = holders
        self._clock = clock
        self._rules = rules
        self._rates = rates
        self._rng = rng if rng is not None else Random()  # noqa: S311 - spreads load, guards nothing
        self._choices = {} if metrics is None else {why: metrics.choices.labels(why.value) for why in Reason}
        self._removed_headers = ROUTING_HEADERS | {IDENTITY_HEADER} | rules.removed_headers

    def kind_of(self, method: str, path: str) -> Kind:
        """Return which call this is. Raises PathNotFound, MethodNotAllowed."""
        return kind_of(method, path, self._rules.engine_paths)

    def admit(
        self, kind: Kind, headers: Mapping[str, str], *, request_id: str, subset: frozenset[str] | None = None
    ) -> Admission:
        """Return who is asking for what. `headers` have lower-case names. Raises Unauthorized, TenantRateExceeded."""
        tenant = self.authenticate(headers)
        if self._rates is not None:
            self._rates.take(tenant)
        return Admission(tenant, kind, request_id, headers, subset)

    def authenticate(self, headers: Mapping[str, str]) -> TenantId:
        """Return the tenant whose key the request has. Raises Unauthorized."""
        return self._authenticator.tenant_of(headers.get("authorization"))

    async def route_by_head(self, admission: Admission, *, has_body: bool) -> Forward | None:
        """Return where a request goes when its head says enough: a turn named by a header, or nothing to look into.

        None: `route` with the body. The pod checks what a body says that was not read here. Raises as `route`.
        """
        if admission.kind is Kind.COMPLETION:
            claim = session_claim(None, admission.headers.get(SESSION_HEADER))
            session = None if claim is None else await self._claimed_session(admission.tenant, claim)
            return None if session is None else await self._turn_forward(admission, None, session)
        if admission.kind is Kind.STATELESS and (not has_body or is_opaque(admission.headers.get("content-type", ""))):
            return self._forward(Kind.STATELESS, None, self._query(admission, light=not has_body))
        return None

    async def route(self, admission: Admission, body: bytes) -> Forward:
        """Return where an admitted create, completion or stateless request goes.

        Raises InvalidRequest, ContextNotFound, ContextExpired, StoreUnavailable, NoReadyEndpoint, EndpointsSaturated.
        """
        if admission.kind is Kind.CREATE:
            return self._create_forward(admission, parse_object(body))
        parsed_or_none = self._parse_if_needed(admission, body)
        if admission.kind is Kind.COMPLETION:
            claim = session_claim(parsed_or_none, admission.headers.get(SESSION_HEADER))
            session = None if claim is None else await self._claimed_session(admission.tenant, claim)
            if session is not None:
                # A claim in the body was read strictly already; one in the header says nothing about the body.
                parsed = parse_object(body) if parsed_or_none is None else parsed_or_none
                return await self._turn_forward(admission, parsed, session)
        changed = None if parsed_or_none is None else without_forbidden_keys(parsed_or_none)
        if self._rules.salts_stateless and admission.kind is Kind.COMPLETION:
            # No model in it: the engine's cache knows models apart, and a context's salt, which has it, stays another.
            salt = cache_salt(admission.tenant, ModelId(""), self._rules.secret)
            changed = with_cache_salt(body if changed is None else changed, salt) or changed
        return self._forward(Kind.STATELESS, changed, self._query(admission, parsed_or_none, light=not body))

    async def reroute(self, forward: Forward, *, unreachable: str) -> Forward:
        """Return the same request for another pod, after `unreachable` refused the connection.

        Nothing was sent, and an identity is good for any pod. Raises NoReadyEndpoint, EndpointsSaturated.
        """
        self._endpoints.mark_unreachable(unreachable)
        return await self._with_kv(replace(forward, choice=self._choose(forward.query)))

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
        wanted = self._says_where(admission) and content_type.lower().startswith("application/json")
        return parse_leniently(body) if wanted or needs_parsing(body, content_type) else None

    def _says_where(self, admission: Admission) -> bool:
        """Return whether a body that claims nothing still decides which pod it goes to."""
        states = self._endpoints.states()
        if len(states) < 2:
            return False
        return model_matters(states) or strategy_of(admission.headers.get(STRATEGY_HEADER)) is Strategy.PREFIX_CACHE

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

    def _create_forward(self, admission: Admission, parsed: dict[str, Any]) -> Forward:
        query = self._query(admission, parsed, affinity=prompt_affinity(admission.tenant, parsed))
        return self._forward(
            Kind.CREATE, without_forbidden_keys(parsed), query, headers=self._identity_header(admission, None)
        )

    async def _turn_forward(
        self, admission: Admission, parsed: dict[str, Any] | None, session: CacheSessionMetadata
    ) -> Forward:
        """Return the pod of a turn, which has its KV or is fetching it."""
        query = RouteQuery(
            model=session.model_id,
            holder=session.holder,
            strategy=strategy_of(admission.headers.get(STRATEGY_HEADER)),
            subset=admission.subset,
        )
        headers = self._identity_header(admission, session.session_id)
        body = None if parsed is None else without_forbidden_keys(parsed)
        return await self._with_kv(self._forward(Kind.TURN, body, query, headers=headers, session=session))

    async def _with_kv(self, forward: Forward) -> Forward:
        """Tell the chosen pod's sidecar to fetch a turn's KV when it is elsewhere, and return the forward."""
        session = forward.session
        if session is not None and session.holder and forward.endpoint.name != session.holder:
            await self._holders.start_pull(session, to=forward.endpoint)
        return forward

    def _identity_header(self, admission: Admission, session_id: SessionId | None) -> dict[str, str]:
        identity = Identity(
            tenant=admission.tenant,
            request_id=admission.request_id,
            expires_at_ms=self._clock.now_ms() + self._rules.identity_ttl_ms,
            session_id=session_id,
        )
        return {IDENTITY_HEADER: sign_identity(identity, self._rules.secret)}

    def _query(
        self,
        admission: Admission,
        parsed: dict[str, Any] | None = None,
        *,
        affinity: bytes = b"",
        light: bool = False,
    ) -> RouteQuery:
        header = admission.headers.get(STRATEGY_HEADER)
        if header is None and parsed is None and admission.subset is None and not light:
            return _ANY_POD
        strategy = strategy_of(header)
        if strategy is Strategy.SESSION_AFFINITY:
            affinity = label_affinity(admission.tenant, admission.headers.get(SESSION_HEADER, "")) or affinity
        elif strategy is Strategy.PREFIX_CACHE and parsed is not None:
            affinity = affinity or prompt_affinity(admission.tenant, parsed)
        return RouteQuery(
            model=model_of(parsed), affinity=affinity, strategy=strategy, subset=admission.subset, light=light
        )

    def _forward(
        self,
        kind: Kind,
        body: bytes | None,
        query: RouteQuery,
        *,
        headers: Mapping[str, str] | None = None,
        session: CacheSessionMetadata | None = None,
    ) -> Forward:
        return Forward(self._choose(query), kind, headers or {}, self._removed_headers, body, query, session)

    def _choose(self, query: RouteQuery) -> Choice:
        choice = choose_endpoint(self._endpoints.states(), query, limits=self._rules.limits, rng=self._rng)
        if self._choices:
            self._choices[choice.reason].inc()
        return choice


def _check_id(session_id: SessionId) -> None:
    if not SESSION_ID_PATTERN.fullmatch(session_id):
        raise _not_found()


def _not_found() -> ContextNotFound:
    # One text for absent, deleted and foreign ids: the answers must not differ in a byte.
    return ContextNotFound("no context has this session_id", param="session_id")
