"""Mutual TLS of our gRPC servers: who may connect, and whose calls are answered."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from typing_extensions import override

from contextcache.tls import HANDSHAKE_TIMEOUT_S, WatchedTls

# A string: the generics exist in the stubs only.
Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    # gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_TIMEOUT_S * 1000)),
    # Those without a word, or without a certificate, count until then; a client of ours has one connection.
    ("grpc.max_allowed_incoming_connections", 4096),
]


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
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate is not one of this deployment")


_KINDS: tuple[tuple[str, Callable[..., Method]], ...] = (
    ("unary_unary", grpc.unary_unary_rpc_method_handler),
    ("unary_stream", grpc.unary_stream_rpc_method_handler),
    ("stream_unary", grpc.stream_unary_rpc_method_handler),
    ("stream_stream", grpc.stream_stream_rpc_method_handler),
)
