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
    """One method of each kind that our services have, none of which ends by itself."""

    def __init__(self):
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
        "Refuse": grpc.unary_stream_rpc_method_handler(calls.refuse),
    }
    server = grpc.aio.server(interceptors=[ErrorMapping(call_timeout_s=0.2)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
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
