"""Clients that ask without a pause, and count what they are answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.kit.gateway_parts import KEY
from tests.kit.until import until

DEADLINE_S = 60


@dataclass(frozen=True)
class Call:
    """One kind of request."""

    kind: str
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False


STATELESS = Call("stateless", "POST", "/v1/completions", b'{"prompt": "x"}')
BODILESS = Call("bodiless", "GET", "/v1/responses/r1")
TURN_BY_BODY = Call("turn by body", "POST", "/v1/completions", b'{"prompt": "x", "session_id": "ctx_1"}')
TURN_BY_HEADER = Call("turn by header", "POST", "/v1/completions", b'{"prompt": "x"}', {"x-session-id": "ctx_1"})
CREATE = Call("create", "POST", "/v1/context", b'{"prompt": "x"}')
STREAMED = Call("streamed", "POST", "/v1/completions", b'{"prompt": "x"}', chunked=True)
"""Through the HTTP front, as any large body."""
READ = Call("read", "GET", "/v1/context/ctx_1")


class Traffic:
    """Counts of answers, by kind of call and by status or kind of failure."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, Any]] = Counter()

    @property
    def num_answered(self) -> int:
        return self.answers.total()

    @property
    def failed(self) -> dict[tuple[str, Any], int]:
        """What was not answered 200."""
        return {found: count for found, count in self.answers.items() if found[1] != 200}

    async def until(self, num_answered: int) -> None:
        """Wait until so many requests were answered in all."""
        await until(lambda: self.num_answered, is_so=lambda number: number >= num_answered, what="answers in all")


@asynccontextmanager
async def traffic(url: str, calls: Sequence[Call], *, num_clients: int) -> AsyncIterator[Traffic]:
    """Ask until the block ends; each client goes round the calls."""
    counted = Traffic()
    stopping = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def client(number: int) -> None:
            position = number
            while not stopping.is_set():
                call = calls[position % len(calls)]
                position += 1
                counted.answers[call.kind, await _asked(http, url, call)] += 1

        clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
        try:
            yield counted
        finally:
            stopping.set()
            await asyncio.gather(*clients)


async def _asked(http: aiohttp.ClientSession, url: str, call: Call) -> object:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **call.headers}
    try:
        async with http.request(
            call.method, url + call.path, data=call.body, headers=headers, chunked=call.chunked or None
        ) as answer:
            body = await answer.read()
            return answer.status if answer.status == 200 else f"{answer.status} {body[:300]!r}"
    except (aiohttp.ClientError, TimeoutError) as exc:
        return repr(exc)
