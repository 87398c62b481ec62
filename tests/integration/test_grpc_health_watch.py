"""Health.Watch of our gRPC servers: what a client that balances by health asks, as gRPC answers it."""

from __future__ import annotations

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contextcache.wire.channels import open_channel
from contextcache.wire.servers import GrpcServer, plain_server
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import TRACEPARENT, open_tracer
from tests.kit.certificates import CertificateFiles
from tests.kit.ports import free_port

DEADLINE_S = 30
TRACED = ((TRACEPARENT, f"00-{'1' * 32}-{'2' * 16}-01"),)


@pytest.mark.thorough
@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_health_watch_tells_of_the_start_and_of_the_end(tmp_path, with_tls, traced):
    tls = WatchedTls(CertificateFiles(tmp_path / "tls").files) if with_tls else None
    endpoint = f"http://127.0.0.1:{free_port()}" if traced else ""
    tracer = open_tracer(endpoint, part="x", sample_ratio=1, on_lost=lambda _num: None)
    plain = plain_server(tls=tls, max_concurrent_rpcs=8, tracer=tracer)
    server = GrpcServer(plain, service_name="x", addresses=["127.0.0.1:0"], tls=tls)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.ports[0]}", tls=tls) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), metadata=TRACED)
        async with asyncio.timeout(DEADLINE_S):
            before = await watch.read()
            stopping = asyncio.create_task(server.stop(DEADLINE_S))
            after = await watch.read()
        watch.cancel()
        await stopping
    await asyncio.to_thread(tracer.close)

    assert (before.status, after.status) == (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
