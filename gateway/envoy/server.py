"""gRPC server of the Envoy front: `envoy.service.ext_proc.v3.ExternalProcessor`, with health and reflection.

Names in health (grpc.health.v1):
- Envoy checks the service's own name. It is SERVING until this process drains, even without pods or a context manager:
  only a processor that stays in use can answer with the error that names the missing part.
- `readiness`: SERVING while a pod is ready and this process does not drain.
- `liveness` and the empty name: SERVING until the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from contextcache.extproc.v3 import external_processor_pb2 as pb
from contextcache.wire.servers import CONNECTION_OPTIONS, Context, GrpcServer, plain_server
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import TRACEPARENT
from gateway.envoy.front import EnvoyFront
from gateway.envoy.messages import ENGINES_METADATA
from gateway.fronts import ClientGone

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
READINESS = "readiness"

_MESSAGE_OVERHEAD_BYTES = 1 << 20
"""Room in a message for its other parts than the body."""
_READINESS_INTERVAL_S = 1.0


class ExtProcServer(GrpcServer):
    """A server whose owner starts, drains and stops it."""

    def __init__(
        self,
        front: EnvoyFront,
        *,
        listen: str,
        max_body_bytes: int,
        is_ready: Callable[[], bool],
        tls: WatchedTls | None = None,
    ) -> None:
        """Bind `listen` (port 0 takes a free one). Raises OSError if it is taken.

        `tls`: callers need a certificate with the deployment's name, for health checks too.
        """
        # Calls are not bounded here: the front answers a request over its bounds with a typed 503.
        server = plain_server(tls=tls, interceptors=(), options=_options(max_body_bytes))
        server.add_generic_rpc_handlers((_service(front),))
        super().__init__(server, service_name=SERVICE_NAME, addresses=[listen], tls=tls)
        self._is_ready = is_ready
        self._draining = False
        self._watching: asyncio.Task[None] | None = None

    @override
    async def start(self) -> None:
        """Serve."""
        await self.set_health(LIVENESS, is_serving=True)
        await self._note_readiness()
        self._watching = asyncio.create_task(self._watch_readiness(), name="ext_proc readiness")
        await super().start()

    async def drain(self) -> None:
        """Report that Envoy must send no new streams. New streams are still answered."""
        self._draining = True
        await self.set_health(SERVICE_NAME, is_serving=False)
        await self._note_readiness()

    @override
    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running calls finish for `grace_s`, then end them."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await super().stop(grace_s)

    async def _watch_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READINESS_INTERVAL_S)
            await self._note_readiness()

    async def _note_readiness(self) -> None:
        await self.set_health(READINESS, is_serving=not self._draining and self._is_ready())


class _GrpcStream:
    """One call, as the front uses it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        metadata: Any = context.invocation_metadata() or ()
        self.traceparent = next((value for key, value in metadata if key == TRACEPARENT), "")
        self.reaches_engines = any(key == ENGINES_METADATA for key, _ in metadata)

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
    async def process(_requests: object, context: Context) -> None:
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
        # Proxies choose how often they ping. A GOAWAY for too many pings would break off their requests.
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        # A proxy whose machine is gone does not close its connections.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
