"""One bounded, deadlined door to Redis or Valkey, whatever its topology. Knows no session.

URLs: `redis://`, `rediss://` (TLS) and `unix://` as redis-py reads them, options in the query string
(`?ssl_ca_certs=/path`), an ACL user as `redis://user:password@host`; a Cluster as `redis+cluster://` or
`rediss+cluster://`; Sentinel as `redis+sentinel://[user:password@]host:26379[,host…]/<service>[/<db>]`
(or `rediss+sentinel://`), the user being the data nodes' own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
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
        on_error: Callable[[str], object] = lambda _name: None,
    ) -> None:
        """Read the URL; connect nothing yet. Raises ValueError for a URL that is none of the forms above.

        `on_error` is told the name of the client library's error for each command that failed.
        """
        self._on_error = on_error
        self._client, self._sentinels = _open(url, timeout_s=timeout_s, max_connections=max_connections)
        self._timeout_s = timeout_s
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
                pipeline = self._client.pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
        except _FOREIGN_ERRORS as exc:
            raise self._counted(exc) from exc
        return answers

    async def close(self) -> None:
        """Close every connection."""
        try:
            async with asyncio.timeout(self._timeout_s):
                for client in (self._client, *self._sentinels):
                    await client.aclose()
        except _FOREIGN_ERRORS as exc:
            log.warning("redis connections did not close", extra={"error": type(exc).__name__})

    async def _within_deadline(self, command: Command, *, repeatable: bool) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s), self._free:
                try:
                    return await self._client.execute_command(*command)
                except RedisConnectionError:
                    if not repeatable:
                        raise
                    return await self._client.execute_command(*command)
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


def _open(url: str, *, timeout_s: float, max_connections: int) -> tuple[Any, Sequence[Any]]:
    """Return the client, and the clients it asks for the master, which it does not close itself."""
    options: dict[str, Any] = {
        # None on purpose: with a number redis-py sends through asyncio.wait_for, which in Python 3.11 loses a
        # cancellation that meets the end of the send. RedisConnection's own deadline covers every call.
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "max_connections": max_connections,
        # RESP2 asks nothing of the server that 6.2, a proxy or a narrow ACL could refuse.
        "protocol": 2,
        # Repeats are decided in RedisConnection, which knows what may be repeated.
        "retry": Retry(NoBackoff(), 0),
    }
    scheme, _, rest = url.partition("://")
    base, _, topology = scheme.partition("+")
    if base not in ("redis", "rediss", "unix") or topology not in ("", "cluster", "sentinel"):
        raise ValueError(f"unknown Redis URL scheme {scheme!r}")
    if base == "unix" and topology:
        raise ValueError("a Cluster or Sentinel is not reached over a Unix socket")
    if "socket_timeout=" in rest:
        raise ValueError("socket_timeout does not belong into the Redis URL: the store has a deadline of its own")
    if topology == "cluster":
        return RedisCluster.from_url(f"{base}://{rest}", **options), ()
    if topology == "sentinel":
        return _open_sentinel(rest, options, tls=base == "rediss")
    return redis.Redis.from_url(url, **options), ()


def _open_sentinel(rest: str, options: dict[str, Any], *, tls: bool) -> tuple[Any, Sequence[Any]]:
    parts = urlsplit(f"redis://{rest}")
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("a Sentinel URL names its service: redis+sentinel://host:26379/<service>")
    sentinels = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":") if ":" in host else (host, "", "26379")
        sentinels.append((name, int(port)))
    asking = options | {
        # A host that is down must leave time to ask the next one.
        "socket_connect_timeout": options["socket_connect_timeout"] / 4
    }
    asking.pop("max_connections")
    # redis-py's own reading of user, db and query; host and port come from the Sentinels.
    of_master = parse_url(f"redis://{user}{at}master/{db}?{parts.query}")
    options |= {name: option for name, option in of_master.items() if name not in ("host", "port")}
    if tls:
        options["ssl"] = True
    watched = Sentinel(  # type: ignore[no-untyped-call]  # redis-py annotates nothing in this class
        sentinels, sentinel_kwargs=asking, **options
    )
    return watched.master_for(service), watched.sentinels
