"""A tenant's bytes on disk never pass its limit, and what is counted is what lies there.

Seen failing: without `Blocks.reserved` (counted after the write only) two saves at once pass the limit in
`test_whatever_tenants_do…`; without `found` nothing is given back and every other test here fails.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.clock import ManualClock
from contextcache.errors import ContextCacheError, ContextDeleted, ContextQuotaExceeded, CorruptBlock, InvalidRequest
from contextcache.names import KEPT_PREFIX
from kv_sidecar.blocks import Blocks
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import block_key
from kv_sidecar.moving.pulling import Wanted
from kv_sidecar.saves import FailedSave, NewSave
from kv_sidecar.tiers.memory import Memory
from tests.kit.catalog_peer import CatalogPeer
from tests.kit.kv_blocks import FINGERPRINT, TENANT, TTL_MS, SidecarUnderTest, new_save, open_block_file
from tests.kit.until import until

TENANTS = ("demo", "other")
TEN = tuple(range(10))
"""Two whole blocks and a tail."""


async def size_of(root: Path, num_tokens: int) -> int:
    """The bytes a context has on disk."""
    async with SidecarUnderTest(root) as kv:
        await kv.save(tuple(range(num_tokens)))
        return kv.disk_bytes()


def bytes_on_disk(kv: SidecarUnderTest) -> Counter[str]:
    """Bytes of block files by the tenant they name themselves."""
    found: Counter[str] = Counter()
    for key in kv.block_files():
        try:
            file = open_block_file(kv.path_of(key))
        except FileNotFoundError:
            continue
        found[file.meta.tenant] += file.size_bytes
        file.close()
    return found


def used(kv: SidecarUnderTest, tenant: str = TENANT) -> int:
    return kv.catalog.tenant_usage(tenant)[0]


async def test_a_save_beyond_the_limit_is_refused_and_everything_it_brought_is_freed(tmp_path: Path) -> None:
    limit = await size_of(tmp_path / "one", 10) - 1
    async with SidecarUnderTest(tmp_path / "two", tenant_limit_bytes=limit) as kv:
        new = new_save(TEN, now_ms=kv.clock.now_ms())
        await kv.catalog.prepare_save(new)
        await kv.send(new, 0)
        assert 0 < used(kv) <= limit
        await kv.send(new, 1)
        with pytest.raises(ContextQuotaExceeded):
            await kv.send(new, 2)

        assert kv.block_files() == set()
        assert kv.catalog.tenant_usage(TENANT) == (0, limit)
        assert kv.counted("refused_saves_total", code="context_quota_exceeded") == 1
        with pytest.raises(ContextDeleted):
            await kv.catalog.seal(new.cache_ref, 0)


async def test_a_tenant_at_its_limit_hears_so_before_it_sends_anything_and_others_do_not(tmp_path: Path) -> None:
    limit = await size_of(tmp_path / "one", 10)
    async with SidecarUnderTest(tmp_path / "two", tenant_limit_bytes=limit) as kv:
        await kv.save(TEN)
        with pytest.raises(ContextQuotaExceeded):
            await kv.catalog.prepare_save(new_save((7, 8, 9), now_ms=kv.clock.now_ms()))

        assert await kv.save(TEN[:8])  # nothing of it is missing, and it has no tail
        assert await kv.save(TEN, tenant="other")
        assert kv.counted("refused_saves_total", code="context_quota_exceeded") == 1


async def test_a_block_of_two_contexts_counts_once_and_until_both_are_gone(kv: SidecarUnderTest) -> None:
    await kv.save(TEN[:8], session_id="ctx_a")
    once = used(kv)
    await kv.save(TEN[:8], session_id="ctx_b")
    assert used(kv) == once == kv.disk_bytes()
    await kv.catalog.delete(TENANT, "ctx_a", [])
    assert used(kv) == once
    await kv.catalog.delete(TENANT, "ctx_b", [])

    assert used(kv) == 0


async def test_what_is_counted_is_rebuilt_from_the_manifests_at_start(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path) as kv:
        await kv.save(TEN)
        await kv.save(TEN, tenant="other")
        before = kv.catalog.tenant_usage(TENANT), kv.catalog.tenant_usage("other")
    async with SidecarUnderTest(tmp_path, tenant_limit_bytes=before[0][0]) as kv:
        after = kv.catalog.tenant_usage(TENANT), kv.catalog.tenant_usage("other")
        with pytest.raises(ContextQuotaExceeded):
            await kv.catalog.prepare_save(new_save((7, 8, 9), now_ms=kv.clock.now_ms()))

    assert [size for size, _ in before] == [size for size, _ in after] != [0, 0]


async def test_a_block_put_aside_is_given_back(tmp_path: Path) -> None:
    async with SidecarUnderTest(tmp_path, memory_limit_bytes=0, spare_ms=60_000) as kv:
        new = await kv.save(TEN)
        path = kv.path_of(block_key(kv.plan(new), 1, 0))
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        with pytest.raises(CorruptBlock):
            await kv.load(new)

        assert used(kv) == kv.disk_bytes() == 0


async def test_a_pull_counts_and_is_refused_like_a_save(tmp_path: Path) -> None:
    limit = await size_of(tmp_path / "one", 10) - 1
    async with SidecarUnderTest(tmp_path / "peer") as peer:
        new = await peer.save(TEN)
        connect = CatalogPeer(peer).connect
        async with SidecarUnderTest(
            tmp_path / "here", tenant_limit_bytes=limit, connect_peer=connect, peers=("*",)
        ) as kv:
            kv.sidecar.engine.introduce(0, 1, FINGERPRINT, "")
            kv.sidecar.pulls.start(Wanted(TENANT, (new.cache_ref,), "127.0.0.1:1"))
            await until(lambda: not kv.sidecar.pulls.num_pulls, what="no pull is going on", interval_s=0)

            assert kv.counted("pulls_total", outcome="context_quota_exceeded") == 1
            assert kv.block_files() == set()
            assert used(kv) == 0


async def test_nobody_s_usage_is_not_answered(kv: SidecarUnderTest) -> None:
    with pytest.raises(InvalidRequest):
        kv.catalog.tenant_usage("")


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "saves at once", "delete", "expire", "abandon", "restart"]),
        st.sampled_from(TENANTS),
        st.integers(1, 14),
        st.integers(0, 2),
    ),
    max_size=14,
)


class Tenants:
    """Tenants that save, delete and let expire over one directory; looked at between any two steps on disk."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.clock = ManualClock()
        self.limit_bytes = limit_bytes
        self.root = root
        self.most = 0
        self.over: list[str] = []
        self.kv = self.sidecar()

    def sidecar(self) -> SidecarUnderTest:
        return SidecarUnderTest(self.root, clock=self.clock, step=self.look, tenant_limit_bytes=self.limit_bytes)

    def look(self, step: str) -> None:
        for tenant, size in bytes_on_disk(self.kv).items():
            self.most = max(self.most, size)
            if size > self.limit_bytes:
                self.over.append(f"{tenant} has {size} at {step}")

    async def play(self, what: str, tenant: str, num_tokens: int, start: int) -> None:
        tokens, session_id = tuple(range(start, start + num_tokens)), f"ctx_{start}"
        if what == "save":
            await self.save(tokens, tenant, session_id)
        elif what == "saves at once":
            saves = [self.save((*tokens, 100 + n), tenant, session_id) for n in range(3)]
            await asyncio.gather(*saves)
        elif what == "delete":
            await self.kv.catalog.delete(tenant, session_id, [])
        elif what == "expire":
            self.clock.advance(ms=TTL_MS // 2)
            await self.kv.sidecar.collect()
        elif what == "abandon":
            new = new_save((*tokens, 99), now_ms=self.clock.now_ms(), tenant=tenant, session_id=session_id)
            await self.attempt(new, seal=False)
        else:
            await self.kv.sidecar.close()
            self.kv = self.sidecar()
            await self.kv.sidecar.open()
            await self.kv.sidecar.collect()

    async def save(self, tokens: tuple[int, ...], tenant: str, session_id: str) -> None:
        new = new_save(tokens, now_ms=self.clock.now_ms(), tenant=tenant, session_id=session_id)
        await self.attempt(new, seal=True)

    async def attempt(self, new: NewSave, *, seal: bool) -> None:
        try:
            await self.kv.send_all(new)
            if seal:
                await self.kv.catalog.seal(new.cache_ref, 0)
            else:
                await self.kv.catalog.give_up_save(FailedSave(new.tenant, new.cache_ref, "arena_full"))
        except ContextCacheError:
            pass

    async def compare(self) -> None:
        """At a quiet point: what is counted is what lies there."""
        await self.kv.sidecar.threads.idle()
        lies = bytes_on_disk(self.kv)
        for tenant in TENANTS:
            assert self.kv.catalog.tenant_usage(tenant) == (lies[tenant], self.limit_bytes)
        assert dict(self.kv.sidecar.blocks.bytes_by_tenant()) == dict(lies)


@settings(deadline=None, max_examples=20)
@given(TURNS, st.integers(2_000, 12_000))
def test_whatever_tenants_do_the_count_is_what_lies_on_disk_and_never_above_the_limit(
    turns: list[tuple[str, str, int, int]], limit_bytes: int
) -> None:
    async def play() -> None:
        with tempfile.TemporaryDirectory() as directory:
            tenants = Tenants(Path(directory), limit_bytes)
            await tenants.kv.sidecar.open()
            for turn in turns:
                await tenants.play(*turn)
                await tenants.compare()
            await tenants.kv.sidecar.close()
            assert tenants.over == []

    asyncio.run(play())


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 3), st.integers(0, 60)), max_size=30))
def test_the_count_follows_files_that_come_go_and_change_owner(changes: list[tuple[str, int, int]]) -> None:
    blocks, files = Blocks(Memory(limit_bytes=0), tenant_limit_bytes=100), dict[BlockKey, tuple[str, int]]()
    for tenant, number, size in changes:
        key = BlockKey("block", f"{number}" * 64, 0)
        block = blocks.get(key)
        try:
            with blocks.reserved(tenant, size), blocks.step("write", block):
                assert blocks.tenant_bytes(tenant)[0] <= 100
                blocks.found(block, size, tenant=tenant)
        except ContextQuotaExceeded:
            assert blocks.tenant_bytes(tenant)[0] + size > 100
            continue
        files[key] = (tenant, size)

        lies = Counter[str]()
        for owner, held in files.values():
            lies[owner] += held
        assert blocks.bytes_by_tenant() == {owner: held for owner, held in lies.items() if held}
        assert blocks.usage().size_bytes == lies.total()


