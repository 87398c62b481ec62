"""Carries the Envoy front on gRPC: `envoy.service.ext_proc.v3.ExternalProcessor` and what its health is.

Health (grpc.health.v1), by name:
- the service's own: SERVING until this process drains. What Envoy asks; pods or a context manager that are away do
  not change it, because a plugin that is taken out answers nobody, not even with the error that says what is missing.
- `readiness`: SERVING while a pod is ready and this process does not drain.
- `liveness` and the empty name: SERVING until the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from contextcache.extproc.v3 import external_processor_pb2 as pb
from contextcache.wire.servers import CONNECTION_OPTIONS, NamedPeers, bind
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import TRACEPARENT
from gateway.envoy.front import EnvoyFront
from gateway.fronts import ClientGone

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
READINESS = "readiness"

_MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room in a message for what is not the body."""
_READINESS_INTERVAL_S = 1.0
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ExtProcServer:
    """One grpc.aio server; its owner starts, drains and stops it."""

    def __init__(
        self,
        front: EnvoyFront,
        *,
        listen: str,
        max_body_bytes: int,
        is_ready: Callable[[], bool],
        tls: WatchedTls | None = None,
    ) -> None:
        """Bind `listen` (port 0 takes a free one). Raises OSError when it is taken.

        `tls`: who calls shows a certificate with the deployment's name, health checks too.
        """
        self._is_ready = is_ready
        self._draining = False
        # No bound on concurrent calls here: the front answers what is too much with a typed 503.
        self._server = grpc.aio.server(
            interceptors=[] if tls is None else [NamedPeers(tls.server_name)], options=_options(max_body_bytes)
        )
        self._server.add_generic_rpc_handlers((_service(front),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = bind(self._server, listen, tls=tls)
        """Port really bound."""
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve."""
        for name in ("", LIVENESS, SERVICE_NAME):
            await self._health.set(name, _SERVING)
        await self._note_readiness()
        self._watching = asyncio.create_task(self._watch_readiness(), name="ext_proc readiness")
        await self._server.start()

    async def drain(self) -> None:
        """Say that nothing new should come; what comes is answered all the same."""
        self._draining = True
        await self._health.set(SERVICE_NAME, _NOT_SERVING)
        await self._note_readiness()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s`, then end them."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await self._server.stop(grace_s)

    async def _watch_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READINESS_INTERVAL_S)
            await self._note_readiness()

    async def _note_readiness(self) -> None:
        is_ready = not self._draining and self._is_ready()
        await self._health.set(READINESS, _SERVING if is_ready else _NOT_SERVING)


class _GrpcStream:
    """A call as the front knows it."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        metadata: Any = context.invocation_metadata() or ()
        self.traceparent = next((value for key, value in metadata if key == TRACEPARENT), "")

    async def read(self) -> pb.ProcessingRequest:
        """Return the next message. Raises ClientGone."""
        try:
            message: Any = await self._context.read()
        except grpc.aio.BaseError as exc:
            raise ClientGone from exc
        if message is grpc.aio.EOF:
            raise ClientGone
        found: pb.ProcessingRequest = message
        return found

    async def write(self, message: pb.ProcessingResponse) -> None:
        """Send an answer. Raises ClientGone."""
        try:
            await self._context.write(message)
        except grpc.aio.BaseError as exc:
            raise ClientGone from exc


def _service(front: EnvoyFront) -> grpc.GenericRpcHandler:
    async def process(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await front.process(_GrpcStream(context))

    method = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": method})


def _options(max_body_bytes: int) -> list[tuple[str, Any]]:
    return [
        *CONNECTION_OPTIONS,
        ("grpc.max_receive_message_length", max_body_bytes + _MESSAGE_OVERHEAD_BYTES),
        ("grpc.max_send_message_length", max_body_bytes + _MESSAGE_OVERHEAD_BYTES),
        # Proxies ping as often as they like: a GOAWAY for it would break off their requests.
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        # A proxy whose machine is gone does not close its connections.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # gRPC's default would share a taken port with whoever has it and let each get half of the calls.
        ("grpc.so_reuseport", 0),
    ]
