"""Bounded calls with deadlines to Redis or Valkey, in any topology. Knows no session.

URLs are those of redis_address.py.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
from context_manager.layout import Script
from context_manager.redis_address import RedisClients, RedisTls, is_cluster, open_clients
from contextcache.errors import ContextCacheError

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")
Command = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ReplicaWait:
    """Replicas that must acknowledge a durable script within so many ms (Redis' WAIT)."""

    num_replicas: int
    timeout_ms: int


class TooFewReplicas(RedisError):
    """Too few replicas acknowledged a write in time: it may be lost with the master."""


_PASSING_ERRORS = (AskError, ClusterError, OutOfMemoryError, ReadOnlyError, TooFewReplicas, TryAgainError)
_PASSING_CODES = frozenset({"BUSY", "MISCONF", "NOREPLICAS"})
"""Refusals that end by themselves or by an operator's action: a retry may succeed."""
_FRAMED = re.compile(r"Error running script \(call to \w+\): [^-]*: -(?P<text>(?P<code>[A-Z]+) .*)", re.DOTALL)
"""Error of Redis before 7 that refuses a write of a script; the cause is at its end."""
_DURABLE_ANSWERS = (b"ok", b"answered")
"""Answers that acknowledge a write; any other one refuses."""
_LEAVING_S = 1.0
"""Minimum seconds between two replacements of all connections because a master became a replica."""
_FOREIGN_ERRORS = (RedisError, RedisClusterException, OSError, TimeoutError)


class RedisConnection:
    """A pool of at most `max_connections`; each call ends within `timeout_s` or raises StoreUnavailable.

    A command that Redis refuses for good raises ContextCacheError: a fault of ours or of the ACL. The wait for a free
    connection counts. Connects lazily, in the loop of the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        max_connections: int,
        tls: RedisTls | None = None,
        wait: ReplicaWait | None = None,
        on_error: Callable[[str], object] = lambda _name: None,
    ) -> None:
        """Read the URL; connect nothing yet. Raises ValueError for a URL that is none of the forms above.

        `wait`: replicas that `durable` scripts wait for; not for a Cluster. `on_error` gets the name of the client
        library's error, or `TooFewReplicas`, for each failed command.
        """
        self.is_cluster = is_cluster(url)
        """Whether keys of two shards may be on two nodes."""
        if wait is not None and self.is_cluster:
            raise ValueError("waiting for replicas is not supported in a Redis Cluster")
        self._wait = wait
        self._on_error = on_error
        self._open = partial(open_clients, url, timeout_s=timeout_s, max_connections=max_connections, tls=tls)
        self._tls = tls
        self._clients = self._open()
        self._timeout_s = timeout_s
        self._leftovers: set[asyncio.Task[None]] = set()
        """Tasks that close clients of a replaced certificate or of a former master."""
        self._left_master_s = -_LEAVING_S
        # The pools of redis-py raise when they are empty. A wait here keeps bound and deadline in one place.
        self._free = asyncio.Semaphore(max_connections)

    async def call(self, *command: Any) -> Any:
        """Run one reading command. It is repeated once after a broken connection."""
        return await self._within_deadline(lambda: self._send(command, repeatable=True))

    async def time_ms(self) -> int:
        """Return the time of Redis, Unix ms. In a Cluster: the median of the primaries."""
        told = await self.call("TIME")
        times = sorted(told.values()) if isinstance(told, dict) else [told]
        seconds, microseconds = times[len(times) // 2]
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def info(self) -> list[Mapping[str, Any]]:
        """Return the INFO fields of each primary."""
        if not self.is_cluster:
            return [await self.call("INFO")]

        async def run() -> Any:
            return await self._client().execute_command("INFO", target_nodes="primaries")

        told = await self._within_deadline(lambda: self._repeated_once(run))
        # The client answers by node where there are several, else as that node does.
        by_node = all(isinstance(one, dict) for one in told.values())
        return list(told.values()) if by_node else [told]

    async def script(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Any],
        *,
        repeatable: bool,
        durable: bool = False,
    ) -> Any:
        """Run a script by its SHA, or by its text where Redis does not know it (yet, or after SCRIPT FLUSH).

        `repeatable`: run it once more when the connection breaks, although the first may have taken effect.
        `durable`: an answer that begins with one of _DURABLE_ANSWERS counts only when enough replicas have the write.
        """
        rest = (len(keys), *keys, *arguments)

        async def run() -> Any:
            try:
                return await self._send(("EVALSHA", script.sha, *rest), repeatable=repeatable, durable=durable)
            except NoScriptError:
                return await self._send(("EVAL", script.text, *rest), repeatable=repeatable, durable=durable)

        return await self._within_deadline(run)

    async def batch(self, commands: Sequence[Command]) -> list[Any]:
        """Run reading commands in as few round trips as their slots allow; not atomic together.

        None answers one about a key that holds another type than ours: damage to one is no fault of the rest.
        """

        async def run() -> list[Any]:
            pipeline = self._client().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return [_unspoilt(answer) for answer in await pipeline.execute(raise_on_error=False)]

        return await self._within_deadline(lambda: self._repeated_once(run))

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
            self._replace_clients("redis clients with an old certificate")
        return self._clients.client

    def _replace_clients(self, why: str) -> None:
        task = asyncio.create_task(self._close_later(self._clients), name=why)
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)
        self._clients = self._open()

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

    async def _within_deadline(self, run: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        try:
            async with asyncio.timeout(self._timeout_s), self._free:
                return await run()
        except _FOREIGN_ERRORS as exc:
            self._on_error(type(exc).__name__)
            raise _mapped(exc) from exc

    async def _send(self, command: Command, *, repeatable: bool, durable: bool = False) -> Any:
        async def run() -> Any:
            try:
                if durable and self._wait is not None:
                    return await self._send_and_wait(command, self._wait)
                return await self._client().execute_command(*command)
            except ResponseError as exc:
                if (unframed := _unframed(exc)) is not None:
                    raise unframed from exc
                raise

        return await (self._repeated_once(run) if repeatable else self._once(run))

    async def _repeated_once(self, run: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        try:
            return await self._once(run)
        except RedisConnectionError:
            return await self._once(run)

    async def _once(self, run: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
        """Run a command; once more, elsewhere, when this Redis says that it is no master any more and did nothing."""
        clients = self._clients
        try:
            return await run()
        except ReadOnlyError:
            now_s = asyncio.get_running_loop().time()
            if self._clients is clients and now_s - self._left_master_s >= _LEAVING_S:
                # The name may lead to the new master by now; open connections never will.
                self._left_master_s = now_s
                self._replace_clients("redis clients of a former master")
            if self._clients is clients:
                raise
            return await run()

    async def _send_and_wait(self, command: Command, wait: ReplicaWait) -> Any:
        """Run a command and WAIT, in one round trip: WAIT is about the writes of its own connection."""
        pipeline = self._client().pipeline(transaction=False)
        pipeline.execute_command(*command)
        pipeline.execute_command("WAIT", wait.num_replicas, wait.timeout_ms)
        answer, num_replicas = await pipeline.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        if answer[0] not in _DURABLE_ANSWERS:
            return answer  # a refusal wrote nothing that could be lost
        if isinstance(num_replicas, Exception):
            # What was written is there all the same: a master that becomes a replica says UNBLOCKED, an ACL NOPERM.
            log.error("redis ended a wait for replicas", extra=_error_fields(num_replicas))
            raise TooFewReplicas from num_replicas
        if num_replicas < wait.num_replicas:
            raise TooFewReplicas
        return answer


def _unspoilt(answer: Any) -> Any:
    if isinstance(answer, ResponseError) and "WRONGTYPE" in str(answer):
        return None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _unframed(exc: ResponseError) -> ResponseError | None:
    """Return the cause of a script's refused write, if Redis before 7 framed it."""
    found = _FRAMED.match(str(exc))
    if found is None:
        return None
    return {"OOM": OutOfMemoryError, "READONLY": ReadOnlyError}.get(found["code"], ResponseError)(found["text"])


def _mapped(exc: Exception) -> ContextCacheError:
    fields = _error_fields(exc)
    code = fields["redis_code"]
    if isinstance(exc, TooFewReplicas):
        log.warning("too few replicas acknowledged a write in time", extra=fields)
        return refusals.unavailable()
    # A script met a trunk that a Cluster is moving to another node.
    passing = isinstance(exc, _PASSING_ERRORS) or code in _PASSING_CODES or "non local key" in str(exc)
    if isinstance(exc, ResponseError) and not passing:
        log.error("redis refused a command", extra=fields)
        return ContextCacheError("the session store refused a command")
    log.warning("redis did not answer", extra=fields)
    return refusals.unavailable()


def _error_fields(exc: Exception) -> dict[str, str]:
    # Only the class and Redis's code word: the rest of an error's text may quote arguments.
    code = str(exc).split(" ", 1)[0] if isinstance(exc, RedisError) else ""
    return {"error": type(exc).__name__, "redis_code": code}
