"""What the gateway does, in order: route a request, read, list and delete contexts. Read this first.

Knows no wire: a front (HTTP, Envoy's external processor) turns its messages into these calls and ContextCacheErrors
into answers. Routing comes in the steps in which every front learns of a request: `admit` with the head (who, what),
then `route_by_head` where the head may say enough, else `route` with the body (which context, which pod).
Nothing is kept between calls, so the gateway can die at any moment without harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from contextcache.beginning import num_tokens_of, prompt_affinity
from contextcache.claim import (
    RESPONSES_PATH,
    SESSION_HEADER,
    TURN_PATHS,
    Claims,
    claimed_session,
    is_opaque,
    read_claims,
    read_strict_claims,
    refuse_session,
)
from contextcache.clock import Clock
from contextcache.errors import ContextExpired, ContextNotFound, ModelNotFound, TooManyInFlight
from contextcache.identity import (
    DESTINATION_HEADER,
    IDENTITY_HEADER,
    TENANT_HEADER,
    UNROUTED_HEADER,
    Identity,
    cache_salt,
    sign_identity,
    tenant_tag,
)
from contextcache.model import (
    MAX_LIST_LIMIT,
    CacheSessionMetadata,
    ContextMode,
    ModelId,
    SessionId,
    SessionPage,
    TenantId,
    TurnReceipt,
    UsageFormat,
    UsageReport,
)
from contextcache.names import new_session_id
from contextcache.requests import SHARE, LargeBodies, TenantsInHand
from contextcache.responses import Continued, Labels, response_id, telling_what_is_missing
from contextcache.terms import IDEMPOTENCY_HEADER, read_repeatable, session_id_of
from gateway.contexts import FORKED_GENERATION, Contexts, KeptConversations, check_id, not_found
from gateway.deployment import Deployment
from gateway.kept import KEEP_HEADER, Plain, allowed, group_of
from gateway.paths import TOKENIZER_PATHS, Kind, kind_of
from gateway.pods.endpoints import WatchedEndpoints
from gateway.pods.routing import Choice, RouteQuery
from gateway.pods.sidecars import Holders, KVState
from gateway.pods.state import Endpoint
from gateway.ports import Authenticator, SessionDirectory
from gateway.tenants.limits import TenantLimits

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)
"""Names of requests that a client may choose."""
ROUTING_HEADERS = frozenset({DESTINATION_HEADER, "x-envoy-original-dst-host", UNROUTED_HEADER, TENANT_HEADER})
"""Headers that say how a request was routed, and for which tenant; a client's own never get through."""

_USAGE_READS_MAX = 4
"""Of one tenant's usage at a time."""
SALTED_PATHS = frozenset({*TURN_PATHS, "/v1/chat/completions/batch"})
"""Calls that make text and take a `cache_salt` (vLLM 0.32: a field of each one's request)."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request whose sender and path are accepted; its body is not read yet."""

    tenant: TenantId
    kind: Kind
    path: str
    request_id: str
    """Minted by the front, never the client's: receipts are looked up by it."""
    headers: Mapping[str, str]
    """Lower-case names."""
    subset: frozenset[str] | None = None
    """Pod addresses that the proxy in front allows; None: all."""
    context_mode: ContextMode | None = None
    """What the key says of requests that name none; None: nothing."""
    usage: UsageFormat | None = None
    """The same of how usage counts."""
    plain: Plain = Plain.OFF
    """What is done for the request if it has no context."""
    key: str = ""
    """Name of its API key, for usage."""
    operator: bool = False
    """Whether the key may look at the deployment, and at any tenant's usage."""


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
    identity: Identity | None = None
    """What `set_headers` has signed, but for where the beginning is, which is the choice's; None: nothing."""

    @property
    def endpoint(self) -> Endpoint:
        """The pod."""
        return self.choice.endpoint

    @property
    def routing_headers(self) -> dict[str, str]:
        """Header that names the pod to the proxies on the way."""
        return {DESTINATION_HEADER: self.endpoint.address}


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
    plain_max: Plain = Plain.KEEP
    """The most that is done for requests without a context."""
    label_headers: tuple[str, ...] = ()
    """That name a conversation, before those of known clients."""
    salts_stateless: bool = False
    """Whether answers without a context hit their tenant's pages of the engine's prefix cache only."""


