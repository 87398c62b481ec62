"""gRPC servers: start and stop, errors as status, health, and the check of callers where TLS is mutual."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message
from opentelemetry.trace import SpanKind
from typing_extensions import override

from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.wire.messages import arguments_of, message_of
from contextcache.wire.rpc import CHANNEL_OPTIONS, error_metadata, status_of
from contextcache.wire.tls import HANDSHAKE_TIMEOUT_S, WatchedTls
from contextcache.wire.tracing import NO_TRACER, TRACEPARENT, Tracer

log = logging.getLogger(__name__)

# Strings: the generics exist in the stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    # gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
    # Connections without a request or a certificate count until the handshake times out. A client opens one.
    ("grpc.max_allowed_incoming_connections", 4096),
    # gRPC's default would share a taken port with its owner, and each would get half of the calls.
    ("grpc.so_reuseport", 0),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    *CONNECTION_OPTIONS,
    # Below the clients' keepalive of 12 s, so that a ping never gets a GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
OnEnded: TypeAlias = Callable[[str, str, float], None]
"""Takes the method of an ended call, the name of its status, and its duration in seconds."""
CALL_TIMEOUT_S = 600.0
"""Maximum duration of a call. Our clients set shorter deadlines. A client without a deadline must not hold a stream,
and a place among the concurrent calls, forever."""

_KINDS: tuple[tuple[str, Callable[..., Method]], ...] = (
    ("unary_unary", grpc.unary_unary_rpc_method_handler),
    ("unary_stream", grpc.unary_stream_rpc_method_handler),
    ("stream_unary", grpc.stream_unary_rpc_method_handler),
    ("stream_stream", grpc.stream_stream_rpc_method_handler),
)


def answering(owner: object, method: str, pb: Any, name: str) -> Any:
    """Return the function that answers the method `name` of a service, whose messages are in `pb`, by the owner's.

    The fields of a request are the arguments. The returned value has the fields of the answer, or is its only field.
    """
    answer_class = getattr(pb, f"{name}Response")
    names = [field.name for field in answer_class.DESCRIPTOR.fields]

    async def answer(request: Message, _context: object) -> Any:
        try:
            arguments = arguments_of(getattr(type(owner), method), request)
        except InvalidRequest:
            raise
        except ContextCacheError as exc:  # of a newer client
            raise InvalidRequest("a field has an enum number that this server does not know") from exc
        found = await getattr(owner, method)(**arguments)
        if found is None or len(names) != 1:
            return message_of(answer_class, found)
        return message_of(answer_class, **{names[0]: found})

    return answer


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Runs a block around every call, of every kind. Calls of unknown methods stay as they are."""

    @abstractmethod
    def around(self, context: Context, details: grpc.HandlerCallDetails) -> AbstractAsyncContextManager[None]:
        """Return the block. It may end the call by `context.abort`."""

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Method | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Method | None:
        """Wrap the method's behaviour."""
        method = await continuation(handler_call_details)
        if method is None:
            return None
        for kind, make in _KINDS:
            if behaviour := getattr(method, kind):
                wrapped = self._wrapped(behaviour, handler_call_details)
                return make(wrapped, method.request_deserializer, method.response_serializer)
        return method

    def _wrapped(self, behaviour: Callable[..., Any], details: grpc.HandlerCallDetails) -> Callable[..., Any]:
        async def answering(request: Any, context: Context) -> Any:
            async with self.around(context, details):
                return await behaviour(request, context)

        async def streaming(request: Any, context: Context) -> None:
            # Written here rather than yielded, so that the block covers the wait for a slow reader.
            async with self.around(context, details), aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    await context.write(message)

        # A stream may write its answers itself, as gRPC's own Health.Watch does.
        return streaming if inspect.isasyncgenfunction(behaviour) else answering


