"""Transport of calls over httpx. deploy/client_sources.py generates `_sync` from this package."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from contextcache.client.calls import DONE, Call
from contextcache.client.failures import ApiError, ConnectionFailed, NotUnderstood, api_error
from contextcache.client.proxies import proxy_of, through
from contextcache.client.retries import Place, Retries, json_of, named

T = TypeVar("T")
_WHOLE_BYTES_MAX = 64 << 20
"""Size limit of an answer that does not stream: longer than the text of any window."""
_FRAMING = {"content-encoding", "content-length", "transfer-encoding"}
"""Headers that no longer describe a body once it is read."""


class AsyncTransport:
    """Sends calls to one place, with retries."""

    def __init__(self, place: Place, retries: Retries, timeout_s: float, http: httpx.AsyncClient | None = None) -> None:
        """`http`: your own client with the transport you want; `close` closes it. Raises ValueError for a bad proxy."""
        self.place, self._retries, self._timeout_s = place, retries, timeout_s
        proxy = None if http is not None else proxy_of(place.base_url)
        self._http = http if http is not None else httpx.AsyncClient(**place.options(timeout_s, proxy))
        self._http.base_url = httpx.URL(place.base_url)
        self._http.headers["authorization"] = f"Bearer {place.api_key}"
        self._way = through(proxy, place.base_url)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Return the parsed answer. Raises ApiError, ConnectionFailed, NotUnderstood."""
        response = await self._answered(call, is_whole=True)
        if response is None:
            return call.read(DONE, {})
        try:
            return call.read(json_of(response), named(response))
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            raise NotUnderstood(
                f"the answer is not from context-cache: check the URL {self.place.base_url}{self._way}"
            ) from exc

    @asynccontextmanager
    async def stream(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        """Yield a successful answer whose body is not read yet. Raises ApiError, ConnectionFailed."""
        response = await self._answered(call.streamed(), is_whole=False)
        assert response is not None, "a streamed call has no answer to skip"
        try:
            yield response
        except httpx.RequestError as exc:
            reason = f"{type(exc).__name__}: {exc}"
            raise ConnectionFailed(f"the connection to {self.place.base_url} broke: {reason}") from exc
        finally:
            await response.aclose()

    async def _answered(self, call: Call[Any], *, is_whole: bool) -> httpx.Response | None:
        """Return a successful answer; None if a retry finds that an earlier attempt has taken effect."""
        began_s, sent, may_be_done = time.monotonic(), 0, False
        while True:
            sent += 1
            try:
                return await self._sent(call, is_whole=is_whole)
            except (ApiError, httpx.RequestError) as error:
                if may_be_done and call.done_when is not None and isinstance(error, call.done_when):
                    return None
                may_be_done |= not isinstance(error, ApiError) or error.status >= 500  # a 429 has had no effect
                wait_s = self._retries.wait_s(call, error, sent, time.monotonic() - began_s)
                if wait_s is None and isinstance(error, ApiError):
                    raise
                if wait_s is None:
                    reason = f"{type(error).__name__}: {error}{self._way}"
                    raise ConnectionFailed(f"no answer from {self.place.base_url}: {reason}") from error
            await asyncio.sleep(wait_s)

    async def _sent(self, call: Call[Any], *, is_whole: bool) -> httpx.Response:
        query, headers = dict(call.query) or None, dict(call.headers)
        request = self._http.build_request(call.method, call.path, json=call.body, params=query, headers=headers)
        response = await self._http.send(request, stream=True)
        if response.is_success and not is_whole:
            return response
        whole = await read_whole(response, self._timeout_s)
        if not whole.is_success:
            raise api_error(whole.status_code, json_of(whole), named(whole), way=self._way)
        return whole


async def read_whole(
    response: httpx.Response, timeout_s: float, *, monotonic_s: Callable[[], float] = time.monotonic
) -> httpx.Response:
    """Read a body to its end and close the response. Raises as `bounded`."""
    try:
        content = b"".join([piece async for piece in bounded(response, timeout_s, monotonic_s=monotonic_s)])
    finally:
        await response.aclose()
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in _FRAMING]
    return httpx.Response(response.status_code, headers=headers, content=content, request=response.request)


async def bounded(
    response: httpx.Response, timeout_s: float, *, monotonic_s: Callable[[], float] = time.monotonic
) -> AsyncGenerator[bytes, None]:
    """Yield a body in pieces. Raises NotUnderstood over 64 MiB, ReadTimeout if it has not ended after `timeout_s`."""
    size_bytes, began_s = 0, monotonic_s()
    async for piece in response.aiter_bytes():
        size_bytes += len(piece)
        if size_bytes > _WHOLE_BYTES_MAX:
            raise NotUnderstood(f"{response.url.host} sent an answer of more than {_WHOLE_BYTES_MAX >> 20} MiB")
        if monotonic_s() - began_s > timeout_s:
            raise httpx.ReadTimeout(f"the answer did not end within {timeout_s:g} s", request=response.request)
        yield piece
