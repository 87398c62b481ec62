"""An external processor in the plugin's place: answers as told, so that Envoy's own behaviour shows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from contextcache.extproc.v3 import external_processor_pb2 as pb
from contextcache.identity import UNROUTED_HEADER
from tests.kit.envoy_names import DESTINATION_KEY, LB_NAMESPACE, PROCESSOR_SERVICE
from tests.kit.ports import free_port


@dataclass
class StubProcessor:
    """Serves on a free loopback port between `start` and `stop`; a second `start` takes the same port."""

    pick: str = ""
    """Address of the pod to name; empty: none is named."""
    refusal: tuple[int, bytes] | None = None
    """Status and body to answer requests with instead."""
    skip_body: bool = False
    hang: bool = False
    """Read, and answer nothing."""
    port: int = field(default_factory=free_port)
    credentials: grpc.ServerCredentials | None = None
    """Serve TLS with them."""
    heads: list[dict[str, str]] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    """Metadata of each stream."""
    body_sizes: list[int] = field(default_factory=list)

    async def start(self) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.http2.min_ping_interval_without_data_ms", 100)]
        self._server = grpc.aio.server(options=options)
        process = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(PROCESSOR_SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((handler,))
        state = health.aio.HealthServicer()
        await state.set(PROCESSOR_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(state, self._server)
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.credentials)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def _process(self, _requests, context) -> None:
        self.calls.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        head = message.request_headers
        self.heads.append(
            {found.key: (found.raw_value or found.value.encode()).decode() for found in head.headers.headers}
        )
        if self.hang:
            await asyncio.Event().wait()
        if self.refusal is not None:
            await context.write(self._refused())
            return
        has_body = not head.end_of_stream and not self.skip_body
        await context.write(self._chosen())
        if has_body:
            message = await context.read()
            if message is not grpc.aio.EOF:
                self.body_sizes.append(len(message.request_body.body))
                await context.write(pb.ProcessingResponse(request_body=pb.BodyResponse()))

    def _refused(self) -> pb.ProcessingResponse:
        status, body = self.refusal
        kind = pb.HeaderValueOption(header=pb.HeaderValue(key="content-type", raw_value=b"application/json"))
        return pb.ProcessingResponse(
            immediate_response=pb.ImmediateResponse(
                status=pb.HttpStatus(code=status), body=body, headers=pb.HeaderMutation(set_headers=[kind])
            )
        )

    def _chosen(self) -> pb.ProcessingResponse:
        mutation = pb.HeaderMutation(remove_headers=[UNROUTED_HEADER])
        response = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        if self.pick:
            value = pb.HeaderValue(key=DESTINATION_KEY, raw_value=self.pick.encode())
            mutation.set_headers.add(header=value)
            response.dynamic_metadata.update({LB_NAMESPACE: {DESTINATION_KEY: self.pick}})
        response.request_headers.response.header_mutation.CopyFrom(mutation)
        if self.skip_body:
            response.mode_override.request_body_mode = pb.BODY_SEND_MODE_UNSPECIFIED
        return response
