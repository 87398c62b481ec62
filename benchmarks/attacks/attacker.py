"""`python -m benchmarks.attacks.attacker NAME PORT SECONDS`: one tenant attacks one front, then prints its statuses.

Every attack uses one ordinary API key. Loops end at the deadline, and every connection closes with the process.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import aiohttp

from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.ports import LOOPBACK
from deploy.local.state import API_KEYS

KEY = list(API_KEYS)[1]
"""Second key of the local stack: a tenant without any rights of its own."""
UPLOADS = 200
LARGE_BYTES, SMALL_BYTES = 32 << 20, 900 << 10
CONTROL_CALLS = 2100
WIDE_KEYS, WIDE_AT_ONCE = 500_000, 16
STATELESS_AT_ONCE = 500
LONG_BYTES, LONG_AT_ONCE = 8 << 20, 4
FORKERS = 8
_PIECE = b" " * (1 << 20)
_RETRY_S = 0.2
"""Pause of a refused connection: a flood that never waits would measure this process."""
_CALL_S = 120.0


class Attacker:
    """One tenant, with its deadline and the statuses that it got."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.statuses: Counter[str] = Counter()
        self._ends_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the attack ends; 0 or less: it has ended."""
        return self._ends_s - time.monotonic()

    async def repeat(self, attack: Callable[[], Awaitable[str]]) -> None:
        """Run an attack again and again until the deadline, and count its outcomes."""
        while self.left_s > 0:
            try:
                async with asyncio.timeout(self.left_s):
                    self.statuses[await attack()] += 1
            except TimeoutError:
                self.statuses["held to the end"] += 1
            except (OSError, EOFError, aiohttp.ClientError):
                self.statuses["connection closed"] += 1
            await asyncio.sleep(_RETRY_S)

    async def half_sent(self, method: str, path: str, declared_bytes: int, sent: Iterable[bytes]) -> str:
        """Announce a body, send a part of it, and wait for the server's answer."""
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {declared_bytes}\r\n\r\n"
            writer.write(head.encode())
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            return (await reader.readline()).split()[1].decode()
        finally:
            writer.close()

    async def post(self, session: aiohttp.ClientSession, path: str, body: bytes, **headers: str) -> str:
        """Send a whole body and return the status."""
        async with session.post(f"http://{LOOPBACK}:{self.port}{path}", data=body, headers=headers) as answer:
            await answer.read()
            return str(answer.status)


def _opened() -> aiohttp.ClientSession:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=_CALL_S),
    )


def _body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL_NAME, "max_tokens": 4, **fields}).encode()


async def uploads(attacker: Attacker) -> None:
    """Send 31 of 32 MiB, and 800 of 900 KiB, on many connections, and stop there."""
    large = lambda: attacker.half_sent("POST", "/v1/completions", LARGE_BYTES, [_PIECE] * 31)  # noqa: E731
    small = lambda: attacker.half_sent("POST", "/v1/completions", SMALL_BYTES, [_PIECE[: 800 << 10]])  # noqa: E731
    await asyncio.gather(*(attacker.repeat((large, small)[number % 2]) for number in range(UPLOADS)))


async def forks(attacker: Attacker) -> None:
    """Fork one context of 2 000 tokens as fast as the server answers."""
    async with _opened() as session:
        url = f"http://{LOOPBACK}:{attacker.port}/v1/context"
        async with session.post(url, data=_body(prompt=plain_text(2000, seed=2))) as answer:
            made = await answer.json()
        fork = f"/v1/context/{made['session_id']}/fork"
        await asyncio.gather(*(attacker.repeat(lambda: attacker.post(session, fork, b"{}")) for _ in range(FORKERS)))


async def controls(attacker: Attacker) -> None:
    """Send one byte of the body of many PATCH requests."""
    patch = lambda: attacker.half_sent("PATCH", "/v1/context/ctx_a", 2, [b"{"])  # noqa: E731
    await asyncio.gather(*(attacker.repeat(patch) for _ in range(CONTROL_CALLS)))


async def wide(attacker: Attacker) -> None:
    """Send bodies of 500 000 keys without a context."""
    keys = ",".join(f'"k{number}":0' for number in range(WIDE_KEYS))
    body = f'{{"model":"{MODEL_NAME}","prompt":"x","max_tokens":1,"metadata":{{{keys}}}}}'.encode()
    async with _opened() as session:
        post = lambda: attacker.post(session, "/v1/completions", body)  # noqa: E731
        await asyncio.gather(*(attacker.repeat(post) for _ in range(WIDE_AT_ONCE)))


async def stateless(attacker: Attacker) -> None:
    """Keep 500 requests without a context in flight."""
    body = _body(prompt="Once upon a time", max_tokens=32)
    async with _opened() as session:
        post = lambda: attacker.post(session, "/v1/completions", body)  # noqa: E731
        await asyncio.gather(*(attacker.repeat(post) for _ in range(STATELESS_AT_ONCE)))


async def long_prompts(attacker: Attacker) -> None:
    """Create contexts of 8 MB of text, which fit no window."""
    body = _body(prompt="word " * (LONG_BYTES // 5))
    async with _opened() as session:
        post = lambda: attacker.post(session, "/v1/context", body)  # noqa: E731
        await asyncio.gather(*(attacker.repeat(post) for _ in range(LONG_AT_ONCE)))


ATTACKS: dict[str, Callable[[Attacker], Coroutine[Any, Any, None]]] = {
    "uploads": uploads,
    "forks": forks,
    "controls": controls,
    "wide": wide,
    "stateless": stateless,
    "long_prompts": long_prompts,
}


def main() -> int:
    """Attack, print the statuses as JSON, and return."""
    name, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    attacker = Attacker(port, seconds)
    asyncio.run(ATTACKS[name](attacker))
    print(json.dumps(attacker.statuses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
