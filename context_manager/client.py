"""`ContextManagerClient`: the client of the context manager. Imports grpc and contextcache only.

vLLM loads it too. A call fails at once when no manager listens, and within `timeout_s` otherwise. Each failure is a
ContextCacheError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from typing_extensions import override

from context_manager import refusals
from context_manager.segments import unpack_transcript
from context_manager.transcript_memory import TranscriptMemory
from contextcache.clock import Clock, SystemClock
from contextcache.errors import AlreadyAnswered, ContextBusy, ContextCacheError, StoreUnavailable
from contextcache.model import (
    CacheSessionMetadata,
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
from contextcache.wire.channels import ServiceClient
from contextcache.wire.messages import value_of
from contextcache.wire.rpc import within
from contextcache.wire.tls import WatchedTls

_SERVICE = "contextcache.v1.ContextManagerService"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
_HEALTH_OF_SERVER = b""
"""HealthCheckRequest with no service: the server as a whole."""
_HEALTH_SERVING = b"\x08\x01"
"""HealthCheckResponse {status: SERVING}: field 1, varint 1."""


class ContextManagerClient(ServiceClient):
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
        super().__init__(address, pb=pb, service=_SERVICE, timeout_s=timeout_s, tls=tls, unavailable=StoreUnavailable)

    async def reserve(
        self, new: NewSession, *, lease_id: str, lease_ttl_ms: int, repeatable: Repeatable | None = None
    ) -> CacheSessionMetadata:
        """See ContextCacheManager.reserve."""
        return await self._session(
            "ReserveSession", new=new, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms, repeatable=repeatable
        )

    async def register_session_cache(self, commit: TurnCommit) -> CacheSessionMetadata:
        """See ContextCacheManager.register_session_cache."""
        return self._memory.committed(await self._session("RegisterSessionCache", commit=commit), commit)

    async def locate(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.locate."""
        return await self._session("LocateSession", tenant=tenant, session_id=session_id)

    async def get_session_metadata(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.get_session_metadata."""
        return await self._session("GetSessionMetadata", tenant=tenant, session_id=session_id)

    async def get_with_turns(
        self, tenant: TenantId, session_id: SessionId
    ) -> tuple[CacheSessionMetadata, tuple[TurnReceipt, ...]]:
        """See ContextCacheManager.get_with_turns."""
        reply = await self._call("GetSessionMetadata", tenant=tenant, session_id=session_id, with_turns=True)
        return value_of(CacheSessionMetadata, reply.session), tuple(value_of(TurnReceipt, one) for one in reply.turns)

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
        """See ContextCacheManager.begin_turn. Returns the whole transcript, known segments included."""
        known = self._memory.find(tenant, session_id)
        try:
            reply = await self._call(
                "BeginTurn",
                tenant=tenant,
                session_id=session_id,
                lease_id=lease_id,
                lease_ttl_ms=lease_ttl_ms,
                read_only=read_only,
                expected_generation=expected_generation,
                takes_packed=True,  # a manager of 0.1.0 sends another form otherwise
                known_mark=known.mark,
                repeatable=repeatable,
            )
            sent = unpack_transcript(reply.packed)
            session = value_of(CacheSessionMetadata, reply.session)
            transcript = known.head(reply.known_segments).grown(sent)
            if transcript.num_tokens != session.num_tokens:
                raise refusals.damaged()
        except (AlreadyAnswered, ContextBusy, StoreUnavailable):
            raise
        except ContextCacheError:
            # The session is gone, or the transcript is damaged, maybe in our memory: the next turn reads all of it.
            self._memory.forget(tenant, session_id)
            raise
        self._memory.begun(session, transcript, lease_id="" if read_only else lease_id)
        self._on_begun(reply.known_segments, len(sent))
        return session, transcript.segments

    async def read_transcript(
        self, tenant: TenantId, session_id: SessionId, *, generation: int | None = None
    ) -> tuple[CacheSessionMetadata, tuple[Segment, ...]]:
        """Return a session and its transcript, now or at a generation. A sliding life starts again.

        Raises as ContextCacheManager.begin_turn, also GenerationGone.
        """
        reply = await self._call(
            "BeginTurn",
            tenant=tenant,
            session_id=session_id,
            lease_id="reader",
            lease_ttl_ms=1,
            read_only=True,
            takes_packed=True,
            at_generation=generation,
        )
        return value_of(CacheSessionMetadata, reply.session), unpack_transcript(reply.packed)

    async def renew_lease(self, tenant: TenantId, session_id: SessionId, *, lease_id: str, lease_ttl_ms: int) -> None:
        """See ContextCacheManager.renew_lease."""
        await self._call(
            "RenewLease", tenant=tenant, session_id=session_id, lease_id=lease_id, lease_ttl_ms=lease_ttl_ms
        )

    async def note_holder(self, tenant: TenantId, session_id: SessionId, *, holder: str, instead_of: str = "") -> None:
        """See ContextCacheManager.note_holder."""
        await self._call("NoteHolder", tenant=tenant, session_id=session_id, holder=holder, instead_of=instead_of)

    async def commit_turn(self, commit: TurnCommit) -> CacheSessionMetadata:
        """See ContextCacheManager.commit_turn."""
        return self._memory.committed(await self._session("CommitTurn", commit=commit), commit)

    async def find_answer(self, tenant: TenantId, session_id: SessionId, *, repeat_key: str) -> KeptAnswer | None:
        """See ContextCacheManager.find_answer."""
        reply = await self._call("GetAnswer", tenant=tenant, session_id=session_id, key=repeat_key)
        return value_of(KeptAnswer, reply) if reply.found else None

    async def rewind(
        self, tenant: TenantId, session_id: SessionId, *, generation: int, expected_generation: int | None = None
    ) -> CacheSessionMetadata:
        """See ContextCacheManager.rewind."""
        return await self._session(
            "RewindSession",
            tenant=tenant,
            session_id=session_id,
            generation=generation,
            expected_generation=expected_generation,
        )

    async def fork(
        self, source_id: SessionId, *, generation: int | None = None, commit: TurnCommit
    ) -> CacheSessionMetadata:
        """See ContextCacheManager.fork."""
        return await self._session("ForkSession", source_id=source_id, generation=generation, commit=commit)

    async def abort_turn(self, tenant: TenantId, session_id: SessionId, *, lease_id: str) -> None:
        """See ContextCacheManager.abort_turn."""
        self._memory.ended(lease_id)
        await self._call("AbortTurn", tenant=tenant, session_id=session_id, lease_id=lease_id)

    async def touch(self, tenant: TenantId, session_id: SessionId, terms: Terms) -> CacheSessionMetadata:
        """See ContextCacheManager.touch."""
        return await self._session("TouchSession", tenant=tenant, session_id=session_id, terms=terms)

    async def unregister_session_cache(self, tenant: TenantId, session_id: SessionId) -> CacheSessionMetadata:
        """See ContextCacheManager.unregister_session_cache."""
        return await self._session("UnregisterSessionCache", tenant=tenant, session_id=session_id)

    async def list_sessions(
        self, tenant: TenantId, *, limit: int, after: SessionId = "", model_id: str = ""
    ) -> SessionPage:
        """See ContextCacheManager.list_sessions."""
        reply = await self._call("ListSessions", tenant=tenant, limit=limit, after=after, model_id=model_id)
        return value_of(SessionPage, reply)

    async def add_usage(self, tenant: TenantId, batch_id: str, usage: Sequence[Usage]) -> None:
        """See ContextCacheManager.add_usage."""
        await self._call("AddUsage", tenant=tenant, batch_id=batch_id, usage=usage)

    async def read_usage(
        self, tenant: TenantId, *, first_day: int | None = None, last_day: int | None = None
    ) -> UsageReport:
        """See ContextCacheManager.read_usage."""
        return value_of(
            UsageReport, await self._call("GetUsage", tenant=tenant, first_day=first_day, last_day=last_day)
        )

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

    @override
    async def close(self) -> None:
        """Close the connection and forget every transcript; a later call opens a new one."""
        self._memory.close()
        await super().close()

    @property
    def transcript_bytes(self) -> int:
        """Memory that the kept transcripts take."""
        return self._memory.size_bytes

    async def _session(self, method: str, **fields: Any) -> CacheSessionMetadata:
        """Call a method that answers a session."""
        return value_of(CacheSessionMetadata, (await self._call(method, **fields)).session)
