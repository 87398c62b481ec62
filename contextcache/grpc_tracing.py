"""Spans of the calls that a gRPC server of ours answers. The client's side is `trace_metadata()`, in each client."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio
from typing_extensions import override

from contextcache.tracing import TRACEPARENT, Tracer, is_kept, is_traceparent

# A string: the generics exist in the stubs only.
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]"


class TracedCalls(grpc.aio.ServerInterceptor):
    """Begins a span for each call that belongs to a trace that is kept. No trace begins here.

    Comes after the one that maps errors, so that it sees them as they were raised.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @override
    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wrap the method's behaviour, if the caller says that it is traced."""
        method = await continuation(handler_call_details)
        parent = _parent(handler_call_details)
        if method is None or not parent:
            return method
        name = handler_call_details.method.removeprefix("/")
        wrap = _Wrapper(self._tracer, name, parent)
        if method.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                wrap.answering(method.unary_unary), method.request_deserializer, method.response_serializer
            )
        if method.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                wrap.answering(method.stream_unary), method.request_deserializer, method.response_serializer
            )
        # Others write their answers themselves, as gRPC's own Health.Watch does.
        if inspect.isasyncgenfunction(method.unary_stream):
            return grpc.unary_stream_rpc_method_handler(
                wrap.streaming(method.unary_stream), method.request_deserializer, method.response_serializer
            )
        return method


class _Wrapper:
    """One call's behaviour inside its span."""

    def __init__(self, tracer: Tracer, name: str, parent: str) -> None:
        self._tracer = tracer
        self._name = name
        self._parent = parent
        service, _, method = name.rpartition("/")
        self._attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}

    def answering(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with self._tracer.span(self._name, kind="server", parent=self._parent, attributes=self._attributes):
                return await behaviour(request, context)

        return call

    def streaming(self, behaviour: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            with self._tracer.span(self._name, kind="server", parent=self._parent, attributes=self._attributes):
                async with aclosing(behaviour(request, context)) as messages:
                    async for message in messages:
                        yield message

        return call


def _parent(details: grpc.HandlerCallDetails) -> str:
    """Return the caller's traceparent, if it is one of a trace that is kept; else empty."""
    for key, value in details.invocation_metadata or ():
        if key == TRACEPARENT:
            text = value if isinstance(value, str) else ""
            return text if is_traceparent(text) and is_kept(text) else ""
    return ""
