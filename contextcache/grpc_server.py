"""How our gRPC servers start, map errors, report health and stop. Used by the manager and the sidecar."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from typing_extensions import override

from contextcache.errors import ContextCacheError
from contextcache.grpc_tls import CONNECTION_OPTIONS, NamedPeers, server_credentials
from contextcache.grpc_tracing import TracedCalls
from contextcache.rpc import CHANNEL_OPTIONS, error_metadata
from contextcache.tls import WatchedTls
from contextcache.tracing import NO_TRACER, Tracer

log = logging.getLogger(__name__)

SERVER_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    *CONNECTION_OPTIONS,
    # Below the clients' 12 s keepalive, so that their pings are never answered with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # gRPC's default would share a taken port with whoever has it and let each get half of the calls.
    ("grpc.so_reuseport", 0),
]


CALL_TIMEOUT_S = 600.0
"""Longest call of our services. Ours name shorter deadlines; a stranger who names none must not hold a stream, and
what it has taken of the few there are, for ever."""


class ErrorMapping(grpc.aio.ServerInterceptor):
    """Turns a ContextCacheError raised by a method into its gRPC status and metadata; ends calls that do not end."""

    def __init__(self, *, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        """`call_timeout_s`: longest call, whatever deadline the caller names."""
        self._call_timeout_s = call_timeout_s

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's behaviour; unknown methods (None) stay as they are."""
        method = await continuation(handler_call_details)
        if method is None:
            return method
        timeout_s = self._call_timeout_s
        if method.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _mapped(method.unary_unary, timeout_s),
                method.request_deserializer,
                method.response_serializer,
            )
        if method.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _mapped(method.stream_unary, timeout_s),
                method.request_deserializer,
                method.response_serializer,
            )
        # Others write their answers themselves, as gRPC's own Health.Watch does.
        if inspect.isasyncgenfunction(method.unary_stream):
            return grpc.unary_stream_rpc_method_handler(
                _mapped_stream(method.unary_stream, timeout_s),
                method.request_deserializer,
                method.response_serializer,
            )
        return method


def _mapped(behaviour: Callable[..., Awaitable[Any]], timeout_s: float) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await behaviour(request, context)
        except ContextCacheError as exc:
            await context.abort(exc.grpc_status, exc.message, error_metadata(exc))
        except TimeoutError:
            await _end_overlong(context)

    return call


def _mapped_stream(behaviour: Callable[..., Any], timeout_s: float) -> Callable[..., Awaitable[None]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            # Written here rather than yielded: a reader who does not read is waited for inside the timeout.
            async with asyncio.timeout(timeout_s), aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    await context.write(message)
        except ContextCacheError as exc:
            await context.abort(exc.grpc_status, exc.message, error_metadata(exc))
        except TimeoutError:
            await _end_overlong(context)

    return call


async def _end_overlong(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    log.warning("a call took too long and was ended", extra={"peer": context.peer()})
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the call took longer than any may")


class GrpcServer:
    """One grpc.aio server with health and reflection; `stop` drains within a grace period."""

    def __init__(
        self,
        *,
        addresses: Iterable[str],
        service_name: str,
        add_service: Callable[[grpc.aio.Server], None],
        max_concurrent_rpcs: int,
        tracer: Tracer = NO_TRACER,
        tls: WatchedTls | None = None,
    ) -> None:
        """Bind `addresses` (`127.0.0.1:0` and `unix:///path` both work). Raises OSError when one is taken.

        `tls`: callers show a certificate with the deployment's name, but over a Unix socket.
        """
        named = [] if tls is None else [NamedPeers(tls.server_name)]
        self._server = grpc.aio.server(
            interceptors=[*named, ErrorMapping(), *_tracing(tracer)],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=max_concurrent_rpcs,
        )
        self._service_name = service_name
        add_service(self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names: Sequence[str] = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.ports = [bind(self._server, address, tls=tls) for address in addresses]
        """Ports really bound, in the order of `addresses`."""
        self.is_serving = False
        """From the start until it is told to stop."""

    async def start(self) -> None:
        """Serve, and report SERVING for the service and for the server as a whole."""
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.is_serving = True

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones finish for `grace_s`, then end them."""
        self.is_serving = False
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.stop(grace_s)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", self._service_name):
            await self._health.set(name, status)


def _tracing(tracer: Tracer) -> list[grpc.aio.ServerInterceptor]:
    # None at all where tracing is off: each one costs every call.
    return [] if tracer is NO_TRACER else [TracedCalls(tracer)]


def bind(server: grpc.aio.Server, address: str, *, tls: WatchedTls | None = None) -> int:
    """Have `server` listen on `address` and return the port. Raises OSError when it is taken.

    With `tls` only who has a certificate of the CA is let in, but over a Unix socket.
    """
    try:
        if tls is None or address.startswith("unix:"):
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as exc:
        raise OSError(f"cannot listen on {address}: {exc}") from exc
    if port == 0:
        raise OSError(f"cannot listen on {address}")
    return port
