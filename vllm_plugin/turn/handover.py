"""Large bodies reach the engine one at a time, a tenant's never before another tenant's that waits.

vLLM reads and checks a body in one step of the event loop: for as long as that takes, every other request of the pod
waits, and the probe too. Rules: the next large body is handed over when the last one has been read and the loop had as
long for others. Of each tenant one body waits in that queue. A body that is read within REST_FROM_S costs no rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm_plugin.turn.engine import Message, Receive

LARGE_BYTES = 64 << 10
"""Bodies from which on the engine may need more than some milliseconds."""
REST_FROM_S = 0.02


class Handover:
    """Hands over the large bodies of one API server process."""

    def __init__(
        self,
        *,
        clock_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock_s`, `sleep`: tests give their own."""
        self._clock_s = clock_s
        self._sleep = sleep
        self._engine = asyncio.Lock()
        self._of_tenant: dict[str, _Turnstile] = {}
        self._free_at_s = 0.0

    def receive(self, tenant: str, receive: Receive) -> Receive:
        """Return a `receive` that holds the last piece of a large body until its turn."""
        size_bytes = 0

        async def handed() -> Message:
            nonlocal size_bytes
            message = await receive()
            size_bytes += len(message.get("body", b""))
            if size_bytes >= LARGE_BYTES and message["type"] == "http.request" and not message.get("more_body", False):
                async with self._tenants_turn(tenant):
                    await self._engine.acquire()
                    try:
                        await self._rest()
                    except BaseException:
                        self._engine.release()
                        raise
                    # The engine parses the body before the loop runs this callback.
                    asyncio.get_running_loop().call_soon(self._was_read, self._clock_s())
            return message

        return handed

    async def _rest(self) -> None:
        if (rest_s := self._free_at_s - self._clock_s()) > 0:
            await self._sleep(rest_s)

    def _was_read(self, begun_s: float) -> None:
        ended_s = self._clock_s()
        took_s = ended_s - begun_s
        self._free_at_s = ended_s + took_s if took_s >= REST_FROM_S else 0.0
        self._engine.release()

    @asynccontextmanager
    async def _tenants_turn(self, tenant: str) -> AsyncIterator[None]:
        turnstile = self._of_tenant.setdefault(tenant, _Turnstile())
        turnstile.users += 1
        try:
            async with turnstile.lock:
                yield
        finally:
            turnstile.users -= 1
            if not turnstile.users:
                del self._of_tenant[tenant]


class _Turnstile:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
