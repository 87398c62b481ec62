"""One bounded, deadlined door to Redis or Valkey, whatever its topology. Knows no session.

URLs are those of redis_url.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from context_manager import refusals
from context_manager.redis_scripts import Script
from context_manager.redis_tls import RedisTls
from context_manager.redis_url import RedisClients, open_clients
from contextcache.errors import ContextCacheError

log = logging.getLogger(__name__)

Command = tuple[Any, ...]

_PASSING_ERRORS = (AskError, ClusterError, OutOfMemoryError, ReadOnlyError, TryAgainError)
_PASSING_CODES = frozenset({"BUSY", "MISCONF", "NOREPLICAS"})
"""Refusals that go away by themselves or by an operator's hand: worth a retry, no fault of ours."""
_FOREIGN_ERRORS = (RedisError, RedisClusterException, OSError, TimeoutError)


class RedisConnection:
    """A pool of at most `max_connections`; each call ends within `timeout_s` or raises StoreUnavailable.

    A command that Redis understands and refuses for good raises ContextCacheError: a fault of ours or of the ACL.

    Waiting for a free connection counts. Connects lazily, in the loop of the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        max_connections: int,
        tls: RedisTls | None = None,
        on_error: Callable[[str], object] = lambda _name: None,
    ) -> None:
        """Read the URL; connect nothing yet. Raises ValueError for a URL that is none of the forms above.

        `on_error` is told the name of the client library's error for each command that failed.
        """
        self._on_error = on_error
        self._open = partial(open_clients, url, timeout_s=timeout_s, max_connections=max_connections, tls=tls)
        self._tls = tls
        self._clients = self._open()
        self._timeout_s = timeout_s
        self._leftovers: set[asyncio.Task[None]] = set()
        """Closing clients whose certificate was replaced."""
        # redis-py's pools raise when they are empty; waiting here keeps bound and deadline in one place.
        self._free = asyncio.Semaphore(max_connections)

    async def call(self, *command: Any) -> Any:
        """Run one reading command; it is repeated once after a broken connection."""
        return await self._within_deadline(command, repeatable=True)

    async def script(self, script: Script, keys: Sequence[str], arguments: Sequence[Any], *, repeatable: bool) -> Any:
        """Run a script by its SHA, or by its text where Redis does not know it (yet, or after SCRIPT FLUSH).

        `repeatable`: run it once more when the connection breaks, although the first may have taken effect.
        """
        rest = (len(keys), *keys, *arguments)
        try:
            return await self._within_deadline(("EVALSHA", script.sha, *rest), repeatable=repeatable)
        except NoScriptError:
            return await self._within_deadline(("EVAL", script.text, *rest), repeatable=repeatable)

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Run reading commands in as few round trips as their slots allow; not atomic together."""
        try:
            async with asyncio.timeout(self._timeout_s), self._free:
                pipeline = self._client().pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
        except _FOREIGN_ERRORS as exc:
            raise self._counted(exc) from exc
        return answers

    async def close(self) -> None:
        """Close every connection."""
        leftovers = list(self._leftovers)
        for task in leftovers:
            task.cancel()
        await asyncio.gather(*leftovers, return_exceptions=True)
        await self._close_clients(self._clients)

    def _client(self) -> Any:
        if self._tls is not None and self._tls.has_changed():
            # redis-py reads the files once for each connection that it keeps for good: they have to go.
            task = asyncio.create_task(self._close_later(self._clients), name="redis clients of an old certificate")
            self._leftovers.add(task)
            task.add_done_callback(self._leftovers.discard)
            self._clients = self._open()
        return self._clients.client

    async def _close_later(self, clients: RedisClients) -> None:
        try:
            # No call runs longer than this.
            await asyncio.sleep(self._timeout_s)
        finally:
            await self._close_clients(clients)

    async def _close_clients(self, clients: RedisClients) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await clients.close()
        except _FOREIGN_ERRORS as exc:
            log.warning("redis connections did not close", extra={"error": type(exc).__name__})

    async def _within_deadline(self, command: Command, *, repeatable: bool) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s), self._free:
                try:
                    return await self._client().execute_command(*command)
                except RedisConnectionError:
                    if not repeatable:
                        raise
                    return await self._client().execute_command(*command)
        except NoScriptError:
            raise
        except _FOREIGN_ERRORS as exc:
            raise self._counted(exc) from exc

    def _counted(self, exc: Exception) -> ContextCacheError:
        self._on_error(type(exc).__name__)
        return _mapped(exc)


def _mapped(exc: Exception) -> ContextCacheError:
    # Only the class and Redis's code word: the rest of an error's text may quote arguments.
    code = str(exc).split(" ", 1)[0] if isinstance(exc, RedisError) else ""
    fields = {"error": type(exc).__name__, "redis_code": code}
    passing = isinstance(exc, _PASSING_ERRORS) or code in _PASSING_CODES
    if isinstance(exc, ResponseError) and not passing:
        log.error("redis refused a command", extra=fields)
        return ContextCacheError("the session store refused a command")
    log.warning("redis did not answer", extra=fields)
    return refusals.unavailable()
