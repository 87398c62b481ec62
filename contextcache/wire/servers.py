"""How our gRPC servers start, map errors, report health and stop, and who may connect where TLS is mutual."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
import grpc.aio
from opentelemetry.trace import SpanKind
from typing_extensions import override

from contextcache.errors import ContextCacheError
from contextcache.wire.rpc import CHANNEL_OPTIONS, error_metadata, status_of
from contextcache.wire.tls import HANDSHAKE_TIMEOUT_S, WatchedTls
from contextcache.wire.tracing import NO_TRACER, TRACEPARENT, Tracer

log = logging.getLogger(__name__)

# A string: the generics exist in the stubs only.
Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    # gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
    # Those without a word, or without a certificate, count until then; a client of ours has one connection.
    ("grpc.max_allowed_incoming_connections", 4096),
]
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
    """What every call of ours has around it: its span, if its trace is kept; its errors as status and metadata; an end.

    No trace begins here.
    """

    def __init__(self, *, call_timeout_s: float = CALL_TIMEOUT_S, tracer: Tracer = NO_TRACER) -> None:
        """`call_timeout_s`: longest call, whatever deadline the caller names."""
        self._call_timeout_s = call_timeout_s
        self._tracer = tracer

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
        call = _Call(self._tracer, handler_call_details, self._call_timeout_s)
        coders = (method.request_deserializer, method.response_serializer)
        if method.unary_unary:
            return grpc.unary_unary_rpc_method_handler(call.answering(method.unary_unary), *coders)
        if method.stream_unary:
            return grpc.stream_unary_rpc_method_handler(call.answering(method.stream_unary), *coders)
        behaviour: Any = method.unary_stream or method.stream_stream
        # Some write their answers themselves, as gRPC's own Health.Watch does.
        wrapped = call.streaming(behaviour) if inspect.isasyncgenfunction(behaviour) else call.answering(behaviour)
        if method.unary_stream:
            return grpc.unary_stream_rpc_method_handler(wrapped, *coders)
        return grpc.stream_stream_rpc_method_handler(wrapped, *coders)


class _Call:
    """One call's behaviour inside what every call has."""

    def __init__(self, tracer: Tracer, details: grpc.HandlerCallDetails, timeout_s: float) -> None:
        self._tracer = tracer
        self._details = details
        self._timeout_s = timeout_s

    def answering(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._mapped(context):
                return await behaviour(request, context)

        return call

    def streaming(self, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            # Written here rather than yielded: a reader who does not read is waited for inside the timeout.
            async with self._mapped(context), aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    await context.write(message)

        return call

    @asynccontextmanager
    async def _mapped(self, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                with self._span():
                    yield
        except ContextCacheError as exc:
            await context.abort(status_of(exc), exc.message, error_metadata(exc))
        except TimeoutError:
            await _end_overlong(context)

    def _span(self) -> AbstractContextManager[object]:
        if self._tracer is NO_TRACER:
            return nullcontext()
        sent = (value for key, value in self._details.invocation_metadata or () if key == TRACEPARENT)
        parent = next(sent, "")
        name = self._details.method.removeprefix("/")
        service, _, method = name.rpartition("/")
        return self._tracer.continued(
            name,
            kind=SpanKind.SERVER,
            parent=parent if isinstance(parent, str) else "",
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        )


async def _end_overlong(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    log.warning("call ended at its time limit", extra={"peer": context.peer()})
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the call reached the server's time limit")


def plain_server(*, max_concurrent_rpcs: int, tracer: Tracer = NO_TRACER, tls: WatchedTls | None) -> grpc.aio.Server:
    """Return a server as ours are, without health, reflection, services and addresses (`bind`)."""
    named = [] if tls is None else [NamedPeers(tls.server_name)]
    return grpc.aio.server(
        interceptors=[*named, ErrorMapping(tracer=tracer)],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


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
        # Not inside vLLM, whose protobuf may be older than what these are generated for (`plain_server`).
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        self._server = plain_server(max_concurrent_rpcs=max_concurrent_rpcs, tracer=tracer, tls=tls)
        self._states = health_pb2.HealthCheckResponse
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
        await self._set_health(self._states.SERVING)
        self.is_serving = True

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones finish for `grace_s`, then end them."""
        self.is_serving = False
        await self._set_health(self._states.NOT_SERVING)
        await self._server.stop(grace_s)

    async def _set_health(self, status: Any) -> None:
        for name in ("", self._service_name):
            await self._health.set(name, status)


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


def server_credentials(tls: WatchedTls) -> grpc.ServerCredentials:
    """Return credentials that want a certificate of the CA, and use what the files hold at each handshake."""
    used = tls.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        # Called from a thread of gRPC's.
        nonlocal used
        material = tls.current()
        if material is used:
            return None
        used = material
        return _configuration(tls)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls),
        newer,  # type: ignore[arg-type]  # None means no change, which the stubs do not know
        require_client_authentication=True,
    )


def _configuration(tls: WatchedTls) -> grpc.ServerCertificateConfiguration:
    material = tls.current()
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


class NamedPeers(grpc.aio.ServerInterceptor):
    """Answers only calls whose certificate carries the deployment's name; a CA may sign for others too.

    Calls over a Unix socket have none: who may open the file may call.
    """

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Method | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Method | None:
        """Wrap the method's behaviour, whatever its kind; unknown methods (None) stay as they are."""
        method = await continuation(handler_call_details)
        if method is None:
            return None
        for kind, make in _KINDS:
            behaviour = getattr(method, kind)
            if behaviour:
                return make(self._guarded(behaviour), method.request_deserializer, method.response_serializer)
        return method

    def _guarded(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._check(context)
            async for message in behaviour(request, context):
                yield message

        return stream if inspect.isasyncgenfunction(behaviour) else call

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._name in context.auth_context().get("peer_dns", ()) or context.peer().startswith("unix:"):
            return
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate does not belong to this deployment")


_KINDS: tuple[tuple[str, Callable[..., Method]], ...] = (
    ("unary_unary", grpc.unary_unary_rpc_method_handler),
    ("unary_stream", grpc.unary_stream_rpc_method_handler),
    ("stream_unary", grpc.stream_unary_rpc_method_handler),
    ("stream_stream", grpc.stream_stream_rpc_method_handler),
)
