"""How long a turn waits for its engine and its client. Both may fall silent with their connections open.

Who is out of patience tells the engine's application that the client has left (`http.disconnect`), as vLLM expects:
it then ends the request in the engine. An application that does not end by that is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from vllm_plugin.turn.engine import Message, Receive

_GRACE_S = 10.0
"""For an application that was told that its client has left."""


class Patience:
    """One turn's. Costs a comparison a message: the timer is moved only when it fires, or must fire earlier."""

    def __init__(self, *, engine_s: float, client_s: float) -> None:
        """`engine_s`: without a message from the engine; `client_s`: for the client to take one."""
        self._engine_s = engine_s
        self._client_s = client_s
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._out = asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        self._awaited = ""
        self.lost_with = ""
        """`engine` or `client`, once it is; empty before."""

    def lose(self, whom: str) -> None:
        """Have no more patience, for whatever reason; harmless outside `watching`, and while we wait for ourselves."""
        if self._limit is not None and self._deadline_s is not None and not self.lost_with:
            self.lost_with = whom
            self._out.set()
            self._limit.reschedule(asyncio.get_running_loop().time() + _GRACE_S)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Wait for the engine inside the block, and raise TimeoutError where that has to be cancelled."""
        async with asyncio.timeout(None) as self._limit:
            self._wait_for("engine", self._engine_s)
            try:
                yield
            finally:
                self._wait_for("", None)
                if self._timer is not None:
                    self._timer.cancel()

    def receive(self, receive: Receive) -> Receive:
        """Return the client's `receive`, which says that it has left once patience is lost."""

        async def next_message() -> Message:
            message = asyncio.ensure_future(receive())
            out = asyncio.ensure_future(self._out.wait())
            try:
                await asyncio.wait((message, out), return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if self.lost_with else message.result()
            finally:
                message.cancel()
                out.cancel()

        return next_message

    def heard_engine(self) -> None:
        """Wait for the engine's next message anew."""
        self._wait_for("engine", self._engine_s)

    @contextmanager
    def with_client(self) -> Iterator[None]:
        """Wait for the client inside the block, for the engine after it."""
        self._wait_for("client", self._client_s)
        yield
        self._wait_for("engine", self._engine_s)

    @contextmanager
    def with_ourselves(self) -> Iterator[None]:
        """Inside the block every wait has a deadline of its own."""
        self._wait_for("", None)
        yield
        self._wait_for("engine", self._engine_s)

    def _wait_for(self, whom: str, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._awaited = whom
        self._deadline_s = None if seconds is None else loop.time() + seconds
        if self._deadline_s is not None and (self._timer is None or self._deadline_s < self._timer.when()):
            self._arm(self._deadline_s)

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._deadline_s is None or self.lost_with:
            return
        now_s = asyncio.get_running_loop().time()
        if now_s < self._deadline_s:
            self._arm(self._deadline_s)
            return
        self.lose(self._awaited)
