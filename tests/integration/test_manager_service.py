"""The manager as a process serves it: gRPC client → server → manager → Redis store → a real valkey-server."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from context_manager.__main__ import serve
from context_manager.client import ContextManagerClient
from context_manager.layout import session_key
from context_manager.limits import SessionKey
from context_manager.settings import ManagerSettings
from contextcache.errors import (
    ContextBusy,
    ContextExists,
    ContextExpired,
    ContextNotFound,
    GenerationMismatch,
    InvalidRequest,
    LeaseLost,
    StoreUnavailable,
    TtlOutOfRange,
)
from contextcache.model import (
    HeldCacheRef,
    NewSession,
    Segment,
    SegmentKind,
    SessionMode,
    SessionPage,
    SessionState,
    TtlPolicy,
    TurnCommit,
)
from contextcache.names import new_cache_ref, new_session_id
from contextcache.terms import Terms
from contextcache.v1 import context_manager_pb2 as pb
from contextcache.v1 import context_manager_pb2_grpc as pb_grpc
from kv_sidecar.orphans import ManagerQuestions
from tests.kit.ports import free_port
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

PROMPT = Segment(SegmentKind.PROMPT, (1, 2, 0xFFFF_FFFF), text="Grüße 🙂")
ANSWER = Segment(SegmentKind.ANSWER, (7,), messages_json="[]")
LEASE_MS = 30_000


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@asynccontextmanager
async def running_manager(url: str, **settings: object) -> AsyncIterator[ContextManagerClient]:
    """A manager in this process and a client of it; both ended at the end. A busy machine fails no call."""
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    values = {"listen": "127.0.0.1:0", "redis_url": url, "redis_timeout_s": 20.0, "sweep_interval_s": 600.0}
    values |= {"drain_s": 1.0} | settings
    process = asyncio.create_task(serve(ManagerSettings.model_validate(values), stop, on_started=port.set_result))
    client: ContextManagerClient | None = None
    try:
        await asyncio.wait([process, port], return_when=asyncio.FIRST_COMPLETED)
        if process.done():
            await process
        client = ContextManagerClient(f"127.0.0.1:{port.result()}", timeout_s=30)
        yield client
    finally:
        if client is not None:
            await client.close()
        stop.set()
        await process


@pytest.fixture
async def client(valkey: ValkeyServer) -> AsyncIterator[ContextManagerClient]:
    valkey.command("FLUSHALL")
    async with running_manager(valkey.url) as client:
        yield client


async def create(client: ContextManagerClient, **changes: object) -> TurnCommit:
    """Create a session of tenant demo and return its first commit."""
    new = NewSession("demo", new_session_id(), "smol", ttl_s=600)
    new = replace(new, **changes)  # type: ignore[arg-type]  # fields of NewSession
    await client.reserve(new, lease_id="create", lease_ttl_ms=LEASE_MS)
    commit = TurnCommit("demo", new.session_id, "create", 0, 0, (PROMPT, ANSWER), new_cache_ref(), "pod-1")
    await client.register_session_cache(commit)
    return commit


async def test_a_conversation_over_the_wire(client: ContextManagerClient) -> None:
    first = await create(client, metadata={"kind": "tëst"}, ttl_policy=TtlPolicy.SLIDING)
    begun, transcript = await client.begin_turn("demo", first.session_id, lease_id="turn", lease_ttl_ms=LEASE_MS)
    await client.renew_lease("demo", first.session_id, lease_id="turn", lease_ttl_ms=LEASE_MS)
    turn = replace(
        first, lease_id="turn", expected_generation=1, keep_segments=1, segments=(ANSWER,), cache_ref="", holder="pod-2"
    )
    committed = await client.commit_turn(turn)

    assert begun.state is SessionState.BUSY
    assert transcript == (PROMPT, ANSWER)
    assert (committed.state, committed.generation, committed.num_tokens) == (SessionState.READY, 2, 4)
    assert (committed.cache_ref, committed.previous_cache_ref, committed.holder) == ("", first.cache_ref, "pod-2")
    assert committed.metadata == {"kind": "tëst"}
    assert await client.locate("demo", first.session_id) == committed
    touched = await client.touch("demo", first.session_id, Terms(ttl_s=120, ttl_policy=TtlPolicy.FIXED, metadata={}))
    assert (touched.ttl_s, touched.ttl_policy, touched.metadata) == (120, TtlPolicy.FIXED, {})
    assert await client.list_sessions("demo", limit=10, model_id="smol") == SessionPage(
        (touched,), has_more=False, last_id=first.session_id
    )
    held = [HeldCacheRef("demo", first.session_id, ref) for ref in (first.cache_ref, new_cache_ref())]
    questions = ManagerQuestions(client._connection.address)
    assert await questions.orphans(held) == (1,)
    assert await client.unregister_session_cache("demo", first.session_id) == touched
    assert await questions.orphans(held) == (0, 1)
    await questions.close()
    assert await client.list_sessions("demo", limit=10) == SessionPage((), has_more=False, last_id="")


async def test_errors_arrive_as_the_class_they_left_as(client: ContextManagerClient) -> None:
    session_id = (await create(client)).session_id
    await client.begin_turn("demo", session_id, lease_id="turn", lease_ttl_ms=LEASE_MS)
    turn = TurnCommit("demo", session_id, "turn", 1, 2, (PROMPT,), "", "pod-1")

    with pytest.raises(ContextBusy) as busy:
        await client.begin_turn("demo", session_id, lease_id="other", lease_ttl_ms=LEASE_MS)
    assert 0 < (busy.value.retry_after_s or 0) <= 30
    with pytest.raises(ContextExists):
        await client.reserve(NewSession("demo", session_id, "smol"), lease_id="x", lease_ttl_ms=LEASE_MS)
    with pytest.raises(GenerationMismatch):
        await client.begin_turn("demo", session_id, lease_id="x", lease_ttl_ms=LEASE_MS, expected_generation=0)
    with pytest.raises(LeaseLost):
        await client.commit_turn(replace(turn, lease_id="other"))
    with pytest.raises(GenerationMismatch):
        await client.commit_turn(replace(turn, expected_generation=2))
    with pytest.raises(TtlOutOfRange) as ttl:
        await client.touch("demo", session_id, Terms(ttl_s=0))
    assert ttl.value.param == "ttl"
    with pytest.raises(InvalidRequest) as after:
        await client.list_sessions("demo", limit=10, after="ctx_none")
    assert after.value.param == "after"


async def test_an_unknown_enum_number_is_an_invalid_request(client: ContextManagerClient) -> None:
    service = pb_grpc.ContextManagerServiceStub(client._connection.channel())
    request = pb.ReserveSessionRequest(tenant="demo", session_id="s", model_id="m", ttl_s=60, mode=99)  # type: ignore[arg-type]

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.ReserveSession(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_two_managers_share_what_they_know(client: ContextManagerClient, valkey: ValkeyServer) -> None:
    first = await create(client, mode=SessionMode.SESSION)
    async with running_manager(valkey.url) as other:
        await other.begin_turn("demo", first.session_id, lease_id="turn", lease_ttl_ms=LEASE_MS)

        with pytest.raises(ContextBusy):
            await client.begin_turn("demo", first.session_id, lease_id="mine", lease_ttl_ms=LEASE_MS)
        await client.unregister_session_cache("demo", first.session_id)
        with pytest.raises(ContextNotFound):
            await other.commit_turn(
                replace(first, lease_id="turn", expected_generation=1, keep_segments=2, segments=(PROMPT,))
            )


async def test_a_short_life_ends_and_the_sweeper_frees_it(valkey: ValkeyServer) -> None:
    valkey.command("FLUSHALL")
    async with running_manager(valkey.url, min_ttl_s=1, tombstone_s=3600, sweep_interval_s=0.05) as client:
        session_id = (await create(client)).session_id
        assert (await client.touch("demo", session_id, Terms(ttl_s=1))).ttl_s == 1
        row = session_key(SessionKey("demo", session_id))

        async def error() -> type[Exception] | None:
            try:
                await client.locate("demo", session_id)
            except (ContextExpired, ContextNotFound) as exc:
                return type(exc)
            return None

        async def until_left(num_keys: int) -> None:
            # What says who sweeps comes and goes.
            await until(
                lambda: valkey.command("KEYS", "cc:*").count(b"cc:{"),
                is_so=lambda count: count == num_keys,
                what=f"{num_keys} keys are left",
            )

        assert await until(error, what="its life ends") is ContextExpired
        await until_left(1)
        assert valkey.command("HGET", row, "state").endswith(b"tombstone\r\n")
        assert 3_000_000 < int(valkey.command("PTTL", row)[1:]) <= 3_600_000
        assert await error() is ContextExpired
        valkey.command("PEXPIRE", row, "1")
        await until_left(0)
        assert await error() is ContextNotFound


async def test_the_manager_says_whether_it_serves(client: ContextManagerClient) -> None:
    assert await client.is_serving()
    nobody = ContextManagerClient(f"127.0.0.1:{free_port()}", timeout_s=30)
    assert not await nobody.is_serving()
    await nobody.close()


async def test_a_manager_that_is_down_is_told_at_once() -> None:
    nobody = ContextManagerClient(f"127.0.0.1:{free_port()}", timeout_s=120)

    async with asyncio.timeout(60):
        with pytest.raises(StoreUnavailable) as refused:
            await nobody.locate("demo", "ctx_1")
    assert refused.value.retry_after_s == 1
    await nobody.close()


def test_one_client_works_in_one_loop_after_another(valkey: ValkeyServer) -> None:
    client = ContextManagerClient("127.0.0.1:1", timeout_s=30)

    async def ask() -> bool:
        async with running_manager(valkey.url) as other:
            client._connection.address = other._connection.address
            serving = await client.is_serving()
            await client.close()
            return serving

    assert asyncio.run(ask())
    assert asyncio.run(ask())


async def test_the_process_serves_metrics_and_stops_on_sigterm(valkey: ValkeyServer, tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()
    environment = os.environ | {
        "MANAGER_LISTEN": f"127.0.0.1:{port}",
        "MANAGER_REDIS_URL": valkey.url,
        "MANAGER_REDIS_TIMEOUT_S": "15",
        "MANAGER_METRICS_PORT": str(metrics_port),
    }
    with (tmp_path / "manager.log").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "context_manager"], env=environment, stderr=output)
    client = ContextManagerClient(f"127.0.0.1:{port}", timeout_s=30)
    try:

        async def serves() -> bool:
            assert process.poll() is None, (tmp_path / "manager.log").read_text()
            return await client.is_serving()

        await until(serves, what="the manager serves", deadline_s=90)
        await create(client)
        scraped = http.client.HTTPConnection("127.0.0.1", metrics_port, timeout=60)
        scraped.request("GET", "/metrics")
        page = scraped.getresponse().read().decode()
        scraped.close()
        process.send_signal(signal.SIGTERM)

        assert process.wait(timeout=60) == 0
        assert "contextcache_manager_turns_committed_total 1.0" in page
        assert 'contextcache_manager_request_duration_seconds_count{code="OK",route="RegisterSessionCache"} 1.0' in page
    finally:
        await client.close()
        if process.poll() is None:
            process.kill()
            process.wait()
    lines = (tmp_path / "manager.log").read_text()
    assert '"manager started"' in lines
    assert "Grüße" not in lines


async def test_a_taken_address_is_said_and_nothing_is_left_running(
    client: ContextManagerClient, valkey: ValkeyServer
) -> None:
    settings = ManagerSettings.model_validate({"listen": client._connection.address, "redis_url": valkey.url})
    before = len(asyncio.all_tasks())

    with pytest.raises(OSError, match="cannot listen"):
        await serve(settings, asyncio.Event())
    assert len(asyncio.all_tasks()) == before


async def test_reflection_names_the_service(client: ContextManagerClient) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with grpc.aio.insecure_channel(client._connection.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()

    names = {service.name for service in answer.list_services_response.service}
    assert names >= {"contextcache.v1.ContextManagerService", "grpc.health.v1.Health"}


async def test_no_life_is_longer_than_the_operator_allows(valkey: ValkeyServer) -> None:
    async with running_manager(valkey.url, max_ttl_s=100) as client:
        await create(client, ttl_s=100)
        with pytest.raises(TtlOutOfRange):
            await create(client, ttl_s=101)


async def test_calls_share_as_many_connections_to_redis_as_the_operator_allows(valkey: ValkeyServer) -> None:
    async with running_manager(valkey.url, redis_max_connections=2) as client:
        await asyncio.gather(*(create(client) for _ in range(40)))
        listed = valkey.command("CLIENT", "LIST").count(b"id=")

    assert listed <= 2 + 1  # and the one that asks
