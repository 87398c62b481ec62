"""A caller without a deadline holds nothing for ever: our gRPC servers end every call.

The first three were seen to fail with the timeout set to days.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from contextcache.errors import ContextNotFound
from contextcache.wire.servers import ErrorMapping

DEADLINE_S = 30


class Calls:
    """One method of each kind that our services have, none of which ends by itself; and one that does."""

    def __init__(self):
        self.timed = []
        """Route, code and duration of each ended call."""
        self.left = asyncio.Event()
        """Set once a method has been ended and has let go of what it held."""

    async def unary(self, request, context):
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def upload(self, requests, context):
        try:
            async for _ in requests:
                pass
        finally:
            self.left.set()

    async def download(self, request, context):
        try:
            while True:
                yield b"x" * (1 << 20)
        finally:
            self.left.set()

    async def watch(self, request, context):
        """As gRPC's Health.Watch: it writes by itself."""
        try:
            await context.write(b"first")
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def talk(self, requests, context):
        """As gRPC's reflection."""
        try:
            async for message in requests:
                yield message
        finally:
            self.left.set()

    async def answer(self, request, context):
        return request

    async def refuse(self, request, context):
        yield b"first"
        raise ContextNotFound("no such thing")


@pytest.fixture
async def served():
    """Return the methods and a channel to them."""
    calls = Calls()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(calls.unary),
        "Upload": grpc.stream_unary_rpc_method_handler(calls.upload),
        "Download": grpc.unary_stream_rpc_method_handler(calls.download),
        "Watch": grpc.unary_stream_rpc_method_handler(calls.watch),
        "Talk": grpc.stream_stream_rpc_method_handler(calls.talk),
        "Answer": grpc.unary_unary_rpc_method_handler(calls.answer),
        "Refuse": grpc.unary_stream_rpc_method_handler(calls.refuse),
    }
    mapping = ErrorMapping(call_timeout_s=0.2, on_ended=lambda *call: calls.timed.append(call))
    server = grpc.aio.server(interceptors=[mapping])
    for service in ("x", "grpc.health.v1.Health"):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield calls, channel
    await server.stop(0)


async def ended(call, calls) -> grpc.StatusCode:
    """Return how a call without a deadline ended, once its method has let go."""
    async with asyncio.timeout(DEADLINE_S):
        code = await call.code()
        await calls.left.wait()
    return code


async def test_a_call_that_names_no_deadline_ends(served):
    calls, channel = served

    assert await ended(channel.unary_unary("/x/Unary")(b""), calls) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_upload_that_falls_silent_ends(served):
    calls, channel = served
    call = channel.stream_unary("/x/Upload")()
    await call.write(b"a piece")

    assert await ended(call, calls) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_download_that_nobody_reads_lets_go_of_what_it_held(served):
    """What the reader is told it would have to read first; the method must be over."""
    calls, channel = served
    call = channel.unary_stream("/x/Download")(b"")
    async with asyncio.timeout(DEADLINE_S):
        await calls.left.wait()
    call.cancel()

    assert calls.left.is_set()


async def test_a_watch_and_a_talk_that_are_parked_end(served):
    """Seen failing: a few connections held all the calls that a server takes."""
    calls, channel = served
    watch = channel.unary_stream("/x/Watch")(b"")

    assert await watch.read() == b"first"
    assert await ended(watch, calls) is grpc.StatusCode.DEADLINE_EXCEEDED

    calls.left.clear()
    talk = channel.stream_stream("/x/Talk")()
    await talk.write(b"a piece")

    assert await talk.read() == b"a piece"
    assert await ended(talk, calls) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_error_after_the_first_message_keeps_its_status(served):
    _, channel = served
    call = channel.unary_stream("/x/Refuse")(b"")
    async with asyncio.timeout(DEADLINE_S):
        first = await call.read()
        code = await call.code()

    assert (first, code) == (b"first", grpc.StatusCode.NOT_FOUND)


async def test_each_call_of_ours_is_timed_with_its_method_and_status(served):
    """Seen failing with the calls of gRPC's own services, and with OK for a call that was cancelled."""
    calls, channel = served
    assert await channel.unary_unary("/x/Answer")(b"a") == b"a"
    assert await channel.unary_unary("/grpc.health.v1.Health/Answer")(b"a") == b"a"
    with pytest.raises(grpc.aio.AioRpcError):
        [message async for message in channel.unary_stream("/x/Refuse")(b"")]
    await ended(channel.unary_unary("/x/Unary")(b""), calls)
    calls.left.clear()
    left = channel.unary_stream("/x/Watch")(b"")
    assert await left.read() == b"first"
    left.cancel()
    await calls.left.wait()

    assert [call[:2] for call in calls.timed] == [
        ("Answer", "OK"),
        ("Refuse", "NOT_FOUND"),
        ("Unary", "DEADLINE_EXCEEDED"),
        ("Watch", "CANCELLED"),
    ]
    assert calls.timed[0][2] < 0.2 <= calls.timed[2][2]
