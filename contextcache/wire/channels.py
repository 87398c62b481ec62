"""Clients of gRPC services. Only this module opens channels, which follow the certificate files.

Imports only what vLLM has too, because it is loaded inside vLLM.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import SpanKind

from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.wire.messages import message_of
from contextcache.wire.rpc import CHANNEL_OPTIONS, answer_of
from contextcache.wire.tls import WatchedTls
from contextcache.wire.tracing import child_span, trace_metadata

_LEFTOVER_GRACE_S = 60.0
"""Time for calls on a channel whose certificate was replaced; longer than any call's deadline."""
_SETTLING_S = 1.0


def open_channel(address: str, *, tls: WatchedTls | None) -> grpc.aio.Channel:
    """Return a channel to `host:port` or `unix:///path`, which connects at its first call.

    With `tls` both ends show a certificate: ours is the current one, the server's must be of the CA with the
    deployment's name. A Unix socket stays plain, because the file's permissions control access.
    """
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    material = tls.current()
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", material.server_name)]
    return grpc.aio.secure_channel(address, credentials, options=options)


class Connection:
    """One channel to one address. The first call opens it, and so does the first call after a new certificate.

    A channel belongs to the event loop of that call. A call from another loop opens a new one.
    """

    def __init__(self, address: str, *, tls: WatchedTls | None) -> None:
        self.address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._material: object = None
        self._leftovers: set[asyncio.Task[None]] = set()
        """Channels of replaced certificates that are closing."""

    def channel(self) -> grpc.aio.Channel:
        """Return the channel for a new call. Calls on an earlier channel run to their end."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._channel, self._loop = None, loop
            self._leftovers.clear()
        material = None if self._tls is None else self._tls.current()
        if self._channel is not None and material is not self._material:
            self._close_later(self._channel)
            self._channel = None
        if self._channel is None:
            self._material = material
            self._channel = open_channel(self.address, tls=self._tls)
        return self._channel

    async def close(self) -> None:
        """Close the channels; calls in flight fail. A later call opens a new channel."""
        channel, self._channel = self._channel, None
        if self._loop is not asyncio.get_running_loop():
            return
        if channel is not None:
            await channel.close()
        leftovers = list(self._leftovers)
        for task in leftovers:
            task.cancel()
        await asyncio.gather(*leftovers, return_exceptions=True)

    def _close_later(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.create_task(_close_in_time(channel), name="channel with an old certificate")
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)


class ServiceClient:
    """Calls of one service, over one connection that is made at the first call."""

    def __init__(
        self,
        address: str,
        *,
        pb: Any,
        service: str,
        timeout_s: float,
        tls: WatchedTls | None,
        unavailable: type[ContextCacheError],
    ) -> None:
        """`address`: host:port or unix:///path; `pb`: module of the service's messages; `timeout_s`: of every call.

        `unavailable`: error of a call without an answer.
        """
        self._pb = pb
        self._service = service
        self._timeout_s = timeout_s
        self._unavailable = unavailable
        self._connection = Connection(address, tls=tls)

    async def close(self) -> None:
        """Close the connection; calls in flight fail. A later call opens a new one."""
        await self._connection.close()

    async def _call(self, method: str, *, wait_ms: int = 0, **fields: Any) -> Any:
        """Call a method with the fields of its request; return its answer. `wait_ms`: its wait in the server.

        Raises the server's error, `unavailable` without an answer, InvalidRequest for a value that gRPC cannot send.
        """
        try:
            request = message_of(getattr(self._pb, f"{method}Request"), **fields)
        except (TypeError, ValueError) as exc:  # a number beyond 64 bits, a lone surrogate, a wrong type
            raise InvalidRequest(f"a field of {method} has a value that gRPC cannot send") from exc
        path, timeout_s = f"{self._service}/{method}", self._timeout_s + wait_ms / 1000
        with child_span(path, kind=SpanKind.CLIENT):
            try:
                call = self._connection.channel().unary_unary(
                    f"/{path}",
                    request_serializer=type(request).SerializeToString,
                    response_deserializer=getattr(self._pb, f"{method}Response").FromString,
                )
                answer = call(request, timeout=timeout_s, metadata=trace_metadata(), wait_for_ready=False)
                return await answer_of(answer, timeout_s, unavailable=self._unavailable)
            except asyncio.CancelledError as exc:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The task was not cancelled: grpc.aio raises this for a call whose channel was closed.
                raise self._unavailable("the connection is closed", retry_after_s=1) from exc


async def _close_in_time(channel: grpc.aio.Channel) -> None:
    try:
        # A call that begins now may not have reached its channel yet.
        await asyncio.sleep(_SETTLING_S)
        await channel.close(_LEFTOVER_GRACE_S)
    except asyncio.CancelledError:
        with suppress(Exception):
            await channel.close()
        raise
