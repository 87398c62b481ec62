"""A name that stands for several managers: calls go to all of them, and one that ends takes no call with it."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import grpc
import grpc.aio

from contextcache.wire.rpc import CHANNEL_OPTIONS
from tests.kit.until import until


class _Servers:
    """Servers of one method that count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.ports: list[int] = []
        self.servers: list[grpc.aio.Server] = []

    async def start(self, stack: AsyncExitStack, number: int) -> None:
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(self._counting(number))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Count", {"Call": method}),))
        self.ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        stack.push_async_callback(server.stop, 0)
        self.servers.append(server)

    def _counting(self, number: int):
        async def call(request: bytes, _: object) -> bytes:
            self.calls[number] += 1
            return request

        return call


async def test_calls_go_to_every_address_and_none_is_lost_when_one_ends() -> None:
    async with AsyncExitStack() as stack:
        servers = _Servers()
        for number in range(3):
            await servers.start(stack, number)
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in servers.ports)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS))
        call = channel.unary_unary("/test.Count/Call")

        made = 0

        async def num_called() -> int:
            nonlocal made
            await call(b"", timeout=60, wait_for_ready=True)
            made += 1
            return len(servers.calls)

        # Connections open one after the other.
        await until(num_called, is_so=lambda num: num == 3, what="every server is called", interval_s=0)
        # A server that stops finishes what it has and says goodbye; the next call knows.
        await servers.servers[0].stop(10)
        before = servers.calls[0]
        for _ in range(20):
            await call(b"", timeout=60, wait_for_ready=True)

    assert set(servers.calls) == {0, 1, 2}
    assert servers.calls[0] == before
    assert sum(servers.calls.values()) == made + 20
