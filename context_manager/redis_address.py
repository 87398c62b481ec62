"""Clients of a Redis URL of any topology, and the certificate files. Connects nothing.

URLs: `redis://`, `rediss://` (TLS) and `unix://` as redis-py reads them, options in the query string
(`?ssl_ca_certs=/path`), an ACL user as `redis://user:password@host`; a Cluster as `redis+cluster://` or
`rediss+cluster://`; Sentinel as `redis+sentinel://[user:password@]host:26379[,host…]/<service>[/<db>]`, the user being
the data nodes' own, or `rediss+sentinel://` with TLS to the Sentinels as to the data nodes.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from context_manager.settings import ManagerSettings
from contextcache.process.reloaded import Reloaded, read_bounded


@dataclass(frozen=True, slots=True)
class RedisClients:
    """A client, and its Sentinel clients, which it does not close itself."""

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
        raise ValueError("certificate files for Redis need a URL with the scheme rediss://")
    try:
        return _open(url, timeout_s=timeout_s, max_connections=max_connections, tls=tls)
    except _WrongUrl as exc:
        raise ValueError(str(exc)) from None
    except (ValueError, TypeError) as exc:
        raise ValueError(f"the Redis URL is not valid ({type(exc).__name__})") from None


class _WrongUrl(Exception):
    """A fault of the URL, with a message that contains no password."""


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
        raise _WrongUrl(
            "unknown scheme of the Redis URL; allowed: redis, rediss, unix, and redis or rediss with "
            "+cluster or +sentinel"
        )
    if base == "unix" and topology:
        raise _WrongUrl("a Redis Cluster or Sentinel needs TCP, not a Unix socket")
    if "socket_timeout=" in rest:
        raise _WrongUrl("the Redis URL must not contain socket_timeout: set MANAGER_REDIS_TIMEOUT_S")
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
        raise _WrongUrl("a Sentinel URL must name its service: redis+sentinel://host:26379/<service>")
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


class RedisTls:
    """Certificate files of a Redis with TLS."""

    def __init__(
        self,
        *,
        ca_file: Path | None,
        cert_file: Path | None,
        key_file: Path | None,
        on_failure: Callable[[], None] = lambda: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ca_file` None: the system's CAs. Raises OSError or ValueError when the files cannot serve.

        `on_failure` is called when changed files cannot serve; new connections fail until they can.
        """
        if (cert_file is None) != (key_file is None):
            raise ValueError("the certificate and the key for Redis belong together: set both or none")
        self._ca_file, self._cert_file, self._key_file = ca_file, cert_file, key_file
        named = [path for path in (ca_file, cert_file, key_file) if path is not None]
        self._files = Reloaded(
            *named,
            read=lambda: self._check(named),
            name="certificate for redis",
            on_failure=on_failure,
            monotonic_s=monotonic_s,
        )
        self._known = self._files.value

    def options(self) -> dict[str, Any]:
        """Return the options of redis-py."""
        named = {"ssl_ca_certs": self._ca_file, "ssl_certfile": self._cert_file, "ssl_keyfile": self._key_file}
        return {name: str(path) for name, path in named.items() if path is not None}

    def has_changed(self) -> bool:
        """Return whether the files differ from those at the last call, and are good. Looks at most once a second."""
        known, self._known = self._known, self._files.current()
        return known is not self._known

    def _check(self, paths: Sequence[Path]) -> ssl.SSLContext:
        """Return a context of the files. Raises OSError or ValueError when they cannot serve."""
        for path in paths:
            # Here, because OpenSSL does not name a missing file.
            read_bounded(path)
        try:
            context = ssl.create_default_context(cafile=None if self._ca_file is None else str(self._ca_file))
        except ssl.SSLError as exc:
            raise ValueError(f"{self._ca_file} has no PEM certificate: {exc.reason or exc}") from exc
        if self._cert_file is None:
            return context
        try:
            context.load_cert_chain(self._cert_file, self._key_file, password="")
        except ssl.SSLError as exc:
            files = f"{self._cert_file} and {self._key_file}"
            raise ValueError(f"{files} are not a PEM certificate and its private key: {exc.reason or exc}") from exc
        return context


def redis_tls(settings: ManagerSettings, *, on_failure: Callable[[], None]) -> RedisTls | None:
    """Return the files that the settings name, None when they name none. Raises as RedisTls."""
    ca, cert, key = settings.redis_ca_file, settings.redis_cert_file, settings.redis_key_file
    if ca is None and cert is None and key is None:
        return None
    return RedisTls(ca_file=ca, cert_file=cert, key_file=key, on_failure=on_failure)
