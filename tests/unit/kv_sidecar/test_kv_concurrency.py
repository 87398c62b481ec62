"""Many things at once, some of them cut off: nothing wrong is served, and at the end every byte can be freed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError
from kv_sidecar.format.manifest import all_keys
from kv_sidecar.saves import NewSave
from kv_sidecar.tiers.memory import rounded
from tests.kit.kv_blocks import TENANT, SidecarUnderTest, new_save
from tests.kit.seed import random_of

NUM_SESSIONS = 5


class Traffic:
    """Random saves, loads, deletes, touches and collector passes over a few sessions that share prefixes."""

    def __init__(self, kv: SidecarUnderTest, random: Random) -> None:
        self.kv = kv
        self.random = random
        self.sealed: list[NewSave] = []
        self.outcomes: Counter[str] = Counter()

    async def run(self, num_steps: int) -> None:
        tasks: list[asyncio.Task[None]] = []
        for _ in range(num_steps):
            tasks.append(asyncio.create_task(self.one()))
            if self.random.random() < 0.15:
                self.random.choice(tasks).cancel()
            running = [task for task in tasks if not task.done()]
            if len(running) > 6:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        await self.kv.sidecar.threads.idle()

    async def one(self) -> None:
        name, action = self.random.choice(
            [("save", self.save)] * 4 + [("load", self.load)] * 3 + [("delete", self.delete), ("rest", self.rest)]
        )
        try:
            await action()
        except ContextCacheError as exc:
            self.outcomes[exc.code] += 1
        else:
            self.outcomes[name] += 1

    def session(self) -> str:
        return f"ctx_{self.random.randrange(NUM_SESSIONS)}"

    async def save(self) -> None:
        start = self.random.choice([0, 100])
        token_ids = (*range(start, start + self.random.randrange(1, 14)), self.random.randrange(3))
        now_ms = self.kv.clock.now_ms()
        new = new_save(token_ids, now_ms=now_ms, session_id=self.session(), started_at_ms=now_ms + 1)
        await self.kv.send_all(new)
        await self.kv.catalog.seal(new.cache_ref, 0)
        self.sealed.append(new)

    async def load(self) -> None:
        if self.sealed:
            await self.kv.load(self.random.choice(self.sealed), in_slots=self.random.random() < 0.5)

    async def delete(self) -> None:
        refs = [self.random.choice(self.sealed).cache_ref] if self.sealed else []
        await self.kv.catalog.delete(TENANT, self.session() if self.random.random() < 0.3 else "", refs)

    async def rest(self) -> None:
        await self.kv.catalog.touch(TENANT, self.session(), self.kv.clock.now_ms() + 1_000_000)
        await self.kv.catalog.collect()


@pytest.mark.parametrize("memory_limit_bytes", [6_000, 1 << 20])
async def test_any_mixture_serves_only_right_bytes_and_ends_clean(tmp_path: Path, memory_limit_bytes: int) -> None:
    clock = ManualClock()
    async with SidecarUnderTest(tmp_path, clock=clock, memory_limit_bytes=memory_limit_bytes, io_threads=4) as kv:
        traffic = Traffic(kv, random_of(f"mixture {memory_limit_bytes}"))
        await traffic.run(120)
        assert kv.blocks.memory_usage().size_bytes <= rounded(memory_limit_bytes)
        assert not kv.has_leases
        clock.advance(ms=kv.settings.limits().save_deadline_ms)
        await kv.catalog.collect()
        live = {ref: await kv.catalog.open(TENANT, ref) for ref in kv.manifest_files()}

        assert {"save", "load", "delete", "rest"} <= set(traffic.outcomes)
        assert set(traffic.outcomes) <= {
            "save",
            "load",
            "delete",
            "rest",
            "cache_ref_not_found",
            "context_deleted",
        }
        assert kv.sidecar.directory.num_quarantined == 0
        assert kv.block_files() == {key for manifest in live.values() for key in all_keys(manifest)}
        for session in range(NUM_SESSIONS):
            await kv.catalog.delete(TENANT, f"ctx_{session}", [])
        assert kv.block_files() == set()
        assert kv.manifest_files() == set()
        assert (kv.in_memory(), kv.memory.lent_bytes, kv.missing_bytes()) == ([], 0, 0)


async def test_a_delete_removes_a_block_whose_step_ends_during_the_removal_of_others(
    kv: SidecarUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = await kv.save(tuple(range(10)))
    last = kv.blocks.get(all_keys(kv.plan(new))[-1])
    step = kv.blocks.step("read", last)
    step.__enter__()
    write = kv.sidecar.threads.write

    async def end_step_first(act: Any, *args: Any) -> Any:
        result = await write(act, *args)
        if act == kv.sidecar.tiers._delete and last.over is not None:
            step.__exit__(None, None, None)
        return result

    monkeypatch.setattr(kv.sidecar.threads, "write", end_step_first)
    await kv.catalog.delete(TENANT, new.session_id, [])

    assert kv.block_files() == set()


async def test_a_delete_does_not_wait_for_the_reads_of_blocks_that_another_context_has(kv: SidecarUnderTest) -> None:
    """Seen failing: it waited for a moment in which nobody read them."""
    stays, goes = [await kv.save((*range(8), last), session_id=f"ctx_{last}") for last in (91, 92)]
    shared = kv.blocks.get(all_keys(kv.plan(stays))[0])
    assert shared is not None
    with kv.blocks.step("read", shared):
        async with asyncio.timeout(30):
            await kv.catalog.delete(TENANT, goes.session_id, [])

    assert kv.block_files() == set(all_keys(kv.plan(stays)))
