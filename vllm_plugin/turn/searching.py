"""The search for an engine, after the engine of a request's pod is gone: the standby's, or the own one that is back.

A request needs an engine for its short calls (`Engine.ask`), for its answer, and for the rest of an answer
(`resuming.py`). One search serves all three, with the same bounds: the client is there, the process has not
drained, and TURN_RESUME_TIMEOUT_S has not passed since the break.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from contextcache.errors import EngineFailed, NoReadyEndpoint
from contextcache.identity import Standby
from vllm_plugin.turn.answer.rest import CannotResume
from vllm_plugin.turn.engine import ASGIApp, Engine, Message
from vllm_plugin.turn.waiting import Draining, TurnPatience

if TYPE_CHECKING:
    from vllm_plugin.turn.turn import Client

log = logging.getLogger(__name__)

HEADER = "x-context-resume"
_FAILURES_MAX = 2
"""Engines that may fail one attempt though they answer another call. A request that makes engines fail ends then."""
_POLL_S = 0.5
_COMMENT_S = 5.0

FoundT = TypeVar("FoundT")


@dataclass
class EngineSearch:
    """Finds engines for one request. Used by the request's task alone."""

    client: Client
    app: ASGIApp
    """This pod's engine."""
    standbys: Callable[[Standby], ASGIApp]
    """Returns the application of another pod's engine."""
    timeout_s: float
    patiences: set[TurnPatience]
    """Patiences of all requests, which end with the process."""
    draining: Draining
    """This pod's engine ends with the process, and refuses new requests by then."""
    at: Standby | None = None
    """Pod that was asked last; None: this one."""
    has_left: bool = False
    """The client closed its connection."""

    async def receive(self) -> Message:
        """Return the client's next message."""
        message = await self.client.receive()
        self.has_left = self.has_left or message["type"] == "http.disconnect"
        return message

    def check(self) -> None:
        """Raise CannotResume if no other engine may be asked."""
        if self.has_left:
            raise CannotResume("client")
        if self.client.headers.get(HEADER, "").strip().lower() == "off":
            raise CannotResume("opted_out")

    async def call(self, attempt: Callable[[Engine], Awaitable[FoundT]], failure: Exception) -> FoundT:
        """Make a short call, which ended with `failure` here, at the engine that is found. Raises `failure`."""
        try:
            self.check()
            return await self.find(attempt, since_s=asyncio.get_running_loop().time())
        except CannotResume as exc:
            log.warning("no engine for a call", extra={"reason": str(exc)})
            raise failure from exc
        finally:
            self.at = None  # the answer's first engine is this pod's

    async def find(self, attempt: Callable[[Engine], Awaitable[FoundT]], *, since_s: float) -> FoundT:
        """Return the result of `attempt` at the first engine that is healthy and does not fail it.

        `since_s`: time of the loop at the break. Raises CannotResume, and client errors of `attempt`.
        """
        left_s = since_s + self.timeout_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise CannotResume("timeout")
        return await self.while_wanted(self._find(attempt), within_s=left_s)

    async def while_wanted(self, work: Coroutine[Any, Any, FoundT], *, within_s: float) -> FoundT:
        """Return the result of `work`. Raises CannotResume if the client leaves, the process ends, or time is up."""
        patience = TurnPatience(within_s)
        self.patiences.add(patience)
        leaving = asyncio.ensure_future(patience.receive(self.receive)())
        working = asyncio.ensure_future(work)
        try:
            async with patience.watching():
                await asyncio.wait((leaving, working), return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    return working.result()
            raise CannotResume("client" if self.has_left else patience.lost_with.replace("engine", "timeout"))
        finally:
            self.patiences.discard(patience)
            leaving.cancel()
            working.cancel()
            await asyncio.gather(leaving, working, return_exceptions=True)

    async def _find(self, attempt: Callable[[Engine], Awaitable[FoundT]]) -> FoundT:
        standby, waited_s, num_failures = self.client.identity.standby, 0.0, 0
        while num_failures < _FAILURES_MAX:
            if standby is None and self.draining.value:
                raise CannotResume("shutdown")
            if standby is not None and self.at is None:
                self.at, app = standby, self.standbys(standby)
            else:
                self.at, app = None, self.app
                await asyncio.sleep(_POLL_S)
                waited_s += _POLL_S
                if waited_s >= _COMMENT_S:
                    waited_s = 0.0
                    await self.client.keep_alive.comment()
            engine = Engine(app, self.client.scope)
            if not await engine.is_ready():
                continue
            try:
                return await attempt(engine)
            except (EngineFailed, NoReadyEndpoint) as exc:
                num_failures += isinstance(exc, EngineFailed) and await engine.tokenizes()
                log.debug("engine cannot take over", extra={"reason": exc.code})
        raise CannotResume("limit")
