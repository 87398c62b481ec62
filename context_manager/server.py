"""The manager behind gRPC. Errors are mapped by wire/servers.py.

A method of the service is a method of the manager. The fields of its request are the arguments of that method, and the
fields of its answer are those of the returned value.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from google.protobuf.message import Message

from context_manager.manager import ContextCacheManager
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from contextcache.wire.messages import message_of
from contextcache.wire.servers import GrpcServer, OnEnded, answering, plain_server
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import NO_TRACER, Tracer

_SERVICE = pb.DESCRIPTOR.services_by_name["ContextManagerService"]
SERVICE_NAME = _SERVICE.full_name
_METHODS = {
    "ReserveSession": "reserve",
    "RegisterSessionCache": "register_session_cache",
    "LocateSession": "locate",
    "BeginTurn": "begin_turn",
    "RenewLease": "renew_lease",
    "NoteHolder": "note_holder",
    "CommitTurn": "commit_turn",
    "RewindSession": "rewind",
    "ForkSession": "fork",
    "AbortTurn": "abort_turn",
    "TouchSession": "touch",
    "UnregisterSessionCache": "unregister_session_cache",
    "CheckCacheRefs": "check_cache_refs",
    "AddUsage": "add_usage",
    "GetUsage": "read_usage",
    "ListSessions": "list_sessions",
}
"""Methods of the service, and those of the manager that answer them."""


def _service(manager: ContextCacheManager) -> Any:
    """Return an object with a method for each method of the service."""

    async def get_session_metadata(request: pb.GetSessionMetadataRequest, _context: object) -> Message:
        if not request.with_turns:
            session = await manager.get_session_metadata(request.tenant, request.session_id)
            return message_of(pb.GetSessionMetadataResponse, session=session)
        session, turns = await manager.get_with_turns(request.tenant, request.session_id)
        return message_of(pb.GetSessionMetadataResponse, session=session, turns=turns)

    async def get_answer(request: pb.GetAnswerRequest, _context: object) -> Message:
        kept = await manager.find_answer(request.tenant, request.session_id, repeat_key=request.key)
        return message_of(pb.GetAnswerResponse, kept, found=kept is not None)

    answers = {name: answering(manager, method, pb, name) for name, method in _METHODS.items()}
    return SimpleNamespace(GetSessionMetadata=get_session_metadata, GetAnswer=get_answer, **answers)


def manager_server(
    manager: ContextCacheManager,
    *,
    listen: str,
    max_concurrent_rpcs: int,
    tracer: Tracer = NO_TRACER,
    tls: WatchedTls | None = None,
    on_ended: OnEnded = lambda *_: None,
) -> GrpcServer:
    """Return a bound server of `manager`, not started yet. Raises OSError when the address is taken."""
    server = plain_server(tls=tls, max_concurrent_rpcs=max_concurrent_rpcs, tracer=tracer, on_ended=on_ended)
    pb_grpc.add_ContextManagerServiceServicer_to_server(_service(manager), server)
    return GrpcServer(server, service_name=SERVICE_NAME, addresses=[listen], tls=tls)
