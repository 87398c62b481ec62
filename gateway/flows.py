"""Steps of a request from its admission to the signed header that it takes to a pod. Read this first.

A front (HTTP, or Envoy's external processor) turns its messages into these calls:

1. `admitted` reads the head: it finds the tenant and counts the request.
2. `route_by_head` routes by the head alone if it says enough, else `route` reads the body. Both find the context,
   choose the pod and sign the identity.
3. `sent` tells the choice of later pods about this one, `reroute` chooses another pod.

Knows no wire. Nothing outlives a call except counts, so the gateway can stop at any moment without harm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

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
from contextcache.errors import ContextExpired, ContextNotFound, TooManyInFlight
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
from contextcache.model import CacheSessionMetadata, ModelId, SessionId, TenantId
from contextcache.names import KEPT_PREFIX, SESSION_ID_PATTERN, new_session_id
from contextcache.requests import QUEUED_BYTES, SHARE, LargeBodies
from contextcache.responses import Continued, Labels, response_id, telling_what_is_missing
from contextcache.terms import IDEMPOTENCY_HEADER, read_repeatable, session_id_of
from gateway.compaction import Compactions
from gateway.contexts import FORKED_GENERATION, Contexts, KeptConversations, check_id, not_found
from gateway.conversations import Conversations
from gateway.kept import Plain, allowed, group_named, group_of, parent_of
from gateway.parts import Parts
from gateway.paths import TOKENIZER_PATHS, Kind, kind_of
from gateway.pods.routing import Choice, RouteQuery
from gateway.pods.state import Endpoint
from gateway.tenants.keys import KEY_HEADERS, Caller

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)
"""Request ids that a client may choose."""
ROUTING_HEADERS = frozenset({DESTINATION_HEADER, "x-envoy-original-dst-host", UNROUTED_HEADER, TENANT_HEADER})
"""Headers that name the pod or the tenant. The gateway removes a client's own."""
SALTED_PATHS = frozenset({*TURN_PATHS, "/v1/chat/completions/batch"})
"""Calls that generate text and take a `cache_salt`, a field of each request in vLLM 0.32."""
IDENTITY_TTL_MS = 60_000
"""Life of a signed identity, and the limit of clock differences between gateways and pods."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A request with an accepted sender and path. Its body is not read yet."""

    tenant: TenantId
    caller: Caller
    kind: Kind
    path: str
    headers: Mapping[str, str]
    """Names are in lower case."""
    plain: Plain
    """Treatment of the request if it has no context."""
    query: Callable[..., RouteQuery]
    """Constructor of the query, with the facts of the head that limit the choice of the pod."""
    identity: Callable[..., Identity]
    """Constructor of the identity, with sender and request id. The front mints the id: receipts are found by it."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A routed request: its pod, and the changes of its head and body."""

    kind: Kind
    query: RouteQuery
    choice: Choice
    endpoint: Endpoint
    """The chosen pod."""
    set_headers: Mapping[str, str]
    """Headers to set beside `routing_headers`, after `remove_headers` are gone."""
    remove_headers: frozenset[str]
    is_direct: bool
    """True: the request goes to vLLM itself, past the pod's turn process."""
    body: bytes | None
    """None: send the body unchanged."""
    session: CacheSessionMetadata | None
    """Context of a turn; None for other requests."""
    identity: Callable[..., Identity] | None
    """Constructor of the identity to sign for the chosen pod; None: the pod gets none."""

    @property
    def url(self) -> str:
        """Root of the HTTP API that gets the request."""
        return self.endpoint.url if self.is_direct else self.endpoint.turn_url

    @property
    def address(self) -> str:
        """`host:port` of that API."""
        return self.endpoint.address if self.is_direct else self.endpoint.turn_address

    @property
    def routing_headers(self) -> dict[str, str]:
        """Header that names the pod to the proxies on the way."""
        return {DESTINATION_HEADER: self.address}


