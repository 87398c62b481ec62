"""Leases on KV: what a load was promised stays in memory and on disk until the engine says so, or time is over."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from contextcache.clock import ManualClock
from contextcache.errors import CacheRefNotFound, CacheRefPending, InvalidRequest
from contextcache.model import Manifest
from kv_sidecar.format.block_file import BlockMeta
from kv_sidecar.format.manifest import block_meta, num_files
from kv_sidecar.retention import LeaseTerms
from kv_sidecar.saves import NewSave
from kv_sidecar.tiers.memory import Slot
from kv_sidecar.tiers.tiers import FetchedBlock
from tests.kit.kv_blocks import SESSION, TENANT, SidecarUnderTest, block_file_bytes

PROMPT = tuple(range(12))
FILE_BYTES = 1000
"""A little more than a block file of these tests."""
LEASE, OTHER = LeaseTerms("a" * 32, 1_000), LeaseTerms("b" * 32, 1_000)


@pytest.fixture
def kv_settings() -> dict[str, object]:
    return {"memory_limit_bytes": 3 * FILE_BYTES, "max_leases": 1}


async def named(kv: SidecarUnderTest, new: NewSave, lease: LeaseTerms | None) -> list[FetchedBlock]:
    """Take all slots of a context to the end of the stream, as gRPC's buffers do, and copy none."""
    manifest: Manifest = await kv.catalog.open(new.tenant, new.cache_ref)
    blocks = kv.catalog.load(manifest, new.fingerprint, 0, range(num_files(manifest)), in_slots=True, lease=lease)
    async with aclosing(blocks):
        return [block async for together in blocks for block in together]


def there(kv: SidecarUnderTest, new: NewSave, blocks: list[FetchedBlock]) -> int:
    """Count the blocks whose slots still hold them."""
    return sum(holds(kv, block_meta(kv.plan(new), block.block_index, 0), block.slot) for block in blocks)


def holds(kv: SidecarUnderTest, meta: BlockMeta, slot: Slot | None) -> bool:
    assert slot is not None
    return bytes(kv.memory.view(slot)) == block_file_bytes(meta)


@pytest.mark.parametrize(("lease", "left"), [(LEASE, 3), (None, 0)])
async def test_what_was_named_stays_in_memory_until_the_engine_has_it(
    kv: SidecarUnderTest, lease: LeaseTerms | None, left: int
) -> None:
    """The second case is how it was: the stream's end let all go, and the next save took their place."""
    new = await kv.save(PROMPT)
    blocks = await named(kv, new, lease)
    await kv.save(tuple(range(100, 112)), session_id="ctx_2")

    assert len(blocks) == 3
    assert there(kv, new, blocks) == left


async def test_ended_blocks_may_leave(kv: SidecarUnderTest) -> None:
    new = await kv.save(PROMPT)
    blocks = await named(kv, new, LEASE)
    await kv.catalog.end_load(LEASE.lease_id)
    await kv.catalog.end_load(LEASE.lease_id)
    await kv.save(tuple(range(100, 112)), session_id="ctx_2")

    assert there(kv, new, blocks) == 0
    assert kv.counted("leases_total", end="ended") == 1


async def test_a_lease_nobody_ends_is_over_at_its_time(kv: SidecarUnderTest, clock: ManualClock) -> None:
    new = await kv.save(PROMPT)
    blocks = await named(kv, new, LEASE)
    clock.advance(ms=999)
    await kv.catalog.collect()
    await kv.save(tuple(range(100, 112)), session_id="ctx_2")
    kept = there(kv, new, blocks)
    clock.advance(ms=1)
    await kv.catalog.collect()
    await kv.save(tuple(range(200, 212)), session_id="ctx_3")

    assert (kept, there(kv, new, blocks)) == (3, 0)
    assert kv.counted("leases_total", end="expired") == 1
    assert not kv.has_leases


async def test_a_lease_is_never_longer_than_the_sidecar_allows(tmp_path: Path, clock: ManualClock) -> None:
    async with SidecarUnderTest(tmp_path, clock=clock, lease_ms=1_000) as kv:
        await named(kv, await kv.save(PROMPT), LeaseTerms("c" * 32, 1 << 60))
        clock.advance(s=1)
        await kv.catalog.collect()

        assert not kv.has_leases


async def test_a_deleted_context_is_gone_at_once_and_its_bytes_when_the_load_has_ended(kv: SidecarUnderTest) -> None:
    new = await kv.save(PROMPT)
    blocks = await named(kv, new, LEASE)
    removed = await kv.catalog.delete(TENANT, SESSION, (new.cache_ref,))
    with pytest.raises(CacheRefNotFound):
        await kv.catalog.open(TENANT, new.cache_ref)
    kept = there(kv, new, blocks), len(kv.block_files())
    await kv.catalog.end_load(LEASE.lease_id)

    assert (removed.num_manifests, removed.freed_bytes, kept) == (1, 0, (3, 3))
    assert kv.block_files() == set()
    assert (kv.in_memory(), kv.missing_bytes()) == ([], 0)


async def test_too_many_leases_are_loads_without_one(kv: SidecarUnderTest) -> None:
    new = await kv.save(PROMPT)
    await named(kv, new, LEASE)
    blocks = await named(kv, new, OTHER)

    assert len(blocks) == 3
    assert kv.counted("leases_total", end="refused") == 1


@pytest.mark.parametrize("lease", [LeaseTerms("short", 1), LeaseTerms("A" * 32, 1), LeaseTerms("a" * 32, 0)])
async def test_what_is_no_lease_is_refused(kv: SidecarUnderTest, lease: LeaseTerms) -> None:
    new = await kv.save(PROMPT)
    with pytest.raises(InvalidRequest):
        await named(kv, new, lease)


async def test_a_save_in_flight_is_pending_to_its_own_tenant(kv: SidecarUnderTest) -> None:
    """Seen failing: it was not found, so a turn that came before the seal computed everything."""
    new = await kv.sent(PROMPT)
    with pytest.raises(CacheRefPending):
        await kv.catalog.open(TENANT, new.cache_ref)
    with pytest.raises(CacheRefNotFound) as foreign:
        await kv.catalog.open("other", new.cache_ref)
    await kv.catalog.seal(new.cache_ref, 0)

    assert not isinstance(foreign.value, CacheRefPending)
    assert (await kv.catalog.open(TENANT, new.cache_ref)).token_ids == PROMPT
