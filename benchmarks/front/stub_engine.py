"""A pod that costs next to nothing: answers completions at once, streams chunks at a set pace, checks who asked.

One process on one event loop, a hand-written HTTP/1.1 protocol, 15 to 20 µs a request, so that what a front costs
shows. How it streams is set by `POST /stub` before a cell, not by the request, because a peer may rewrite requests.
`GET /stub` says what it has seen: that requests with a signed identity arrived shows that a path is what it is
called. Not a model of vLLM's speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import cast

from typing_extensions import override

from benchmarks.front.event_loop import run
from contextcache.identity import IN_FLIGHT_HEADER

MODEL = "stub-model"
"""The one model served."""
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_STREAM = re.compile(rb'"stream": ?true')
_WAY = re.compile(rb"\nx-bench-way: *([^\r]*)")
_LAST = b"0\r\n\r\n"
_WORDS = ("it", "sat", "in", "the", "sun", "and", "was", "warm")


@dataclass(slots=True)
class Behaviour:
    """How streams are sent from now on."""

    num_chunks: int = 200
    pace_ms: float = 0.0
    """Between two chunks of a stream; 0: one chunk in each turn of the event loop."""
    hold: bool = False
    """Send one chunk, then nothing until the client goes."""


@dataclass(slots=True)
class Seen:
    """What arrived since the start, of all requests or of those with one value of the `x-bench-way` header."""

    completions: int = 0
    signed: int = 0
    """With the gateway's identity header."""
    unrouted: int = 0
    """With Envoy's mark that no plugin has seen the request."""


class Stub:
    """What all connections share."""

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.seen: dict[str, Seen] = defaultdict(Seen)
        """By way; a peer does not hand the header on, so its requests are under the empty name."""
        self.held: set[Connection] = set()
        """Connections whose stream has begun and does not go on: closed by the next `POST /stub`."""
        usage = {"prompt_tokens": 12, "completion_tokens": 16, "total_tokens": 28}
        message = {"role": "assistant", "content": "It sat in the sun, warm and quiet, and did not move all day."}
        common = {"id": "chatcmpl-0123456789abcdef", "created": 1_760_000_000, "model": MODEL}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        self.completion = answer({"object": "chat.completion", **common, "choices": [choice], "usage": usage})
        self.models = answer({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]})
        self.empty = answer(None, (IN_FLIGHT_HEADER, ""))  # `/health` of a pod that runs turns
        chunk = {"object": "chat.completion.chunk", **common}
        # Different ones in turn: a peer takes a hundred equal chunks for a model that has gone wrong.
        self.chunks = [event({**chunk, "choices": [_choice({"content": f" {word}"})]}) for word in _WORDS]
        self.chunk_last = event({**chunk, "choices": [_choice({}, "stop")]})
        self.stream_head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def control(self, body: bytes) -> bytes:
        """Change how streams are sent when told so; say what was seen."""
        if body:
            for connection in list(self.held):
                connection.close()
            self.behaviour = Behaviour(**json.loads(body))
        return answer({way: asdict(seen) for way, seen in self.seen.items()})


class Connection(asyncio.Protocol):
    """One connection: one request at a time, as HTTP/1.1 clients send them."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._buffer = bytearray()
        self._wanted = 0
        """With no more bytes than this the request is not whole; 0: not known yet."""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.Handle | None = None
        self._streaming = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by its methods only

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._end_stream()

    @override
    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._streaming and len(self._buffer) > self._wanted:
            end = self._buffer.find(_HEAD_END)
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            start = end + len(_HEAD_END)
            whole = start + content_length(head)
            if len(self._buffer) < whole:
                self._wanted = whole - 1
                return
            body = bytes(self._buffer[start:whole])
            del self._buffer[:whole]
            self._wanted = 0
            self._answer(head, body)

    def close(self) -> None:
        """End the connection, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        stub = self._stub
        target = head.split(b" ", 2)[1]
        if target.endswith(b"/completions"):
            way = _WAY.search(head)
            seen = stub.seen[way[1].decode() if way else ""]
            seen.completions += 1
            seen.signed += b"\nx-context-identity:" in head
            seen.unrouted += b"\nx-context-unrouted:" in head
            if _STREAM.search(body):
                self._start_stream()
            else:
                self._transport.write(stub.completion)
        elif target == b"/stub":
            self._transport.write(stub.control(body))
        else:
            self._transport.write(stub.models if target == b"/v1/models" else stub.empty)

    def _start_stream(self) -> None:
        assert self._transport is not None
        behaviour = self._stub.behaviour
        self._streaming = True
        self._transport.write(self._stub.stream_head + self._stub.chunks[0])
        if behaviour.hold:
            self._stub.held.add(self)
        else:
            self._next(behaviour.num_chunks - 1, behaviour.pace_ms / 1000)

    def _next(self, left: int, pace_s: float) -> None:
        loop = asyncio.get_running_loop()
        send: Callable[[int, float], None] = self._send
        self._timer = loop.call_later(pace_s, send, left, pace_s) if pace_s else loop.call_soon(send, left, pace_s)

    def _send(self, left: int, pace_s: float) -> None:
        if self._transport is None:
            return
        if left > 1:
            self._transport.write(self._stub.chunks[left % len(_WORDS)])
            self._next(left - 1, pace_s)
            return
        self._transport.write(self._stub.chunk_last + framed(b"data: [DONE]\n\n") + _LAST)
        self._end_stream()
        if self._buffer:
            self.data_received(b"")

    def _end_stream(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stub.held.discard(self)
        self._streaming = False


def content_length(head: bytes) -> int:
    """Return the body's length of a lower-case head, 0 when it names none."""
    at = head.find(_LENGTH)
    if at < 0:
        return 0
    return int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])


def answer(content: object, *headers: tuple[str, str]) -> bytes:
    """Return a whole 200 answer with a JSON body; None: an empty one."""
    body = b"" if content is None else json.dumps(content).encode()
    named = [*headers, ("content-type", "application/json"), ("content-length", str(len(body)))]
    head = "".join(f"{name}: {value}\r\n" for name, value in named)
    return b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (head.encode(), body)


def event(content: object) -> bytes:
    """Return one server-sent event in a chunk of its own."""
    return framed(b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n")


def framed(data: bytes) -> bytes:
    """Return `data` as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


async def serve(port: int) -> None:
    """Serve on loopback until cancelled."""
    stub = Stub()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(stub), "127.0.0.1", port, backlog=4096, reuse_address=True
    )
    await server.serve_forever()


def main() -> None:
    """Run as a process until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
