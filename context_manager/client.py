"""`ContextManagerClient`: the manager as other processes call it. Imports grpc and contextcache only.

It is loaded into vLLM too. Each call fails at once when nobody listens and within `timeout_s` otherwise; every
failure is a ContextCacheError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
from opentelemetry.trace import SpanKind

from context_manager import refusals
from context_manager.segments import packed, unpack_transcript
from context_manager.transcript_memory import TranscriptMemory
from contextcache.clock import Clock, SystemClock
from contextcache.convert import (
    commit_to_pb,
    held_to_pb,
    mode_to_pb,
    policy_to_pb,
    receipt_from_pb,
    repeatable_to_pb,
    segments_from_pb,
    session_from_pb,
    terms_to_pb,
    usage_from_pb,
    usage_to_pb,
)
from contextcache.errors import AlreadyAnswered, ContextBusy, ContextCacheError, InvalidRequest, StoreUnavailable
from contextcache.model import (
    CacheSessionMetadata,
    HeldCacheRef,
    KeptAnswer,
    NewSession,
    Repeatable,
    Segment,
    SessionId,
    SessionPage,
    TenantId,
    TurnCommit,
    TurnReceipt,
    Usage,
    UsageReport,
)
from contextcache.terms import Terms
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from contextcache.wire.channels import Connection
from contextcache.wire.rpc import error_from_rpc, within
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import child_span, trace_metadata

ReplyT = TypeVar("ReplyT")

_SERVICE = "contextcache.v1.ContextManagerService"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH_OF_SERVER = b""
"""HealthCheckRequest with no service: the server as a whole."""
_HEALTH_SERVING = b"\x08\x01"
"""HealthCheckResponse {status: SERVING}: field 1, varint 1."""


class ContextManagerClient:
    """The methods of ContextCacheManager, over one connection that is made at the first call."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 2.0,
        tls: WatchedTls | None = None,
        transcript_bytes_max: int = 0,
        on_begun: Callable[[int, int], None] = lambda _known, _sent: None,
        clock: Clock | None = None,
    ) -> None:
        """`address`: host:port or unix:///path; `timeout_s`: deadline of every call.

        `transcript_bytes_max`: memory for transcripts that later turns need not be sent again. `on_begun` is told how
        many segments of a turn's transcript were known, and how many were sent.
        """
        self._memory = TranscriptMemory(bytes_max=transcript_bytes_max, clock=clock or SystemClock())
        self._on_begun = on_begun
        self._connection = Connection(address, tls=tls)
        self._timeout_s = timeout_s

    async def reserve(
        self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, repeatable: Repeatable | None = None
    ) -> CacheSessionMetadata:
        """See ContextCacheManager.reserve."""
        reply = await self._call(
            lambda stub: stub.ReserveSession,
            lambda: pb.ReserveSessionRequest(
                tenant=new.tenant,
                session_id=new.session_id,
                model_id=new.model_id,
                mode=mode_to_pb(new.mode),
                ttl_s=new.ttl_s,
                ttl_policy=policy_to_pb(new.ttl_policy),
                metadata=new.metadata,
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                repeatable=repeatable_to_pb(repeatable),
            ),
        )
        return session_from_pb(reply.session)

    async def register_session_cache(self, commit: TurnCommit) -> CacheSessionMetadata:
        """See ContextCacheManager.register_session_cache."""
        reply = await self._call(
            lambda stub: stub.RegisterSessionCache, lambda: pb.RegisterSessionCacheRequest(commit=commit_to_pb(commit))
        )
        return self._committed(reply.session, commit)

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.locate."""
        reply = await self._call(
            lambda stub: stub.LocateSession, lambda: pb.LocateSessionRequest(tenant=tenant, session_id=session_id)
        )
        return session_from_pb(reply.session)

    async def get_session_metadata(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.get_session_metadata."""
        reply = await self._call(
            lambda stub: stub.GetSessionMetadata,
            lambda: pb.GetSessionMetadataRequest(tenant=tenant, session_id=session_id),
        )
        return session_from_pb(reply.session)

    async def get_with_turns(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, tuple[TurnReceipt, ...]]:
        """See ContextCacheManager.get_with_turns; a manager of the release before knows of no turns."""
        reply = await self._call(
            lambda stub: stub.GetSessionMetadata,
            lambda: pb.GetSessionMetadataRequest(tenant=tenant, session_id=session_id, with_turns=True),
        )
        return session_from_pb(reply.session), tuple(map(receipt_from_pb, reply.turns))

    async def begin_turn(
        self,
        tenant: TenantId,
        session_id: SessionId,
        *,
        lease_id: str,
        lease_ttl_ms: int,
        read_only: bool = False,
        expected_generation: int | None = None,
        repeatable: Repeatable | None = None,
    ) -> tuple[CacheSessionMetadata, tuple[Segment, ...]]:
        """See ContextCacheManager.begin_turn; the transcript is whole, whatever of it was sent."""
        known = self._memory.find(tenant, session_id)
        try:
            reply = await self._call(
                lambda stub: stub.BeginTurn,
                lambda: pb.BeginTurnRequest(
                    tenant=tenant,
                    session_id=session_id,
                    lease_id=lease_id,
                    lease_ttl_ms=lease_ttl_ms,
                    read_only=read_only,
                    expected_generation=expected_generation,
                    takes_packed=True,
                    known_mark=known.mark,
                    repeatable=repeatable_to_pb(repeatable),
                ),
            )
            sent = unpack_transcript(reply.packed) or tuple(map(packed, segments_from_pb(reply.transcript)))
            session, transcript = session_from_pb(reply.session), known.head(reply.known_segments).grown(sent)
            if transcript.num_tokens != session.num_tokens:
                raise refusals.damaged()
        except (AlreadyAnswered, ContextBusy, StoreUnavailable):
            raise
        except ContextCacheError:
            # Gone, or not what it should be, and were it for our memory: the next turn reads everything.
            self._memory.forget(tenant, session_id)
            raise
        self._memory.begun(session, transcript, lease_id="" if read_only else lease_id)
        self._on_begun(reply.known_segments, len(sent))
        return session, transcript.segments

    async def renew_lease(self, tenant: TenantId, session_id: SessionId, *, lease_id: str, lease_ttl_ms: int) -> None:
        """See ContextCacheManager.renew_lease."""
        await self._call(
            lambda stub: stub.RenewLease,
            lambda: pb.RenewLeaseRequest(
                tenant=tenant, session_id=session_id, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms
            ),
        )

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """See ContextCacheManager.note_holder."""
        await self._call(
            lambda stub: stub.NoteHolder,
            lambda: pb.NoteHolderRequest(tenant=tenant, session_id=session_id, holder=holder, instead_of=instead_of),
        )

    async def commit_turn(self, commit: TurnCommit) -> CacheSessionMetadata:
        """See ContextCacheManager.commit_turn."""
        reply = await self._call(
            lambda stub: stub.CommitTurn, lambda: pb.CommitTurnRequest(commit=commit_to_pb(commit))
        )
        return self._committed(reply.session, commit)

    async def find_answer(self, tenant: TenantId, session_id: SessionId, *, repeat_key: str) -> KeptAnswer | None:
        """See ContextCacheManager.find_answer."""
        reply = await self._call(
            lambda stub: stub.GetAnswer,
            lambda: pb.GetAnswerRequest(tenant=tenant, session_id=session_id, key=repeat_key),
        )
        return KeptAnswer(reply.answer, reply.generation, reply.expires_at_ms, reply.request) if reply.found else None

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None = None
    ) -> CacheSessionMetadata:
        """See ContextCacheManager.rewind."""
        reply = await self._call(
            lambda stub: stub.RewindSession,
            lambda: pb.RewindSessionRequest(
                tenant=tenant,
                session_id=session_id,
                generation=generation,
                expected_generation=expected_generation,
            ),
        )
        return session_from_pb(reply.session)

    async def fork(
        self, source_id: SessionId, *, generation: int | None = None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """See ContextCacheManager.fork."""
        reply = await self._call(
            lambda stub: stub.ForkSession,
            lambda: pb.ForkSessionRequest(source_id=source_id, generation=generation, commit=commit_to_pb(commit)),
        )
        return session_from_pb(reply.session)

    async def abort_turn(self, tenant: TenantId, session_id: SessionId, *, lease_id: str) -> None:
        """See ContextCacheManager.abort_turn."""
        self._memory.ended(lease_id)
        await self._call(
            lambda stub: stub.AbortTurn,
            lambda: pb.AbortTurnRequest(tenant=tenant, session_id=session_id, lease_id=lease_id),
        )

    async def touch(self, tenant: TenantId, session_id: SessionId, terms: Terms) -> CacheSessionMetadata:
        """See ContextCacheManager.touch."""
        reply = await self._call(lambda stub: stub.TouchSession, lambda: terms_to_pb(tenant, session_id, terms))
        return session_from_pb(reply.session)

    async def unregister_session_cache(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.unregister_session_cache."""
        reply = await self._call(
            lambda stub: stub.UnregisterSessionCache,
            lambda: pb.UnregisterSessionCacheRequest(tenant=tenant, session_id=session_id),
        )
        return session_from_pb(reply.session)

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model_id: str = ""
    ) -> SessionPage:
        """See ContextCacheManager.list_sessions."""
        reply = await self._call(
            lambda stub: stub.ListSessions,
            lambda: pb.ListSessionsRequest(tenant=tenant, limit=limit, after=after, model_id=model_id),
        )
        sessions = tuple(session_from_pb(session) for session in reply.sessions)
        # A manager of the release before does not tell, and has no short pages.
        last_id = reply.last_id or (sessions[-1].session_id if sessions else "")
        return SessionPage(sessions, has_more=reply.has_more, last_id=last_id)

    async def check_cache_refs(self, held: Sequence[HeldCacheRef]) -> tuple[int, ...]:
        """See ContextCacheManager.check_cache_refs."""
        reply = await self._call(
            lambda stub: stub.CheckCacheRefs, lambda: pb.CheckCacheRefsRequest(held=[held_to_pb(one) for one in held])
        )
        return tuple(reply.orphans)

    async def add_usage(self, tenant: TenantId, batch_id: str, usage: Sequence[Usage]) -> None:
        """See ContextCacheManager.add_usage."""
        await self._call(
            lambda stub: stub.AddUsage,
            lambda: pb.AddUsageRequest(tenant=tenant, batch_id=batch_id, usage=map(usage_to_pb, usage)),
        )

    async def read_usage(
        self, tenant: TenantId, *, first_day: int | None = None, last_day: int | None = None
    ) -> UsageReport:
        """See ContextCacheManager.read_usage."""
        reply = await self._call(
            lambda stub: stub.GetUsage,
            lambda: pb.GetUsageRequest(tenant=tenant, first_day=first_day, last_day=last_day),
        )
        days = {day.day: [usage_from_pb(one) for one in day.usage] for day in reply.days}
        return UsageReport(days, reply.num_contexts, reply.today)

    async def is_serving(self) -> bool:
        """Return whether the manager says it serves (grpc.health.v1). Never raises."""
        # Spelled out in bytes, because grpcio-health-checking is not installed beside vLLM.
        check: Any = self._connection.channel().unary_unary(_HEALTH_METHOD)
        try:
            call = check(_HEALTH_OF_SERVER, timeout=self._timeout_s, wait_for_ready=False)
            reply = await within(call, self._timeout_s)
        except grpc.RpcError:
            return False
        return bool(reply == _HEALTH_SERVING)

    async def close(self) -> None:
        """Close the connection and forget every transcript; a later call opens a new one."""
        self._memory.close()
        await self._connection.close()

    @property
    def transcript_bytes(self) -> int:
        """Memory that the kept transcripts take."""
        return self._memory.size_bytes

    def _committed(self, message: pb.Session, commit: TurnCommit) -> CacheSessionMetadata:
        session = session_from_pb(message)
        self._memory.committed(session, commit)
        return session

    async def _call(
        self,
        method: Callable[[pb_grpc.ContextManagerServiceAsyncStub], Callable[..., Awaitable[ReplyT]]],
        request: Callable[[], Any],
    ) -> ReplyT:
        try:
            message = request()
        except (TypeError, ValueError) as exc:  # a number beyond 64 bits, a lone surrogate, a wrong type
            raise InvalidRequest("a field has a value that gRPC cannot send to the context manager") from exc
        stub: Any = pb_grpc.ContextManagerServiceStub(self._connection.channel())
        # A request's message is named like its method.
        with child_span(f"{_SERVICE}/{type(message).__name__.removesuffix('Request')}", kind=SpanKind.CLIENT):
            metadata = trace_metadata()
            try:
                call = method(stub)(message, timeout=self._timeout_s, metadata=metadata, wait_for_ready=False)
                return await within(call, self._timeout_s)
            except grpc.RpcError as exc:
                raise error_from_rpc(exc, unavailable=StoreUnavailable) from exc