async def test_a_cancelled_save_leaves_no_record_of_files_that_its_eviction_removed(tmp_path: Path) -> None:
    """Seen failing: the next save of these tokens sent only its tail, and was sealed without its blocks."""
    is_evicting, may_go_on = threading.Event(), threading.Event()
    may_go_on.set()

    def step(name: str) -> None:
        if name.startswith("unlink ") and not may_go_on.is_set():
            is_evicting.set()
            may_go_on.wait(10)

    limit_bytes = await size_of(tmp_path / "size", len(TEN)) + 10
    async with SidecarUnderTest(tmp_path / "pod", step=step, tenant_limit_bytes=limit_bytes) as kv:
        await kv.save(TEN, session_id=f"{KEPT_PREFIX}{'1' * 32}")
        kv.blocks._tenant_limit_bytes = kv.blocks.tenant_bytes(TENANT)[0]
        may_go_on.clear()
        cut = asyncio.create_task(kv.catalog.prepare_save(new_save((9, 8, 7), now_ms=kv.clock.now_ms())))
        await asyncio.to_thread(is_evicting.wait, 10)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        may_go_on.set()
        await until(_files(kv), is_so=lambda found: not found, what="the eviction has ended")

        prepared = await kv.catalog.prepare_save(new_save(TEN, now_ms=kv.clock.now_ms()))

        assert prepared.missing_files == (0, 1, 2)


def _files(kv: SidecarUnderTest) -> Callable[[], Awaitable[set[BlockKey]]]:
    async def found() -> set[BlockKey]:
        return kv.block_files()

    return found
