"""What every SessionStore promises of usage: over more than a day it is what was done, by tenant, day and key."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from context_manager.layout import DAY_MS, day_of
from context_manager.manager import ContextCacheManager
from context_manager.metrics import ManagerMetrics
from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit, Usage
from tests.kit.seed import random_of
from tests.kit.session_store import SessionStore

MODELS = ("smol", "org/smol: 2 @ fp8", "")
"""Names as engines may serve them, and none: usage of no model, or that an older release sent."""
KEYS = {"acme": ("app", "batch"), "globex": ("app",)}
MIDNIGHT = 1_700_006_400_000
BEGIN_MS, END_MS = MIDNIGHT - 4 * 3_600_000, MIDNIGHT + 26 * 3_600_000
LONGEST_PAUSE_MS = 30 * 60_000
LEASE_MS = 30_000
SEGMENT = Segment(SegmentKind.PROMPT, (1, 2), text="Hello")


class RandomDay:
    """Does at random what parts do, tells much of it twice, and adds up what was done once."""

    def __init__(self, store: SessionStore, chosen: Random) -> None:
        self.clock = ManualClock(BEGIN_MS)
        self.sums: dict[tuple[str, int], dict[tuple[str, str], Counter[str]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        self.alive: dict[tuple[str, str], int] = {}
        """Generation by tenant and id."""
        self._store, self._chosen, self._number = store, chosen, 0
        self._commits: list[tuple[str | None, TurnCommit]] = []
        """That were made, with what they were forked from."""
        self._batches: dict[str, tuple[int, Usage]] = {}
        """By tenant the last one that its sidecar told."""
        self.restart()

    def restart(self) -> None:
        """Have another manager go on over the same store."""
        self.manager = ContextCacheManager(
            self._store._redis, clock=self.clock, metrics=ManagerMetrics(CollectorRegistry())
        )

    async def step(self) -> None:
        """Do one thing some minutes later; where midnight lies between, one in its last and one in its first ms."""
        later_ms = self._chosen.randrange(LONGEST_PAUSE_MS)
        to_midnight_ms = DAY_MS - self.clock.now_ms() % DAY_MS
        if later_ms > to_midnight_ms:
            later_ms -= to_midnight_ms
            self.clock.advance(ms=to_midnight_ms - 1)
            await self._turn(*self._one())
            self.clock.advance(ms=1)
            await self._repeat()
            await self._turn(*self._one())
        self.clock.advance(ms=later_ms)
        tenant, session_id = self._one()
        what = self._chosen.choice((self._create, self._turn, self._turn, self._fork, self._change, self._tell))
        await what(tenant, session_id)
        if self._chosen.random() < 0.5:
            await self._repeat()

    def _one(self) -> tuple[str, str]:
        """Choose a tenant and one of its contexts; it may have none."""
        tenant = self._chosen.choice(list(KEYS))
        return tenant, self._chosen.choice(sorted(name for whose, name in self.alive if whose == tenant) or [""])

    def _name(self, what: str) -> str:
        self._number += 1
        return f"{what}-{self._number}"

    def _used(self, tenant: str, **counts: int) -> Usage:
        tokens = {name: self._chosen.randrange(1 << 17) for name in ("computed_tokens", "cached_tokens", "saved_ms")}
        model = self._chosen.choice(MODELS)
        return Usage(self._chosen.choice(KEYS[tenant]), counts | (tokens if "turns" in counts else {}), model)

    def _done(self, tenant: str, usage: Usage) -> None:
        self.sums[tenant, day_of(self.clock.now_ms())][usage.key, usage.model].update(usage.counts)

    async def _commit(self, commit: TurnCommit, *, forked_from: str | None = None) -> None:
        assert commit.usage is not None
        if forked_from is None:
            await self.manager.commit_turn(commit)
        else:
            await self.manager.fork(forked_from, commit=commit)
        self._done(commit.tenant, commit.usage)
        self._commits.append((forked_from, commit))
        self.alive[commit.tenant, commit.session_id] = commit.expected_generation + 1

    async def _reserved(self, tenant: str, what: str, usage: Usage) -> TurnCommit:
        name = self._name(what)
        new = NewSession(tenant, name, "smol", ttl_s=7 * 86_400)
        await self.manager.reserve(new, lease_id=name, lease_ttl_ms=LEASE_MS)
        return TurnCommit(tenant, name, name, 0, 0, (), "", "pod-1", usage=usage)

    async def _create(self, tenant: str, _: str) -> None:
        commit = await self._reserved(tenant, "ctx", self._used(tenant, contexts=1, turns=1))
        await self._commit(replace(commit, segments=(SEGMENT,)))

    async def _fork(self, tenant: str, session_id: str) -> None:
        if session_id:
            commit = await self._reserved(tenant, "fork", self._used(tenant, contexts=1))
            await self._commit(commit, forked_from=session_id)

    async def _turn(self, tenant: str, session_id: str) -> None:
        """Take a turn that commits, is refused, or ends before its end."""
        if not session_id:
            return
        lease_id, generation = self._name("turn"), self.alive[tenant, session_id]
        await self.manager.begin_turn(tenant, session_id, lease_id=lease_id, lease_ttl_ms=LEASE_MS)
        usage = self._used(tenant, turns=1)
        commit = TurnCommit(tenant, session_id, lease_id, generation, 1, (SEGMENT,), "", "pod-1", usage=usage)
        end = self._chosen.choice(("committed", "committed", "refused", "aborted"))
        if end == "committed":
            await self._commit(commit)
            return
        if end == "refused":
            with pytest.raises(ContextCacheError):
                await self.manager.commit_turn(replace(commit, expected_generation=generation + 1))
            # What commits nothing is told beside its answer; the answer to that may be lost.
            for _ in range(self._chosen.choice((1, 2))):
                await self.manager.add_usage(tenant, lease_id, [usage])
            self._done(tenant, usage)
        await self.manager.abort_turn(tenant, session_id, lease_id=lease_id)

    async def _change(self, tenant: str, session_id: str) -> None:
        if not session_id:
            return
        if self._chosen.random() < 0.5:
            await self.manager.unregister_session_cache(tenant, session_id)
            del self.alive[tenant, session_id]
        else:
            # A generation that was replaced is gone: nothing changes then.
            generation = self._chosen.randint(1, self.alive[tenant, session_id])
            try:
                rewound = await self.manager.rewind(tenant, session_id, generation=generation)
            except ContextCacheError:
                return
            self.alive[tenant, session_id] = rewound.generation

    async def _tell(self, tenant: str, _: str) -> None:
        """Have a sidecar tell what was held; whoever hears it again is another manager."""
        last, _ = self._batches.get(tenant, (0, None))
        usage = Usage("", {"disk_kib_s": self._chosen.randrange(1, 1 << 40)})
        self._batches[tenant] = last + 1, usage
        await self._told(tenant)
        self._done(tenant, usage)
        self.restart()

    async def _told(self, tenant: str) -> None:
        number, usage = self._batches[tenant]
        await self.manager.add_usage(tenant, f"{tenant}-{number}", [usage], sender="sidecar-1", number=number)

    async def _repeat(self) -> None:
        """Tell again what was told: a commit of today or yesterday, whatever became of its context, and a batch."""
        if self._commits:
            forked_from, commit = self._chosen.choice(self._commits[-5:])
            try:
                if forked_from is None:
                    await self.manager.commit_turn(commit)
                else:
                    await self.manager.fork(forked_from, commit=commit)
            except ContextCacheError:
                pass  # the context has gone on since, or is gone
        for tenant in self._batches:
            await self._told(tenant)


class UsageContract:
    """Subclass it with a `store` fixture: an empty store."""

    async def test_usage_of_more_than_a_day_is_what_was_done(self, store: SessionStore) -> None:
        """Over two midnights, by managers that came one after the other; much was told twice, some across midnight.

        Seen failing without the check for a commit that comes again, for a batch's number, and for the day.
        """
        day = RandomDay(store, random_of("a day of usage"))
        while day.clock.now_ms() < END_MS:
            await day.step()

        first, last = day_of(MIDNIGHT) - 1, day_of(day.clock.now_ms())
        for tenant in KEYS:
            report = await day.manager.read_usage(tenant, first_day=first, last_day=last)
            found = {
                (tenant, on): {(one.key, one.model): Counter(one.counts) for one in usage}
                for on, usage in report.days.items()
            }
            done = {
                (whose, on): {named: +counts for named, counts in by_name.items()}
                for (whose, on), by_name in day.sums.items()
                if whose == tenant
            }
            today = await day.manager.read_usage(tenant)
            assert found == done
            assert len(found) >= 2
            assert report.num_contexts == sum(whose == tenant for whose, _ in day.alive)
            assert today.days == {on: usage for on, usage in report.days.items() if on == last}
