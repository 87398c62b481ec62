"""The external processor over real gRPC: a scripted Envoy in front, the whole gateway behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contextcache.clock import SystemClock
from contextcache.identity import IDENTITY_HEADER
from gateway.envoy.front import EnvoyFront
from gateway.envoy.server import LIVENESS, READINESS, SERVICE_NAME, ExtProcServer
from gateway.tenants.keys import SingleTenant
from tests.kit.ext_proc import DUPLEX, Answer, ExtProcClient, body, head
from tests.kit.gateway_parts import SECRET, GatewayParts
from tests.kit.gateway_server import DEADLINE_S, running_gateway, settings_for
from tests.kit.identities import verify_identity
from tests.kit.until import until

ROOT = Path(__file__).parents[2]
JSON = {"content-type": "application/json"}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def running(tmp_path, engine, manager, **more):
    settings = settings_for(
        tmp_path, {"pod-a": engine}, manager_port=manager.port, ext_proc_listen="127.0.0.1:0", **more
    )
    async with running_gateway(settings, num_ready=1) as gateway:
        client = ExtProcClient(gateway.ext_proc_port)
        try:
            yield gateway, client
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def draining(tmp_path, engine, manager):
    """A gateway whose drain lasts until the block ends: nobody waits for it, and a busy machine does not miss it."""
    with contextlib.suppress(asyncio.CancelledError):
        async with running(tmp_path, engine, manager, drain_delay_s=600) as (gateway, client):
            gateway.stop.set()
            yield gateway, client
            gateway.serving.cancel()


@contextlib.asynccontextmanager
async def processor(*, is_ready=lambda: True, budget_bytes=1 << 20):
    """A processor alone, over sessions in memory."""
    parts = GatewayParts(SingleTenant(), limits={"total_bytes_max": budget_bytes})
    await parts.endpoints.probe_all()
    front = front_of(parts)
    server = ExtProcServer(front, listen="127.0.0.1:0", max_body_bytes=1 << 20, is_ready=is_ready)
    await server.start()
    client = ExtProcClient(server.ports[0])
    try:
        yield server, client, parts
    finally:
        await client.close()
        await server.stop(0)


def front_of(parts) -> EnvoyFront:
    return EnvoyFront(parts.gateway)


async def health_of(client, *names) -> list[int]:
    stub = health_pb2_grpc.HealthStub(client.channel)
    requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
    return [(await stub.Check(request, timeout=DEADLINE_S)).status for request in requests]


@pytest.mark.parametrize("mode", [2, DUPLEX])
async def test_a_turn_is_found_signed_and_sent_to_its_holder(tmp_path, engine, manager, mode):
    await manager.add("ctx_1")
    raw = json.dumps({"session_id": "ctx_1", "prompt": "x"}).encode()
    async with running(tmp_path, engine, manager) as (gateway, client):
        answers = await ask(client, head(headers=JSON, mode=mode), raw)
        timed = "contextcache_gateway_request_duration_seconds_count"
        routed = await gateway.metric(timed, '{code="routed",route="turn"}')
    told = next(answer for answer in answers if answer.set_headers)
    identity = verify_identity(told.set_headers[IDENTITY_HEADER], SECRET, now_ms=SystemClock().now_ms())

    assert (identity.tenant, identity.session_id) == ("demo", "ctx_1")
    assert told.metadata == {"envoy.lb": {"x-gateway-destination-endpoint": f"127.0.0.1:{engine.port}"}}
    assert (len(answers), routed) == (2, 1)


async def test_the_stream_ends_with_the_answer(tmp_path, engine, manager):
    async with running(tmp_path, engine, manager) as (_, client):
        call = client.open()
        await call.write(head("/v1/models", method="GET", ends=True))
        answer = Answer(await call.read())

        assert answer.phase == "request_headers"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("mode", [2, DUPLEX])
async def test_a_body_of_20_mib_passes_and_one_over_the_limit_is_typed(tmp_path, engine, manager, mode):
    big = b'{"prompt": "%b"}' % (b"x" * (20 << 20))
    first = head(headers=JSON, mode=mode)
    async with running(tmp_path, engine, manager, max_body_bytes=(20 << 20) + 100) as (_, client):
        passed = await ask(client, first, big)
        refused = await ask(client, first, big + b" " * 100)

    if mode == DUPLEX:
        assert b"".join(answer.piece.body for answer in passed[1:]) == big
        assert max(len(answer.piece.body) for answer in passed[1:]) < 62_000
    assert {answer.phase for answer in passed} == {"request_headers", "request_body"}
    assert refused[-1].error == (413, "body_too_large")


async def test_errors_of_the_real_manager_are_typed(tmp_path, engine, manager):
    async with running(tmp_path, engine, manager) as (_, client):
        unknown = await client.ask(head(headers=JSON), body({"session_id": "ctx_none", "prompt": "x"}))
        await manager.stop()
        try:
            away = await client.ask(head(headers=JSON), body({"session_id": "ctx_none", "prompt": "x"}))
            stateless = await client.ask(head(headers=JSON), body({"prompt": "x"}))
            await until(lambda: readiness_is(client, SERVING), what="health says SERVING")
            [health] = await health_of(client, SERVICE_NAME)
        finally:
            await manager.start()

    assert unknown[-1].error == (404, "context_not_found")
    assert away[-1].error == (503, "store_unavailable")
    assert stateless[-1].phase == "request_body"
    assert health == SERVING


async def test_a_client_that_leaves_costs_nothing_that_is_not_given_back():
    big = b"x" * 600_000
    async with processor(budget_bytes=1_300_000) as (_, client, parts):  # a tenant alone may hold half
        for _ in range(3):
            call = client.open()
            await call.write(head("/v1/embeddings", mode=DUPLEX))
            await call.write(body(big, ends=False))
            await until(lambda: streams_are(parts, 1), what="streams are 1")
            call.cancel()
            await until(lambda: streams_are(parts, 0), what="streams are 0")
        answers = await duplex(client, head("/v1/embeddings", mode=DUPLEX), big)

    assert b"".join(answer.piece.body for answer in answers[1:]) == big


async def test_a_proxy_that_ends_its_side_without_the_body_is_no_fault(caplog):
    async with processor() as (_, client, parts):
        call = client.open()
        await call.write(head(headers=JSON))
        await call.read()
        await call.done_writing()
        ended = await call.read()
        code = await call.code()
        await until(lambda: streams_are(parts, 0), what="streams are 0")

    assert (ended, code) == (grpc.aio.EOF, grpc.StatusCode.OK)
    assert "request failed" not in caplog.messages


async def test_two_processors_never_share_a_port():
    async with processor() as (server, _, parts):
        with pytest.raises(OSError, match="cannot listen on"):
            ExtProcServer(
                front_of(parts), listen=f"127.0.0.1:{server.ports[0]}", max_body_bytes=1, is_ready=lambda: True
            )


async def test_health_has_a_name_for_each_question():
    ready = True
    async with processor(is_ready=lambda: ready) as (server, client, _):
        serving = await health_of(client, "", LIVENESS, READINESS, SERVICE_NAME)
        ready = False
        await until(lambda: readiness_is(client, NOT_SERVING), what="health says NOT_SERVING")
        without_pods = await health_of(client, "", LIVENESS, SERVICE_NAME)
        ready = True
        await until(lambda: readiness_is(client, SERVING), what="health says SERVING")
        await server.drain()
        draining = await health_of(client, "", LIVENESS, READINESS, SERVICE_NAME)
        answers = await client.ask(head("/v1/models", method="GET", ends=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(client, "other")

    assert serving == [SERVING] * 4
    assert without_pods == [SERVING] * 3
    assert draining == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]
    assert answers[0].phase == "request_headers"
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_both_fronts_say_that_they_drain_before_they_stop(tmp_path, engine, manager):
    async with draining(tmp_path, engine, manager) as (gateway, client):
        await until(lambda: readiness_is(client, NOT_SERVING), what="health says NOT_SERVING")
        [health] = await health_of(client, SERVICE_NAME)
        async with gateway.get("/readyz") as readyz:
            assert await readyz.json() == {"ready": False}
        # The manager may be late for the second that it has.
        details = await until(
            gateway.details, is_so=lambda found: len(found["missing"]) == 1, what="only time is missing"
        )
        answers = await client.ask(head("/v1/models", method="GET", ends=True))

    assert (health, readyz.status) == (NOT_SERVING, 503)
    assert details["missing"] == ["time: the gateway is draining"]
    assert answers[0].phase == "request_headers"


async def test_a_request_under_way_is_finished_after_the_port_has_closed(tmp_path, engine, manager):
    async with running(tmp_path, engine, manager) as (gateway, client):
        call = client.open()
        await call.write(head(headers=JSON))
        await call.read()
        gateway.stop.set()
        await until(lambda: is_closed(gateway.ext_proc_port), what="its port is closed")
        await call.write(body({"prompt": "x"}))
        answer = Answer(await call.read())
        await asyncio.wait_for(gateway.serving, DEADLINE_S)

    assert answer.phase == "request_body"


def test_a_taken_address_ends_the_start_with_its_name(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = subprocess.run(
            [sys.executable, "-m", "gateway"],
            env=environment(tmp_path, address),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert result.returncode == 1
    assert json.loads(result.stderr.splitlines()[-1])["error"].startswith(f"cannot listen on {address}")
    assert "Traceback" not in result.stderr


def test_a_process_says_where_it_listens_and_ends_on_sigterm(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway"],
        env=environment(tmp_path, "127.0.0.1:0"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # gRPC may write lines of its own.
        lines = (json.loads(line) for line in process.stderr if line.lstrip()[:1] in ("{", b"{"))
        started = next(line for line in lines if line["event"] == "gateway started")
        with socket.create_connection(("127.0.0.1", started["ext_proc_port"]), timeout=DEADLINE_S):
            pass
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line)["event"] for line in process.stderr]

        assert process.wait(DEADLINE_S) == 0
        assert [event for event in events if event.startswith("gateway")] == ["gateway draining", "gateway stopped"]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def environment(tmp_path, ext_proc_listen: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    return kept | {
        "GATEWAY_PORT": "0",
        "GATEWAY_MANAGER": "127.0.0.1:1",
        "GATEWAY_ENDPOINTS": '[{"name": "pod-a", "url": "http://127.0.0.1:1"}]',
        "GATEWAY_SECRET_FILE": str(tmp_path / "secret"),
        "GATEWAY_EXT_PROC_LISTEN": ext_proc_listen,
    }


async def ask(client, first, raw: bytes) -> list[Answer]:
    """Ask in the mode that the first message names."""
    if first.protocol_config.request_body_mode == DUPLEX:
        return await duplex(client, first, raw)
    return await client.ask(first, body(raw))


async def duplex(client, first, raw: bytes) -> list[Answer]:
    """Ask as Envoy does in full duplex mode: pieces are sent unasked, while answers are read."""
    call = client.open()
    await call.write(first)

    async def send() -> None:
        # A refusal ends the stream in the middle of the body.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for start in range(0, len(raw), 100_000):
                await call.write(body(raw[start : start + 100_000], ends=start + 100_000 >= len(raw)))

    sending = asyncio.create_task(send())
    answers = []
    while (found := await call.read()) is not grpc.aio.EOF:
        answers.append(Answer(found))
    await sending
    return answers


async def streams_are(parts, number: int) -> bool:
    return parts.metrics.registry.get_sample_value("contextcache_gateway_ext_proc_streams") == number


async def readiness_is(client, status: int) -> bool:
    return await health_of(client, READINESS) == [status]


async def is_closed(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return True
    writer.close()
    await writer.wait_closed()
    return False
