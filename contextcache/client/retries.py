"""Who is asked and by whom, and which calls are sent again: what both transports share."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from typing_extensions import override

from contextcache.client.calls import Call
from contextcache.client.errors import (
    ApiError,
    ClientError,
    ConnectionFailed,
    ContextBusy,
    DeadlineExceeded,
    EndpointsSaturated,
    EngineError,
    GatewayUnavailable,
    IdempotencyKeyInUse,
    NoReadyEndpoint,
    RateLimitExceeded,
    StoreUnavailable,
    TooManyInFlight,
)
from contextcache.client.proxies import Proxy, connection_options, through

T = TypeVar("T")
_UNTOUCHED = (RateLimitExceeded, TooManyInFlight, EndpointsSaturated, GatewayUnavailable, NoReadyEndpoint, ContextBusy)
"""Nothing was begun: any call may come again."""
_UNKNOWN = (StoreUnavailable, EngineError, DeadlineExceeded, IdempotencyKeyInUse)
"""It may have happened: only what is twice as once may come again."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 8.0


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a call is sent again, and how long all of it may take."""

    times: int = 4
    within_s: float = 60.0
    """From the first sending to the last; a longer `Retry-After` is not waited for."""
    draw: Callable[[], float] = random.random

    def wait_s(
        self, call: Call[Any], error: ClientError | httpx.RequestError, sent: int, since_s: float
    ) -> float | None:
        """Return how long to wait before it is sent again; None: not again.

        `sent`: how often it was; `since_s`: how long ago the first time was.
        """
        if isinstance(error, ApiError):
            may = isinstance(error, _UNTOUCHED) or (call.repeatable and isinstance(error, _UNKNOWN))
            asked_s = error.retry_after_s or 0.0
        else:
            may = call.repeatable or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            asked_s = 0.0
        # Not all at once again where many were refused together.
        wait_s = max(asked_s, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (sent - 1)) * (0.5 + self.draw() / 2))
        return wait_s if may and sent <= self.times and since_s + wait_s <= self.within_s else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is and who asks."""

    base_url: str
    api_key: str

    @classmethod
    def of(cls, base_url: str | None, api_key: str | None) -> Place:
        """Fill in what is not said from `CONTEXT_CACHE_URL` and `CONTEXT_CACHE_API_KEY`. Raises ValueError."""
        url = base_url or os.environ.get("CONTEXT_CACHE_URL", "")
        key = api_key or os.environ.get("CONTEXT_CACHE_API_KEY", "")
        if not url:
            raise ValueError("no server URL: pass base_url or set CONTEXT_CACHE_URL=https://…")
        if not url.startswith(("http://", "https://")):
            raise ValueError("the server URL must begin with http:// or https://, such as http://gateway:8000")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as exc:
            told = "base_url is not a valid URL; write an IPv6 address in brackets: http://[::1]:8000"
            raise ValueError(f"{told} ({exc})") from exc
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url must not contain a user or password: error messages show it")
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError("no API key: pass api_key or set CONTEXT_CACHE_API_KEY=… (printable ASCII)")
        return cls(url.rstrip("/").removesuffix("/v1"), key)

    @override
    def __repr__(self) -> str:
        """Return it without the key."""
        return f"Place({self.base_url!r})"

    def options(self, timeout_s: float, proxy: Proxy | None) -> dict[str, Any]:
        """Return what either of httpx's clients is made with. `timeout_s`: for connecting, and between two bytes."""
        return {
            "base_url": self.base_url,
            "headers": {"authorization": f"Bearer {self.api_key}", "user-agent": "context-cache-python"},
            "timeout": httpx.Timeout(timeout_s, connect=10.0),
            **connection_options(proxy),
        }


def request_of(http: httpx.Client | httpx.AsyncClient, call: Call[Any]) -> httpx.Request:
    """Return what a call is on the wire."""
    return http.build_request(
        call.method, call.path, json=call.body, params=dict(call.query) or None, headers=dict(call.headers)
    )


def adopt(http: httpx.Client | httpx.AsyncClient, place: Place) -> None:
    """Have somebody's own client ask this server with this key."""
    http.base_url = httpx.URL(place.base_url)
    http.headers["authorization"] = f"Bearer {place.api_key}"


def json_of(response: httpx.Response) -> Any:
    """Return an answer's JSON; an empty object where it is none."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return {}


def named(response: httpx.Response) -> dict[str, str]:
    """Return an answer's headers, names in lower case."""
    return {name.lower(): value for name, value in response.headers.items()}


def told(error: ApiError | httpx.RequestError, place: Place, proxy: Proxy | None) -> ClientError:
    """Return the error that the caller sees."""
    if isinstance(error, ApiError):
        return error
    way = through(proxy, place.base_url)
    return ConnectionFailed(f"no answer from {place.base_url}: {type(error).__name__}: {error}{way}")


@contextmanager
def no_foreign_errors(place: Place) -> Iterator[None]:
    """Have what breaks while an answer is read raise an error of ours."""
    try:
        yield
    except httpx.RequestError as exc:
        raise ConnectionFailed(f"the connection to {place.base_url} broke: {type(exc).__name__}: {exc}") from exc
