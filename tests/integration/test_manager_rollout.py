"""What is repeated among the parts, and what is not: a call to a manager that ends, and one that it answered."""

from __future__ import annotations

import asyncio
import functools
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from context_manager.client import ContextManagerClient
from contextcache.errors import ContextNotFound, StoreUnavailable
from contextcache.model import SessionId, TenantId
from tests.kit.manager_process import ManagerProcess, running_manager_process
from tests.kit.until import until
from tests.kit.valkey import ValkeyServer

pytestmark = pytest.mark.thorough

NUM_CALLERS = 8
NUM_ROLLOUTS = 4
TIMEOUT_S = 30.0
PATIENT = {"MANAGER_REDIS_TIMEOUT_S": "15"}
"""On a machine that stalls, Redis is not away."""
TENANT, NOBODY = TenantId("t"), SessionId("ctx_nobody")


class Callers:
    """They call without a pause, over one connection to each manager, which gRPC shares among them."""

    def __init__(self, managers: list[ManagerProcess]) -> None:
        self._managers = managers
        target = "ipv4:" + ",".join(manager.address for manager in managers)
        self._clients = [ContextManagerClient(target, timeout_s=TIMEOUT_S) for _ in range(NUM_CALLERS)]
        self._is_over = False
        self.num_answers = 0

    async def call(self) -> None:
        await asyncio.gather(*map(self._call, self._clients))

    async def _call(self, client: ContextManagerClient) -> None:
        while not self._is_over:
            await client.list_sessions(TENANT, limit=1)
            with pytest.raises(ContextNotFound):
                await client.get_session_metadata(TENANT, NOBODY)
            self.num_answers += 1
        await client.close()

    async def until_each_calls_every_manager(self, calling: asyncio.Task[None]) -> None:
        """A manager that is back is called again within a second; the refusals are counted where they were made."""
        for manager in self._managers:
            refusals = functools.partial(asyncio.to_thread, manager.metric, "contextcache_manager_refusals_total")
            wanted = await refusals() + 50
            await until(
                refusals,
                is_so=lambda number, wanted=wanted: number >= wanted or calling.done(),
                what=lambda wanted=wanted: f"{wanted} refusals; {self.num_answers} pairs of calls answered in all",
            )
            if calling.done():
                await calling  # says which call failed

    def end(self) -> None:
        self._is_over = True


async def test_managers_are_replaced_under_load_and_no_call_fails(tmp_path: Path, valkey: ValkeyServer) -> None:
    """Seen to fail without the retries of CHANNEL_OPTIONS: a manager that stops cancels calls it has not begun."""
    async with AsyncExitStack() as stack:
        managers = [
            await stack.enter_async_context(running_manager_process(tmp_path, valkey.url, **PATIENT)) for _ in range(2)
        ]
        callers = Callers(managers)
        calling = asyncio.create_task(callers.call())
        for number in range(NUM_ROLLOUTS):
            await callers.until_each_calls_every_manager(calling)
            manager = managers[number % 2]
            manager.send(signal.SIGTERM)
            assert await manager.wait() == 0
            await manager.start()
        callers.end()
        await calling

    print(f"{NUM_ROLLOUTS} managers replaced under {callers.num_answers} pairs of calls")


async def test_what_a_manager_has_answered_is_not_asked_again(tmp_path: Path, valkey: ValkeyServer) -> None:
    """Seen to fail without the push-back of our own errors: four times as long, and four times the work."""
    async with running_manager_process(tmp_path, valkey.url) as manager:
        valkey.stop()
        client = ContextManagerClient(manager.address, timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable):
            await client.list_sessions(TENANT, limit=1)
        await client.close()

        assert manager.metric("contextcache_manager_refusals_total", of='operation="list"') == 1
