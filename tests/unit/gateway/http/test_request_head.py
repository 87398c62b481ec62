"""A client without a key can hold a connection for a bounded time, and make the gateway keep a bounded head."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from contextcache.wire.http_server import HEAD_SIZE_BYTES_MAX, HttpBounds

READ_BYTES = 1 << 14
HEAD = b"POST / HTTP/1.1\r\nhost: g\r\n"


class Timer:
    def __init__(self, delay_s, call):
        self.delay_s, self.call, self.cancelled = delay_s, call, False

    def cancel(self):
        self.cancelled = True


class ManualLoop:
    """Runs nothing by itself."""

    def __init__(self):
        self.timers: list[Timer] = []

    def call_later(self, delay_s, call, *args):
        self.timers.append(Timer(delay_s, call))
        return self.timers[-1]

    def create_task(self, coroutine, **_):
        coroutine.close()
        return asyncio.Future(loop=asyncio.get_running_loop())

    def running(self):
        return [timer for timer in self.timers if not timer.cancelled]


class Wire(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name, default=None):
        return default

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Connection:
    def __init__(self, protocol):
        config = uvicorn.Config(lambda scope: None, log_config=None, ws="none", lifespan="off")
        config.load()
        self.loop, self.wire = ManualLoop(), Wire()
        bounded = type("Bounded", (HttpBounds, protocol), {})
        self.protocol = bounded(config, ServerState(), {}, _loop=self.loop)
        self.protocol.connection_made(self.wire)

    def send(self, data: bytes) -> int:
        """Send in pieces as a socket would; return how many bytes were taken before the connection was closed."""
        for start in range(0, len(data), READ_BYTES):
            if self.wire.closed:
                return start
            self.protocol.data_received(data[start : start + READ_BYTES])
        return len(data)

    def answered(self):
        """As when the application has answered."""
        self.protocol.cycle.response_complete = True


@pytest.fixture(params=[HttpToolsProtocol, H11Protocol])
async def connection(request):
    return Connection(request.param)


@pytest.fixture
async def parsed():
    return Connection(HttpToolsProtocol)


async def test_who_says_nothing_is_closed_at_the_deadline(connection):
    (timer,) = connection.loop.running()
    timer.call()

    assert connection.wire.closed


async def test_a_byte_now_and_then_does_not_move_the_deadline(connection):
    (timer,) = connection.loop.running()
    for byte in HEAD:
        connection.send(bytes([byte]))

    assert connection.loop.running() == [timer]


async def test_a_whole_head_ends_the_wait_however_long_the_body_takes(connection):
    connection.send(HEAD + b"content-length: 5\r\n\r\n")

    assert connection.loop.running() == []
    connection.send(b"ab")
    assert connection.loop.running() == []


async def test_the_next_head_on_a_kept_connection_has_a_deadline_too(connection):
    connection.send(HEAD + b"content-length: 0\r\n\r\n")
    connection.answered()
    connection.send(b"GET /")

    assert len(connection.loop.running()) == 1


async def test_what_is_left_of_a_refused_body_is_not_read_for_ever(connection):
    connection.send(HEAD + b"content-length: 100000000\r\n\r\n")
    connection.answered()
    connection.send(b"x" * 100)
    (timer,) = connection.loop.running()
    connection.send(b"x" * 100)

    assert connection.loop.running() == [timer]


async def test_a_connection_that_is_gone_leaves_no_deadline(connection):
    connection.protocol.connection_lost(None)

    assert connection.loop.running() == []


@pytest.mark.parametrize(
    "sent",
    [
        b"A" * (1 << 20),
        b"GET /" + b"a" * (1 << 20),
        HEAD + b"x: " + b"a" * (1 << 20),
        HEAD + b"x" * (1 << 20),
        HEAD + b"x: y\r\n" * 200_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 200_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * (1 << 20),
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * (1 << 20),
    ],
    ids=["method", "target", "value", "name", "headers", "trailers", "trailer", "chunk extension"],
)
async def test_nothing_makes_the_head_larger_than_it_may_be(parsed, sent):
    """Seen to fail without the counts: every one of them was taken to its end, and kept."""
    taken = parsed.send(sent)

    assert taken <= 4 * HEAD_SIZE_BYTES_MAX
    assert parsed.wire.closed
    assert b"HTTP/1.1 400" in parsed.wire.written


async def test_a_large_body_is_no_head(parsed):
    sent = HEAD + b"content-length: %d\r\n\r\n" % (1 << 20) + b"x" * (1 << 20)

    assert parsed.send(sent) == len(sent)
    assert not parsed.wire.closed


async def test_bodies_of_kept_connections_do_not_add_up_to_a_head(parsed):
    for _ in range(20):
        parsed.send(HEAD + b"content-length: 9000\r\n\r\n" + b"x" * 9000)
        parsed.answered()

    assert not parsed.wire.closed
