"""Envoy in miniature: messages as its ext_proc filter sends them, and what the answers to them say."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import grpc.aio
from google.protobuf.json_format import MessageToDict

from contextcache.extproc.v3 import external_processor_pb2 as pb
from gateway.envoy.server import SERVICE_NAME
from gateway.fronts import ClientGone
from tests.kit.gateway_parts import KEY

BUFFERED = pb.BODY_SEND_MODE_BUFFERED
DUPLEX = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
DEADLINE_S = 30


def head(
    path="/v1/completions",
    *,
    method="POST",
    headers=(),
    mode: int | None = BUFFERED,
    ends=False,
    subset=None,
    key=KEY,
    shows_answer=False,
) -> pb.ProcessingRequest:
    """The first message of a stream; `headers` is a dict or pairs, so that names can be repeated."""
    pairs = [(":method", method), (":path", path), (":authority", "g"), (":scheme", "http")]
    if key:
        pairs.append(("authorization", f"Bearer {key}"))
    pairs += headers.items() if isinstance(headers, dict) else headers
    raw = [pb.HeaderValue(key=name, raw_value=_bytes(value)) for name, value in pairs]
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=raw), end_of_stream=ends)
    )
    if mode is not None:
        message.protocol_config.request_body_mode = mode
    if shows_answer:
        message.protocol_config.response_body_mode = DUPLEX
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": subset})
    return message


def body(data=b"", *, ends=True) -> pb.ProcessingRequest:
    """A body, or a piece of one."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=raw, end_of_stream=ends))


def answer_head(*, ends=False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_headers=pb.HttpHeaders(end_of_stream=ends))


def answer_body(data: bytes, *, ends=True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=ends))


def answer_trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_trailers=pb.HttpTrailers())


def trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


@dataclass(frozen=True)
class Answer:
    """What one of our messages says."""

    message: pb.ProcessingResponse

    @property
    def phase(self) -> str:
        return self.message.WhichOneof("response")

    @property
    def _changes(self) -> pb.CommonResponse:
        return getattr(self.message, self.phase).response

    @property
    def set_headers(self) -> dict[str, str]:
        mutation = self.message.immediate_response.headers
        if self.phase != "immediate_response":
            mutation = self._changes.header_mutation
        for option in mutation.set_headers:
            assert option.append_action == pb.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
        return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}

    @property
    def removed(self) -> set[str]:
        return set(self._changes.header_mutation.remove_headers)

    @property
    def metadata(self) -> dict:
        return MessageToDict(self.message.dynamic_metadata)

    @property
    def body(self) -> bytes | None:
        mutation = self._changes.body_mutation
        return mutation.body if mutation.HasField("body") else None

    @property
    def piece(self) -> pb.StreamedBodyResponse:
        return self._changes.body_mutation.streamed_response

    @property
    def error(self) -> tuple[int, str]:
        """Status and code of an answer in the pod's place, whose shape is checked."""
        immediate = self.message.immediate_response
        told = json.loads(immediate.body)
        assert told["detail"] == told["error"]["message"]
        assert self.set_headers["content-type"] == "application/json"
        assert self.set_headers["x-request-id"]
        assert immediate.details == told["error"]["code"]
        return immediate.status.code, told["error"]["code"]


class ScriptedStream:
    """A stream whose messages are known beforehand; afterwards the other end is gone, or silent for ever."""

    traceparent = ""
    reaches_engines = False

    def __init__(self, *script: pb.ProcessingRequest, silent=False):
        self._script = list(script)
        self._silent = silent
        self.answers: list[Answer] = []
        self.events: list[str] = []
        """Phases read (`<`) and answered (`>`), in order."""
        self.broken = False
        """True: every answer finds that the other end has gone."""
        self.cancels_after: int | None = None
        """Answers after which the other end needs no more, and cancels."""

    async def read(self) -> pb.ProcessingRequest:
        if not self._script:
            if self._silent:
                await asyncio.Event().wait()
            raise ClientGone
        message = self._script.pop(0)
        self.events.append(f"<{message.WhichOneof('request')}")
        return message

    async def write(self, message: pb.ProcessingResponse) -> None:
        if self.broken:
            raise ClientGone
        self.answers.append(Answer(message))
        self.events.append(f">{message.WhichOneof('response')}")
        if len(self.answers) == self.cancels_after:
            raise asyncio.CancelledError


class ExtProcClient:
    """Asks a real server, one stream a request, as Envoy does."""

    def __init__(self, port: int):
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}",
            options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
        )
        self._method = self._channel.stream_stream(
            f"/{SERVICE_NAME}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    def open(self) -> grpc.aio.StreamStreamCall:
        return self._method(timeout=DEADLINE_S)

    async def ask(self, first: pb.ProcessingRequest, *later: pb.ProcessingRequest) -> list[Answer]:
        """Send the first message, and each later one after an answer; return all answers once the server ends it."""
        call = self.open()
        await call.write(first)
        answers = []
        for message in (*later, None):
            found = await call.read()
            if found is grpc.aio.EOF:
                break
            answers.append(Answer(found))
            if message is not None and answers[-1].phase != "immediate_response":
                await call.write(message)
        return answers + [Answer(found) async for found in _rest(call)]

    async def close(self) -> None:
        await self._channel.close()


async def _rest(call):
    while (found := await call.read()) is not grpc.aio.EOF:
        yield found


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
