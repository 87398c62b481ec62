"""A promise over real gRPC: the sidecar's process is killed, and a load of several disks follows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from contextcache.clock import SystemClock
from contextcache.errors import CacheRefNotFound
from contextcache.model import Promise
from kv_sidecar.client import KVSidecarClient
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import BLOCK_TOKENS, TENANT, new_save
from tests.kit.sidecar_process import SidecarProcess, fault

PAGE_BYTES = 1 << 10
CONTEXT_BYTES = 2 * 4 * PAGE_BYTES
DISK_BYTES = 12 * CONTEXT_BYTES


def tokens(number: int) -> tuple[int, ...]:
    return tuple(range(100 * number, 100 * number + 2 * BLOCK_TOKENS))


async def test_promised_kv_survives_a_kill_and_overload_and_a_delete_ends_it(tmp_path: Path) -> None:
    """Seen failing: with the promise in memory only, the context was evicted after the kill."""
    process = SidecarProcess(
        tmp_path, block_tokens=BLOCK_TOKENS, memory_limit_bytes=1 << 20, disk_limit_bytes=DISK_BYTES
    )
    process.start()
    try:
        rank = EngineRank(process.address, page_bytes=PAGE_BYTES)
        now_ms = SystemClock().now_ms()
        asked, later, plain = (
            new_save(tokens(number), now_ms=now_ms, session_id=f"ctx_{number}") for number in range(3)
        )
        for new in (replace(asked, retain_ms=600_000), later, plain):
            await asyncio.to_thread(rank.send, new)
        client = KVSidecarClient(process.address, timeout_s=30)
        at_seal = (await client.wait_sealed(TENANT, asked.cache_ref, timeout_ms=0)).promise
        on_call = await client.retain_context(TENANT, [later.cache_ref], retain_ms=600_000, pinned=True)
        denied = await client.retain_context(TENANT, [plain.cache_ref], retain_ms=600_000, pinned=False)
        rank.close()
        process.kill()
        process.start()
        rank = EngineRank(process.address, page_bytes=PAGE_BYTES)
        for number in range(10, 60):
            await asyncio.to_thread(
                rank.send, new_save(tokens(number), now_ms=now_ms, session_id=f"ctx_{number}", tenant="other")
            )

        assert at_seal.until_ms >= now_ms + 600_000
        assert on_call.pinned
        assert denied == Promise(reason="tenant_share")
        for new in (asked, later):
            assert await asyncio.to_thread(rank.load, new)
        assert isinstance(fault(lambda: rank.load(plain)), CacheRefNotFound)
        await client.delete_context(TENANT, cache_refs=[asked.cache_ref], replaced=True)
        assert await asyncio.to_thread(rank.load, asked)
        await client.delete_context(TENANT, session_id=asked.session_id)
        assert isinstance(fault(lambda: rank.load(asked)), CacheRefNotFound)
        await client.close()
        rank.close()
    finally:
        process.kill()
