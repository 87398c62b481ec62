"""Waits of a turn: for its engine and its client, for calls beside its answer, and for the end of the process.

A client or an engine may fall silent with its connection open. At its limit the engine's application hears that the
client has left (`http.disconnect`). vLLM then ends the request in the engine. An application that does not end by that
is cancelled.

vLLM 0.32 lets running answers finish after SIGTERM (`--shutdown-timeout`). Meanwhile its port stays open, `/health`
answers 200, and new requests fail. Answers that have not finished when it kills its engine get neither another token
nor an end (entrypoints/launchers/launcher.py serve_http). This process hears SIGTERM at the same time. It tells
routers, so that another pod takes new turns, and it gives up a turn that runs too long before vLLM is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from contextcache.errors import ContextCacheError
from vllm_plugin.turn.engine import Message, Receive

log = logging.getLogger(__name__)

_CLIENT_S = 120.0
"""Time for which a client may leave a part of its answer unread."""
GRACE_S = 10.0
"""Time that an application has after its client has left."""


class TurnPatience:
    """One turn's."""

    def __init__(self, engine_s: float) -> None:
        """`engine_s`: seconds without a message from the engine."""
        self._engine_s = engine_s
        self._whom = ""
        """`engine` or `client`, while one of them is waited for."""
        self._until_s = 0.0
        """Time of the loop at which its patience ends."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires at `_until_s` or before. A timer for each message would cost as much as the message."""
        self._out = asyncio.Event()
        self._limit: asyncio.Timeout | None = None
        self.lost_with = ""
        """`engine`, `client` or `shutdown`, once it is; empty before."""

    def lose(self, whom: str) -> None:
        """End the patience; harmless outside `watching`, and while we wait for ourselves."""
        if self._limit is not None and self._whom and not self.lost_with:
            self.lost_with = whom
            self._out.set()
            self._limit.reschedule(asyncio.get_running_loop().time() + GRACE_S)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Wait for the engine inside the block, and raise TimeoutError where that has to be cancelled."""
        async with asyncio.timeout(None) as self._limit:
            self._wait_for("engine", self._engine_s)
            try:
                yield
            finally:
                self._whom = ""
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

    async def with_client(self, sending: Awaitable[None]) -> None:
        """Wait for the client until it has taken a part of its answer, for the engine after that."""
        self._wait_for("client", _CLIENT_S)
        await sending
        self._wait_for("engine", self._engine_s)

    @contextmanager
    def with_ourselves(self) -> Iterator[None]:
        """Inside the block every wait has a deadline of its own."""
        self._whom = ""
        yield
        self._wait_for("engine", self._engine_s)

    def _wait_for(self, whom: str, seconds: float) -> None:
        self._whom, self._until_s = whom, asyncio.get_running_loop().time() + seconds
        if self._timer is None or self._until_s < self._timer.when():
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._until_s, self._look)

    def _look(self) -> None:
        """Lose patience, unless a message has come since the timer was set."""
        assert self._timer is not None
        is_over = self._timer.when() >= self._until_s
        self._timer = None
        if self._whom and is_over:
            self.lose(self._whom)
        elif self._whom:
            self._set_timer()


class Background:
    """Runs small calls that outlive their callers. A call that does not fit or fails is logged."""

    def __init__(self, *, limit: int, deadline_s: float) -> None:
        """Run at most `limit` calls at once, each for at most `deadline_s`."""
        self._limit = limit
        self._deadline_s = deadline_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, call: Coroutine[Any, Any, object]) -> asyncio.Task[None] | None:
        """Run `call` and return its task, which raises nothing; None: there are too many already."""
        if len(self._tasks) >= self._limit:
            call.close()
            log.warning("background call dropped")
            return None
        task = asyncio.create_task(self._bounded(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, call: Coroutine[Any, Any, object], *, within_s: float | None = None) -> None:
        """Run `call` and wait for it, for `within_s` at most; it goes on when the caller is cancelled or goes on."""
        task = self.start(call)
        if task is not None:
            await asyncio.wait([task], timeout=within_s)

    async def drain(self) -> None:
        """Wait for everything that runs now."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _bounded(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await call
        except (ContextCacheError, TimeoutError) as exc:
            log.warning("background call failed", extra={"reason": type(exc).__name__})


class Draining:
    """Whether the process was told to end."""

    def __init__(self, *, timeout_s: float, give_up: Callable[[], None]) -> None:
        """`give_up` is called `timeout_s` after the drain began."""
        self.value = False
        self._timeout_s = timeout_s
        self._give_up = give_up

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.value = True
        asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)
