"""Address of a server with the API key, and the rule for retries. Both transports share them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import httpx

from contextcache.client import errors
from contextcache.client.calls import Call
from contextcache.client.failures import ApiError, ClientError
from contextcache.client.proxies import Proxy, connection_options

_WITHOUT_EFFECT = (
    errors.RateLimitExceeded,
    errors.TooManyInFlight,
    errors.EndpointsSaturated,
    errors.GatewayUnavailable,
    errors.NoReadyEndpoint,
    errors.ContextBusy,
)
"""Errors before any effect: every call may be sent again."""
_PERHAPS_DONE = (errors.StoreUnavailable, errors.EngineError, errors.DeadlineExceeded, errors.IdempotencyKeyInUse)
"""Errors after a possible effect: only a repeatable call may be sent again."""
_NOT_CONNECTED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 8.0


@dataclass(frozen=True, slots=True)
class Retries:
    """Limits of the retries of one call."""

    times: int = 4
    within_s: float = 60.0
    """Seconds from the first attempt to the last. A longer `Retry-After` ends the retries."""
    draw: Callable[[], float] = random.random
    """Source of the jitter, 0 to 1."""

    def wait_s(
        self, call: Call[Any], error: ClientError | httpx.RequestError, sent: int, since_s: float
    ) -> float | None:
        """Return the seconds to wait before the next attempt; None: no further attempt.

        `sent`: number of attempts so far. `since_s`: seconds since the first attempt.
        """
        if isinstance(error, ApiError):
            may = isinstance(error, _WITHOUT_EFFECT) or (call.repeatable and isinstance(error, _PERHAPS_DONE))
        else:
            may = call.repeatable or isinstance(error, _NOT_CONNECTED)
        asked_s = (error.retry_after_s or 0.0) if isinstance(error, ApiError) else 0.0
        # The jitter spreads the retries of clients that were refused together.
        wait_s = max(asked_s, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (sent - 1)) * (0.5 + self.draw() / 2))
        return wait_s if may and sent <= self.times and since_s + wait_s <= self.within_s else None


@dataclass(frozen=True, slots=True)
class Place:
    """Base URL of a server, and the API key."""

    base_url: str
    api_key: str = field(repr=False)

    @classmethod
    def of(cls, base_url: str | None, api_key: str | None) -> Place:
        """Take missing values from `CONTEXT_CACHE_URL` and `CONTEXT_CACHE_API_KEY`. Raises ValueError."""
        url = base_url or os.environ.get("CONTEXT_CACHE_URL", "")
        key = api_key or os.environ.get("CONTEXT_CACHE_API_KEY", "")
        if not url:
            raise ValueError("no server URL: pass base_url or set CONTEXT_CACHE_URL=https://…")
        if not url.startswith(("http://", "https://")):
            raise ValueError("the server URL must begin with http:// or https://, such as http://gateway:8000")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as exc:
            cure = "base_url is not a valid URL; write an IPv6 address in brackets: http://[::1]:8000"
            raise ValueError(f"{cure} ({exc})") from exc
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url must not contain a user or password: error messages show it")
        if not key or not key.isascii() or not key.isprintable():
            raise ValueError("no API key: pass api_key or set CONTEXT_CACHE_API_KEY=… (printable ASCII)")
        return cls(url.rstrip("/").removesuffix("/v1"), key)

    def options(self, timeout_s: float, proxy: Proxy | None) -> dict[str, Any]:
        """Return the arguments of an httpx client. `timeout_s`: the longest silence of the server."""
        return {
            "headers": {"user-agent": "context-cache-python"},
            "timeout": httpx.Timeout(timeout_s, connect=10.0),
            **connection_options(proxy),
        }

    def openai_options(self, session_id: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of an `openai` client whose calls continue a context; the caller's `options` win.

        The header carries ids that begin with `ctx_`. Another id goes into the body of each call:
        `extra_body={"session_id": …}`. Raises ValueError for such an id, ImportError without the package `openai`.
        """
        if find_spec("openai") is None:
            raise ImportError("`openai()` needs the package openai: pip install 'context-cache[openai]'", name="openai")
        if not session_id.startswith("ctx_"):
            cure = "pass extra_body={'session_id': …} with each call"
            raise ValueError(f"a header cannot carry session_id {session_id!r}; {cure}")
        headers = {"X-Session-ID": session_id, **options.get("default_headers", {})}
        known = {"base_url": f"{self.base_url}/v1", "api_key": self.api_key}
        return {**known, **options, "default_headers": headers}


def json_of(response: httpx.Response) -> Any:
    """Return the JSON of an answer; an empty object if the body is not JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return {}


def named(response: httpx.Response) -> dict[str, str]:
    """Return the headers of an answer, names in lower case."""
    return {name.lower(): value for name, value in response.headers.items()}
