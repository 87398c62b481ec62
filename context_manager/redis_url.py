"""What a Redis URL means: the clients of it, whatever the topology. Connects nothing.

URLs: `redis://`, `rediss://` (TLS) and `unix://` as redis-py reads them, options in the query string
(`?ssl_ca_certs=/path`), an ACL user as `redis://user:password@host`; a Cluster as `redis+cluster://` or
`rediss+cluster://`; Sentinel as `redis+sentinel://[user:password@]host:26379[,host…]/<service>[/<db>]`, the user being
the data nodes' own, or `rediss+sentinel://` with TLS to the Sentinels as to the data nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from context_manager.redis_tls import RedisTls


@dataclass(frozen=True, slots=True)
class RedisClients:
    """A client, and the clients it asks for the master, which it does not close itself."""

    client: Any
    sentinels: Sequence[Any] = ()

    async def close(self) -> None:
        """Close every connection."""
        for client in (self.client, *self.sentinels):
            await client.aclose()


def is_cluster(url: str) -> bool:
    """Return whether a URL names a Cluster."""
    return url.partition("://")[0].endswith("+cluster")


def open_clients(url: str, *, timeout_s: float, max_connections: int, tls: RedisTls | None) -> RedisClients:
    """Return the clients of a URL. Raises ValueError, which repeats nothing of it: it may hold a password."""
    if tls is not None and not url.startswith("rediss"):
        raise ValueError("certificate files for Redis need a URL that begins with rediss")
    try:
        return _open(url, timeout_s=timeout_s, max_connections=max_connections, tls=tls)
    except _WrongUrl as exc:
        raise ValueError(str(exc)) from None
    except (ValueError, TypeError) as exc:
        raise ValueError(f"the Redis URL cannot be read ({type(exc).__name__})") from None


class _WrongUrl(Exception):
    """With a message of our own, which is safe to show."""


def _open(url: str, *, timeout_s: float, max_connections: int, tls: RedisTls | None) -> RedisClients:
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
        **({} if tls is None else tls.options()),
    }
    scheme, _, rest = url.partition("://")
    base, _, topology = scheme.partition("+")
    if base not in ("redis", "rediss", "unix") or topology not in ("", "cluster", "sentinel"):
        raise _WrongUrl("unknown Redis URL scheme")
    if base == "unix" and topology:
        raise _WrongUrl("a Cluster or Sentinel is not reached over a Unix socket")
    if "socket_timeout=" in rest:
        raise _WrongUrl("socket_timeout does not belong into the Redis URL: the store has a deadline of its own")
    if topology == "cluster":
        return RedisClients(RedisCluster.from_url(f"{base}://{rest}", **options))
    if topology == "sentinel":
        return _open_sentinel(rest, options, tls=base == "rediss")
    return RedisClients(redis.Redis.from_url(url, **options))


def _open_sentinel(rest: str, options: dict[str, Any], *, tls: bool) -> RedisClients:
    parts = urlsplit(f"redis://{rest}")
    user, at, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise _WrongUrl("a Sentinel URL names its service: redis+sentinel://host:26379/<service>")
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
        asking |= {name: option for name, option in options.items() if name.startswith("ssl")}
    watched = Sentinel(  # type: ignore[no-untyped-call]  # redis-py annotates nothing in this class
        sentinels, sentinel_kwargs=asking, **options
    )
    return RedisClients(watched.master_for(service), watched.sentinels)
