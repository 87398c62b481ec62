"""Mixed load: workers that keep a constant number of contexts alive, and everything a client can do to them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.kit.stack import KEY, MODEL, OTHER_KEY

NUM_WORKERS = 4
CONTEXTS_PER_WORKER = 6
NUM_LIVE = NUM_WORKERS * CONTEXTS_PER_WORKER
HANGS_S = 120
"""A request that takes longer is stuck: the longest fault lasts 3 s, and the machine stands still for some."""
_TOKENS_MAX = 1100
"""Longer contexts make room for new ones."""
_LONG_TTL_S = 3600
_SHORT_TTL_S = 10
_PAUSE_MAX_S = 0.25
_ALLOWED = {502, 503}
"""Faults that a client may be told of, besides 4xx."""
_OPERATIONS = {
    "turn": 40, "streamed turn": 25, "client gone": 8, "stateless": 8, "replace": 6, "short-lived": 5, "read": 5,
    "refused": 5, "race": 4, "no HTTP": 2,
}  # fmt: skip


@dataclass
class Held:
    """A context of a worker's."""

    session_id: str
    key: str
    num_tokens: int


@dataclass
class Load:
    """Runs until `stop` is set; then every context is as it was left."""

    url: str
    front_url: str
    random: Random
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    held: list[Held] = field(default_factory=list)
    unsure: list[Held] = field(default_factory=list)
    """Creates whose answer never came: they may be there, or come to be. Who names a context can delete it."""

    async def run(self) -> None:
        """Work. Raises nothing but faults of this file."""
        timeout = aiohttp.ClientTimeout(total=HANGS_S)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as workers:
            for number in range(NUM_WORKERS):
                workers.create_task(_Worker(self, http, Random(self.random.random()), number).run())

    async def delete_all(self) -> None:
        """Delete every context that is left."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANGS_S)) as http:
            for one in self.held + self.unsure:
                async with http.delete(f"{self.url}/v1/context/{one.session_id}", headers=_auth(one.key)) as answer:
                    self.seen[f"last delete {answer.status}"] += 1


class _Worker:
    def __init__(self, load: Load, http: aiohttp.ClientSession, random: Random, number: int) -> None:
        self._load, self._http, self._random = load, http, random
        self._key = (KEY, OTHER_KEY)[number % 2]
        self._mine: list[Held] = []
        self._unsure: list[Held] = []

    async def run(self) -> None:
        while not self._load.stop.is_set():
            while len(self._mine) < CONTEXTS_PER_WORKER and not self._load.stop.is_set():
                await self._attempt("create", self._create)
            if self._unsure:
                await self._attempt("delete unsure", self._delete_unsure)
            (name,) = self._random.choices(list(_OPERATIONS), list(_OPERATIONS.values()))
            await self._attempt(name, getattr(self, "_" + name.lower().replace(" ", "_").replace("-", "_")))
            await asyncio.sleep(self._random.random() * _PAUSE_MAX_S)
        self._load.held += self._mine

    async def _attempt(self, name: str, operation: Any) -> None:
        began_s = time.monotonic()
        try:
            outcome = await operation()
        except TimeoutError:
            outcome = "hung"
            self._load.failures.append(f"{name}: no answer within {HANGS_S} s")
        except (aiohttp.ClientError, OSError) as exc:
            outcome = f"broken ({type(exc).__name__})"
            await asyncio.sleep(0.2)
        self._load.seen[f"{name}: {outcome}"] += 1
        if isinstance(outcome, int) and outcome >= 500:
            if outcome not in _ALLOWED:
                self._load.failures.append(f"{name}: {outcome}")
            await asyncio.sleep(0.2)
        self._load.seen["longest, s"] = max(self._load.seen["longest, s"], round(time.monotonic() - began_s))

    def _url(self, path: str) -> str:
        return (self._load.front_url if self._random.random() < 0.3 else self._load.url) + path

    def _text(self) -> str:
        return "".join(self._random.choices("abcdefgh ", k=self._random.randrange(5, 120)))

    def _picked(self) -> Held:
        return self._random.choice(self._mine)

    def _body(self, context: Held, **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "session_id": context.session_id, "max_tokens": self._random.randrange(1, 8)}
        return {**body, "prompt": self._text(), "context_mode": "append", **more}

    async def _create(self, *, ttl: int = _LONG_TTL_S) -> int:
        prompt = self._text() * self._random.randrange(1, 8)
        new = Held(f"soak-{self._random.getrandbits(64):x}", self._key, len(prompt))
        body = {"model": MODEL, "prompt": prompt, "ttl": ttl, "max_tokens": self._random.choice((0, 1, 4))}
        body["session_id"] = new.session_id
        is_known = ttl != _LONG_TTL_S
        try:
            async with self._http.post(self._url("/v1/context"), json=body, headers=_auth(self._key)) as answer:
                await answer.read()
                if answer.status == 200 and not is_known:
                    self._mine.append(new)
                    is_known = True
                return answer.status
        finally:
            if not is_known:
                self._unsure.append(new)
                self._load.unsure.append(new)

    async def _delete_unsure(self) -> None:
        for one in tuple(self._unsure):
            async with self._http.delete(self._url(f"/v1/context/{one.session_id}"), headers=_auth(one.key)) as answer:
                if answer.status in {200, 404}:
                    self._unsure.remove(one)

    async def _short_lived(self) -> int:
        return await self._create(ttl=_SHORT_TTL_S)

    async def _turn(self) -> int:
        return await self._ask(self._picked())

    async def _ask(self, context: Held, **more: Any) -> int:
        body = self._body(context, **more)
        async with self._http.post(self._url("/v1/completions"), json=body, headers=_auth(self._key)) as answer:
            await answer.read()
            if answer.status == 200:
                context.num_tokens += len(body["prompt"]) + body["max_tokens"]
            if answer.status in {400, 404, 410}:
                # Longer than the model takes, or lost with Redis: another one takes its place.
                self._load.seen[f"let go after {answer.status}"] += 1
                await self._let_go(context)
            elif context.num_tokens > _TOKENS_MAX:
                await self._let_go(context)
            return answer.status

    async def _streamed_turn(self) -> int:
        return await self._ask(self._picked(), stream=True, stream_options={"include_usage": True})

    async def _client_gone(self) -> str:
        body = self._body(self._picked(), stream=True, max_tokens=200)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.random()):
                url = self._url("/v1/completions")
                async with self._http.post(url, json=body, headers=_auth(self._key)) as answer:
                    await answer.content.readany()
                    answer.close()
        return "left"

    async def _stateless(self) -> int:
        body = {"model": MODEL, "prompt": self._text(), "max_tokens": 4, "stream": self._random.random() < 0.5}
        async with self._http.post(self._url("/v1/completions"), json=body, headers=_auth(self._key)) as answer:
            await answer.read()
            return answer.status

    async def _replace(self) -> str:
        await self._let_go(self._picked())
        return "done"

    async def _let_go(self, context: Held) -> None:
        if context in self._mine:
            self._mine.remove(context)
        url, status = self._url(f"/v1/context/{context.session_id}"), 0
        try:
            async with self._http.delete(url, headers=_auth(self._key)) as answer:
                status = answer.status
                self._load.seen[f"delete: {status}"] += 1
        finally:
            if status not in {200, 404, 410}:
                # Not gone for all we know: asked again, or it would be one more than there may be.
                self._unsure.append(context)
                self._load.unsure.append(context)

    async def _read(self) -> int:
        path = self._random.choice(("/v1/context", f"/v1/context/{self._picked().session_id}"))
        async with self._http.get(self._url(path), headers=_auth(self._key)) as answer:
            await answer.read()
            return answer.status

    async def _refused(self) -> int:
        foreign = OTHER_KEY if self._key == KEY else KEY
        body, key = self._random.choice((
            (self._body(Held("ctx_nobody", "", 0)), self._key), (self._body(self._picked()), foreign),
            (self._body(self._picked()), "nobody"), ({"model": "other", "prompt": ""}, self._key),
        ))  # fmt: skip
        async with self._http.post(self._url("/v1/completions"), json=body, headers=_auth(key)) as answer:
            await answer.read()
            return answer.status

    async def _race(self) -> str:
        context = self._picked()
        both = await asyncio.gather(self._ask(context), self._ask(context), return_exceptions=True)
        return "+".join(sorted(str(one) if isinstance(one, int) else "broken" for one in both))

    async def _no_http(self) -> str:
        host, _, port = self._load.front_url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(self._random.randbytes(200))
        await asyncio.sleep(self._random.random() * 0.2)
        writer.close()
        return "sent"


def _auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
