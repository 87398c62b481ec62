"""Single parts behind the front, when their addresses are given: a gateway's metrics, health of manager and sidecar."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contextcache.wire.channels import open_channel
from contextcache.wire.tls import WatchedTls
from doctor.finding import Finding, failed, ok
from doctor.front import Front, Unreachable

_METRIC = "contextcache_gateway_requests_total"


def metrics(front: Front) -> Iterator[Finding]:
    """Say whether a gateway's metrics port serves its metrics."""
    try:
        answer = front.call("GET", "/metrics", with_key=False)
    except Unreachable as exc:
        yield failed("metrics", exc.reason, exc.hint)
        return
    if answer.status == 200 and _METRIC in answer.text:
        yield ok("metrics", f"{front.url} serves the gateway's")
    else:
        hint = "Expected the port GATEWAY_METRICS_PORT of a gateway, 9090 in the chart."
        yield failed("metrics", f"{front.url}/metrics: {answer.status}, without {_METRIC}", hint)


def grpc_health(part: str, address: str, *, tls: WatchedTls | None, timeout_s: float) -> Iterator[Finding]:
    """Ask a part's gRPC health service."""
    try:
        status = asyncio.run(_ask(address, tls=tls, timeout_s=timeout_s))
    except grpc.RpcError as exc:
        hint = "Is it the right port, do its NetworkPolicy and (with tls.enabled) --tls-dir let this caller in?"
        yield failed(part, f"{address} does not answer: {exc.code().name}", hint)
        return
    if status == health_pb2.HealthCheckResponse.SERVING:
        yield ok(part, f"{address} serves")
    else:
        yield failed(part, f"{address} is draining or has not started", f"Look at the log of {part}.")


async def _ask(address: str, *, tls: WatchedTls | None, timeout_s: float) -> int:
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        return int(answer.status)
