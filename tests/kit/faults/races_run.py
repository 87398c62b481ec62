"""Clients that race on a few sessions while processes are killed and stopped; then every transcript is explained."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random

import aiohttp

from tests.kit.faults.races_model import Attempt, Told, explain
from tests.kit.faults.races_world import LEASE_TTL_S, RPC_DEADLINE_S, RunningProcess, World, send

FREE_WITHIN_S = LEASE_TTL_S + 2 * RPC_DEADLINE_S
"""A turn's last renewal may come so late, and then its lease lives on."""
_KEEPING = 0.93
"""Chance, a second, that a session is not deleted."""
NOISE_S = 60.0
"""What a busy machine may add; only who never comes free takes longer."""


@dataclass(eq=False)
class Session:
    """One name, the turns on it, and how often it was deleted."""

    session_id: str
    attempts: list[Attempt] = field(default_factory=list)
    deletes_begun: int = 0
    deletes_done: int = 0
    seen: str = ""
    """The longest conversation a client has seen, for replays."""
    generation: int = 0


@dataclass
class Outcome:
    """What a run saw."""

    failures: list[str] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    free_after_s: list[float] = field(default_factory=list)
    generations: int = 0


class Races:
    """One seeded run: what each client and the fault maker choose follows from the seed, what they meet does not."""

    def __init__(self, world: World, *, seed: int, clients: tuple[int, ...], seconds: float) -> None:
        """`clients`: how many race on each session."""
        self._world = world
        self._seed = seed
        self._ends_at = time.monotonic() + seconds
        self._sessions = {Session(f"race-{seed}-{number}"[:60]): count for number, count in enumerate(clients)}
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        async with AsyncExitStack() as stack:
            timeout = aiohttp.ClientTimeout(total=60)
            http = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))
            )
            async with asyncio.TaskGroup() as tasks:
                world = self._world
                for kind in (world.managers, list(world.pods.values()), world.gateways):
                    tasks.create_task(self._make_faults(kind))
                for session, count in self._sessions.items():
                    tasks.create_task(self._own(http, session))
                    for number in range(count):
                        tasks.create_task(self._ask(http, session, number))
            for session in self._sessions:
                await self._check(http, session)
        return self.outcome

    def _random(self, name: str) -> Random:
        return Random(f"{self._seed}/{name}")

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    async def _turn(self, http: aiohttp.ClientSession, base: str, session: Session, attempt: Attempt, **how) -> Attempt:
        first = session.deletes_done
        session.attempts.append(attempt)
        await send(http, base, session.session_id, attempt, **how)
        attempt.lives = (first, session.deletes_begun)
        self.outcome.told[attempt.told.value] += 1
        self.outcome.why[attempt.why] += 1
        if attempt.told is Told.COMMITTED:
            session.generation = attempt.generation
            if attempt.is_replay or attempt.is_create:
                session.seen = attempt.applied("")
        return attempt

    async def _own(self, http: aiohttp.ClientSession, session: Session) -> None:
        """Create the session, and now and then delete it and create it again under the same name."""
        random = self._random(f"owner {session.session_id}")
        number = 0
        while True:
            number += 1
            attempt = Attempt(f"<create {number}>", is_create=True)
            attempt = await self._turn(http, random.choice(self._world.gateway_urls), session, attempt)
            if attempt.told is not Told.COMMITTED and attempt.why != "409 context_exists":
                await asyncio.sleep(0.1)
                continue
            while random.random() < _KEEPING or self._is_over():
                if self._is_over():
                    return
                await asyncio.sleep(1)
            session.deletes_begun += 1
            while not await self._is_deleted(http, random, session):
                await asyncio.sleep(0.1)
            session.deletes_done += 1

    async def _is_deleted(self, http: aiohttp.ClientSession, random: Random, session: Session) -> bool:
        url = f"{random.choice(self._world.gateway_urls)}/v1/context/{session.session_id}"
        try:
            async with http.delete(url, headers={"authorization": "Bearer test-key-1234567890"}) as answer:
                return answer.status in {200, 404}
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _ask(self, http: aiohttp.ClientSession, session: Session, number: int) -> None:
        random = self._random(f"client {session.session_id} {number}")
        count = 0
        while not self._is_over():
            count += 1
            tag = f"<{number}.{count}>"
            attempt = Attempt(tag)
            if random.random() < 0.25 and session.seen:
                attempt = Attempt(session.seen + tag, is_replay=True)
            stream = random.random() < 0.6
            await self._turn(
                http,
                random.choice(self._world.gateway_urls),
                session,
                attempt,
                stream=stream,
                commit=random.random() < 0.85,
                if_match=session.generation if random.random() < 0.15 else None,
                cut_after=random.randrange(1, 8) if stream and random.random() < 0.3 else None,
                reset=random.random() < 0.5,
            )
            await asyncio.sleep(random.random() * 0.2)

    async def _make_faults(self, kind: list[RunningProcess]) -> None:
        """Kill or stop one process of a kind at a time, and bring it back."""
        random = self._random(f"faults {kind[0].name}")
        while not self._is_over():
            await asyncio.sleep(random.uniform(0.2, 0.8))
            process = random.choice(kind)
            if random.random() < 0.5:
                self.outcome.faults[f"{process.name} killed"] += 1
                await asyncio.to_thread(process.kill)
                await asyncio.sleep(random.random())
                process.launch()
                await _until_ready(process)
            else:
                self.outcome.faults[f"{process.name} stopped"] += 1
                process.signal(signal.SIGSTOP)
                # A third of them for longer than a lease lives.
                await asyncio.sleep(random.uniform(0.2, 1.5 * LEASE_TTL_S))
                process.signal(signal.SIGCONT)

    async def _check(self, http: aiohttp.ClientSession, session: Session) -> None:
        """All is well again: the next turn runs once the last lease has ended, and the transcript can be explained."""
        begun_s = time.monotonic()
        number = 0
        while True:
            number += 1
            last = Attempt(f"<last {number}>")
            last = await self._turn(http, self._world.gateway_urls[number % 2], session, last)
            if last.told is Told.COMMITTED:
                break
            waited_s = time.monotonic() - begun_s
            if waited_s > FREE_WITHIN_S + NOISE_S:
                self.outcome.failures.append(
                    f"{session.session_id}: {last.why} for {waited_s:.1f} s after the last fault"
                )
                return
            if last.why.startswith("404"):  # its last create came to nothing
                again = Attempt(f"<create last {number}>", is_create=True)
                await self._turn(http, self._world.gateway_urls[0], session, again)
            await asyncio.sleep(0.05)
        self.outcome.free_after_s.append(time.monotonic() - begun_s)
        generation, text = await self._world.transcript(session.session_id)
        self.outcome.generations += generation
        reason = explain(session.attempts, life=session.deletes_done, generation=generation, text=text)
        if reason:
            self.outcome.failures.append(f"{session.session_id}: {reason}")


async def _until_ready(process: RunningProcess) -> None:
    async with asyncio.timeout(90):
        while not await asyncio.to_thread(process.is_ready):
            await asyncio.sleep(0.05)
