"""The manager behind gRPC: messages to values and back, nothing else. Errors are mapped by wire/servers.py."""

from __future__ import annotations

from typing import Any

import grpc.aio
from typing_extensions import override

from context_manager.manager import ContextCacheManager
from contextcache.convert import (
    commit_from_pb,
    held_from_pb,
    new_session_from_pb,
    receipt_to_pb,
    repeatable_from_pb,
    segment_to_pb,
    session_to_pb,
    terms_from_pb,
    usage_from_pb,
    usage_to_pb,
)
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from contextcache.wire.servers import GrpcServer, plain_server
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import NO_TRACER, Tracer

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ContextManagerService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class ContextManagerService(pb_grpc.ContextManagerServiceServicer):
    """One method a call, as in context_manager.proto."""

    def __init__(self, manager: ContextCacheManager) -> None:
        self._manager = manager

    @override
    async def ReserveSession(self, request: pb.ReserveSessionRequest, context: Context) -> pb.ReserveSessionResponse:
        session = await self._manager.reserve(
            new_session_from_pb(request),
            lease_id=request.lease_id,
            lease_ttl_ms=request.lease_ttl_ms,
            repeatable=repeatable_from_pb(request.repeatable),
        )
        return pb.ReserveSessionResponse(session=session_to_pb(session))

    @override
    async def RegisterSessionCache(
        self, request: pb.RegisterSessionCacheRequest, context: Context
    ) -> pb.RegisterSessionCacheResponse:
        session = await self._manager.register_session_cache(commit_from_pb(request.commit))
        return pb.RegisterSessionCacheResponse(session=session_to_pb(session))

    @override
    async def LocateSession(self, request: pb.LocateSessionRequest, context: Context) -> pb.LocateSessionResponse:
        session = await self._manager.locate(request.tenant, request.session_id)
        return pb.LocateSessionResponse(session=session_to_pb(session))

    @override
    async def GetSessionMetadata(
        self, request: pb.GetSessionMetadataRequest, context: Context
    ) -> pb.GetSessionMetadataResponse:
        if not request.with_turns:
            session = await self._manager.get_session_metadata(request.tenant, request.session_id)
            return pb.GetSessionMetadataResponse(session=session_to_pb(session))
        session, turns = await self._manager.get_with_turns(request.tenant, request.session_id)
        return pb.GetSessionMetadataResponse(session=session_to_pb(session), turns=map(receipt_to_pb, turns))

    @override
    async def BeginTurn(self, request: pb.BeginTurnRequest, context: Context) -> pb.BeginTurnResponse:
        begun = await self._manager.begin_turn(
            request.tenant,
            request.session_id,
            lease_id=request.lease_id,
            lease_ttl_ms=request.lease_ttl_ms,
            read_only=request.read_only,
            expected_generation=request.expected_generation if request.HasField("expected_generation") else None,
            known_mark=request.known_mark if request.takes_packed else "",
            repeatable=repeatable_from_pb(request.repeatable),
        )
        session = session_to_pb(begun.session)
        if not request.takes_packed:  # a pod of the release before
            return pb.BeginTurnResponse(session=session, transcript=map(segment_to_pb, begun.transcript()))
        return pb.BeginTurnResponse(session=session, known_segments=begun.known_segments, packed=begun.packed)

    @override
    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        await self._manager.renew_lease(
            request.tenant, request.session_id, lease_id=request.lease_id, lease_ttl_ms=request.lease_ttl_ms
        )
        return pb.RenewLeaseResponse()

    @override
    async def NoteHolder(self, request: pb.NoteHolderRequest, context: Context) -> pb.NoteHolderResponse:
        await self._manager.note_holder(
            request.tenant, request.session_id, holder=request.holder, instead_of=request.instead_of
        )
        return pb.NoteHolderResponse()

    @override
    async def CommitTurn(self, request: pb.CommitTurnRequest, context: Context) -> pb.CommitTurnResponse:
        session = await self._manager.commit_turn(commit_from_pb(request.commit))
        return pb.CommitTurnResponse(session=session_to_pb(session))

    @override
    async def RewindSession(self, request: pb.RewindSessionRequest, context: Context) -> pb.RewindSessionResponse:
        session = await self._manager.rewind(
            request.tenant,
            request.session_id,
            generation=request.generation,
            expected_generation=request.expected_generation if request.HasField("expected_generation") else None,
        )
        return pb.RewindSessionResponse(session=session_to_pb(session))

    @override
    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.ForkSessionResponse:
        session = await self._manager.fork(
            request.source_id,
            generation=request.generation if request.HasField("generation") else None,
            commit=commit_from_pb(request.commit),
        )
        return pb.ForkSessionResponse(session=session_to_pb(session))

    @override
    async def AbortTurn(self, request: pb.AbortTurnRequest, context: Context) -> pb.AbortTurnResponse:
        await self._manager.abort_turn(request.tenant, request.session_id, lease_id=request.lease_id)
        return pb.AbortTurnResponse()

    @override
    async def TouchSession(self, request: pb.TouchSessionRequest, context: Context) -> pb.TouchSessionResponse:
        session = await self._manager.touch(request.tenant, request.session_id, terms_from_pb(request))
        return pb.TouchSessionResponse(session=session_to_pb(session))

    @override
    async def UnregisterSessionCache(
        self, request: pb.UnregisterSessionCacheRequest, context: Context
    ) -> pb.UnregisterSessionCacheResponse:
        session = await self._manager.unregister_session_cache(request.tenant, request.session_id)
        return pb.UnregisterSessionCacheResponse(session=session_to_pb(session))

    @override
    async def CheckCacheRefs(self, request: pb.CheckCacheRefsRequest, context: Context) -> pb.CheckCacheRefsResponse:
        orphans = await self._manager.check_cache_refs([held_from_pb(one) for one in request.held])
        return pb.CheckCacheRefsResponse(orphans=orphans)

    @override
    async def GetAnswer(self, request: pb.GetAnswerRequest, context: Context) -> pb.GetAnswerResponse:
        kept = await self._manager.find_answer(request.tenant, request.session_id, repeat_key=request.key)
        if kept is None:
            return pb.GetAnswerResponse()
        return pb.GetAnswerResponse(
            found=True,
            answer=kept.answer,
            generation=kept.generation,
            expires_at_ms=kept.expires_at_ms,
            request=kept.request,
        )

    @override
    async def AddUsage(self, request: pb.AddUsageRequest, context: Context) -> pb.AddUsageResponse:
        await self._manager.add_usage(
            request.tenant,
            request.batch_id,
            [usage_from_pb(one) for one in request.usage],
            sender=request.sender,
            number=request.number,
        )
        return pb.AddUsageResponse()

    @override
    async def GetUsage(self, request: pb.GetUsageRequest, context: Context) -> pb.GetUsageResponse:
        report = await self._manager.read_usage(
            request.tenant,
            first_day=request.first_day if request.HasField("first_day") else None,
            last_day=request.last_day if request.HasField("last_day") else None,
        )
        days = [pb.DayOfUsage(day=day, usage=map(usage_to_pb, usage)) for day, usage in report.days.items()]
        return pb.GetUsageResponse(days=days, num_contexts=report.num_contexts, today=report.today)

    @override
    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        page = await self._manager.list_sessions(
            request.tenant, limit=request.limit, after=request.after, model_id=request.model_id
        )
        return pb.ListSessionsResponse(
            sessions=[session_to_pb(session) for session in page.sessions], has_more=page.has_more, last_id=page.last_id
        )


def manager_server(
    manager: ContextCacheManager,
    *,
    listen: str,
    max_concurrent_rpcs: int,
    tracer: Tracer = NO_TRACER,
    tls: WatchedTls | None = None,
) -> GrpcServer:
    """Return a bound server of `manager`, not started yet. Raises OSError when the address is taken."""
    server = plain_server(tls=tls, max_concurrent_rpcs=max_concurrent_rpcs, tracer=tracer)
    pb_grpc.add_ContextManagerServiceServicer_to_server(ContextManagerService(manager), server)
    return GrpcServer(server, service_name=SERVICE_NAME, addresses=[listen], tls=tls)
