"""Carries calls. `contextcache/client/_sync` is made from `_async` by `python -m deploy.sync_client`: edit that one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from contextcache.client.calls import DONE, Call
from contextcache.client.failures import ApiError, NotUnderstood, api_error
from contextcache.client.proxies import proxy_of, through
from contextcache.client.retries import (
    Place,
    Retries,
    adopt,
    json_of,
    named,
    no_foreign_errors,
    request_of,
    told,
)

T = TypeVar("T")
_WHOLE_BYTES_MAX = 64 << 20
"""Of an answer that does not stream: beyond any window's text."""
_OF_THE_WAY = {"content-encoding", "content-length", "transfer-encoding"}
"""Headers that say nothing of a body that was read."""


class AsyncTransport:
    """Carries calls to one place."""

    def __init__(self, place: Place, retries: Retries, timeout_s: float, http: httpx.AsyncClient | None = None) -> None:
        """`http`: a client of yours, with the transport you want; it is closed with this one. Raises ValueError."""
        self.place, self._retries, self._timeout_s = place, retries, timeout_s
        self._proxy = None if http is not None else proxy_of(place.base_url)
        self._http = http if http is not None else httpx.AsyncClient(**place.options(timeout_s, self._proxy))
        if http is not None:
            adopt(http, place)

    async def close(self) -> None:
        """End all connections."""
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        """Return what an answer says. Raises ApiError, ConnectionFailed, NotUnderstood."""
        response = await self._answered(call, is_whole=True)
        if response is None:
            return call.read(DONE, {})
        try:
            return call.read(json_of(response), named(response))
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            way = through(self._proxy, self.place.base_url)
            raise NotUnderstood(
                f"the answer is not from context-cache: check the URL {self.place.base_url}{way}"
            ) from exc

    @asynccontextmanager
    async def stream(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        """Give the head of an answer whose body comes bit by bit. Raises ApiError, ConnectionFailed, until the head."""
        response = await self._answered(call.streamed(), is_whole=False)
        assert response is not None, "a streamed call has no answer to skip"
        try:
            with no_foreign_errors(self.place):
                yield response
        finally:
            await response.aclose()

    async def _answered(self, call: Call[Any], *, is_whole: bool) -> httpx.Response | None:
        """Return a good answer, whole or its head; None where a repeat says that all is done already."""
        began_s, sent, may_be_done = time.monotonic(), 0, False
        while True:
            sent += 1
            try:
                return await self._sent(call, is_whole=is_whole)
            except (ApiError, httpx.RequestError) as error:
                if may_be_done and call.done_when is not None and isinstance(error, call.done_when):
                    return None
                may_be_done |= not isinstance(error, ApiError) or error.status >= 500  # 429 is before anything is done
                wait_s = self._retries.wait_s(call, error, sent, time.monotonic() - began_s)
                if wait_s is None:
                    raise told(error, self.place, self._proxy) from (None if isinstance(error, ApiError) else error)
            await asyncio.sleep(wait_s)

    async def _sent(self, call: Call[Any], *, is_whole: bool) -> httpx.Response:
        response = await self._http.send(request_of(self._http, call), stream=True)
        if response.is_success and not is_whole:
            return response
        try:
            whole = await self._whole(response)
        finally:
            await response.aclose()
        if not whole.is_success:
            way = through(self._proxy, self.place.base_url)
            raise api_error(whole.status_code, json_of(whole), named(whole), way=way)
        return whole

    async def _whole(self, response: httpx.Response) -> httpx.Response:
        """Read an answer to its end: not for longer than a silence may be, however slowly it comes, nor for ever."""
        content, began_s = bytearray(), time.monotonic()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > _WHOLE_BYTES_MAX:
                raise NotUnderstood(f"{self.place.base_url} sent an answer of more than {_WHOLE_BYTES_MAX >> 20} MiB")
            if time.monotonic() - began_s > self._timeout_s:
                raise httpx.ReadTimeout(
                    f"the answer did not end within {self._timeout_s:g} s", request=response.request
                )
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in _OF_THE_WAY]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)