class Gateway:
    """Routes requests to pods and answers for contexts."""

    def __init__(  # one place is told everything, by name
        self,
        *,
        authenticator: Authenticator,
        directory: SessionDirectory,
        endpoints: WatchedEndpoints,
        holders: Holders,
        clock: Clock,
        rules: GatewayRules,
        tenants: TenantLimits,
    ) -> None:
        self._authenticator = authenticator
        self._directory = directory
        self._labels = Labels(directory.locate, clock)
        self._endpoints = endpoints
        self._holders = holders
        self._usage_reads = TenantsInHand(requests_max=_USAGE_READS_MAX)
        self.deployment = Deployment(authenticator, endpoints, tenants)
        """What operators see."""
        self.contexts = Contexts(directory, holders, rules.secret)
        """Changes what is there."""
        self.kept = KeptConversations(holders)
        """What is kept of requests without a context."""
        self._clock = clock
        self._rules = rules
        self.kind_of: Callable[[str, str], Kind] = partial(kind_of, engine_paths=rules.engine_paths)
        """Which call a method and a path are. Raises PathNotFound, MethodNotAllowed."""
        self._tenants = tenants
        self._large_bodies = LargeBodies()
        self._removed_headers = ROUTING_HEADERS | {IDENTITY_HEADER} | rules.removed_headers

    def admit(
        self,
        kind: Kind,
        headers: Mapping[str, str],
        *,
        path: str,
        request_id: str,
        subset: frozenset[str] | None = None,
    ) -> Admission:
        """Return who is asking for what. `headers` have lower-case names. Raises Unauthorized, TenantRateExceeded."""
        caller = self._authenticator.caller_of(headers)
        self._tenants.ask(caller.tenant)
        plain = Plain.OFF
        if path in TURN_PATHS and headers.get(KEEP_HEADER, "").strip().lower() != "off":
            plain = allowed(caller.plain, self._rules.plain_max)
        return Admission(
            tenant=caller.tenant,
            kind=kind,
            path=path,
            request_id=request_id,
            headers=headers,
            subset=subset,
            context_mode=caller.context_mode,
            usage=caller.usage,
            plain=plain,
            key=caller.key,
            operator=caller.operator,
        )

    def in_flight(self, admission: Admission) -> AbstractContextManager[None]:
        """Count a request for the length of a `with` block: every kind, before its body is read.

        Entering raises TooManyInFlight, NoReadyEndpoint.
        """
        has_limit = self._tenants.limits[0] > 0
        elsewhere = self._endpoints.num_reported(self._tag(admission)) if has_limit else 0
        return self._tenants.request(admission.tenant, elsewhere=elsewhere)

    async def route_by_head(self, admission: Admission, *, has_body: bool) -> Forward | None:
        """Return where a request goes when its head says enough: a turn named by a header, or nothing to look into.

        None: `route` with the body. The pod checks what a body says that was not read here. Raises as `route`.
        """
        if admission.kind is Kind.COMPLETION:
            named = claimed_session(None, admission.headers.get(SESSION_HEADER))
            if named is None or admission.path == RESPONSES_PATH:  # which generation, its body says
                return None
            try:
                return await self._turn_forward(admission, None, named)
            except (ContextNotFound, ContextExpired):
                return None  # the body may say what is wrong, or that the context is to be created
        if admission.kind is Kind.STATELESS and (not has_body or is_opaque(admission.headers.get("content-type", ""))):
            return self._forward(Kind.STATELESS, None, self._query(admission, light=not has_body))
        return None

    async def route(self, admission: Admission, body: bytes) -> Forward:
        """Return where an admitted create, completion or stateless request goes.

        Raises InvalidRequest, ContextNotFound, ContextExpired, StoreUnavailable, NoReadyEndpoint, EndpointsSaturated,
        TooManyInFlight.
        """
        if admission.kind is Kind.CREATE:
            new = await self._large_bodies.read(partial(read_strict_claims, path=admission.path), body)
            return self._create_forward(admission, new, None)
        claims = None
        if body and not is_opaque(admission.headers.get("content-type", "")):
            claims = await self._large_bodies.read(partial(read_claims, path=admission.path), body)
        if admission.kind is Kind.COMPLETION:
            header = admission.headers.get(SESSION_HEADER)
            asked = await self._labels.continued_by(admission.tenant, admission.path, claims, header)
            if asked is not None:
                if claims is None:  # nothing in it says anything, and a session's request has to be JSON
                    claims = await self._large_bodies.read(partial(read_strict_claims, path=admission.path), body)
                with telling_what_is_missing(asked.said):
                    return await self._continued(admission, claims, asked)
        else:
            refuse_session(claims)
        if claims is None:
            return self._forward(Kind.STATELESS, None, self._query(admission, None, light=not body))
        if admission.plain is not Plain.OFF:
            return _under_own_name(self._conversation(admission, claims), claims)
        changed = claims.changed(salt=self._stateless_salt(admission))
        forward = self._forward(Kind.STATELESS, changed, self._query(admission, claims, light=not body))
        return _under_own_name(forward, claims)

    async def reroute(self, forward: Forward, *, unreachable: str, certain: bool = True) -> Forward:
        """Return the same request for another pod, after `unreachable` refused the connection.

        Not `certain`: it only did not take it in time; where no other pod is ready, the answer is the same pod again.
        Nothing was sent. Raises NoReadyEndpoint, EndpointsSaturated, TooManyInFlight.
        """
        self._endpoints.mark_unreachable(unreachable, certain=certain)
        choice = self._choose(forward.query)
        headers = {**forward.set_headers, **self._signed(forward.identity, choice)}
        return await self._with_kv(replace(forward, choice=choice, set_headers=headers))

    def sent(self, forward: Forward) -> Callable[[], None]:
        """Remember that a request went where it was to go, before any report tells of what it left there.

        What is returned forgets it: the pod took no connection.
        """
        choice = forward.choice
        return self._endpoints.note_placed(
            choice.endpoint.name, forward.query.affinity, at_ms=self._clock.now_ms(), is_new=choice.is_placed
        )

    async def read(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, KVState, Sequence[TurnReceipt]]:
        """Return a context, its KV and receipts of its last turns.

        Raises ContextNotFound, ContextExpired, StoreUnavailable; none for a sidecar.
        """
        check_id(session_id)
        try:
            session, turns = await self._directory.get_with_turns(tenant, session_id)
        except ContextNotFound as exc:
            raise not_found() from exc
        return session, await self._holders.kv_state(session), turns

    async def list_contexts(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model: ModelId = ""
    ) -> SessionPage:
        """Return one page of the tenant's contexts, newest first; short, or empty, where `model` matches few.

        Raises InvalidRequest (after), StoreUnavailable.
        """
        assert 1 <= limit <= MAX_LIST_LIMIT
        return await self._directory.list_sessions(tenant, limit=limit, after=after, model_id=model)

    def model_seen_s(self, model: ModelId) -> int:
        """Return the `created` of a model that a pod serves: now, as in vLLM's list. Raises ModelNotFound."""
        if not self._endpoints.roster().serves(model):
            raise ModelNotFound(f"the model `{model}` does not exist", param="model")
        return self._clock.now_ms() // 1000

    async def usage(self, tenant: TenantId, *, first_day: int | None, last_day: int | None) -> UsageReport:
        """Return what a tenant used, from one day since 1970-01-01 to another; None: today.

        Raises InvalidRequest, StoreUnavailable, TooManyInFlight: a month of it is two thousand reads of the store.
        """
        with self._usage_reads.request(tenant):
            return await self._directory.read_usage(tenant, first_day=first_day, last_day=last_day)

    async def delete(self, tenant: TenantId, session_id: SessionId) -> None:
        """Remove a context: first its row, so that nothing points at KV that is going, then its KV everywhere.

        A sidecar that cannot be reached collects by TTL. Raises ContextNotFound, ContextExpired, StoreUnavailable.
        """
        check_id(session_id)
        try:
            session = await self._directory.unregister_session_cache(tenant, session_id)
        except ContextNotFound as exc:
            raise not_found() from exc
        await self._holders.delete(session)

    async def is_serving(self) -> bool:
        """Return whether the context manager answers. Never raises."""
        return await self._directory.is_serving()

    def _tag(self, admission: Admission) -> str:
        return tenant_tag(admission.tenant, self._rules.secret)

    def _stateless_salt(self, admission: Admission) -> str:
        """Return the tenant's salt where one is given; empty: none."""
        if not self._rules.salts_stateless or admission.path not in SALTED_PATHS:
            return ""
        # No model in it: the engine's cache knows models apart, and a context's salt, which has it, stays another.
        return cache_salt(admission.tenant, ModelId(""), self._rules.secret)

    async def _continued(self, admission: Admission, claims: Claims, asked: Continued) -> Forward:
        """Return where a turn goes, or the create that it turns out to be."""
        repeatable = read_repeatable(admission.headers.get(IDEMPOTENCY_HEADER), ())
        session_id = asked.session_id
        if session_id is None:
            if repeatable is None:
                return self._create_forward(admission, claims, new_session_id())
            session_id = session_id_of(admission.tenant, repeatable.key, self._rules.secret)
        elif asked.generation is not None:
            branch = await self.contexts.branch(
                admission.tenant,
                session_id,
                asked.generation,
                repeat_key="" if repeatable is None else repeatable.key,
                key=admission.key,
                # A request that no pod takes leaves no branch.
                check=lambda source: self._choose(self._turn_query(admission, source), is_made=False),
            )
            if branch is not None:
                try:
                    previous = response_id(branch, FORKED_GENERATION)
                    return await self._turn_forward(admission, claims, branch, previous=previous)
                except BaseException:
                    await self.contexts.drop_branch(admission.tenant, branch)
                    raise
        return await self._turn_forward(admission, claims, session_id, creates=asked.creates)

    async def _turn_forward(
        self,
        admission: Admission,
        claims: Claims | None,
        session_id: SessionId,
        *,
        creates: bool = False,
        previous: str = "",
    ) -> Forward:
        """Return the pod of a turn, which has its KV or is fetching it. `previous`: of a branch, see Claims.changed.

        With the store down a turn is refused: an answer without its context would be wrong.
        """
        check_id(session_id)
        try:
            session = await self._directory.locate(admission.tenant, session_id)
        except (ContextNotFound, ContextExpired) as exc:
            # The pod creates it, or gives an answer again that outlived its context.
            if claims is not None and (creates or IDEMPOTENCY_HEADER in admission.headers):
                return self._create_forward(admission, claims, session_id)
            if isinstance(exc, ContextExpired):
                raise
            raise not_found() from exc
        query = self._turn_query(admission, session)
        identity = self._identity(admission, session.session_id, is_branch=bool(previous))
        body = None if claims is None else claims.changed(previous=previous, session_id=session_id if previous else "")
        forward = self._forward(Kind.TURN, body, query, identity=identity, session=session)
        if previous and claimed_session(None, admission.headers.get(SESSION_HEADER)) is not None:
            forward = replace(forward, set_headers={**forward.set_headers, SESSION_HEADER: session_id})
        return await self._with_kv(forward)

    def _turn_query(self, admission: Admission, session: CacheSessionMetadata) -> RouteQuery:
        return RouteQuery(
            model=session.model_id,
            holder=session.holder,
            num_tokens=session.num_tokens,
            subset=admission.subset,
            tenant=self._tag(admission),
        )

    def _conversation(self, admission: Admission, claims: Claims) -> Forward:
        """Return where one more request of what seems to be a conversation goes; no store is asked about it."""
        group = group_of(admission.tenant, admission.headers, claims, self._rules.label_headers)
        query = self._query(admission, claims, conversation=group)
        if admission.plain is Plain.ROUTE:
            return self._forward(Kind.STATELESS, claims.changed(salt=self._stateless_salt(admission)), query)
        identity = self._identity(admission, None, kept=group, beginning=group)
        return self._forward(Kind.STATELESS, claims.changed(), query, identity=identity)

    def _create_forward(self, admission: Admission, claims: Claims, session_id: SessionId | None) -> Forward:
        """Return the pod that creates a context; `session_id`: of a turn whose context is not there."""
        query = self._query(admission, claims, affinity=prompt_affinity(admission.tenant, claims), stays=True)
        identity = self._identity(admission, session_id, beginning=query.affinity)
        return self._forward(Kind.CREATE, claims.changed(), query, identity=identity)

    async def _with_kv(self, forward: Forward) -> Forward:
        """Tell the chosen pod's sidecar to fetch a turn's KV when it is elsewhere, and return the forward."""
        session = forward.session
        if session is not None and session.holder and forward.endpoint.name != session.holder:
            await self._holders.start_pull(session, to=forward.endpoint)
        return forward

    def _identity(self, admission: Admission, session_id: SessionId | None, **more: Any) -> Identity:
        now_ms = self._clock.now_ms()
        return Identity(
            tenant=admission.tenant,
            request_id=admission.request_id,
            expires_at_ms=now_ms + self._rules.identity_ttl_ms,
            issued_at_ms=now_ms,
            session_id=session_id,
            context_mode=admission.context_mode,
            usage=admission.usage,
            key=admission.key,
            **more,
        )

    def _signed(self, identity: Identity | None, choice: Choice) -> dict[str, str]:
        """Return the header that tells the chosen pod who asks, and where the beginning is."""
        if identity is None:
            return {}
        told = replace(identity, prefix_at=choice.prefix_at) if choice.prefix_at else identity
        return {IDENTITY_HEADER: sign_identity(told, self._rules.secret)}

    def _query(
        self,
        admission: Admission,
        claims: Claims | None = None,
        *,
        affinity: str = "",
        conversation: str = "",
        stays: bool = False,
        light: bool = False,
    ) -> RouteQuery:
        return RouteQuery(
            model=None if claims is None else claims.model(),
            affinity=conversation or affinity,
            is_conversation=bool(conversation),
            stays=stays or bool(conversation),
            num_tokens=0 if claims is None else num_tokens_of(claims),
            subset=admission.subset,
            light=light or admission.path in TOKENIZER_PATHS,
            tenant=self._tag(admission),
        )

    def _forward(
        self,
        kind: Kind,
        body: bytes | None,
        query: RouteQuery,
        *,
        identity: Identity | None = None,
        session: CacheSessionMetadata | None = None,
    ) -> Forward:
        choice = self._choose(query)
        headers = self._signed(identity, choice)
        if query.counted_tenant is not None:
            headers[TENANT_HEADER] = query.counted_tenant
        return Forward(choice, kind, headers, self._removed_headers, body, query, session, identity)

    def _choose(self, query: RouteQuery, *, is_made: bool = True) -> Choice:
        """Return a request's pod. Not `is_made`: only to learn whether there is one. Raises as `route`."""
        try:
            return self._endpoints.choose(query, is_made=is_made)
        except TooManyInFlight:
            self._tenants.refused(SHARE)
            raise


def _under_own_name(forward: Forward, claims: Claims) -> Forward:
    """Return a request without a context under the `request_id` of its body.

    vLLM names the answer by the header, and a front always gives one: the body's name would be lost.
    """
    name = claims.text("request_id")
    if name is None or not REQUEST_ID_PATTERN.fullmatch(name):
        return forward
    return replace(forward, set_headers={**forward.set_headers, REQUEST_ID_HEADER: name})
