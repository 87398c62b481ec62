"""A turn from the signed request to the committed transcript. Read this first.

`create` makes a context, `continue_turn` continues one. Both end in `_run`. The engine gets the whole prompt as token
ids, and the names of the KV to load and to save. The lease is renewed while the answer streams. The commit
(`settlement.py`) comes before the answer's last byte: an answer that a client has seen complete is committed.

Rules: KV is a cache of the transcript, so no fault of KV is ever the client's. Whatever ends a turn early (client gone,
engine error, our own fault) aborts it: nothing is committed, the lease is free.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import get_current_span

from contextcache.clock import Clock
from contextcache.errors import (
    AlreadyAnswered,
    ContextCacheError,
    ContextExists,
    ContextExpired,
    ContextLengthExceeded,
    ContextNotFound,
    ContextQuotaExceeded,
    EngineFailed,
    GenerationGone,
    InvalidRequest,
    ModelMismatch,
    NoReadyEndpoint,
)
from contextcache.identity import KVTransfer, Standby
from contextcache.model import (
    BRANCH_LEASE_ID,
    CacheSessionMetadata,
    ContextMode,
    NewSession,
    SessionId,
    SessionMode,
    TenantId,
    TtlPolicy,
)
from contextcache.names import new_cache_ref
from contextcache.process.crash_points import crash_point
from contextcache.responses import LOOK_UP_S, generation_named
from contextcache.wire.tracing import NO_TRACER, Tracer, child_span, kept_traceparent
from vllm_plugin.turn.admission import TurnAdmission
from vllm_plugin.turn.answer.diagnostics import Cause, Comparison
from vllm_plugin.turn.answer.repeats import give_again
from vllm_plugin.turn.answer.rest import CannotResume
from vllm_plugin.turn.crash_points import BEFORE_ENGINE, BEGUN
from vllm_plugin.turn.engine import ASGIApp
from vllm_plugin.turn.metrics import TurnMetrics
from vllm_plugin.turn.ports import KVStore
from vllm_plugin.turn.prompt.comparing import compare
from vllm_plugin.turn.prompt.composition import compose_first, compose_turn
from vllm_plugin.turn.prompt.matching import match, under_instructions, with_summary
from vllm_plugin.turn.prompt.request import TurnRequest, with_new_messages
from vllm_plugin.turn.prompt.transcript import Transcript
from vllm_plugin.turn.resuming import Resuming
from vllm_plugin.turn.searching import EngineSearch
from vllm_plugin.turn.settings import TurnSettings
from vllm_plugin.turn.settlement import Settlement
from vllm_plugin.turn.turn import Client, Turn
from vllm_plugin.turn.waiting import Background, Draining, TurnPatience

if TYPE_CHECKING:
    from context_manager.client import ContextManagerClient
    from kv_sidecar.client import KVSidecarClient

log = logging.getLogger(__name__)

_GIVING_BACK_S = 0.2
"""Wait for the release of a lease that a silent manager may have given; together with MANAGER_REDIS_TIMEOUT_S below a
second."""
_SERVED_MAX = 10_000
"""Names remembered, some 200 bytes each."""
_PIECE_TOKENS = 256
"""Tokens of a prompt that the engine computes at once in the background: a small part of its step."""
_PIECES_MAX = 32
"""Pieces of one prompt: each one is a request to the engine."""
_BACKGROUND_CALLS_MAX = 1024
"""Two for each turn that is cut when a gateway with 500 of them dies."""


@dataclass
class TurnStory:
    """Runs turns. One per turn process."""

    settings: TurnSettings
    manager: ContextManagerClient
    kv: KVStore
    clock: Clock
    metrics: TurnMetrics
    standbys: Callable[[Standby], ASGIApp]
    """Returns the application of another pod's engine."""
    tracer: Tracer = NO_TRACER
    """Begins the spans of requests; closed with the story."""
    quotas: KVSidecarClient | None = None
    """Client of the sidecar that counts a tenant's KV; None: no quotas."""

    def __post_init__(self) -> None:
        """Make the parts that belong to the story; nothing is connected yet."""
        self.admission = TurnAdmission(self.settings, quotas=self.quotas, clock=self.clock, metrics=self.metrics)
        self.background = Background(limit=_BACKGROUND_CALLS_MAX, deadline_s=self.settings.rpc_deadline_ms / 1000)
        self._served: dict[SessionId, None] = {}
        """Contexts that this process has served, the one served last in the end."""
        self._patiences: set[TurnPatience] = set()
        """Patiences of the turns that the engine is answering."""
        self._settlement = Settlement(self.settings, self.manager, self.kv, self.clock, self.metrics, self.background)

    async def run(self, client: Client, request: TurnRequest, named: SessionId | None, new: NewSession | None) -> None:
        """Run a turn, or give the answer of a request that was committed before. Raises ContextCacheError."""
        try:
            await self._continue_or_create(client, request, named, new)
        except (AlreadyAnswered, ContextQuotaExceeded):  # the first request may have been under the quota
            session_id, said = new.session_id if new else named, request.repeatable
            if said is None or session_id is None:
                raise
            kept = await self.manager.find_answer(client.identity.tenant, session_id, repeat_key=said.key)
            if kept is None:
                raise
            await give_again(kept, said, client.send)

    async def _continue_or_create(
        self, client: Client, request: TurnRequest, named: SessionId | None, new: NewSession | None
    ) -> None:
        """Continue the context `named`, create `new`, or with both, create it where it does not exist or has expired.

        The reservation decides which of several requests at once creates it. The others continue it, or hear that it is
        busy. A turn for one generation (`If-Match`) creates nothing.
        """
        if named is not None:
            try:
                return await self.continue_turn(client, request, named)
            except (ContextNotFound, ContextExpired):
                if new is None or request.expected_generation is not None:
                    raise
        assert new is not None
        await self.admission.check_quota(new.tenant)
        try:
            await self.create(client, request, new)
        except ContextExists:
            if named is None:
                raise
            await self.continue_turn(client, request, named)

    async def create(self, client: Client, request: TurnRequest, new: NewSession) -> None:
        """Make a context: reserve, answer the first prompt, save its KV, register. Raises ContextCacheError."""
        if not request.commit:
            raise InvalidRequest("context_commit must not be false on a create", param="context_commit")
        request = with_summary(request, Transcript())  # a new context has no summary
        lease_id = secrets.token_hex(16)
        async with self._taking(new.tenant, new.session_id, lease_id):
            session = await self.manager.reserve(
                new, lease_id=lease_id, lease_ttl_ms=self.settings.lease_ttl_ms, repeatable=request.repeatable
            )
        request = under_instructions(request, (), ContextMode.AUTO, has_stored_ids=False)
        turn = Turn(
            client,
            request,
            session,
            lease_id,
            save_ref=new_cache_ref(),
            is_create=True,
            started_ms=self.clock.now_ms(),
        )
        async with self._lease(turn):
            crash_point(BEGUN)
            self._note_served(new.session_id)
            with child_span("turn compose"):
                turn.prompt = await compose_first(client.engine, request)
            await self._compare(turn, Transcript())
            await self._run(turn)

    async def continue_turn(self, client: Client, request: TurnRequest, session_id: SessionId) -> None:
        """Continue a context: lease and transcript, prompt put together, answer, commit. Raises ContextCacheError."""
        identity, lease_id = client.identity, secrets.token_hex(16)
        async with self._taking(identity.tenant, session_id, lease_id):
            session, segments = await self.manager.begin_turn(
                identity.tenant,
                session_id,
                lease_id=lease_id,
                lease_ttl_ms=self.settings.lease_ttl_ms,
                read_only=not request.commit,
                expected_generation=request.expected_generation,
                repeatable=request.repeatable,
            )
        # A conversation that no turn has continued yet belongs to no model.
        session = replace(session, model_id=session.model_id or request.model)
        commits = request.commit and session.mode is SessionMode.SESSION
        save_ref = new_cache_ref() if commits else None
        turn = Turn(
            client, request, session, lease_id, save_ref=save_ref, is_create=False, started_ms=self.clock.now_ms()
        )
        async with self._lease(turn):
            crash_point(BEGUN)
            if session.model_id != request.model:
                raise ModelMismatch(f"the context belongs to model {session.model_id}", param="model")
            transcript = Transcript(segments)
            self._read_ahead(session, transcript)
            request = with_summary(request, transcript)
            mode = request.context_mode or identity.context_mode or ContextMode.AUTO
            has_ids = bool(request.item_ids) and not request.item_ids.isdisjoint(transcript.item_ids)
            if request.instructions is not None:
                request = under_instructions(request, transcript.messages, mode, has_stored_ids=has_ids)
                mode = request.context_mode or mode
            found = match(transcript, request.prompt, mode=mode, has_stored_ids=has_ids)
            turn.request = with_new_messages(request, found.new)
            with child_span("turn compose"):
                turn.prompt = await compose_turn(client.engine, turn.request, transcript, found)
            self.metrics.count_match(turn.prompt.outcome, turn.prompt.diverged)
            await self._compare(turn, transcript)
            await self._run(turn)

    async def _compare(self, turn: Turn, transcript: Transcript) -> None:
        """Compare the prompt with that of the earlier answer that the client names, of this context or another.

        `transcript`: the context's own. A comparison that cannot be made never fails the turn.
        """
        answer_id, own = turn.request.compared_with, turn.session
        if not answer_id:
            return
        named, session = generation_named(answer_id), own
        turn.comparison = Comparison(Cause.NOT_FOUND)
        if named is None:
            return
        # A branch has the transcript of the generation that it was made from.
        if named not in ((own.session_id, own.generation), own.forked_from if own.generation == 1 else None):
            try:
                async with asyncio.timeout(LOOK_UP_S):
                    session, segments = await self.manager.read_transcript(own.tenant, named[0], generation=named[1])
            except (ContextNotFound, ContextExpired, GenerationGone):
                return
            except (ContextCacheError, TimeoutError):
                turn.comparison = Comparison(Cause.UNKNOWN)
                return
            transcript = Transcript(segments)
        turn.comparison = compare(turn.prompt, turn.request, session, transcript)

    async def drop_branch(self, tenant: TenantId, session_id: SessionId) -> None:
        """Remove a branch that its turn did not take over; any other context stays. Waits a moment for that."""
        dropping = self.manager.abort_turn(tenant, session_id, lease_id=BRANCH_LEASE_ID)
        await self.background.finish(dropping, within_s=_GIVING_BACK_S)

    def search(self, client: Client, app: ASGIApp, draining: Draining) -> EngineSearch:
        """Return the search for an engine of one request; `app` is this pod's."""
        return EngineSearch(client, app, self.standbys, self.settings.resume_timeout_s, self._patiences, draining)

    def give_up(self) -> None:
        """Let every turn that waits for its engine or its client end as if the engine had broken off."""
        for patience in tuple(self._patiences):
            patience.lose("shutdown")

    async def close(self) -> None:
        """End background work and connections."""
        await self.background.drain()
        await self.manager.close()
        await self.kv.close()
        await asyncio.to_thread(self.tracer.close)

    async def _run(self, turn: Turn) -> None:
        """Let the engine answer and deliver it, settling the turn before the last byte."""
        turn.advance("prompt composed")
        turn.prompt_ids = turn.prompt.token_ids
        given, window = len(turn.prompt_ids), turn.client.engine.max_model_len
        if not given:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if window is not None and given >= window:
            # Known already: the engine would have to be handed all those ids to say the same.
            raise ContextLengthExceeded(
                f"context and prompt have {given} tokens, but the model's window has {window}: rewind the "
                "context, or set `truncation`"
            )
        turn.timings_ms["compose"] = self.clock.now_ms() - turn.started_ms
        if turn.is_create and turn.client.identity.background:
            await self._compute_in_pieces(turn)
        reader = partial(turn.client.dialect.answer, turn)
        answer = Resuming(turn, self._settlement, reader, self.settings, self.metrics, partial(self._engine_body, turn))
        crash_point(BEFORE_ENGINE)
        turn.advance("engine asked")
        if turn.load_refs:
            self.kv.expect_load(turn.request_id)
        try:
            with child_span("turn generate"):
                await answer.run()
        except (EngineFailed, NoReadyEndpoint) as exc:
            lost_with_client = answer.delivery.patience.lost_with == "client"
            self.metrics.aborts.labels(reason="client" if lost_with_client else "engine").inc()
            if not turn.client.keep_alive.has_begun:
                raise
            # The stream has begun: closing the connection without `[DONE]` is the only honest way to say it broke.
            log.warning("answer cut off", extra={"session_id": turn.session.session_id, "reason": exc.message})
        finally:
            for left in turn.left_refs:
                self.background.start(self.kv.interrupt(turn.session.tenant, left))
            await self.kv.forget_load(turn.request_id)

    async def _compute_in_pieces(self, turn: Turn) -> None:
        """Have the engine compute most of a new prompt, so that other requests wait for one piece at most.

        The turn itself computes the rest, or all of it if a piece failed or took too long, or the engine's prefix cache
        did not keep the pieces. Raises NoReadyEndpoint if the client leaves or the process ends.
        """
        try:
            await turn.client.search.while_wanted(self._pieces(turn), within_s=self.settings.engine_timeout_s / 2)
        except CannotResume as exc:
            if str(exc) != "timeout":
                raise NoReadyEndpoint(f"background work ended: {exc}", retry_after_s=1) from exc

    async def _pieces(self, turn: Turn) -> None:
        """Compute the pieces of a prompt, and rest as long as each took."""
        ids, (_, salt) = turn.prompt.token_ids, self._kv_order(turn, turn.prompt.token_ids)
        size = max(_PIECE_TOKENS, -(-len(ids) // _PIECES_MAX))
        loop = asyncio.get_running_loop()
        with suppress(ContextCacheError):
            for end in range(size, len(ids), size):
                begun_s = loop.time()
                cached = await turn.client.engine.prefill(turn.request.model, ids[:end], salt)
                turn.num_precomputed += max(0, end - max(cached, end - size))
                if 2 * cached < end - size:
                    return
                await asyncio.sleep(loop.time() - begun_s)

    def _read_ahead(self, session: CacheSessionMetadata, transcript: Transcript) -> None:
        """Have the sidecar begin to read KV before the engine asks, unless this process has served the context lately.

        In that case the engine mostly has the KV itself.
        """
        if session.cache_refs and session.session_id not in self._served:
            self.background.start(self.kv.read_ahead(session, transcript.token_ids))
        self._note_served(session.session_id)

    def _note_served(self, session_id: SessionId) -> None:
        self._served.pop(session_id, None)
        self._served[session_id] = None
        if len(self._served) > _SERVED_MAX:
            del self._served[next(iter(self._served))]

    def _engine_body(self, turn: Turn, known_ids: Sequence[int], changed: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's body: the client's own fields, our prompt, and the connector's orders.

        `known_ids`: leading ids of the answer, after which the engine continues. `changed`: fields for that.
        """
        request, prompt = turn.request, [*turn.prompt.token_ids, *known_ids]
        kv_transfer, salt = self._kv_order(turn, prompt)
        body = request.engine_body(prompt, turn.prompt.messages, kv_transfer, salt) | changed
        if request.prefill_only:
            body["max_tokens"] = 1
            body.pop("max_completion_tokens", None)
        if request.stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return body

    def _kv_order(self, turn: Turn, prompt: Sequence[int]) -> tuple[dict[str, Any], str]:
        """Return the connector's order and the salt.

        A turn that commits nothing and begins with the whole context has its KV saved under the session's name, should
        the sidecar have lost it: without a commit there is no new name, and every later turn would compute it.
        """
        session = turn.session
        begins_with_all = turn.prompt.context_tokens == session.num_tokens
        saves_again = session.cache_ref and turn.save_ref is None and begins_with_all
        is_sliding = session.ttl_policy is TtlPolicy.SLIDING  # the commit moves its expiry
        life_ms = session.ttl_s * 1000 if is_sliding else session.expires_at_ms - self.clock.now_ms()
        turn.retain_ms = turn.request.hints.retain_ms(life_ms)
        order = KVTransfer(
            tenant=session.tenant,
            session_id=session.session_id,
            request_id=turn.part_id,
            load=(*turn.left_refs, *turn.load_refs),
            save=turn.save_ref,
            expires_at_ms=session.expires_at_ms,
            save_again_tokens=session.num_tokens if saves_again else 0,
            traceparent=kept_traceparent(),
            beginning=turn.client.identity.beginning,
            prefix_at=turn.kv_at or turn.client.identity.prefix_at,
            retain_ms=turn.retain_ms,
            pinned=turn.request.hints.pinned,
        )
        return self.kv.order(session, order, prompt)

    @asynccontextmanager
    async def _taking(self, tenant: TenantId, session_id: SessionId, lease_id: str) -> AsyncIterator[None]:
        """Have a lease given back when its call failed or gave no answer: it may have been taken all the same.

        A client that is told so may try again at once; it waits a moment for that, and no longer.
        """
        try:
            yield
        except asyncio.CancelledError:
            self.background.start(self.manager.abort_turn(tenant, session_id, lease_id=lease_id))
            raise
        except ContextCacheError as exc:
            if exc.http_status < 500:
                raise  # a refusal: nothing was taken
            giving_back = self.manager.abort_turn(tenant, session_id, lease_id=lease_id)
            await self.background.finish(giving_back, within_s=_GIVING_BACK_S)
            raise

    @asynccontextmanager
    async def _lease(self, turn: Turn) -> AsyncIterator[None]:
        """Renew the lease and fill silences while the turn runs; release it when the turn ends unsettled."""
        get_current_span().set_attribute("contextcache.session_id", turn.session.session_id)
        renewal = None if turn.save_ref is None else asyncio.create_task(self._renew(turn))
        try:
            async with turn.client.keep_alive.filling(stream=turn.request.stream):
                yield
        finally:
            try:
                if renewal is not None:
                    renewal.cancel()
                    await asyncio.wait([renewal])
            finally:
                await self._settlement.abort(turn)

    async def _renew(self, turn: Turn) -> None:
        ttl_ms = self.settings.lease_ttl_ms
        while True:
            await asyncio.sleep(ttl_ms / 3000)
            try:
                await self.manager.renew_lease(
                    turn.session.tenant, turn.session.session_id, lease_id=turn.lease_id, lease_ttl_ms=ttl_ms
                )
            except ContextCacheError as exc:
                # The answer goes on; the commit decides about a lost lease.
                log.warning("lease not renewed", extra={"session_id": turn.session.session_id, "reason": exc.code})