class ErrorMapping(CallInterceptor):
    """Gives every call a time limit, a span if its trace is kept, and errors as status and metadata. Tells durations.

    No trace begins here.
    """

    def __init__(
        self,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
        tracer: Tracer = NO_TRACER,
        on_ended: OnEnded = lambda *_: None,
    ) -> None:
        """`call_timeout_s`: maximum duration of a call, whatever deadline its client sets.

        `on_ended` is not told of gRPC's own services: a watch of a server's health is as long as its client.
        """
        self._call_timeout_s = call_timeout_s
        self._tracer = tracer
        self._on_ended = on_ended

    @override
    @asynccontextmanager
    async def around(self, context: Context, details: grpc.HandlerCallDetails) -> AsyncIterator[None]:
        started_s, status = time.monotonic(), grpc.StatusCode.UNKNOWN
        try:
            async with asyncio.timeout(self._call_timeout_s):
                with self._span(details):
                    yield
            status = grpc.StatusCode.OK
        except asyncio.CancelledError:
            status = grpc.StatusCode.CANCELLED
            raise
        except ContextCacheError as exc:
            status = status_of(exc)
            await context.abort(status, exc.message, error_metadata(exc))
        except TimeoutError:
            log.warning("call ended at its time limit", extra={"peer": context.peer()})
            status = grpc.StatusCode.DEADLINE_EXCEEDED
            await context.abort(status, "the call reached the server's time limit")
        finally:
            service, _, method = details.method.removeprefix("/").rpartition("/")
            if not service.startswith("grpc."):
                self._on_ended(method, status.name, time.monotonic() - started_s)

    def _span(self, details: grpc.HandlerCallDetails) -> AbstractContextManager[object]:
        sent = (value for key, value in details.invocation_metadata or () if key == TRACEPARENT)
        parent = next(sent, "")
        name = details.method.removeprefix("/")
        service, _, method = name.rpartition("/")
        return self._tracer.continued(
            name,
            kind=SpanKind.SERVER,
            parent=parent if isinstance(parent, str) else "",
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
        )


class NamedPeers(CallInterceptor):
    """Answers only calls whose certificate carries the deployment's name: a CA may sign for others too.

    A call over a Unix socket has no certificate. The file's permissions control access.
    """

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    @override
    @asynccontextmanager
    async def around(self, context: Context, details: grpc.HandlerCallDetails) -> AsyncIterator[None]:
        if not (self._name in context.auth_context().get("peer_dns", ()) or context.peer().startswith("unix:")):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate does not belong to this deployment")
        yield


def plain_server(
    *,
    tls: WatchedTls | None,
    max_concurrent_rpcs: int | None = None,
    tracer: Tracer = NO_TRACER,
    on_ended: OnEnded = lambda *_: None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] | None = None,
    options: Sequence[tuple[str, Any]] | None = None,
) -> grpc.aio.Server:
    """Return a server without health, reflection, services and addresses (`bind`).

    `interceptors`: the default maps errors and tells `on_ended` of each call. The check of callers comes before them.
    `options`: see SERVER_OPTIONS.
    """
    named = [] if tls is None else [NamedPeers(tls.server_name)]
    others = [ErrorMapping(tracer=tracer, on_ended=on_ended)] if interceptors is None else interceptors
    return grpc.aio.server(
        interceptors=[*named, *others],
        options=SERVER_OPTIONS if options is None else options,
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


class GrpcServer:
    """A server with health and reflection; `stop` drains within a grace period."""

    def __init__(
        self,
        server: grpc.aio.Server,
        *,
        service_name: str,
        addresses: Iterable[str],
        tls: WatchedTls | None = None,
    ) -> None:
        """Take a `plain_server` with its service and bind `addresses`. Raises OSError when one is taken.

        `127.0.0.1:0` and `unix:///path` both work. `tls`: as for the server.
        """
        # Not at the top: vLLM's protobuf may be older than these modules need (`plain_server`).
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection

        self._server = server
        self._states = health_pb2.HealthCheckResponse
        self._service_name = service_name
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names: Sequence[str] = (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.ports = [bind(server, address, tls=tls) for address in addresses]
        """Bound ports, in the order of `addresses`."""
        self.is_serving = False
        """True from `start` to `stop`."""

    async def start(self) -> None:
        """Serve, and report SERVING for the service and for the server as a whole."""
        await self._server.start()
        await self._set_all(is_serving=True)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, refuse new calls, let running calls finish for `grace_s`, then end them."""
        await self._set_all(is_serving=False)
        await self._server.stop(grace_s)

    async def set_health(self, name: str, *, is_serving: bool) -> None:
        """Report the health of one name, of a service or of an aspect such as readiness."""
        await self._health.set(name, self._states.SERVING if is_serving else self._states.NOT_SERVING)

    async def _set_all(self, *, is_serving: bool) -> None:
        self.is_serving = is_serving
        for name in ("", self._service_name):
            await self.set_health(name, is_serving=is_serving)


def bind(server: grpc.aio.Server, address: str, *, tls: WatchedTls | None = None) -> int:
    """Bind `server` to `address` and return the port. Raises OSError when it is taken.

    With `tls` clients must have a certificate of the CA, except over a Unix socket.
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
    """Return credentials that require a certificate of the CA, and follow the files at each handshake."""
    used = tls.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(used.key, used.certificate)], used.ca)

    def newer() -> grpc.ServerCertificateConfiguration | None:
        # Called from a thread of gRPC's.
        nonlocal used
        before, used = used, tls.current()
        return None if used is before else configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        newer,  # type: ignore[arg-type]  # None means no change, which the stubs do not know
        require_client_authentication=True,
    )