class Gateway:
    """Routes requests to pods."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.contexts = Contexts(parts)
        self.kept = KeptConversations(parts.holders)
        self.conversations = Conversations(parts, self.contexts)
        self.compactions = Compactions(parts, self.contexts, self.conversations)
        settings = parts.settings
        self.kind_of: Callable[[str, str], Kind] = partial(kind_of, engine_paths=frozenset(settings.engine_paths))
        """Which call a method and a path are. Raises PathNotFound, MethodNotAllowed."""
        self._labels = Labels(parts.manager.locate, parts.clock)
        self.large_bodies = LargeBodies()
        self._plain_max = Plain(settings.plain_max)
        # Without a key file, a key in a request may be for the engine.
        removed = KEY_HEADERS if settings.api_keys_file else frozenset[str]()
        self._removed_headers = ROUTING_HEADERS | {IDENTITY_HEADER} | removed

    @contextmanager
    def admitted(
        self,
        kind: Kind,
        headers: Mapping[str, str],
        *,
        path: str,
        request_id: str,
        subset: frozenset[str] | None = None,
        only_turn: bool = False,
    ) -> Iterator[Admission]:
        """Find the sender of a request, and count the request as in flight during the `with` block.

        `subset`, `only_turn`: see RouteQuery.
        Raises Unauthorized, TenantRateExceeded, TooManyInFlight, NoReadyEndpoint.
        """
        parts = self.parts
        caller = parts.keys.caller_of(headers)
        parts.tenants.ask(caller.tenant)
        tag = tenant_tag(caller.tenant, parts.secret)
        admission = Admission(
            tenant=caller.tenant,
            caller=caller,
            kind=kind,
            path=path,
            headers=headers,
            plain=allowed(caller.plain, self._plain_max, path, headers),
            query=partial(RouteQuery, subset=subset, only_turn=only_turn, light=path in TOKENIZER_PATHS, tenant=tag),
            identity=partial(
                Identity,
                caller.tenant,
                request_id,
                context_mode=caller.context_mode,
                usage=caller.usage,
                key=caller.key,
            ),
        )
        elsewhere = parts.endpoints.num_reported(tag) if parts.tenants.limits[0] else 0
        with parts.tenants.request(caller.tenant, elsewhere=elsewhere):
            yield admission

    def on_behalf(self, admission: Admission, path: str, headers: Mapping[str, str]) -> Admission:
        """Return the admission of a background request that an admitted request needs. It is not counted again."""
        return replace(
            admission,
            kind=self.kind_of("POST", path),
            path=path,
            headers=headers,
            plain=allowed(admission.caller.plain, self._plain_max, path, headers),
            identity=partial(admission.identity, background=True),
        )

    async def route_by_head(self, admission: Admission, *, has_body: bool) -> Forward | None:
        """Route a request by its head, if that names a turn or there is no body to read.

        None: `route` must read the body. The pod checks a body that was not read here. Raises as `route`.
        """
        if admission.kind is Kind.COMPLETION:
            named = claimed_session(None, admission.headers.get(SESSION_HEADER))
            if named is None or admission.path == RESPONSES_PATH:  # the body names the generation
                return None
            try:
                return await self._turn(admission, None, named)
            except (ContextNotFound, ContextExpired):
                return None  # the body may have a fault to report, or create the context
        if admission.kind is Kind.STATELESS and (not has_body or is_opaque(admission.headers.get("content-type", ""))):
            return await self._unread(admission, has_body=has_body)
        return None

    async def route(self, admission: Admission, body: bytes) -> Forward:
        """Route an admitted create, completion or stateless request.

        Raises InvalidRequest, ContextNotFound, ContextExpired, StoreUnavailable, NoReadyEndpoint, EndpointsSaturated,
        TooManyInFlight.
        """
        strict = partial(read_strict_claims, path=admission.path)
        if admission.kind is Kind.CREATE:
            return await self._create(admission, await self.large_bodies.read(strict, body), None)
        claims = None
        if body and not is_opaque(admission.headers.get("content-type", "")):
            claims = await self.large_bodies.read(partial(read_claims, path=admission.path), body)
        if admission.kind is Kind.COMPLETION:
            header = admission.headers.get(SESSION_HEADER)
            asked = await self._labels.continued_by(admission.tenant, admission.path, claims, header)
            if asked is not None:
                if claims is None:  # a request of a context must be JSON
                    claims = await self.large_bodies.read(strict, body)
                with telling_what_is_missing(asked.said):
                    return await self._continued(admission, claims, asked)
        else:
            refuse_session(claims)
        if claims is None:
            return await self._unread(admission, has_body=bool(body))
        return await self._stateless(admission, claims, body_bytes=len(body))

    async def reroute(self, forward: Forward, *, unreachable: str, certain: bool = True) -> Forward:
        """Route the same request to another pod, after `unreachable` refused the connection. Nothing was sent.

        `certain` is False for a pod that only did not accept in time: if no other pod is ready, it is chosen again.
        Raises NoReadyEndpoint, EndpointsSaturated, TooManyInFlight.
        """
        self.parts.endpoints.mark_unreachable(unreachable, certain=certain)
        return await self._placed(
            forward.kind,
            forward.query,
            forward.body,
            set_headers=forward.set_headers,
            identity=forward.identity,
            session=forward.session,
        )

    def sent(self, forward: Forward) -> Callable[[], None]:
        """Remember where a request went, until the pod's own reports show it. Call the result if it was not sent."""
        return self.parts.endpoints.note_placed(
            forward.endpoint.name,
            forward.query.affinity,
            at_ms=self.parts.clock.now_ms(),
            is_new=forward.choice.is_placed,
        )

    async def _create(self, admission: Admission, claims: Claims, session_id: SessionId | None) -> Forward:
        """Route a create. `session_id` is the name that the client gives the context; None: the pod mints one."""
        parent = await self._parent(admission)
        affinity = prompt_affinity(admission.tenant, claims)
        query = admission.query(
            model=claims.model(),
            holder="" if parent is None else parent.holder,
            affinity=affinity,
            stays=True,
            num_tokens=num_tokens_of(claims),
        )
        identity = partial(admission.identity, session_id=session_id)
        if parent is not None:
            identity = partial(identity, parent=parent.session_id, parent_refs=parent.cache_refs)
        return await self._placed(Kind.CREATE, query, claims.changed(), identity=identity)

    async def _parent(self, admission: Admission) -> CacheSessionMetadata | None:
        """Return the parent context that the request names; None: the tenant has no such context."""
        name = parent_of(admission.headers)
        if not SESSION_ID_PATTERN.fullmatch(name) or name.startswith(KEPT_PREFIX):
            return None
        with suppress(ContextExpired):
            return await self._labels.find(admission.tenant, name)
        return None

    async def _continued(self, admission: Admission, claims: Claims, asked: Continued) -> Forward:
        """Route a turn, on a branch if it continues an older generation, or the create that it turns out to be."""
        repeatable = read_repeatable(admission.headers.get(IDEMPOTENCY_HEADER), ())
        session_id = asked.session_id
        if session_id is None:
            if repeatable is None:
                return await self._create(admission, claims, new_session_id())
            session_id = session_id_of(admission.tenant, repeatable.key, self.parts.secret)
        elif asked.generation is not None:
            branch = await self.contexts.branch(
                admission.tenant,
                session_id,
                asked.generation,
                repeat_key="" if repeatable is None else repeatable.key,
                key=admission.caller.key,
                # A request that no pod takes leaves no branch.
                check=lambda source: self._choose(
                    _turn_query(admission, source, source.model_id or claims.model() or ""), is_made=False
                ),
            )
            if branch is not None:
                try:
                    return await self._turn(admission, claims, branch, previous=response_id(branch, FORKED_GENERATION))
                except BaseException:
                    await self.contexts.drop_branch(admission.tenant, branch)
                    raise
        return await self._turn(admission, claims, session_id, creates=asked.creates)

    async def _turn(
        self,
        admission: Admission,
        claims: Claims | None,
        session_id: SessionId,
        *,
        creates: bool = False,
        previous: str = "",
    ) -> Forward:
        """Route a turn to the pod that has its KV or pulls it. `previous`: on a branch, see Claims.changed.

        While the store is down, turns are refused: an answer without its context would be wrong.
        """
        check_id(session_id)
        try:
            session = await self.parts.manager.locate(admission.tenant, session_id)
        except (ContextNotFound, ContextExpired):
            # The pod creates the context, or repeats an answer that outlived it.
            if claims is not None and (creates or IDEMPOTENCY_HEADER in admission.headers):
                return await self._create(admission, claims, session_id)
            raise
        model = session.model_id or (None if claims is None else claims.model())
        if model is None:
            raise not_found()  # by its head alone, a request on a conversation without a model has no pod
        is_branch = bool(previous)
        body = None if claims is None else claims.changed(previous=previous, session_id=session_id if is_branch else "")
        header = {}
        if is_branch and claimed_session(None, admission.headers.get(SESSION_HEADER)) is not None:
            header[SESSION_HEADER] = session_id
        return await self._placed(
            Kind.TURN,
            _turn_query(admission, session, model),
            body,
            set_headers=header,
            identity=partial(admission.identity, session_id=session.session_id, is_branch=is_branch),
            session=session,
        )

    async def _stateless(self, admission: Admission, claims: Claims, *, body_bytes: int) -> Forward:
        """Route a request without a context: with its conversation, if the key asks for that. No store is asked."""
        group, parent, identity = "", "", None
        if admission.plain is not Plain.OFF:
            label_headers = self.parts.settings.label_headers
            group = group_of(admission.tenant, admission.headers, claims, label_headers)
            label = parent_of(admission.headers)
            parent = label and group_named(admission.tenant, claims, label)
        salt = ""
        if admission.plain is Plain.KEEP:
            identity = partial(admission.identity, kept=group)
        elif self.parts.settings.salt_stateless and admission.path in SALTED_PATHS:
            # Without a model: the engine's cache separates models itself. A context's salt has one, and so differs.
            salt = cache_salt(admission.tenant, ModelId(""), self.parts.secret)
        query = admission.query(
            model=claims.model(),
            affinity=group,
            parent=parent,
            is_conversation=bool(group),
            stays=bool(group),
            num_tokens=num_tokens_of(claims),
            body_bytes=body_bytes,
        )
        # vLLM names the answer by the header. A front always sets it, which would hide the body's `request_id`.
        name = claims.text("request_id")
        header = {} if name is None or not REQUEST_ID_PATTERN.fullmatch(name) else {REQUEST_ID_HEADER: name}
        return await self._placed(
            Kind.STATELESS, query, claims.changed(salt=salt), set_headers=header, identity=identity
        )

    async def _unread(self, admission: Admission, *, has_body: bool) -> Forward:
        """Route a request without a context and with an empty or opaque body."""
        query = admission.query(body_bytes=None) if has_body else admission.query(light=True)
        return await self._placed(Kind.STATELESS, query, None)

    async def _placed(
        self,
        kind: Kind,
        query: RouteQuery,
        body: bytes | None,
        *,
        set_headers: Mapping[str, str] = MappingProxyType({}),
        identity: Callable[..., Identity] | None = None,
        session: CacheSessionMetadata | None = None,
    ) -> Forward:
        """Choose the pod, sign the identity for it, and start a pull if a turn leaves its holder."""
        choice = self._choose(query, is_turn=identity is not None and kind is not Kind.STATELESS)
        headers = dict(set_headers)
        if not query.light:
            headers[TENANT_HEADER] = query.tenant
        if identity is not None:
            now_ms = self.parts.clock.now_ms()
            signed = identity(
                issued_at_ms=now_ms,
                expires_at_ms=now_ms + IDENTITY_TTL_MS,
                beginning=query.affinity,
                prefix_at=choice.prefix_at,
                standby=self.parts.endpoints.standby(query, choice.endpoint),
            )
            if signed.parent_refs and choice.endpoint.name != query.holder:
                # Elsewhere the names would bring all KV from the shared store. `prefix_at` brings the common beginning.
                signed = replace(signed, parent_refs=())
            headers[IDENTITY_HEADER] = sign_identity(signed, self.parts.secret)
        if session is not None and session.holder and choice.endpoint.name != session.holder:
            await self.parts.holders.start_pull(session, to=choice.endpoint)
        return Forward(
            kind=kind,
            query=query,
            choice=choice,
            endpoint=choice.endpoint,
            set_headers=headers,
            remove_headers=self._removed_headers,
            is_direct=identity is None and self._is_direct(query, choice.endpoint),
            body=body,
            session=session,
            identity=identity,
        )

    def _is_direct(self, query: RouteQuery, endpoint: Endpoint) -> bool:
        """Return whether a request without an identity goes to vLLM itself and not to the pod's turn process.

        The turn process runs turns and keeps KV, which needs an identity. It hands large bodies to the engine one after
        the other, and it counts requests by tenant. So a request goes to vLLM directly only if it has no identity, its
        body is known to be small, and no limit or share of a tenant needs the count.
        """
        return (
            endpoint.has_turn_process
            and not (endpoint.draining or query.only_turn)
            and query.body_bytes is not None
            and query.body_bytes < QUEUED_BYTES
            and not self.parts.tenants.limits[0]
            and self.parts.endpoints.takes_direct(endpoint.name)
        )

    def _choose(self, query: RouteQuery, *, is_made: bool = True, is_turn: bool = False) -> Choice:
        """Choose the pod. `is_made` is False to learn only whether there is one. Raises as `route`."""
        try:
            return self.parts.endpoints.choose(query, is_made=is_made, is_turn=is_turn)
        except TooManyInFlight:
            self.parts.tenants.refused(SHARE)
            raise


def _turn_query(admission: Admission, session: CacheSessionMetadata, model: ModelId) -> RouteQuery:
    return admission.query(model=model, holder=session.holder, num_tokens=session.num_tokens)
