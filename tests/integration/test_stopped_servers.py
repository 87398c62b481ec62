"""Every call ends at its deadline, also where the other end is stopped and takes no more of the request.

Seen failing: gRPC ended none of these calls while the socket was full, whatever their deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from context_manager.client import ContextManagerClient
from contextcache.clock import SystemClock
from contextcache.errors import ContextCacheError, SidecarUnavailable, StoreUnavailable
from contextcache.model import HeldCacheRef
from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from contextcache.wire.rpc import error_from_rpc, is_late, is_unanswered, late_call
from kv_sidecar.client import EngineSidecarClient, KVSidecarClient, pack_token_ids
from kv_sidecar.limits import Limits
from kv_sidecar.moving.peer import PeerSidecar
from kv_sidecar.orphans import ManagerQuestions
from kv_sidecar.sealed.prefixes import PrefixQuestion
from tests.kit.kv_blocks import FINGERPRINT, TENANT
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.silent_server import SilentServer

DEADLINE_S = 0.3
HANG_S = 60
"""Far beyond every deadline here; a test that reaches it has found a call that hangs."""
NUM_TOKENS = 128_000
LARGE = b"\1" * (8 << 20)
"""More than the buffers of a TCP connection over loopback."""


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SilentServer]:
    with SilentServer(tmp_path / "sidecar.sock" if request.param == "unix" else None) as server:
        yield server


def announce(
    client: EngineSidecarClient,
    *,
    num_tokens: int = NUM_TOKENS,
    timeout_s: float = DEADLINE_S,
    expires_at_ms: int = 1,
) -> object:
    request = pb.PrepareSaveRequest(
        tenant=TENANT,
        session_id="ctx_1",
        cache_ref=new_cache_ref(),
        fingerprint=FINGERPRINT,
        world_size=1,
        token_ids=pack_token_ids(range(100_000, 100_000 + num_tokens)),
        expires_at_ms=expires_at_ms,
    )
    return client.prepare_save(request, timeout_s)


def match(client: EngineSidecarClient) -> object:
    return client.resolve(pb.ResolveRequest(tenant=TENANT, token_ids=LARGE), DEADLINE_S)


def send_frames(client: EngineSidecarClient) -> object:
    frames = (pb.SaveBlocksRequest(frame=LARGE[: 1 << 20]) for _ in range(64))
    return client.save_blocks(frames, DEADLINE_S)


def load(client: EngineSidecarClient) -> object:
    return list(client.load_blocks(pb.LoadBlocksRequest(tenant=TENANT), DEADLINE_S))


def seal(client: EngineSidecarClient) -> object:
    return client.seal(new_cache_ref(), 0, DEADLINE_S)


def error_of(call: Callable[[], object]) -> ContextCacheError:
    """Return the error of a call made in a thread; fail if the call hangs."""
    errors: list[ContextCacheError] = []

    def make() -> None:
        try:
            call()
        except ContextCacheError as exc:
            errors.append(exc)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "the call outlived its deadline"
    (error,) = errors
    return error


CALLS = pytest.mark.parametrize("call", [lambda it: announce(it, num_tokens=3_000_000), match, send_frames])


@CALLS
def test_an_engine_s_call_to_a_stopped_sidecar_ends_by_its_deadline(
    server: SilentServer, call: Callable[[EngineSidecarClient], object]
) -> None:
    client = EngineSidecarClient(server.address, timeout_s=DEADLINE_S)
    error = error_of(lambda: call(client))

    assert isinstance(error, SidecarUnavailable)
    assert is_late(error)
    assert is_unanswered(error)
    client.close()


def test_an_announcement_of_128_000_tokens_ends_by_its_deadline_over_a_unix_socket(tmp_path: Path) -> None:
    with SilentServer(tmp_path / "sidecar.sock") as server:
        client = EngineSidecarClient(server.address, timeout_s=DEADLINE_S)

        assert is_late(error_of(lambda: announce(client)))
        client.close()


def test_a_sidecar_process_that_was_stopped_costs_each_call_its_deadline_and_serves_when_it_runs_again(
    tmp_path: Path,
) -> None:
    sidecar = SidecarProcess(tmp_path, memory_limit_bytes=0)
    sidecar.start()
    client = EngineSidecarClient(sidecar.address, timeout_s=HANG_S)
    try:
        expires_at_ms = SystemClock().now_ms() + 3_600_000
        for _ in range(4):  # gRPC gives more room with each large request, as it does on an engine that saves
            announce(client, timeout_s=HANG_S, expires_at_ms=expires_at_ms)
        sidecar.stop()
        for _ in range(3):
            assert is_late(error_of(lambda: announce(client)))
        sidecar.go_on()

        assert announce(client, timeout_s=HANG_S, expires_at_ms=expires_at_ms)
    finally:
        sidecar.go_on()
        client.close()
        sidecar.kill()


@pytest.mark.thorough
def test_calls_after_the_first_and_beside_it_end_too_and_leave_nothing_in_the_full_connection(tmp_path: Path) -> None:
    with SilentServer(tmp_path / "sidecar.sock") as server:
        client = EngineSidecarClient(server.address, timeout_s=DEADLINE_S)
        with_many = [threading.Thread(target=error_of, args=(lambda: announce(client),)) for _ in range(4)]
        for thread in with_many:
            thread.start()
        for thread in with_many:
            thread.join(HANG_S)
        for call in (announce, match, send_frames, load, seal):
            for _ in range(3):
                assert is_late(error_of(partial(call, client)))

        assert server.num_connections == 2
        client.close()


def test_a_client_whose_calls_hang_closes_all_the_same(tmp_path: Path) -> None:
    with SilentServer(tmp_path / "sidecar.sock") as server:
        client = EngineSidecarClient(server.address, timeout_s=DEADLINE_S)
        hanging = threading.Thread(target=error_of, args=(lambda: announce(client),))
        hanging.start()
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(HANG_S)
        hanging.join(HANG_S)

        assert not closing.is_alive()
        assert not hanging.is_alive()
        assert isinstance(error_of(lambda: client.seal(new_cache_ref(), 0, DEADLINE_S)), SidecarUnavailable)


async def ends(call: Callable[[], object], error: type[ContextCacheError]) -> ContextCacheError:
    async with asyncio.timeout(HANG_S):
        with pytest.raises(error) as caught:
            await call()  # type: ignore[misc]  # a coroutine function
    return caught.value


async def test_a_sidecar_s_question_to_a_stopped_peer_ends_by_its_deadline() -> None:
    with SilentServer() as server:
        peer = PeerSidecar(
            server.address,
            timeout_s=DEADLINE_S,
            limits=Limits(block_tokens=1, pull_bytes_per_s_min=1, manifest_timeout_s=DEADLINE_S),
            slots=asyncio.Semaphore(1),
        )
        question = PrefixQuestion(TENANT, FINGERPRINT, LARGE, 1)

        assert is_late(await ends(lambda: peer.match(question, 1), SidecarUnavailable))
        await peer.close()


async def test_a_gateway_s_call_to_a_stopped_sidecar_ends_by_its_deadline(server: SilentServer) -> None:
    client = KVSidecarClient(server.address, timeout_s=DEADLINE_S)
    refs = [new_cache_ref()] * 200_000

    assert is_late(await ends(lambda: client.delete_context(TENANT, cache_refs=refs), SidecarUnavailable))
    assert is_late(await ends(client.stats, SidecarUnavailable))
    await client.close()


async def test_a_turn_s_call_to_a_stopped_manager_ends_by_its_deadline(server: SilentServer) -> None:
    client = ContextManagerClient(server.address, timeout_s=DEADLINE_S)

    assert is_late(await ends(lambda: client.get_session_metadata(TENANT, "x" * len(LARGE)), StoreUnavailable))
    assert not await client.is_serving()
    await client.close()


async def test_a_sidecar_s_question_to_a_stopped_manager_ends_by_its_deadline(server: SilentServer) -> None:
    questions = ManagerQuestions(server.address, timeout_s=DEADLINE_S)
    held = [HeldCacheRef(TENANT, "ctx_1", new_cache_ref())] * 100_000

    assert is_late(await ends(lambda: questions.orphans(held), StoreUnavailable))
    await questions.close()


def test_a_late_call_s_error_reads_as_grpc_s_own() -> None:
    error = error_from_rpc(late_call(), unavailable=SidecarUnavailable)
    assert "deadline_exceeded" in error.message
    assert late_call().code() is grpc.StatusCode.DEADLINE_EXCEEDED
