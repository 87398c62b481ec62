"""The sidecar's question to a manager over gRPC: one that knows it, one of the release before, one that is silent."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from typing_extensions import override

from context_manager.manager import ContextCacheManager
from context_manager.server import manager_server
from contextcache.errors import InvalidRequest, StoreUnavailable
from contextcache.model import HeldCacheRef
from contextcache.names import new_cache_ref
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from kv_sidecar.orphans import ManagerQuestions
from tests.kit.ports import free_port
from tests.kit.session_store import in_valkey

HELD = [HeldCacheRef("demo", f"ctx_{number}", new_cache_ref()) for number in range(3)]


class ReleaseBefore(pb_grpc.ContextManagerServiceServicer):
    """Every call is UNIMPLEMENTED, as one is that a server has never heard of."""


class Knowing(ReleaseBefore):
    def __init__(self) -> None:
        self.asked: list[str] = []

    @override
    async def CheckCacheRefs(self, request, context):
        self.asked += [one.session_id for one in request.held]
        return pb.CheckCacheRefsResponse(orphans=[0, 2])


class Silent(ReleaseBefore):
    @override
    async def CheckCacheRefs(self, request, context):
        await asyncio.Event().wait()


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


async def served(servicer: pb_grpc.ContextManagerServiceServicer, address: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    pb_grpc.add_ContextManagerServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


async def test_the_manager_hears_what_is_held_and_says_which_are_orphans(address: str) -> None:
    knowing = Knowing()
    server = await served(knowing, address)
    questions = ManagerQuestions(address, timeout_s=30)
    try:
        assert await questions.orphans(HELD) == (0, 2)
        assert knowing.asked == [one.session_id for one in HELD]
    finally:
        await questions.close()
        await server.stop(None)


@pytest.mark.parametrize("servicer", [ReleaseBefore(), Silent(), None], ids=["release-before", "silent", "nobody"])
async def test_who_does_not_know_or_does_not_answer_counts_as_silent_in_bounded_time(
    address: str, servicer: pb_grpc.ContextManagerServiceServicer | None
) -> None:
    """Seen to fail without the deadline of a question: a silent manager was given up after 51 s, by gRPC itself."""
    server = None if servicer is None else await served(servicer, address)
    questions = ManagerQuestions(address, timeout_s=0.5)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(StoreUnavailable):
                await questions.orphans(HELD)
    finally:
        await questions.close()
        if server is not None:
            await server.stop(None)


async def test_a_question_that_is_refused_is_told_from_silence(address: str) -> None:
    """The real manager refuses names that no session could have; the sidecar then asks about others first."""
    manager = ContextCacheManager(**in_valkey())
    server = manager_server(manager, listen=address, max_concurrent_rpcs=16)
    await server.start()
    questions = ManagerQuestions(address, timeout_s=30)
    try:
        assert await questions.orphans(HELD) == (0, 1, 2)
        with pytest.raises(InvalidRequest):
            await questions.orphans([HeldCacheRef("demo", "ctx_1", "no ref of ours")])
    finally:
        await questions.close()
        await server.stop(0)
